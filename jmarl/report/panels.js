// What the reader does with a chart: make it large, save it as a picture or a table; and the x axis of all charts.

const AXES = { updates: "updates", tokens: "tokens that were sampled", minutes: "minutes" };
const PAINTED = ["fill", "stroke", "stroke-width", "stroke-opacity", "fill-opacity", "stroke-dasharray", "font-family", "font-size"];

/** Return the place on the chosen axis of an update of a group; between the updates that were counted, in proportion. */
function onAxis(group, x) {
  const known = group.axes?.x, used = group.axes?.[view.axis];
  if (view.axis === "updates" || !used || !known.length) return x;
  if (x <= 0) return 0;
  let after = known.findIndex((update) => update >= x);
  if (after < 0) after = known.length - 1;
  const [x0, y0] = after ? [known[after - 1], used[after - 1]] : [0, 0], [x1, y1] = [known[after], used[after]];
  return x1 === x0 ? y1 : y0 + (Math.min((x - x0) / (x1 - x0), 1)) * (y1 - y0);
}

/** Return the axes on which all groups can be drawn. */
const axesOf = (groups) => Object.keys(AXES).filter((name) => name === "updates" || groups.every((group) => group.axes?.[name]));

const whereOnAxis = (x) => (view.axis === "tokens" ? `${number(x)} tokens` : view.axis === "minutes" ? `${number(x)} minutes` : updateText(x));

/** Return a series without the points outside of the part of the x axis that the reader chose. */
function inPart(entry) {
  const { curve } = entry, used = curve.x.map((_, i) => i).filter((i) => curve.x[i] >= view.from && curve.x[i] <= view.to);
  if (used.length === curve.x.length) return entry;
  const pick = (values) => values && used.map((i) => values[i]);
  const cut = ({ x, mean, interval, runs, lines }) => ({ x: pick(x), mean: pick(mean), interval: pick(interval), runs: pick(runs), lines: lines && lines.map(pick) });
  return { ...entry, curve: { ...cut(curve), thick: cut(smoothed(curve)) } };
}

/** Return the fields that choose a part of the x axis, and a function that sets them. draw: called when they change. */
function partOfAxis(draw) {
  const field = (name, none) => make("input", { type: "number", class: "small", step: "any", placeholder: name, title: name, "aria-label": `${name}, on the x axis`,
    onchange: (event) => { view[name] = event.target.value === "" ? none : Number(event.target.value); draw(); } });
  const fields = [field("from", -Infinity), field("to", Infinity)];
  const choose = (...ends) => {
    [view.from, view.to] = ends;
    fields.forEach((input, i) => { input.value = Number.isFinite(ends[i]) ? Number(ends[i].toPrecision(4)) : ""; });
    draw();
  };
  const whole = make("button", { class: "link", "aria-label": "show the whole x axis", onclick: () => choose(-Infinity, Infinity) }, "whole");
  return [make("span", { title: "or drag over a chart" }, fields[0], " ", fields[1], " ", whole), choose];
}

/** Return the buttons of a chart. series: as of `chart`; xs: the name of its x axis. */
function chartTools(title, series, xs, svg, box) {
  const name = title.replace(/[^\w.-]+/g, "_"), button = (text, press, about) => make("button", { class: "link", onclick: press, title: about, "aria-label": `${about}: ${title}` }, text);
  const large = () => { box.classList.toggle("large"); };
  return make("div", { class: "chart-tools" }, button("larger", large, "larger or smaller"),
    button("PNG", () => savePicture(svg, `${name}.png`), "save as a picture"), button("CSV", () => saveSeries(series, xs, `${name}.csv`), "save as a table"));
}

function saveSeries(series, xs, name) {
  const rows = series.flatMap(({ label, curve }) => curve.x.map((x, i) => ({ curve: label || name.replace(/\.csv$/, ""), [xs]: x, mean: curve.mean[i],
    half_of_interval: curve.interval[i], ...Object.fromEntries((curve.lines || []).map((line, k) => [`run ${k}`, line[i]])) })));
  const names = [...new Set(rows.flatMap((row) => Object.keys(row)))];
  save(name, "text/csv", csvOf(names, rows));
}

/** Save a chart as it is drawn, on the background of the page. */
function savePicture(svg, name) {
  const copy = svg.cloneNode(true), drawn = [svg, ...svg.querySelectorAll("*")], own = [copy, ...copy.querySelectorAll("*")], [, , width, height] = svg.getAttribute("viewBox").split(" ").map(Number);
  drawn.forEach((element, i) => {
    const style = getComputedStyle(element);
    own[i].setAttribute("style", PAINTED.map((property) => `${property}: ${style.getPropertyValue(property)}`).join("; "));
  });
  for (const [attribute, value] of [["width", width], ["height", height], ["xmlns", SVG]]) copy.setAttribute(attribute, value);
  const picture = new Image(), scale = 3;
  picture.onload = () => {
    const canvas = make("canvas", { width: width * scale, height: height * scale }), pen = canvas.getContext("2d");
    pen.fillStyle = getComputedStyle(document.body).backgroundColor;
    pen.fillRect(0, 0, canvas.width, canvas.height);
    pen.drawImage(picture, 0, 0, canvas.width, canvas.height);
    const link = make("a", { href: canvas.toDataURL("image/png"), download: name });
    document.body.dataset.saved = String(link.href.length);
    link.click();
  };
  picture.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(new XMLSerializer().serializeToString(copy))}`;
}
