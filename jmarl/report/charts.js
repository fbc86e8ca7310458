"use strict";
// Elements, numbers, and line charts as SVG.

const SVG = "http://www.w3.org/2000/svg";

let roles = []; // of the agents, if all runs have the same
/** Return the role of an agent, with its number if others have the same. */
function agentName(n) {
  if (!roles[n]) return `agent ${n}`;
  return roles.filter((role) => role === roles[n]).length > 1 ? `${roles[n]} (agent ${n})` : roles[n];
}

/** Return an element. Strings among the children become text, never HTML. */
function make(tag, attributes, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

function shape(tag, attributes, text) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (text !== undefined) element.textContent = text;
  return element;
}

function number(x) {
  if (x === null || x === undefined) return "–";
  const size = Math.abs(x);
  if (size >= 1e6 || (size > 0 && size < 1e-3)) return Number(x.toPrecision(3)).toExponential();
  return String(Number(x.toPrecision(4)));
}

const color = (i) => (i < 8 ? `var(--c${i})` : `hsl(${Math.round(i * 137.5) % 360} 55% var(--more))`);
const DASHES = ["", "6 3", "2 3", "8 3 2 3"];

// What the reader chose: the grouping, the x axis and its part that is drawn, how many points a thick line is the mean of, log axes, episodes as a
// thread, groups that are not drawn.
const view = { by: 0, axis: "updates", from: -Infinity, to: Infinity, smooth: 10, logX: false, logY: false, thread: false, hidden: new Set() };

/** Return four to six round numbers between low and high. */
function ticks(low, high) {
  const rough = (high - low) / 4 || 1;
  const unit = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((k) => k * unit).find((size) => size >= rough) || rough;
  const first = Math.ceil(low / step), count = Math.floor(high / step + 1e-9) - first + 1;
  return Array.from({ length: Math.min(Math.max(count, 0), 10) }, (_, i) => Number(((first + i) * step).toPrecision(12)));
}

/** Return the labels of a log axis from 10^low to 10^high: powers of ten, or numbers between them where there are few. */
function logTicks(low, high) {
  const every = Math.ceil((high - low) / 5) || 1, values = [];
  for (let power = Math.floor(low); power <= high; power += 1) {
    const factors = high - low < 2 ? [1, 2, 5] : [1];
    if (power % every === 0) values.push(...factors.map((factor) => factor * 10 ** power));
  }
  const inside = values.filter((x) => Math.log10(x) >= low - 1e-9 && Math.log10(x) <= high + 1e-9);
  return inside.length > 1 ? inside : ticks(10 ** low, 10 ** high).filter((x) => x > 0);
}

/** Return an axis: where a value is between `from` and `to`, and its labels. On a log axis low and high are logarithms. */
function axis(low, high, from, to, log) {
  const scale = (x) => (log ? Math.log10(Math.max(x, 1e-300)) : x);
  const inside = (x) => Math.min(Math.max(scale(x), low), high);
  const place = (x) => from + ((inside(x) - low) / (high - low || 1)) * (to - from);
  return { place, labels: log ? logTicks(low, high) : ticks(low, high) };
}

/** Return the mean of each value and those before it, `view.smooth` in all. */
function smooth(values) {
  return values.map((value, i) => {
    const near = values.slice(Math.max(0, i - view.smooth + 1), i + 1).filter((x) => x !== null);
    return value === null || !near.length ? null : near.reduce((a, b) => a + b) / near.length;
  });
}

const isDrawn = (y) => y !== null && y !== undefined && !(view.logY && y <= 0);

/** Return the path of a line, with gaps where values are missing. */
function path(xs, ys, toX, toY) {
  let line = "", pen = "M";
  xs.forEach((x, i) => {
    if (!isDrawn(ys[i])) { pen = "M"; return; }
    line += `${pen}${toX(x).toFixed(1)} ${toY(ys[i]).toFixed(1)}`;
    pen = "L";
  });
  return line;
}

/** Return the curve that is drawn thick: means over neighbors of the mean and of half the interval (which is at least half the
 * interval of that mean). */
