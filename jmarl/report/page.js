// Read the data and fill the sections of the page.

const MAIN = [
  "reward/mean", "loss", "agent_N/length", "agent_N/entropy", "agent_N/distinct_1", "agent_N/distinct_2", "agent_N/repeated",
  "agent_N/kl", "agent_N/loss", "agent_N/grad_norm", "agent_N/accuracy",
];
const PHASES = ["sampling", "rewards", "data", "update", "checkpoint", "evaluation", "compiling", "idle"];
const DASHES = ["", "6 3", "2 3", "8 3 2 3"];

async function readData() {
  if (typeof DecompressionStream === "undefined") throw new Error("this page needs a browser of 2023 or newer");
  const element = document.getElementById("data"), text = atob(element.textContent.trim()), bytes = new Uint8Array(text.length);
  element.remove();
  for (let i = 0; i < text.length; i += 1) bytes[i] = text.charCodeAt(i);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

/** Return the charts by title: columns of several agents are one chart, held-out rewards are points in the chart of rewards. */
function chartsOf(data) {
  const charts = new Map();
  data.groups.forEach((group, g) => {
    for (const [name, curve] of Object.entries(group.curves)) {
      if (!curve.mean.some((x) => x !== null)) continue;
      const [title, agent] = [name.replace(/agent_\d+/, "agent_N"), (name.match(/agent_(\d+)/) || [])[1]];
      const several = data.groups.length > 1;
      const label = [several ? group.name : null, agent === undefined ? null : `agent ${agent}`].filter(Boolean).join(" ");
      const style = several ? { stroke: color(g), dash: DASHES[(agent || 0) % 4] } : { stroke: color(agent || 0), dash: "" };
      const entry = { label, agent, curve, ...style, points: name.startsWith("eval/") };
      charts.set(title, [...(charts.get(title) || []), entry]);
      const heldOut = name === "reward/mean" && group.curves["eval/reward"];
      if (heldOut) charts.get(title).push({ ...entry, label: `${label} held-out`.trim(), curve: heldOut, points: true });
    }
  });
  return charts;
}

function fillCurves(section, data) {
  const charts = chartsOf(data);
  const isMain = (title) => MAIN.includes(title.replace(/^turn_\d+\//, ""));
  const rank = (title) => MAIN.indexOf(title.replace(/^turn_\d+\//, ""));
  const titles = [...charts.keys()], main = titles.filter(isMain).sort((a, b) => rank(a) - rank(b));
  const agents = [...charts.values()].flat().map(({ agent }) => agent).filter((agent) => agent !== undefined);
  const names = Array.from({ length: Math.max(-1, ...agents) + 1 }, (_, agent) => `agent ${agent}`);
  section.append(data.groups.length > 1 ? legend(data.groups.map((group) => group.name)) : legend(names));
  const several = data.groups.some((group) => group.num_runs > 1);
  const means = several ? "Bands: 95 % interval of the mean over seeds. " : "";
  section.append(make("p", { class: "note" },
    `Thin: every update; thick: mean of ten. ${means}Points: held-out tasks, with the 95 % interval over ${several ? "seeds" : "prompts"}.`));
  section.append(make("div", { class: "charts" }, ...main.map((title) => chart(title, charts.get(title)))));
  const rest = titles.filter((title) => !isMain(title)).sort();
  const place = make("div", { class: "charts" });
  const filter = make("input", { type: "search", placeholder: "name of a column" });
  const draw = () => place.replaceChildren(...rest.filter((t) => t.includes(filter.value)).map((t) => chart(t, charts.get(t))));
  filter.addEventListener("input", draw);
  const more = make("details", {}, make("summary", {}, `${rest.length} more columns`), filter, place);
  more.addEventListener("toggle", () => { if (more.open && !place.childElementCount) draw(); });
  if (rest.length) section.append(more);
}

function legend(names) {
  return make("div", { class: "legend" }, ...names.map((name, i) =>
    make("span", {}, make("i", { style: `border-color: ${color(i)}` }), name)));
}

function fillHeldOut(section, data) {
  const names = [...new Set(data.groups.flatMap((group) => Object.keys(group.held_out)))];
  if (!names.length) { section.append(make("p", { class: "note" }, "No held-out tasks were given.")); return; }
  const cell = (end) => make("td", { class: "number" },
    end ? `${number(end[1])}${end[2] === null ? "" : ` ± ${number(end[2])}`}` : "–");
  const head = make("tr", {}, make("th", {}, ""), ...data.groups.flatMap((group) => {
    const ends = Object.values(group.held_out)[0] || [[0], [0]];
    return ends.map(([updates]) => make("th", { class: "number" }, `${group.name}, ${updates} updates`));
  }));
  const rows = names.map((name) => make("tr", {}, make("td", { class: "code name" }, name),
    ...data.groups.flatMap((group) => (group.held_out[name] || [null, null]).map(cell))));
  section.append(make("div", { class: "wide" }, make("table", {}, head, ...rows)),
    make("p", { class: "note" }, "Mean ± half of the 95 % interval, over seeds if there are several, else over prompts."));
}

function fillGoodput(section, data) {
  for (const group of data.groups) {
    const phases = PHASES.filter((phase) => group.goodput[phase] > 0);
    const total = phases.reduce((sum, phase) => sum + group.goodput[phase], 0);
    if (!total) { section.append(make("p", { class: "note" }, `${group.name} did not measure its phases.`)); continue; }
    const share = (phase) => (100 * group.goodput[phase]) / total;
    const paint = (phase) => `background: ${color(PHASES.indexOf(phase))}`;
    section.append(make("h3", {}, `${group.name}: ${number(total / group.num_runs)} s${group.num_runs > 1 ? " per seed" : ""}`),
      make("div", { class: "bar" }, ...phases.map((phase) =>
        make("div", { style: `${paint(phase)}; flex: ${share(phase)}`, title: `${phase} ${share(phase).toFixed(1)} %` }))),
      make("table", {}, ...phases.map((phase) => make("tr", {},
        make("td", {}, make("span", { class: "swatch", style: paint(phase) }), phase),
        make("td", { class: "number" }, `${share(phase).toFixed(1)} %`),
        make("td", { class: "number" }, `${number(group.goodput[phase] / group.num_runs)} s`)))));
  }
  section.append(make("p", { class: "note" }, "What the host did or waited for, up to the last step. An update that still runs "
    + "while the host logs or reads tasks counts for these."));
}

function fillSettings(section, data) {
  if (!data.settings.length) { section.append(make("p", { class: "note" }, "The runs recorded no settings.")); return; }
  const head = make("tr", {}, make("th", {}, "setting"), ...data.groups.map((group) => make("th", {}, group.name)));
  const line = (row) => make("tr", row.differs ? { class: "differs" } : {}, make("td", { class: "code name" }, row.name),
    ...row.values.map((value) => make("td", { class: "code" }, value.length > 300 ? `${value.slice(0, 300)} …` : value)));
  const table = (rows) => make("div", { class: "wide" }, make("table", {}, head.cloneNode(true), ...rows.map(line)));
  const differing = data.settings.filter((row) => row.differs), rest = data.settings.filter((row) => !row.differs);
  if (data.groups.length > 1) {
    section.append(make("h3", {}, "Differences between the runs"),
      differing.length ? table(differing) : make("p", { class: "note" }, "None."));
  }
  const changed = rest.filter((row) => !row.default);
  section.append(make("h3", {}, "Not the default"), changed.length ? table(changed) : make("p", { class: "note" }, "None."),
    make("details", {}, make("summary", {}, "Defaults"), table(rest.filter((row) => row.default))));
}

function fillAttempts(section, data) {
  for (const run of data.runs) {
    section.append(make("h3", {}, run.name));
    if (!run.attempts.length) section.append(make("p", { class: "note" }, "No start of this run was recorded."));
    run.attempts.forEach((attempt, i) => {
      const versions = Object.entries(attempt.versions || {}).map(([name, version]) => `${name} ${version}`).join(", ");
      const title = `${attempt.number}: ${attempt.time || "unknown time"} on ${attempt.host || "an unknown host"}`;
      section.append(make("details", i === run.attempts.length - 1 ? { open: "" } : {}, make("summary", {}, title),
        make("p", { class: "code" }, (attempt.command || []).join(" ")),
        make("p", { class: "note" }, `${(attempt.devices || []).join(", ")}; Python ${attempt.python || "?"}; ${versions}`),
        make("pre", {}, attempt.log || "No lines were logged.")));
    });
  }
}

async function main() {
  const summary = document.getElementById("summary"), section = (id) => document.getElementById(id);
  try {
    const data = await readData();
    const runs = data.runs.length, updates = Math.max(...data.groups.map((group) => group.updates));
    fillCurves(section("curves"), data);
    fillHeldOut(section("held-out"), data);
    fillGoodput(section("goodput"), data);
    fillSettings(section("settings"), data);
    fillCompletions(section("completions"), data);
    fillAttempts(section("attempts"), data);
    summary.textContent = `${runs} run${runs > 1 ? "s" : ""}, ${updates} updates. Written by jmarl report, ${data.created}.`;
    document.body.dataset.ready = String(Math.round(performance.now()));
  } catch (error) {
    summary.textContent = `The page could not be drawn: ${error.message}`;
    throw error;
  }
}

main();
