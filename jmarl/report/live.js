// Ask the server of `jmarl report --watch` for new data every few seconds, and show the newest episode.

const SECONDS = 3;

/** Return which runs there are, and when each was first started: other ones need another page. */
const identity = ({ runs }) => JSON.stringify(runs.map((run) => [run.name, run.attempts.map((attempt) => attempt.time)]));

/** Return the path of one episode: of another prompt in each step. */
function newestPath({ step, turns }) {
  const nodes = turns[0].items.length, drawn = Math.max(step - 1, 0);
  return episodePath(turns, drawn % nodes, Math.floor(drawn / nodes) % turns[0].joint.length);
}

async function fillNewest(section, data, episodes) {
  const last = data.steps.size - 1, record = last < 0 ? null : await data.steps.record(last);
  if (data.steps.size - 1 !== last) return; // a newer step came while this one was unpacked
  if (!record) { section.append(note("No step is done yet, or the run keeps no completions.")); return; }
  const when = record.kind === "eval" ? `held-out, after ${record.step} updates` : `step ${record.step}`;
  section.append(note(`${data.runs.length > 1 ? `${data.runs[record.run].name}, ` : ""}${when}`));
  const returns = jointReturns(record.turns, gammaOf(data, record)), path = newestPath(record), [[task, joint]] = path;
  const open = () => episodes && episodes.goTo(last, { task, joint }).then(() => document.getElementById("episodes").scrollIntoView());
  const act = { group: open, exact: (text, title) => episodes && episodes.openText(text, title) };
  section.append(make("div", { class: "episode" }, drawEpisode(record, returns, path, act)));
}

/** Ask for new data until the page is closed. episodes: the section that lists them, or null. */
function follow(data, episodes) {
  const status = document.getElementById("live"), pause = make("input", { type: "checkbox" }), text = make("span");
  status.append(text, make("label", {}, pause, " pause"));
  const newest = () => redraw("newest", data.steps.size, (section) => {
    fillNewest(section, data, list).catch((error) => section.append(note(`The newest step cannot be drawn: ${error.message}`)));
  });
  let list = episodes, asked = new Date();
  const say = (state) => { text.textContent = `${state} `; };
  const clock = () => asked.toLocaleTimeString();

  async function ask() {
    const after = data.runs.map((_, run) => data.steps.of(run).reduce((most, i) => Math.max(most, data.steps.index.step[i]), -1));
    const response = await fetch(`data?after=${after.join()}`, { cache: "no-store" });
    if (!response.ok) { say(`At ${new Date().toLocaleTimeString()}: ${await response.text()} Shown is the state of ${clock()}.`); return; }
    const answer = await response.json();
    if (identity(answer) !== identity(data)) { location.reload(); return; }
    const { completions, ...numbers } = answer, added = completions.filter((record) => data.steps.add(record));
    if (view.by >= answer.groupings.length) view.by = 0;
    Object.assign(data, numbers);
    draw(data);
    newest();
    if (added.length && list) list.extend();
    if (added.length && !list) list = fillEpisodes(document.getElementById("episodes"), data);
    asked = new Date();
    showSummary(data);
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