function smoothed({ x, mean, interval, lines, thick }) {
  return thick || { x, mean: smooth(mean), interval: smooth(interval), lines: lines && lines.map(smooth) };
}

/** Return the outline of the interval around a mean. */
function band(curve, toX, toY) {
  const used = curve.x.map((_, i) => i).filter((i) => isDrawn(curve.mean[i]) && curve.interval[i] !== null);
  const edge = (i, sign) => `${toX(curve.x[i]).toFixed(1)} ${toY(curve.mean[i] + sign * curve.interval[i]).toFixed(1)}`;
  return used.length > 1 ? `M${[...used.map((i) => edge(i, 1)), ...used.reverse().map((i) => edge(i, -1))].join("L")}Z` : "";
}

const smallest = (values) => values.reduce((a, b) => Math.min(a, b), Infinity);
const largest = (values) => values.reduce((a, b) => Math.max(a, b), -Infinity);

/** Return the smallest and largest value that a chart shows, or their logarithms. Intervals that are much wider than the curves
 * are cut. */
function range(series) {
  const scale = (y) => (view.logY ? Math.log10(y) : y);
  const means = series.flatMap(({ curve }) => curve.mean).filter(isDrawn).map(scale);
  if (!means.length) return [0, 1];
  const drawn = series.map(({ curve, points }) => (points ? curve : smoothed(curve)));
  const bands = drawn.flatMap(({ mean, interval, lines }, k) => (lines && !series[k].points ? lines.flat()
    : mean.flatMap((y, i) => (y === null ? [] : [y - interval[i], y + interval[i]]))));
  const ends = bands.filter(isDrawn).map(scale);
  let [low, high] = [smallest(means), largest(means)];
  const room = 0.6 * (high - low) || Infinity;
  [low, high] = [Math.max(low - room, smallest([...means, ...ends])), Math.min(high + room, largest([...means, ...ends]))];
  if (high - low <= 1e-9 * Math.max(Math.abs(low), Math.abs(high))) [low, high] = [low - (Math.abs(low) / 10 || 0.5), high + (Math.abs(high) / 10 || 0.5)];
  const margin = (high - low) * 0.04;
  return [low - margin, high + margin];
}

/** Draw one series: the band of its interval or a line of each run, every point thin, and their running mean thick; or points, where few. `shift`
 * puts points of the same update beside each other; count: of the series in the chart, whose bands lie over each other. */
function drawSeries(svg, { curve, stroke, dash, points, shift }, count, toX, toY) {
  if (points) {
    curve.x.forEach((x, i) => {
      if (!isDrawn(curve.mean[i])) return;
      const [cx, half] = [toX(x) + shift, curve.interval[i]];
      if (half !== null) {
        const [y1, y2] = [toY(curve.mean[i] - half), toY(curve.mean[i] + half)];
        svg.append(shape("line", { x1: cx, x2: cx, y1, y2, style: `stroke: ${stroke}`, "stroke-width": 1.5 }));
      }
      svg.append(shape("circle", { cx, cy: toY(curve.mean[i]), r: 3.5, style: `fill: ${stroke}`, class: "point" }));
    });
    return;
  }
  const line = smoothed(curve), outline = line.lines ? "" : band(line, toX, toY), style = `stroke: ${stroke}; fill: none`;
  if (outline) svg.append(shape("path", { d: outline, style: `fill: ${stroke}`, "fill-opacity": Math.min(0.16, 0.6 / count), class: "band" }));
  for (const run of line.lines || []) svg.append(shape("path", { d: path(line.x, run, toX, toY), style, "stroke-width": 1, "stroke-opacity": 0.6, class: "seed" }));
  const thin = { d: path(curve.x, curve.mean, toX, toY), style, "stroke-width": 1, "stroke-opacity": 0.35 };
  if (view.smooth > 1 && !line.lines) svg.append(shape("path", thin));
  const thick = { d: path(line.x, line.mean, toX, toY), style, "stroke-width": 2, class: "curve" };
  svg.append(shape("path", dash ? { ...thick, "stroke-dasharray": dash } : thick));
}

