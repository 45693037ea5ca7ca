"use strict";
// Line charts and maps as SVG, drawn to the available width. No dependencies.

const NAMESPACE = "http://www.w3.org/2000/svg";

function make(name, attributes = {}, ...children) {
  const element = name === "svg" || make.svg.has(name) ? document.createElementNS(NAMESPACE, name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) if (value !== undefined) element.setAttribute(key, value);
  element.append(...children);
  return element;
}
make.svg = new Set(["g", "path", "line", "text", "rect", "title"]);

const COLOURS = 10;

// The look of a line: that of its series ([colour, dashes]), or by its index, with the next dashes when colours run out.
function lookOf(series, i, dashes) {
  const [hue, dash] = series.look || [i % COLOURS, (i + Math.floor(i / COLOURS)) % dashes.length];
  return { colour: `var(--c${hue})`, dash: dashes[dash] || undefined };
}

function number(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(2);
  return String(Number(value.toPrecision(4)));
}

const SUPERSCRIPTS = { "-": "⁻", 0: "⁰", 1: "¹", 2: "²", 3: "³", 4: "⁴", 5: "⁵", 6: "⁶", 7: "⁷", 8: "⁸", 9: "⁹" };
const power = (value) => "10" + [...String(Math.round(Math.log10(value)))].map((c) => SUPERSCRIPTS[c]).join("");

const percent = (value) => (value === null ? "–" : `${(100 * value).toFixed(1)} %`);

function stepOf(low, high, wanted, whole) {
  const span = high - low;
  const step = 10 ** Math.floor(Math.log10(span / wanted));
  const factor = [1, 2, 5, 10].find((f) => span / (step * f) <= wanted);
  return whole ? Math.max(1, step * factor) : step * factor;
}

function ticks(low, high, wanted, whole) {
  const step = stepOf(low, high, wanted, whole);
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) found.push(Number((i * step).toPrecision(12)));
  return found;
}

function decades(low, high, wanted) {
  const first = Math.ceil(Math.log10(low) - 1e-9), last = Math.floor(Math.log10(high) + 1e-9);
  const every = Math.max(1, Math.ceil((last - first + 1) / wanted));
  const found = [];
  for (let e = first; e <= last; e += every) found.push(10 ** e);
  return found;
}

// Positive values that span more than two decades get a logarithmic scale.
function scaleOf(values, from, to, { zero = false, whole = false, wanted = 5, widen = false } = {}) {
  let low = Infinity, high = -Infinity;
  for (const v of values) if (v !== null) { low = Math.min(low, v); high = Math.max(high, v); } // too many for arguments
  const log = !zero && low > 0 && high / low > 100;
  if (zero) low = Math.min(0, low);
  if (low === high) [low, high] = [low - (Math.abs(low) * 0.1 || 0.5), high + (Math.abs(high) * 0.1 || 0.5)];
  if (widen && !log) { // to whole ticks
    const step = stepOf(low, high, wanted, whole);
    [low, high] = [Math.floor(low / step + 1e-9) * step, Math.ceil(high / step - 1e-9) * step];
  }
  const bend = log ? Math.log10 : (v) => v;
  const place = (v) => from + ((bend(v) - bend(low)) / (bend(high) - bend(low))) * (to - from);
  const marks = log ? decades(low, high, wanted) : ticks(low, high, wanted, whole);
  return { place, marks, log };
}

function path(points) {
  let text = "", pen = "M";
  for (const [x, y] of points) {
    if (y === null) { pen = "M"; continue; }
    text += `${pen}${x.toFixed(1)} ${y.toFixed(1)}`;
    pen = "L";
  }
  return text;
}

// The segments of a band between its breaks.
function parts(series) {
  const found = [[]];
  series.x.forEach((_, k) => {
    if (series.breaks && series.breaks.has(k)) found.push([]);
    if (series.low[k] !== null && series.high[k] !== null) found[found.length - 1].push(k);
  });
  return found.filter((part) => part.length);
}

// Draws now and whenever the width changes. A container that is given again is drawn by the new function.
function drawnToWidth(container, draw) {
  const first = !container.draw;
  container.draw = draw;
  draw();
  if (!first) return draw;
  let width = container.clientWidth;
  new ResizeObserver(() => {
    if (container.clientWidth === width) return;
    width = container.clientWidth;
    container.draw();
  }).observe(container);
  return draw;
}

