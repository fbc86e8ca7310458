// Read the data, fill the sections of the page, and draw them again when the reader chooses something or new data come.

const MAX_LINES = 4; // runs of a group that are drawn one by one, see `summary.py`
const MAIN = [
  "reward/mean", "eval/reward", "agent_N/return", "loss", "agent_N/length", "agent_N/entropy", "agent_N/distinct_1", "agent_N/distinct_2",
  "agent_N/repeated", "agent_N/kl", "agent_N/loss", "agent_N/grad_norm", "agent_N/accuracy",
];
const LIBRARY = /^reward\/(mean|std|max|invalid|raised|truncated|comparator|comparator_invalid)$|@\d+(_ci95|_episodes|_runs)?$/;
const OWN = /^(reward|measures)\//; // parts of the reward and measures that the user wrote

/** Return the place of a chart: the reward, own parts and measures, then what most readers look at; -1 for all others. */
function rank(title) {
  const name = title.replace(/^turn_\d+\//, "");
  if (OWN.test(name) && !LIBRARY.test(name)) return 0.5 + 0.1 * name.startsWith("measures/");
  return MAIN.indexOf(name);
}

/** Return whether all points of a chart are equal. */
function isFlat(entries) {
  const values = entries.flatMap(({ curve }) => curve.mean).filter((x) => x !== null);
  return largest(values) - smallest(values) <= 1e-9 * Math.abs(largest(values));
}

async function readData() {
  const element = document.getElementById("data"), data = await unpack(element.textContent);
  element.remove();
  return Object.assign(data, { steps: new Steps(data.steps, data.live) });
}

/** Return the groups of runs that the reader chose. */
function chosenGroups(data) {
  return data.groupings[view.by].members.map(({ name, group }) => ({ ...data.groups[group], name }));
}

/** Return the charts by title: columns of several agents are one chart, held-out rewards are points in the chart of rewards. */
function chartsOf(groups) {
  const charts = new Map(), several = groups.length > 1;
  const add = (title, entry) => charts.set(title, [...(charts.get(title) || []), entry]);
  groups.forEach((group, g) => {
    for (const [name, known] of Object.entries(group.curves)) {
      if (!known.mean.some((x) => x !== null)) continue;
      const curve = view.axis === "updates" ? known : { ...known, x: known.x.map((x) => onAxis(group, x)) };
      const [title, agent] = [name.replace(/agent_\d+/, "agent_N"), (name.match(/agent_(\d+)/) || [])[1]];
      const label = [several ? group.name : null, agent === undefined ? null : agentName(agent)].filter(Boolean).join(" ");
      const style = several ? { stroke: color(g), dash: DASHES[(agent || 0) % 4] } : { stroke: color(agent || 0), dash: "" };
      const entry = { label, agent, group: g, curve, ...style, points: name.startsWith("eval/"),
        shift: 3 * (g - (groups.length - 1) / 2) };
      add(title, entry);
      const trained = name === "eval/reward" ? "reward/mean" : name.replace(/^eval\//, "");
      if (name.startsWith("eval/") && (trained === "reward/mean" || trained in group.curves)) add(trained, { ...entry, label: `${label} held-out`.trim(), beside: true });
    }
  });
  return charts;
}

/** Return a panel that the reader opens, which is open again when it is drawn anew. */
function panel(name, title, ...content) {
  return make("details", { "data-name": name }, make("summary", {}, title), ...content);
}

function fillCurves(section, groups) {
  const charts = chartsOf(groups), titles = [...charts.keys()];
  const flat = new Map(titles.map((title) => [title, isFlat(charts.get(title))])), order = (a, b) => flat.get(a) - flat.get(b);
  const isGame = flat.get("reward/mean"); // one wins what the other loses: the returns of the agents say more than their mean
  const isReturn = (title) => isGame && title.endsWith("agent_N/return"), isNew = [...flat.values()].every(Boolean); // of one update
  const isIdle = (title) => isGame && !isNew && title.startsWith("turn_") && flat.get(title);
  const isMain = (title) => rank(title) >= 0 && !isIdle(title) && (isGame || !title.endsWith("agent_N/return"));
  const main = titles.filter(isMain).sort((a, b) => order(a, b) || isReturn(b) - isReturn(a) || a.startsWith("turn_") - b.startsWith("turn_") || rank(a) - rank(b));
  if (!titles.length) { section.append(note("No step is done yet.")); return; }
  const drawn = (title) => {
    const shown = charts.get(title).filter((entry) => !view.hidden.has(groups[entry.group].name)), part = shown.map(inPart).filter(({ curve }) => curve.x.length);
    return shown.length && !part.length ? null : chart(title, part, whereOnAxis, AXES[view.axis], view.choose);
  };
  const place = make("div", { class: "charts" }), morePlace = make("div", { class: "charts" });
  const isBeside = (title) => title.startsWith("eval/") && charts.has(title.slice(5));
  const rest = titles.filter((title) => !main.includes(title) && !isBeside(title)).sort((a, b) => order(a, b) || (a < b ? -1 : 1));
  const filter = make("input", { type: "search", placeholder: "name of a column", "aria-label": "name of a column", value: view.filter || "" });
  const drawMore = () => morePlace.replaceChildren(...rest.filter((title) => title.includes(filter.value)).map(drawn).filter(Boolean));
  filter.addEventListener("input", () => { view.filter = filter.value; drawMore(); });
  const more = panel("columns", `${rest.length} more columns`, filter, morePlace);
  const draw = () => {
    const panels = main.filter((title) => title !== "eval/reward").map(drawn).filter(Boolean);
    place.replaceChildren(...(panels.length ? panels : [note("Nothing was measured in this part of the x axis.")]));
    if (more.open) drawMore();
  };
  more.addEventListener("toggle", () => { if (more.open) drawMore(); });
  const below = groups.length > 1 && roles.length > 1 ? `; of the agents from above: ${roles.map((_, n) => agentName(n)).join(", ")}` : "";
  section.append(make("h3", {}, `Last values${view.smooth > 1 ? `, mean of ${view.smooth} points` : ""}${below}`),
    lastValues(groups, charts, main, draw), agentLegend(groups, charts), note(explanation(groups)), place, ...groups.map(lineage).filter(Boolean));
  if (rest.length) section.append(more);
  draw();
}

/** Return how the lines of the agents look: by color, or by dashes if colors tell runs apart. */
function agentLegend(groups, charts) {
  const agents = [...charts.values()].flat().map(({ agent }) => agent).filter((agent) => agent !== undefined);
  const several = groups.length > 1, numbers = [...new Set(agents)].sort((a, b) => a - b);
  return make("div", { class: "legend" }, ...numbers.map((agent) => make("span", {},
    sample(several ? "var(--text)" : color(agent), several ? DASHES[agent % 4] : ""), agentName(agent))));
}

function explanation(groups) {
  const several = groups.some((group) => group.num_runs > 1);
  return [
    groups.some(({ updates }) => updates > 400) ? "A point is the mean of neighboring updates, of which there are many." : "A point is an update.",
    view.smooth > 1 ? `Thin: every point; thick: mean of ${view.smooth}.` : "",
    groups.some((group) => group.num_runs > MAX_LINES) ? "Bands: 95 % interval of the mean over runs." : "",
    groups.some(({ num_runs: n }) => n > 1 && n <= MAX_LINES) ? `Up to ${MAX_LINES} runs of a group are a thin line each, and their mean is thick.` : "",
    `Dots: held-out tasks, with the 95 % interval over ${several ? "runs" : "prompts"}.`,
    view.logY ? "Values that are not above 0 are not drawn." : "",
    view.logX ? "What was measured before the first update stands at 1." : "",
  ].join(" ");
}

/** Return what the reader chooses: the grouping, smoothing and log axes. */
function controls(data, draw) {
  const select = (label, options, value, choose) => {
    const list = make("select", { "aria-label": label, onchange: () => { choose(list.value); draw(); } },
      ...options.map(([number, text]) => make("option", { value: number }, text)));
    list.value = value;
    return make("label", {}, `${label} `, list);
  };
  const box = (label, name) => {
    const input = make("input", { type: "checkbox", onchange: () => { view[name] = input.checked; draw(); } });
    return make("label", {}, input, ` ${label}`);
  };
  const groupings = data.groupings.map(({ by }, i) => [i, by]);
  const smoothing = [[1, "none"], ...[3, 10, 30, 100].map((n) => [n, `${n} points`])];
  const axes = axesOf(data.groups), [part, choose] = partOfAxis(draw);
  view.choose = choose;
  return make("div", { class: "controls" },
    groupings.length > 1 ? select("a curve for each", groupings, view.by, (i) => { view.by = Number(i); }) : null,
    axes.length > 1 ? select("over", axes.map((name) => [name, name]), view.axis, (name) => { view.axis = name; choose(-Infinity, Infinity); }) : null, part,
    select("smoothing", smoothing, view.smooth, (n) => { view.smooth = Number(n); }), box("log x", "logX"), box("log values", "logY"));
}

function fillAttempts(section, data) {
  for (const run of data.runs) {
    const entries = run.attempts.map((attempt, i) => {
      const versions = Object.entries(attempt.versions || {}).map(([name, version]) => `${name} ${version}`).join(", ");
      const title = `${attempt.number}: ${attempt.time || "unknown time"} on ${attempt.host || "an unknown host"}`;
      const entry = panel(`${run.name} attempt ${attempt.number}`, title,
        make("p", { class: "code" }, (attempt.command || []).join(" ")),
        make("p", { class: "note" }, `${(attempt.devices || []).join(", ")}; Python ${attempt.python || "?"}; ${versions}`),
        make("pre", {}, attempt.log || "No lines were logged."));
      entry.open = data.runs.length === 1 && i === run.attempts.length - 1;
      return entry;
    });
    section.append(make("h3", {}, run.name), ...(entries.length ? entries : [note("No start of this run was recorded.")]));
  }
}

/** Draw a section anew if what it shows has changed. Panels stay open or closed. fill: appends to the section. */
function redraw(id, content, fill) {
  const section = document.getElementById(id), text = JSON.stringify(content);
  const isTyping = section.rest?.contains(document.activeElement) && document.activeElement.type === "search";
  if (section.drawn === text || isTyping) return;
  const first = section.drawn === undefined;
  section.drawn = text;
  const panels = () => [...section.querySelectorAll("details[data-name]")];
  const open = new Map(panels().map((details) => [details.dataset.name, details.open]));
  const logs = new Map(panels().map((details) => [details.dataset.name, details.querySelector("pre")?.scrollTop]));
  if (first) section.rest = section.appendChild(make("div"));
  section.rest.replaceChildren();
  fill(section.rest);
  for (const details of panels()) {
    const name = details.dataset.name, log = details.querySelector("pre");
    if (open.has(name)) details.open = open.get(name);
    if (log && logs.get(name)) log.scrollTop = logs.get(name);
  }
}

/** Draw all sections but the episodes. */
function draw(data) {
  const groups = chosenGroups(data), { settings } = data.groupings[view.by], top = window.scrollY;
  const numbers = data.groupings[view.by].members;
  if (data.comparison) {
    redraw("comparison", [view.smooth, view.logX, view.logY], (section) => fillComparison(section, data.comparison));
  }
  redraw("curves", [groups, view.axis, `${view.from} ${view.to}`, view.smooth, view.logX, view.logY], (section) => fillCurves(section, groups));
  redraw("held-out", groups.map(({ name, held_out: results, best }) => [name, results, best]), (section) => fillHeldOut(section, groups));
  const leagues = data.runs.filter((run) => run.league);
  if (leagues.length) redraw("league", [leagues, view.smooth, view.logX, view.logY], (section) => fillLeague(section, leagues));
  redraw("goodput", groups.map(({ name, goodput }) => [name, goodput]), (section) => fillGoodput(section, groups));
  redraw("settings", [numbers, settings], (section) => fillSettings(section, groups, settings));
  redraw("attempts", data.runs, (section) => fillAttempts(section, data));
  window.scrollTo(window.scrollX, top);
}

/** Show the chart of the column that the address names, among the others if it is there. */
function openColumn() {
  const [, name] = /^#column=([\w/@-]+)$/.exec(location.hash) || [], find = () => document.querySelector(`#curves .chart[data-title$="${name}"]`);
  const more = document.querySelector('#curves [data-name="columns"]');
  if (!name) return;
  if (more && !find()) {
    more.querySelector("input").value = name;
    more.querySelector("input").dispatchEvent(new Event("input"));
  }
  if (more?.contains(find())) more.open = true;
  (find() || document.getElementById("curves")).scrollIntoView({ block: "center" });
}

/** Show at the top how the runs ended, how far they came, and what the user noted. */
function showSummary(data) {
  const runs = data.runs.length, updates = Math.max(...data.groups.map((group) => group.updates)), counts = new Map();
  for (const { status } of data.runs) if (status) counts.set(status, (counts.get(status) || 0) + 1);
  const states = [...counts].map(([status, count]) => make("span", { class: `status ${status.split(/\W/)[0]}` }, runs > 1 ? `${count} ${status}` : status));
  const notes = [...new Set(data.runs.map(({ description }) => description).filter(Boolean))].map(String);
  const tags = [...new Set(data.runs.flatMap((run) => run.tags || []))].map((tag) => make("span", { class: "tag" }, String(tag)));
  document.getElementById("summary").replaceChildren(...states,
    `${runs} run${runs > 1 ? "s" : ""}, ${updates} updates. Written by jmarl report, ${data.created}. `, ...notes.slice(0, 3).map((text) => `${text} `), ...tags);
}

async function main() {
  const summary = document.getElementById("summary");
  try {
    const data = await readData();
    roles = data.roles.map((role) => role.replace(new RegExp(UNSEEN, "g"), "\ufffd"));
    document.getElementById("curves").append(controls(data, () => draw(data)));
    draw(data);
    const episodes = fillEpisodes(document.getElementById("episodes"), data);
    showSummary(data);
    if (data.live) follow(data, episodes);
    if (episodes) await episodes.ready;
    window.addEventListener("hashchange", openColumn);
    document.getElementById("findings").addEventListener("click", (event) => { if (event.target.hash === location.hash) openColumn(); }); // once more
    openColumn();
    if (location.hash.startsWith("#e=")) document.getElementById("episodes").scrollIntoView();
    document.body.dataset.ready = String(Math.round(performance.now()));
  } catch (error) {
    summary.textContent = `The page could not be drawn: ${error.message}`;
    throw error;
  }
}

main();
