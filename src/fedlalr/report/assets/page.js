// The controls of the page, and the charts that they control.

let data;
const find = (id) => document.getElementById(id);

// Radio buttons. Returns the value that is chosen: the same as before, if there is one.
function radios(fieldset, choices, change) {
  const before = fieldset.querySelector(":checked");
  const chosen = (choices.find(([value]) => before && value === before.value) || choices[0])[0];
  fieldset.replaceChildren(fieldset.querySelector("legend"), ...choices.map(([value, text]) => {
    const input = make("input", { type: "radio", name: fieldset.id, value });
    input.checked = value === chosen;
    input.addEventListener("change", () => change(value));
    return make("label", {}, input, make("span", {}, text));
  }));
  return chosen;
}

// A list, shown if there is a choice. Returns the item that is chosen: the same as before, if there is one.
function options(id, items, change) {
  const list = find(id), before = list.selectedOptions[0];
  const chosen = Math.max(0, items.findIndex((item) => before && item.label === before.textContent));
  list.replaceChildren(...items.map((item, i) => make("option", { value: i }, item.label)));
  list.value = chosen;
  list.onchange = () => change(items[Number(list.value)]);
  list.parentElement.hidden = items.length < 2;
  return items[chosen];
}

const QUANTITIES = [
  ["accuracy", "accuracy"], ["loss", "test loss"], ["held_out_loss", "held-out loss"], ["train_loss", "training loss"], ["lr", "client rate"],
];
const NOT_IN_EVERY_ROUND = ["accuracy", "held_out_loss"]; // of the clients' held-out samples
const AXES = [["round", "rounds"], ["megabytes", "megabytes"], ["seconds", "time"], ["virtual", "virtual time"]];
const AXIS_LABELS = { round: "round", megabytes: "megabytes sent, up and down", seconds: "seconds", virtual: "virtual seconds" };

function curves() {
  const own = [...new Set(data.curves.flatMap((c) => Object.keys(c.y)))].filter((name) => name.startsWith("metrics/"));
  const all = [...QUANTITIES, ...own.map((name) => [name, name.slice("metrics/".length)])];
  const there = all.filter(([name]) => data.curves.some((c) => c.y[name]));
  if (!there.length) { find("curves-chart").textContent = "No run has finished a round yet."; return; }
  let y = radios(find("curves-y"), there, (value) => { y = value; draw(); });
  const across = AXES.filter(([name]) => data.curves.some((c) => c.x[name]));
  let x = radios(find("curves-x"), across, (value) => { x = value; draw(); });
  const label = (name) => there.find(([n]) => n === name)[1];
  const several = data.curves.some((c) => c.seeds > 1);
  const draw = lineChart(find("curves-chart"), () => ({
    dashes: data.dashes,
    series: data.curves.filter((c) => c.y[y] && c.x[x]).map((c) => {
      // lines connect the rounds that have a value
      const has = (_, k) => !NOT_IN_EVERY_ROUND.includes(y) || c.y[y].mean[k] !== null;
      const { mean, low, high } = c.y[y];
      return { label: c.label, look: c.look, x: c.x[x].filter(has), y: mean.filter(has), low: low && low.filter(has), high: high && high.filter(has) };
    }),
    xLabel: AXIS_LABELS[x],
    yLabel: label(y) + (several ? ", mean and range over seeds" : ""),
    whole: x === "round",
    format: y === "accuracy" ? percent : number,
    tick: y === "accuracy" ? (v) => `${Math.round(100 * v)} %` : number,
    hint: "Values after the last round. Point at the chart to read others; click a name to hide its line.",
    where: (at) => (x === "round" ? `At round ${at}:` : `After ${number(at)} ${x === "virtual" ? "virtual seconds" : x}:`),
  }));
}

function clients() {
  const there = QUANTITIES.filter(([name]) => data.clients.some((c) => c.y[name]));
  if (!there.length) return;
  let y = radios(find("clients-y"), there.map(([name]) => [name, name]), (value) => { y = value; draw(); });
  find("clients-y").hidden = false;
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
}

function trajectories() {
  find("trajectories-y").hidden = !data.trajectories.length;
  if (!data.trajectories.length) {
    find("trajectories-chart").textContent = "No trajectory was recorded in these runs. To record one for FedLALR, set trajectory={clients: [0, 1]}.";
    return;
  }
  let run = options("trajectories-run", data.trajectories, (chosen) => { run = chosen; name = quantities(); draw(); });
  const quantities = () => radios(find("trajectories-y"), run.quantities.map((q) => [q.name, q.name]), (value) => { name = value; draw(); });
  let name = quantities();
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
  find("trajectories-of").hidden = data.runs === 1 || data.trajectories.length > 1; // with several the list names the run
  find("trajectories-of").textContent = `Recorded by ${run.label}; the other runs have none.`;
}

function partition() {
  if (!data.partitions.length) return;
  let chosen = options("partition-choice", data.partitions, (view) => { chosen = view; draw(); });
  const draw = map(find("partition-chart"), () => chosen);
}

// Draws everything; again if the data has changed.
function show() {
  data = JSON.parse(find("data").textContent);
  for (const section of [curves, clients, trajectories, partition]) section();
}

show();