// A chart whose container keeps its state: which lines are hidden, where the cursor is.
// series: [{label, x, y, low?, high?, breaks?, look?}]; dashes: SVG's stroke-dasharray for each kind of dashes.
function lineChart(container, describe) {
  const state = (container.state = container.state || { hidden: new Set(), cursor: null, axis: "" }), hidden = state.hidden;

  function draw() {
    const view = describe();
    if (state.axis !== view.xLabel) [state.axis, state.cursor] = [view.xLabel, null];
    const width = Math.max(280, container.clientWidth), height = Math.round(Math.min(380, Math.max(240, width * 0.5)));
    const all = view.series.map((s, i) => ({ ...s, ...lookOf(s, i, view.dashes) }));
    const shown = all.filter((s) => !hidden.has(s.label));
    const drawn = shown.length ? shown : all;
    const box = { left: 54, right: width - 12, top: 22, bottom: height - 40 };
    const y = scaleOf(drawn.flatMap((s) => [...s.y, ...(s.low || []), ...(s.high || [])]), box.bottom, box.top, { widen: true });
    const x = scaleOf(drawn.flatMap((s) => s.x), box.left, box.right, { zero: view.zero !== false, whole: view.whole, wanted: width < 500 ? 4 : 8 });
    const svg = make("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", tabindex: "0", "aria-label": aria(view, drawn) });
    axes(svg, view, x, y, box);
    for (const s of shown) {
      for (const part of s.low ? parts(s) : []) {
        const outline = [...part.map((k) => [x.place(s.x[k]), y.place(s.high[k])]), ...part.reverse().map((k) => [x.place(s.x[k]), y.place(s.low[k])])];
        svg.append(make("path", { class: "band", d: path(outline) + "Z", fill: s.colour }));
      }
    }
    for (const s of shown) {
      const points = s.x.flatMap((v, k) => [...(s.breaks && s.breaks.has(k) ? [[0, null]] : []), [x.place(v), s.y[k] === null ? null : y.place(s.y[k])]]);
      svg.append(make("path", { class: "line", d: path(points), stroke: s.colour, "stroke-dasharray": s.dash }));
    }
    const line = make("line", { class: "cursor", y1: box.top, y2: box.bottom, visibility: "hidden" });
    svg.append(line);
    const where = make("p", { class: "where", "aria-live": "polite" });
    const list = legend(view, all, () => draw());
    container.replaceChildren(svg, where, list.element);
    const xs = [...new Set(shown.flatMap((s) => s.x))].sort((a, b) => a - b);
    function point(value) {
      state.cursor = value;
      const at = value === null ? null : xs.reduce((best, v) => (Math.abs(v - value) < Math.abs(best - value) ? v : best), xs[0]);
      line.setAttribute("visibility", at === null ? "hidden" : "visible");
      if (at !== null) for (const end of ["x1", "x2"]) line.setAttribute(end, x.place(at));
      where.textContent = at === null ? view.hint : view.where(at);
      list.update(at);
    }
    const fraction = (event) => (event.clientX - svg.getBoundingClientRect().left) * (width / svg.getBoundingClientRect().width);
    const span = x.place(1) - x.place(0);
    const back = (event) => (fraction(event) - x.place(0)) / span;
    svg.addEventListener("pointermove", (event) => xs.length && point(back(event)));
    svg.addEventListener("pointerdown", (event) => xs.length && point(back(event)));
    svg.addEventListener("pointerleave", (event) => event.pointerType === "mouse" && point(null));
    svg.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (event.key === "Escape") point(null);
      if (!step || !xs.length) return;
      event.preventDefault();
      const now = state.cursor === null ? (step > 0 ? -1 : xs.length) : xs.findIndex((v) => v >= state.cursor);
      point(xs[Math.min(xs.length - 1, Math.max(0, now + step))]);
    });
    point(state.cursor);
  }

  function legend(view, all, redraw) {
    const element = make("ul", { class: "legend" });
    const values = all.map((s, i) => {
      const value = make("b");
      const swatch = make("svg", { viewBox: "0 0 36 8", height: "8", "aria-hidden": "true" }, make("path", { class: "line", d: "M0 4H36", stroke: s.colour, "stroke-dasharray": s.dash }));
      const button = make("button", { type: "button", "aria-pressed": String(!hidden.has(s.label)), title: "Show or hide" }, swatch, make("span", {}, s.label), value);
      button.addEventListener("click", () => {
        if (!hidden.delete(s.label)) hidden.add(s.label);
        redraw();
        container.querySelectorAll(".legend button")[i].focus();
      });
      element.append(make("li", {}, button));
      return value;
    });
    const update = (at) => view.series.forEach((s, i) => {
      let k = s.x.length - 1;
      if (at !== null) { while (k > 0 && s.x[k] > at) k--; if (s.x[k] > at) k = -1; }
      values[i].textContent = k < 0 ? "–" : view.format(s.y[k]);
    });
    return { element, update };
  }

  return drawnToWidth(container, draw);
}

