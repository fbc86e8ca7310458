"use strict";
// Elements, numbers, and line charts as SVG.

const SVG = "http://www.w3.org/2000/svg";

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

const color = (i) => `var(--c${i % 8})`;

/** Return four to six round numbers between low and high. */
function ticks(low, high) {
  const rough = (high - low) / 4 || 1;
  const unit = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((k) => k * unit).find((size) => size >= rough) || rough;
  const values = [];
  for (let x = Math.ceil(low / step) * step; x <= high + step * 1e-9; x += step) values.push(Number(x.toPrecision(12)));
  return values;
}

/** Return the mean of each value and up to nine before it. */
function smooth(values) {
  return values.map((value, i) => {
    const near = values.slice(Math.max(0, i - 9), i + 1).filter((x) => x !== null);
    return value === null || !near.length ? null : near.reduce((a, b) => a + b) / near.length;
  });
}

/** Return the path of a line, with gaps where values are null. */
function path(xs, ys, toX, toY) {
  let line = "", pen = "M";
  xs.forEach((x, i) => {
    if (ys[i] === null) { pen = "M"; return; }
    line += `${pen}${toX(x).toFixed(1)} ${toY(ys[i]).toFixed(1)}`;
    pen = "L";
  });
  return line;
}

/** Return the outline of the interval around a mean. */
function band(curve, toX, toY) {
  const used = curve.x.map((_, i) => i).filter((i) => curve.mean[i] !== null && curve.interval[i] !== null);
  const edge = (i, sign) => `${toX(curve.x[i]).toFixed(1)} ${toY(curve.mean[i] + sign * curve.interval[i]).toFixed(1)}`;
  return used.length > 1 ? `M${[...used.map((i) => edge(i, 1)), ...used.reverse().map((i) => edge(i, -1))].join("L")}Z` : "";
}

/** Return the smallest and largest value that a chart shows. Intervals that are much wider than the curves are cut. */
function range(series) {
  const smallest = (values) => values.reduce((a, b) => Math.min(a, b), Infinity);
  const largest = (values) => values.reduce((a, b) => Math.max(a, b), -Infinity);
  const used = series.flatMap(({ curve }) => curve.mean.map((mean, i) => [mean, curve.interval[i] || 0])).filter(([mean]) => mean !== null);
  if (!used.length) return [0, 1];
  const means = used.map(([mean]) => mean);
  let [low, high] = [smallest(means), largest(means)];
  const room = 0.6 * (high - low) || Infinity;
  low = Math.max(low - room, smallest(used.map(([mean, half]) => mean - half)));
  high = Math.min(high + room, largest(used.map(([mean, half]) => mean + half)));
  if (low === high) [low, high] = [low - (Math.abs(low) / 10 || 0.5), high + (Math.abs(high) / 10 || 0.5)];
  const margin = (high - low) * 0.04;
  return [low - margin, high + margin];
}

/** Draw one series: the band of its interval, every update thin, and their running mean thick; or points, where few. */
function drawSeries(svg, { curve, stroke, dash, points }, toX, toY) {
  if (points) {
    curve.x.forEach((x, i) => {
      if (curve.mean[i] === null) return;
      const [cx, half] = [toX(x), curve.interval[i]];
      if (half !== null) {
        const [y1, y2] = [toY(curve.mean[i] - half), toY(curve.mean[i] + half)];
        svg.append(shape("line", { x1: cx, x2: cx, y1, y2, style: `stroke: ${stroke}`, "stroke-width": 1.5 }));
      }
      svg.append(shape("circle", { cx, cy: toY(curve.mean[i]), r: 3.5, style: `fill: ${stroke}`, class: "point" }));
    });
    return;
  }
  const outline = band(curve, toX, toY);
  if (outline) svg.append(shape("path", { d: outline, style: `fill: ${stroke}`, "fill-opacity": 0.18, class: "band" }));
  const style = `stroke: ${stroke}; fill: none`;
  svg.append(shape("path", { d: path(curve.x, curve.mean, toX, toY), style, "stroke-width": 1, "stroke-opacity": 0.45 }));
  const line = { d: path(curve.x, smooth(curve.mean), toX, toY), style, "stroke-width": 2, class: "curve" };
  svg.append(shape("path", dash ? { ...line, "stroke-dasharray": dash } : line));
}

/** Return a chart. series: [{label, curve, stroke, dash, points}]. */
function chart(title, series) {
  const [width, height, left, bottom, top, right] = [420, 210, 46, 22, 8, 18]; // right: room for half of the last label
  const all = series.flatMap(({ curve }) => curve.x);
  const [first, last] = [all.reduce((a, b) => Math.min(a, b), Infinity), all.reduce((a, b) => Math.max(a, b), 1)];
  const [low, high] = range(series);
  const toX = (x) => left + ((x - first) / (last - first || 1)) * (width - left - right);
  const inside = (y) => Math.min(Math.max(y, low), high);
  const toY = (y) => height - bottom - ((inside(y) - low) / (high - low)) * (height - top - bottom);
  const svg = shape("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": title });
  for (const y of ticks(low, high)) {
    svg.append(shape("line", { x1: left, x2: width - right, y1: toY(y), y2: toY(y), class: "grid" }));
    svg.append(shape("text", { x: left - 6, y: toY(y) + 4, "text-anchor": "end" }, number(y)));
  }
  for (const x of ticks(first, last).filter(Number.isInteger)) {
    svg.append(shape("text", { x: toX(x), y: height - 6, "text-anchor": "middle" }, number(x)));
  }
  for (const entry of series) drawSeries(svg, entry, toX, toY);
  const cursor = shape("line", { y1: top, y2: height - bottom, class: "cursor", visibility: "hidden" });
  svg.append(cursor);
  const values = make("div", { class: "values" });
  const latest = () => series.map(({ label, curve }) => `${label} ${number(curve.mean[curve.mean.length - 1])}`);
  const show = (head, texts) => { values.textContent = head + (texts.length > 4 ? [...texts.slice(0, 4), "…"] : texts).join(" · "); };
  show("last: ", latest());
  svg.addEventListener("mousemove", (event) => {
    const box = svg.getBoundingClientRect();
    const x = first + (((event.clientX - box.left) / box.width) * width - left) / (width - left - right) * (last - first);
    const nearest = ({ curve }) => curve.x.reduce((best, at, i) => (Math.abs(at - x) < Math.abs(curve.x[best] - x) ? i : best), 0);
    const update = series[0].curve.x[nearest(series[0])];
    for (const name of ["x1", "x2"]) cursor.setAttribute(name, toX(update));
    cursor.setAttribute("visibility", "visible");
    show(`update ${update}: `, series.map((entry) => `${entry.label} ${number(entry.curve.mean[nearest(entry)])}`));
  });
  svg.addEventListener("mouseleave", () => { cursor.setAttribute("visibility", "hidden"); show("last: ", latest()); });
  return make("div", { class: "chart" }, make("h3", {}, title), svg, values);
}
