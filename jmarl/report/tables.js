// Tables of the page: last values, held-out results, goodput, settings.

const PHASES = ["sampling", "rewards", "data", "update", "checkpoint", "evaluation", "compiling", "idle"];
const NAME_OF = { "reward/mean": "reward", "eval/reward": "held-out reward" };
const NAME_WITH_TURNS = { "reward/mean": "return", "eval/reward": "held-out return" };

const ofRuns = (runs) => (runs === undefined || runs === null ? "" : ` (of ${number(runs)} run${runs === 1 ? "" : "s"})`);
const withInterval = ([, mean, half, runs]) => `${number(mean)}${half === null ? "" : ` ± ${number(half)}`}${ofRuns(runs)}`;
const cell = (text) => make("td", { class: "number" }, text);
const head = (text) => make("th", { class: "number" }, text);
const columnHead = (name) => make("th", { class: "number column" }, ...name.split(/(?<=\/)|(?<=_)(?=[a-z])/).flatMap((part) => [part, make("wbr")])); // may break there
const note = (text) => make("p", { class: "note" }, text);

/** Return a table that scrolls by itself. Where the window is narrow its rows stand below each other, each cell with the name of its
 * column, if the first row has names. */
function wide(...rows) {
  const names = rows.length ? [...rows[0].children] : [], hasNames = names.length > 1 && names.every(({ tagName }) => tagName === "TH");
  if (hasNames) {
    for (const row of rows.slice(1)) [...row.children].forEach((td, i) => { if (names[i]?.textContent) td.dataset.name = names[i].textContent; });
  }
  return make("div", { class: "wide" }, make("table", hasNames ? { class: "named" } : {}, ...rows));
}

/** Return a table of rows of cells, turned if it has more columns than fit. names: heads of its columns, the first one empty. */
function upright(names, rows) {
  if (names.length <= Math.max(rows.length, 7)) return wide(make("tr", {}, ...names), ...rows.map((row) => make("tr", {}, ...row)));
  const first = make("tr", {}, make("td", {}), ...rows.map(([name]) => make("th", { class: "name" }, ...name.childNodes)));
  return wide(first, ...names.slice(1).map((name, i) => make("tr", {},
    make("td", { class: name.classList.contains("code") ? "code name" : "name" }, ...name.childNodes), ...rows.map((row) => row[i + 1]))));
}

/** Return the newest values of the curves in `titles`: a row a group, the agents of a team below each other. The first column is
 * the legend, whose boxes choose what is drawn. */
function lastValues(groups, charts, titles, onChoose) {
  const nameOf = [...charts.keys()].some((title) => title.startsWith("turn_")) ? NAME_WITH_TURNS : NAME_OF;
  const newest = ({ curve, points }) => {
    const value = (points ? curve.mean : smooth(curve.mean)).filter((x) => x !== null).pop();
    return make("div", {}, number(Number(value.toPrecision(3))));
  };
  if (groups.length === 1) {
    const entries = titles.map((title) => [title, charts.get(title).filter((entry) => !entry.beside)]);
    return make("div", { class: "last-values" }, ...entries.map(([title, all]) => make("div", {}, make("div", { class: "part" }, (nameOf[title] || title).replace("agent_N/", "")),
      ...all.map((entry) => make("div", {}, newest(entry), all.length > 1 ? make("span", { class: "part" }, agentName(entry.agent)) : null)))));
  }
  const row = (group, g) => {
    const values = titles.map((title) => charts.get(title).filter((entry) => entry.group === g && !entry.beside).map(newest));
    return [make("td", { class: "name" }, chooser(group, g, onChoose)), ...values.map((of) => cell(of.length ? make("div", {}, ...of) : "–"))];
  };
  const names = titles.map((title) => nameOf[title] || title.replace("agent_N/", ""));
  return upright([make("th", {}, ""), ...names.map(columnHead)], groups.map(row));
}

/** Return the name of a group with a box that says whether it is drawn. */
function chooser(group, g, onChoose) {
  const box = make("input", { type: "checkbox", onchange: () => {
    if (box.checked) view.hidden.delete(group.name); else view.hidden.add(group.name);
    onChoose();
  } });
  box.checked = !view.hidden.has(group.name);
  return make("label", {}, box, sample(color(g), ""), group.name);
}

/** Fill in a table for each compared column, with its curves over updates and over tokens. */
function fillComparison(section, { caption, head: names, tables }) {
  for (const { column, cells, updates, tokens } of tables) {
    const row = ([name, ...values], g) => make("tr", {}, make("td", { class: "name" }, sample(color(g), ""), name), ...values.map(cell));
    const entries = (curves) => curves.map((curve, g) => ({ label: cells[g][0], curve: curve && { ...curve, lines: undefined }, stroke: color(g), dash: "",
      points: column.startsWith("eval/"), shift: 3 * (g - (curves.length - 1) / 2) })).filter(({ curve }) => curve);
    const place = make("div", { class: "charts" });
    for (const [unit, series] of [["updates", entries(updates)], ["tokens", entries(tokens)]]) {
      const where = unit === "tokens" ? (x) => `${number(x)} tokens` : updateText;
      if (series.length) place.append(chart(`${column} over ${unit}`, series, where, unit));
    }
    const first = make("tr", {}, make("th", {}, names[0]), ...names.slice(1).map(head));
    section.append(make("h3", {}, column), wide(first, ...cells.map(row)), place);
  }
  section.append(note(`${caption} Curves: the same runs, with the 95 % interval of their mean.`));
}

