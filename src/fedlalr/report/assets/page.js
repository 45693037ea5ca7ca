// The controls of the page, and the charts that they control.

const data = JSON.parse(document.getElementById("data").textContent);
const find = (id) => document.getElementById(id);

function radios(fieldset, choices, change) {
  const rest = fieldset.querySelector("legend");
  fieldset.replaceChildren(rest, ...choices.map(([value, text], i) => {
    const input = make("input", { type: "radio", name: fieldset.id, value });
    input.checked = i === 0;
    input.addEventListener("change", () => change(value));
    return make("label", {}, input, make("span", {}, text));
  }));
}

function options(id, items, change) {
  if (items.length < 2) return;
  find(id).append(...items.map((item, i) => make("option", { value: i }, item.label)));
  find(id).addEventListener("change", (event) => change(items[Number(event.target.value)]));
  find(id).parentElement.hidden = false;
}

const QUANTITIES = [["accuracy", "accuracy"], ["loss", "test loss"], ["train_loss", "training loss"], ["lr", "client rate"]];
const AXES = [["round", "rounds"], ["megabytes", "megabytes"], ["seconds", "time"], ["virtual", "virtual time"]];
const AXIS_LABELS = { round: "round", megabytes: "megabytes sent, up and down", seconds: "seconds", virtual: "virtual seconds" };

function curves() {
  const own = [...new Set(data.curves.flatMap((c) => Object.keys(c.y)))].filter((name) => name.startsWith("metrics/"));
  const all = [...QUANTITIES, ...own.map((name) => [name, name.slice("metrics/".length)])];
  const there = all.filter(([name]) => data.curves.some((c) => c.y[name]));
  if (!there.length) { find("curves-chart").textContent = "No run has finished a round yet."; return; }
  let y = there[0][0], x = AXES[0][0];
  const label = (name) => there.find(([n]) => n === name)[1];
  const several = data.curves.some((c) => c.seeds > 1);
  const draw = lineChart(find("curves-chart"), () => ({
    dashes: data.dashes,
    series: data.curves.filter((c) => c.y[y] && c.x[x]).map((c) => ({ label: c.label, look: c.look, x: c.x[x], y: c.y[y].mean, low: c.y[y].low, high: c.y[y].high })),
    xLabel: AXIS_LABELS[x],
    yLabel: label(y) + (several ? ", mean and range over seeds" : ""),
    whole: x === "round",
    format: y === "accuracy" ? percent : number,
    tick: y === "accuracy" ? (v) => `${Math.round(100 * v)} %` : number,
    hint: "Values after the last round. Point at the chart to read others; click a name to hide its line.",
    where: (at) => (x === "round" ? `At round ${at}:` : `After ${number(at)} ${x === "virtual" ? "virtual seconds" : x}:`),
  }));
  radios(find("curves-y"), there, (value) => { y = value; draw(); });
  radios(find("curves-x"), AXES.filter(([name]) => data.curves.some((c) => c.x[name])), (value) => { x = value; draw(); });
}

function clients() {
  const there = QUANTITIES.filter(([name]) => data.clients.some((c) => c.y[name]));
  if (!there.length) return;
  let y = there[0][0];
  const draw = lineChart(find("clients-chart"), () => ({
    dashes: data.dashes,
    series: data.clients.filter((c) => c.y[y]).flatMap(({ label, look, y: found }) => [
      { label: `${label}, mean`, look, x: found[y].x, y: found[y].mean, low: found[y].low, high: found[y].high },
      { label: `${label}, worst 10 %`, look: [look[0], (look[1] + 3) % data.dashes.length], x: found[y].x, y: found[y].worst },
    ]),
    xLabel: "round", yLabel: `${y} over the clients: mean, standard deviation, worst 10 %`, whole: true,
    format: y === "accuracy" ? percent : number,
    tick: y === "accuracy" ? (v) => `${Math.round(100 * v)} %` : number,
    hint: "Values after the last evaluation. Point at the chart to read others; click a name to hide its line.",
    where: (at) => `At round ${at}:`,
  }));
  radios(find("clients-y"), there.map(([name]) => [name, name]), (value) => { y = value; draw(); });
  find("clients-y").hidden = false;
}

function trajectories() {
  if (!data.trajectories.length) {
    find("trajectories-chart").textContent = "No trajectory was recorded in these runs. To record one for FedLALR, set trajectory={clients: [0, 1]}.";
    find("trajectories-y").hidden = true;
    return;
  }
  let run = data.trajectories[0], name = run.quantities[0].name;
  const draw = lineChart(find("trajectories-chart"), () => ({
    dashes: data.dashes,
    series: run.clients.map((c) => ({
      label: `client ${c.client}`, x: c.x, ...c.values[name],
      breaks: new Set(c.round.flatMap((r, k) => (k && r !== c.round[k - 1] ? [k] : []))),
    })),
    xLabel: "local steps, round by round",
    yLabel: run.quantities.filter((q) => q.name === name).map((q) => q.name + q.detail)[0],
    zero: false, whole: true,
    marks: run.marks.map((m) => ({ x: m.x, text: `round ${m.round}` })),
    format: number, tick: number,
    hint: "Values after the last recorded step. Point at the chart to read others.",
    where: (at) => {
      for (const c of run.clients) { const k = c.x.indexOf(at); if (k >= 0) return `After step ${c.step[k]} of round ${c.round[k]}:`; }
      return "";
    },
  }));
  const quantities = () => radios(find("trajectories-y"), run.quantities.map((q) => [q.name, q.name]), (value) => { name = value; draw(); });
  quantities();
  if (data.runs > 1 && data.trajectories.length === 1) { // with several trajectories the list names the run
    find("trajectories-of").textContent = `Recorded by ${run.label}; the other runs have none.`;
    find("trajectories-of").hidden = false;
  }
  options("trajectories-run", data.trajectories, (chosen) => { run = chosen; name = run.quantities[0].name; quantities(); draw(); });
}

function partition() {
  if (!data.partitions.length) return;
  let chosen = data.partitions[0];
  const draw = map(find("partition-chart"), () => chosen);
  options("partition-choice", data.partitions, (view) => { chosen = view; draw(); });
}

curves();
clients();
trajectories();
partition();