function axes(svg, view, x, y, box) {
  for (const mark of y.marks) {
    svg.append(make("line", { class: "grid", x1: box.left, x2: box.right, y1: y.place(mark), y2: y.place(mark) }));
    svg.append(make("text", { x: box.left - 6, y: y.place(mark) + 4, "text-anchor": "end" }, y.log ? power(mark) : view.tick(mark)));
  }
  let lastLine = -Infinity, lastText = -Infinity;
  for (const mark of view.marks || x.marks.map((v) => ({ x: v, text: number(v) }))) {
    const at = x.place(mark.x);
    if (view.marks && at - lastLine >= 8) {
      svg.append(make("line", { class: "grid", x1: at, x2: at, y1: box.top, y2: box.bottom }));
      lastLine = at;
    }
    if (view.marks && at - lastText < 62) continue;
    lastText = at;
    svg.append(make("text", { x: at, y: box.bottom + 16, "text-anchor": view.marks ? "start" : "middle" }, mark.text));
  }
  svg.append(make("text", { x: (box.left + box.right) / 2, y: box.bottom + 34, "text-anchor": "middle" }, view.xLabel));
  svg.append(make("text", { x: 4, y: 12 }, view.yLabel + (y.log ? ", logarithmic" : "")));
}

function aria(view, series) {
  const ends = series.map((s) => `${s.label} ends at ${view.format(s.y[s.y.length - 1])}`);
  return `${view.yLabel} against ${view.xLabel}. ${ends.join("; ")}. Arrow keys move along the lines.`;
}

// Clients by classes; more samples, stronger colour.
function map(container, describe) {
  const LEVELS = 8;

  function draw() {
    const { counts, clients } = describe();
    const classes = counts[0].length, width = Math.max(280, container.clientWidth);
    const row = Math.max(4, Math.min(18, Math.round(260 / classes)));
    const box = { left: 44, right: width - 8, top: 22, bottom: 22 + row * classes };
    const column = (box.right - box.left) / counts.length;
    const most = Math.max(1, ...counts.map((c) => Math.max(...c)));
    const svg = make("svg", { viewBox: `0 0 ${width} ${box.bottom + 40}`, role: "img", "aria-label": `Samples of each of ${classes} classes on ${counts.length} clients, at most ${most}. The facts below give the numbers.` });
    const shapes = Array.from({ length: LEVELS }, () => "");
    counts.forEach((client, i) => client.forEach((count, k) => {
      if (!count) return;
      const level = Math.min(LEVELS - 1, Math.floor((count / most) ** 0.5 * LEVELS));
      shapes[level] += `M${(box.left + i * column).toFixed(2)} ${box.top + k * row}h${column.toFixed(2)}v${row}h${(-column).toFixed(2)}z`;
    }));
    svg.append(make("rect", { x: box.left, y: box.top, width: box.right - box.left, height: row * classes, fill: "var(--panel)" }));
    shapes.forEach((shape, level) => shape && svg.append(make("path", { class: "cell", d: shape, "fill-opacity": ((level + 1) / LEVELS).toFixed(3) })));
    for (const mark of ticks(0, Math.max(1, classes - 1), Math.min(classes, 10), true)) svg.append(make("text", { x: box.left - 6, y: box.top + (mark + 0.5) * row + 4, "text-anchor": "end" }, String(mark)));
    for (const mark of ticks(0, Math.max(1, counts.length - 1), width < 500 ? 5 : 10, true).filter((v) => v < counts.length)) svg.append(make("text", { x: box.left + (mark + 0.5) * column, y: box.bottom + 16, "text-anchor": "middle" }, String(mark)));
    const some = counts.length < clients ? `client (the first ${counts.length} of ${clients})` : "client";
    svg.append(make("text", { x: (box.left + box.right) / 2, y: box.bottom + 34, "text-anchor": "middle" }, some));
    svg.append(make("text", { x: 4, y: 12 }, "class"));
    const where = make("p", { class: "where", "aria-live": "polite" }, `Strongest colour: ${most} samples. Point at a cell to read it.`);
    const read = (event) => {
      const frame = svg.getBoundingClientRect(), zoom = width / frame.width;
      const i = Math.floor(((event.clientX - frame.left) * zoom - box.left) / column), k = Math.floor(((event.clientY - frame.top) * zoom - box.top) / row);
      if (counts[i] && counts[i][k] !== undefined) where.textContent = `Client ${i}, class ${k}: ${counts[i][k]} of the client's ${counts[i].reduce((a, b) => a + b, 0)} samples.`;
    };
    svg.addEventListener("pointermove", read);
    svg.addEventListener("pointerdown", read);
    container.replaceChildren(svg, where);
  }

  return drawnToWidth(container, draw);
}