function fillHeldOut(section, groups) {
  const found = [...new Set(groups.flatMap((group) => Object.keys(group.held_out)))];
  const names = [...found.filter((name) => name === "reward"), ...found.filter((name) => name !== "reward")];
  if (!names.length) {
    const given = groups.some((group) => group.has_held_out);
    section.append(note(given ? "No evaluation was made yet." : "No held-out tasks were given."));
    return;
  }
  const row = (title, kind, ends) => {
    const [first, last] = ends || [null, null];
    const change = ends && first[1] !== null && last[1] !== null ? last[1] - first[1] : null;
    return make("tr", {}, make("td", { class: `${kind} name` }, title), ...(ends ? [withInterval(first), withInterval(last),
      change === null ? "–" : (change > 0 ? "+" : "") + number(change), `${first[0]} → ${last[0]}`] : ["–", "–", "–", "–"]).map(cell));
  };
  const table = (title, rows) => wide(make("tr", {}, make("th", {}, title), ...["first", "last", "change", "updates"].map(head)), ...rows);
  const perRun = (name) => table(name, groups.map((group) => row(group.name, "", group.held_out[name])));
  if (groups.length === 1) section.append(table("", names.map((name) => row(name, "code", groups[0].held_out[name]))));
  else {
    section.append(perRun(names[0]));
    if (names.length > 1) section.append(panel("held-out", `${names.length - 1} more columns`, ...names.slice(1).map(perRun)));
  }
  section.append(note("First and last evaluation: mean ± half of the 95 % interval, over runs if there are several, else over prompts."));
  const known = groups.filter((group) => group.is_trained_on).map(({ name }) => name);
  if (known.length) section.append(note(`The held-out tasks are those of training${groups.length > 1 ? `: ${known.join(", ")}` : ""}.`));
  const best = groups.flatMap((group) => group.best);
  if (best.length) {
    section.append(note(`Best evaluation, whose weights are kept: ${best.join("; ")}. ` +
      "It was chosen on these held-out tasks, so on others the result may be worse."));
  }
}

function fillGoodput(section, groups) {
  const measured = groups.filter((group) => PHASES.some((phase) => group.goodput[phase] > 0));
  if (!measured.length) { section.append(note("No phases were measured.")); return; }
  const phases = PHASES.filter((phase) => measured.some((group) => group.goodput[phase] > 0));
  const paint = (phase) => `background: ${color(PHASES.indexOf(phase))}`;
  const row = (group) => {
    const total = phases.reduce((sum, phase) => sum + (group.goodput[phase] || 0), 0);
    const share = (phase) => (100 * (group.goodput[phase] || 0)) / total;
    const bar = phases.filter((phase) => share(phase) > 0).map((phase) =>
      make("div", { style: `${paint(phase)}; flex: ${share(phase)}`, title: `${phase} ${share(phase).toFixed(1)} %` }));
    return make("tr", {}, make("td", { class: "name" }, group.name), cell(`${number(total / group.num_runs)} s`),
      make("td", { class: "bars" }, make("div", { class: "bar" }, ...bar)), ...phases.map((phase) => cell(`${share(phase).toFixed(1)} %`)));
  };
  const names = phases.map((phase) => make("th", { class: "number" }, make("span", { class: "swatch", style: paint(phase) }), phase));
  section.append(wide(make("tr", {}, make("th", {}, ""), head("per run"), make("th", {}, ""), ...names), ...measured.map(row)));
  if (measured.length < groups.length) section.append(note("The other runs did not measure their phases."));
  section.append(note("What the host did or waited for, up to the last step. An update that still runs while the host logs or reads tasks counts for these."));
}

const short = (value) => (value.length > 300 ? `${value.slice(0, 300)} …` : value);
const code = (text) => make("td", { class: "code" }, short(text));

function fillSettings(section, groups, settings) {
  if (!settings.length) { section.append(note("The runs recorded no settings.")); return; }
  const differing = settings.filter((row) => row.differs), rest = settings.filter((row) => !row.differs);
  const table = (rows) => wide(...rows.map((row) => make("tr", {}, make("td", { class: "code name" }, row.name), code(row.values[0]))));
  if (groups.length > 1) {
    const names = [make("th", {}, ""), ...differing.map((row) => make("th", { class: "code" }, row.name))];
    const rows = groups.map((group, g) => [make("td", { class: "name" }, group.name), ...differing.map((row) => code(row.values[g]))]);
    section.append(make("h3", {}, "Differences between the runs"), differing.length ? upright(names, rows) : note("None."));
  }
  const changed = rest.filter((row) => !row.default && !row.auto), auto = rest.filter((row) => row.auto);
  section.append(make("h3", {}, groups.length > 1 ? "Equal for all curves, and not the default" : "Not the default"),
    changed.length ? table(changed) : note("None."));
  if (auto.length) section.append(make("h3", {}, "Chosen by the run, or given: the default is auto"), table(auto));
  section.append(panel("defaults", "Defaults", table(rest.filter((row) => row.default))));
}
