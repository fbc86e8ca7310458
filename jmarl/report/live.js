// Ask the server of `jmarl report --watch` for new data every few seconds, and show the newest joint action.

const SECONDS = 3;
const MAX_RECORDS = 500; // of steps that came after the page was opened; older ones make room

const keyOf = (record) => [record.run, record.kind, record.step, record.updates].join();

/** Return which runs there are, and when each was first started: other ones need another page. */
const identity = ({ runs }) => JSON.stringify(runs.map((run) => [run.name, run.attempts.map((attempt) => attempt.time)]));

/** Return one episode as [turn, node, joint action]: of another prompt in each step. */
function episode(record) {
  const turns = [], nodes = record.turns[0].items.length, actions = record.turns[0].joint.length;
  const drawn = Math.max(record.step - 1, 0);
  let [p, j] = [drawn % nodes, Math.floor(drawn / nodes) % actions];
  for (const [t, turn] of record.turns.entries()) {
    if (t) p = turn.parents.indexOf(p * record.turns[t - 1].joint.length + j);
    if (p < 0) break;
    if (j >= turn.joint.length) j = 0;
    turns.push([t, p, j]);
  }
  return turns;
}

function fillNewest(section, data) {
  const record = data.completions.at(-1);
  if (!record) { section.append(note("No step is done yet, or the run keeps no completions.")); return; }
  const when = record.kind === "eval" ? `held-out, after ${record.updates} updates` : `step ${record.step}`;
  section.append(note(`${data.runs.length > 1 ? `${data.runs[record.run].name}, ` : ""}${when}`));
  for (const [t, p, j] of episode(record)) {
    const turn = record.turns[t], action = jointActions(record, t, p).find((other) => other.j === j);
    section.append(make("div", { class: "node" }, record.turns.length > 1 ? make("b", {}, `Turn ${t}`) : "",
      ...drawPrompts(turn, p, ""), agentNames(turn), drawAction(["", action], "")));
  }
}

/** Ask for new data until the page is closed. completions: the section that lists them, or null. */
function follow(data, completions) {
  const status = document.getElementById("live"), pause = make("input", { type: "checkbox" }), text = make("span");
  status.append(text, make("label", {}, pause, " pause"));
  const newest = () => redraw("newest", data.completions.at(-1) ? keyOf(data.completions.at(-1)) : "", (section) => fillNewest(section, data));
  const limit = data.completions.length + MAX_RECORDS;
  let list = completions, asked = new Date();
  const say = (state) => { text.textContent = `${state} `; };
  const clock = () => asked.toLocaleTimeString();

  async function ask() {
    const after = data.runs.map((_, run) => data.completions.reduce((most, x) => (x.run === run ? Math.max(most, x.step) : most), -1));
    const response = await fetch(`data?after=${after.join()}`, { cache: "no-store" });
    if (!response.ok) { say(`At ${new Date().toLocaleTimeString()}: ${await response.text()} Shown is the state of ${clock()}.`); return; }
    const answer = await response.json();
    if (identity(answer) !== identity(data)) { location.reload(); return; }
    const known = new Set(data.completions.map(keyOf)), added = answer.completions.filter((record) => !known.has(keyOf(record)));
    data.completions.push(...added);
    data.completions.splice(0, data.completions.length - limit);
    if (view.by >= answer.groupings.length) view.by = 0;
    Object.assign(data, { ...answer, completions: data.completions });
    draw(data);
    newest();
    if (added.length && list) list.extend();
    if (added.length && !list) list = fillCompletions(document.getElementById("completions"), data);
    asked = new Date();
    document.getElementById("summary").textContent = summaryOf(data);
    say(`Live: asks every ${SECONDS} s; newest data of ${clock()}.`);
    document.body.dataset.asked = String(Number(document.body.dataset.asked || 0) + 1);
  }

  async function repeat() {
    try { if (!pause.checked) await ask(); else say(`Paused; shown is the state of ${clock()}.`); }
    catch (error) { say(`jmarl report --watch does not answer (${error.message}). Shown is the state of ${clock()}.`); }
    setTimeout(repeat, SECONDS * 1000);
  }
  newest();
  repeat();
}