/** Return a chart. series: [{label, curve, stroke, dash, points}]; where: returns how a place on the x axis is called; xs: its title;
 * choose: called with the ends of a part of the x axis over which the reader drags. */
function chart(title, series, where = updateText, xs = "updates", choose = null) {
  const [width, height, left, bottom, top, right] = [420, 224, 46, 36, 8, 18]; // right: room for half of the last label
  const all = series.flatMap(({ curve }) => curve.x).map((x) => (view.logX ? Math.log10(Math.max(x, 1)) : x));
  const first = smallest(all), last = largest([...all, view.logX ? 0 : xs === "minutes" ? 1e-3 : 1]);
  const [low, high] = range(series);
  const { place: toX, labels } = axis(first, last, left, width - right, view.logX);
  const { place: toY, labels: ys } = axis(low, high, height - bottom, top, view.logY);
  const svg = shape("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": title });
  for (const y of ys) {
    svg.append(shape("line", { x1: left, x2: width - right, y1: toY(y), y2: toY(y), class: "grid" }));
    svg.append(shape("text", { x: left - 6, y: toY(y) + 4, "text-anchor": "end" }, number(y)));
  }
  for (const x of labels.filter((at) => Number.isInteger(at) || xs === "minutes")) {
    svg.append(shape("text", { x: toX(x), y: height - 20, "text-anchor": "middle" }, number(x)));
  }
  svg.append(shape("text", { x: left, y: height - 5, class: "axis" }, `${title.replace(/^.*\//, "")} over ${xs}${view.logX ? " (log)" : ""}`));
  for (const entry of series) drawSeries(svg, entry, series.length, toX, toY);
  const cursor = shape("line", { y1: top, y2: height - bottom, class: "cursor", visibility: "hidden" });
  svg.append(cursor);
  const values = make("div", { class: "values", hidden: "" });
  svg.addEventListener("mousemove", (event) => {
    const box = svg.getBoundingClientRect();
    readOut(values, cursor, series, toX, where, ((event.clientX - box.left) / box.width) * width);
  });
  svg.addEventListener("mouseleave", () => { cursor.setAttribute("visibility", "hidden"); values.hidden = true; });
  const valueAt = (x) => {
    if (x <= left || x >= width - right) return x <= left ? view.from : view.to; // all that is there, also what comes
    const at = first + ((x - left) / (width - right - left)) * (last - first);
    return view.logX ? 10 ** at : at;
  };
  if (choose && all.length) onDrag(svg, [left, width - right], [top, height - bottom], width, (ends) => choose(...ends.map(valueAt)));
  const box = make("div", { class: "chart", "data-title": title }, make("h3", {}, title));
  box.append(chartTools(title, series, xs, svg, box), svg, values);
  return box;
}

/** Call `choose` with the ends [x, x] of what the reader drags over in a chart. across, down: where its curves are. */
function onDrag(svg, across, down, width, choose) {
  svg.addEventListener("mousedown", (event) => {
    if (event.button) return;
    const box = svg.getBoundingClientRect(); // as it is now: a page that is served may draw all charts anew
    const placeOf = ({ clientX }) => Math.min(Math.max(((clientX - box.left) / box.width) * width, across[0]), across[1]);
    const start = placeOf(event), chosen = shape("rect", { y: down[0], height: down[1] - down[0], class: "chosen" }), own = new AbortController();
    const ends = (other) => [start, placeOf(other)].sort((a, b) => a - b);
    svg.append(chosen);
    event.preventDefault();
    document.activeElement?.blur(); // a field that has the focus is not drawn anew
    const until = { signal: own.signal };
    addEventListener("mousemove", (other) => { const [x1, x2] = ends(other); chosen.setAttribute("x", x1); chosen.setAttribute("width", x2 - x1); }, until);
    addEventListener("mouseup", (other) => { own.abort(); chosen.remove(); if (ends(other)[1] - ends(other)[0] > 4) choose(ends(other)); }, until);
  });
}

const updateText = (x) => `update ${Number.isInteger(x) ? x : number(x)}`;

/** Show the value of each curve at the update that is drawn nearest to `at`, the largest first. A curve that has none at the
 * update of the first one, such as a held-out one, says of which update its value is. */
function readOut(values, cursor, series, toX, where, at) {
  const nearest = ({ curve }) => curve.x.reduce((best, x, i) => (Math.abs(toX(x) - at) < Math.abs(toX(curve.x[best]) - at) ? i : best), 0);
  const update = series[0].curve.x[nearest(series[0])];
  for (const name of ["x1", "x2"]) cursor.setAttribute(name, toX(update));
  cursor.setAttribute("visibility", "visible");
  const line = (entry) => {
    const { x, mean, runs } = entry.curve, i = nearest(entry);
    return [entry, mean[i], runs && runs[i], x[i] === update ? "" : ` after ${where(x[i])}`];
  };
  const lines = series.map(line).sort(([, a], [, b]) => (b ?? -Infinity) - (a ?? -Infinity));
  values.replaceChildren(make("div", {}, where(update)), ...lines.map(([{ label, stroke, dash }, value, runs, when]) =>
    make("div", {}, sample(stroke, dash), `${number(value)} ${label}${when}${ofRuns(runs)}`)));
  values.hidden = false;
}

/** Return a short line as in a chart, for legends. */
function sample(stroke, dash) {
  const svg = shape("svg", { viewBox: "0 0 22 8", class: "sample" });
  svg.append(shape("line", { x1: 0, x2: 22, y1: 4, y2: 4, style: `stroke: ${stroke}`, "stroke-width": 3, "stroke-dasharray": dash || "none" }));
  return svg;
}

/** Return who copied whom in a population: a lane of each member over updates, in the color of the member that its weights come
 * from, and its last held-out return; null where there is no population. */
function lineage({ name, curves, updates }) {
  const parents = [];
  while (curves[`population/member_${parents.length}/parent`]) parents.push(curves[`population/member_${parents.length}/parent`]);
  if (!parents.length) return null;
  const [width, left, right, lane] = [860, 76, 56, 24], height = lane * parents.length + 26, toY = (k) => lane * (k + 0.5) + 4;
  const { place: toX, labels } = axis(0, updates, left, width - right, false);
  const svg = shape("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `lineage of ${name}` });
  const line = (x1, y1, x2, y2, k, more) => svg.append(shape("line", { x1, y1, x2, y2, style: `stroke: ${color(k)}`, ...more }));
  for (const x of labels.filter(Number.isInteger)) svg.append(shape("text", { x: toX(x), y: height - 6, "text-anchor": "middle" }, number(x)));
  let origins = parents.map((_, k) => k), since = 0;
  const lanes = (until) => origins.forEach((origin, k) => line(toX(since), toY(k), toX(until), toY(k), origin, { "stroke-width": 2.5 }));
  parents[0].x.forEach((x, i) => { // the row of the update after the exploit
    lanes(x - 1);
    since = x - 1;
    const copied = parents.map((curve) => Math.round(curve.mean[i])), before = origins;
    origins = copied.map((parent) => before[parent]);
    copied.forEach((parent, k) => {
      if (parent !== k) line(toX(since), toY(parent), toX(since), toY(k), before[parent], { class: "copy", "stroke-dasharray": "3 2" });
    });
    copied.forEach((parent, k) => {
      if (parent !== k) svg.append(shape("circle", { cx: toX(since), cy: toY(k), r: 4, style: `fill: ${color(origins[k])}` }));
    });
  });
  lanes(updates);
  parents.forEach((_, k) => {
    const held = curves[`eval/member_${k}`];
    svg.append(shape("text", { x: left - 8, y: toY(k) + 4, "text-anchor": "end" }, `member ${k}`));
    if (held) svg.append(shape("text", { x: width - right + 8, y: toY(k) + 4 }, number(held.mean[held.mean.length - 1])));
  });
  return make("div", { class: "chart lineage" }, make("h3", {}, `${name}: lineage, and last held-out return`), svg);
}
