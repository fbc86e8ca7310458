// The view of episodes: choose a step, a task and an episode, look at its messages and their groups, and at the same task
// elsewhere.

const TASKS = 8, CHOICES = 12; // tasks of a step, and episodes of a task, that are drawn before the reader asks for more
const gammaOf = (data, record) => data.runs[record.run].gamma ?? 1;

class Episodes {
  constructor(section, data) {
    Object.assign(this, { data, steps: data.steps, at: { task: 0, joint: null, choices: {} }, query: "" });
    Object.assign(this.steps, { every: data.every, names: data.runs.map(({ name }) => name) });
    const kinds = [["train", "training"], ["eval", "held-out"]].filter(([kind]) => data.live || this.steps.index.kind.includes(kind));
    const select = (name, options) => make("select", { "aria-label": name, onchange: () => this.choose() }, ...options.map(([value, text]) => make("option", { value }, text)));
    this.run = select("run", data.runs.map((run, i) => [i, run.name]));
    this.kind = select("kind", kinds);
    const go = () => this.show(this.places[Number(this.slider.value)]);
    this.slider = make("input", { type: "range", min: "0", value: "0", "aria-label": "step", oninput: go });
    this.label = make("span", { id: "step-label" });
    const move = (by) => () => { this.slider.value = by === null ? this.slider.max : Number(this.slider.value) + by; go(); };
    const button = (text, title, press) => make("button", { "aria-label": title, title, onclick: press }, text);
    this.wanted = make("input", { type: "number", class: "small", min: "0", "aria-label": "go to step", placeholder: "step", onchange: () => this.goToStep() });
    this.finder = new Finder(data, this.steps, (row) => this.openRow(row));
    this.page = make("div", { id: "page" });
    this.dialog = make("dialog", { class: "drawer", "aria-label": "other completions" });
    section.append(this.which = note(""), make("div", { class: "controls" }, data.runs.length > 1 ? this.run : null, this.kind, button("first", "first step", () => { this.slider.value = 0; go(); }),
      button("◀", "step before", move(-1)), this.slider, button("▶", "next step", move(1)), button("newest", "newest step", move(null)), this.wanted, this.label),
    this.finder.element, this.page, this.dialog);
    let pressed = null; // where a click began: a selection of text may end outside
    this.dialog.addEventListener("mousedown", (event) => { pressed = event.target; });
    this.dialog.addEventListener("click", (event) => { if (event.target === this.dialog && pressed === this.dialog) this.dialog.close(); });
    this.choose(true);
    this.sayWhich();
    window.addEventListener("hashchange", () => { if (this.openLink()) section.scrollIntoView(); });
  }

  /** Say which steps are in the page. */
  sayWhich() {
    const all = this.steps.of(null, "train"), here = all.filter((i) => this.steps.isHere(i)).length;
    const rest = this.data.live ? "the others are read when they are asked for" : "“jmarl report --steps N” puts others in";
    this.which.textContent = here === all.length ? `The completions of all ${all.length} recorded steps are in this page${this.data.live ? "; load it again for steps that came while it was paused" : ""}.`
      : `The completions of ${here} of ${all.length} recorded steps are in this page: the first, the newest, those asked for, and every ${this.data.every}. between; ${rest}.`;
  }

  /** Set the places of the steps of the chosen run and kind, in order. */
  setPlaces() {
    this.places = this.steps.of(Number(this.run.value), this.kind.value).sort((a, b) => this.steps.index.step[a] - this.steps.index.step[b]);
    this.slider.max = Math.max(this.places.length - 1, 0);
  }

  /** Show the newest step of the run and kind, or the one of a link. */
  choose(isNew = false) {
    this.setPlaces();
    this.slider.value = this.slider.max;
    if (!isNew || !this.openLink()) this.ready = this.show(this.places.at(-1));
  }

  /** Show what the address names: a run, a kind, a step or the nearest one, perhaps a task and an episode. Return whether it does. */
  openLink() {
    const [, run, kind, step, task, joint] = /^#e=(\d+),(train|eval),(\d+)(?:,(\d+),(\d+))?$/.exec(location.hash) || [];
    const all = run === undefined ? [] : this.steps.of(Number(run), kind), here = all.filter((i) => this.steps.isHere(i));
    const place = this.nearest(task === undefined && here.length && !this.data.live ? here : all, Number(step));
    if (place !== undefined) this.ready = this.goTo(place, task === undefined ? {} : { task: Number(task), joint: Number(joint) });
    return place !== undefined;
  }

  /** Return the place of the step next to a wanted one. */
  nearest(places, step) {
    const far = (i) => Math.abs(this.steps.index.step[i] - step);
    return places.length ? places.reduce((best, i) => (far(i) < far(best) ? i : best)) : undefined;
  }

  goToStep() {
    if (this.wanted.value !== "" && this.places.length) this.show(this.nearest(this.places, Number(this.wanted.value)));
  }

  /** Take up steps that came later. What is shown stays. */
  extend() {
    const before = this.places.length;
    this.setPlaces();
    if (!before && this.places.length) this.show(this.places.at(-1));
    else if (this.place !== undefined) { this.slider.value = this.places.indexOf(this.place); this.nameStep(); }
    this.sayWhich();
  }

  /** Show a step of any run, and an episode of it: {task, joint, choices, query}. */
  goTo(place, at) {
    const { run, kind } = this.steps.info(place);
    [this.run.value, this.kind.value] = [String(run), kind];
    this.setPlaces();
    return this.show(place, at);
  }

  openRow(row) {
    this.steps.record(row.place).then((record) => {
      const { turns } = record, path = pathTo(turns, row.turn, row.node), at = { choices: {}, query: this.finder.query };
      const own = turns[row.turn].joint.findIndex((action) => action[row.agent] === row.completion);
      path.push([row.node, own]);
      [at.task, at.joint] = path[0];
      path.forEach(([, j], t) => { if (t) at.choices[t] = j; });
      return this.goTo(row.place, at).then(() => this.focusOn(row.turn, row.agent));
    }).catch((error) => this.page.replaceChildren(note(error.message)));
  }

  focusOn(turn, agent) {
    const card = this.page.querySelector(`.message[data-turn="${turn}"][data-agent="${agent}"]`);
    if (card) { card.scrollIntoView({ block: "center", inline: "nearest" }); card.focus(); }
  }

  nameStep() {
    const { kind, step, reward } = this.steps.info(this.place);
    const when = kind === "eval" ? `held-out after ${step} updates` : `step ${step}`;
    const gains = () => this.record.turns[0].items.flatMap((_, p) => episodesOf(this.record, this.returns, p).map(({ gain }) => gain));
    const mean = this.record ? meanOf(gains()) : reward, what = `${this.record?.turns.length > 1 ? "return" : "reward"}${this.record ? whose(this.returns) : ""}`;
    this.label.textContent = `${when} (${this.places.length} recorded)${mean === null ? "" : `, mean ${what} ${number(mean)}`}`;
  }

  /** Show a step: its tasks with their episodes, and one of them. */
  async show(place, at = {}) {
    if (place === undefined) { this.page.replaceChildren(note("No completions of this kind were kept.")); return; }
    const round = this.round = (this.round || 0) + 1;
    this.place = place;
    this.slider.value = this.places.indexOf(place);
    this.record = null;
    this.nameStep();
    try {
      if (!this.steps.isHere(place)) await new Promise((resolve) => { setTimeout(resolve, 150); }); // the slider may still move
      if (this.round !== round) return;
      const record = await this.steps.record(place);
      if (this.round !== round) return;
      this.returns = jointReturns(record.turns, gammaOf(this.data, record));
      this.record = record;
      this.at = { task: 0, joint: null, choices: {}, query: "", ...at };
      this.at.task = Math.min(this.at.task, record.turns[0].items.length - 1);
      this.finder.offer(record);
      this.nameStep();
      this.draw();
    } catch (error) {
      if (this.round === round) this.page.replaceChildren(note(error instanceof TypeError || error instanceof RangeError
        ? `This step cannot be drawn: its record is damaged (${error.message}).` : error.message));
    }
  }

  /** Draw the tasks and the chosen episode. */
  draw() {
    if (!this.record) return; // another step is loading
    const { record, returns, at } = this, ranked = episodesOf(record, returns, at.task);
    if (at.joint === null || !ranked.some(({ j }) => j === at.joint)) at.joint = ranked[0].j;
    const rank = ranked.findIndex(({ j }) => j === at.joint), { gain, gains } = ranked[rank];
    const path = this.path = episodePath(record.turns, at.task, at.joint, at.choices), task = record.tasks?.[at.task];
    const pick = (by) => () => { Object.assign(at, { joint: ranked[Math.min(Math.max(rank + by, 0), ranked.length - 1)].j, choices: {} }); this.draw(); };
    const own = gains.every((x) => x === gains[0]) ? "" : ` (${gains.map((x, n) => `${agentName(n)} ${number(x)}`).join(", ")})`;
    const button = (id, text, press) => make("button", { "data-do": id, onclick: press }, text);
    const order = ranked.length > 1 && gain !== null && ranked.every((x) => x.gain === gain) ? ", all with the same" : " from the best:";
    const title = make("h3", {}, `Task ${at.task + 1}, episode ${rank + 1} of ${ranked.length}${order} return${whose(returns)} ${number(gain)}${own}`);
    const tools = make("div", { class: "tools" }, button("better", "better one", pick(-1)), button("worse", "worse one", pick(1)),
      path.length > 1 ? button("thread", view.thread ? "as lanes" : "as one thread", () => { view.thread = !view.thread; this.draw(); }) : null,
      button("over", "the same task over time", () => this.overTime()),
      this.data.runs.length > 1 ? button("runs", "in the other runs", () => this.inOtherRuns()) : null,
      make("span", { class: "part" }, "Click a message for what else was sampled there."));
    const focused = document.activeElement?.dataset?.do;
    const act = { group: (message, j) => this.openGroup(message, j), exact: (text, name) => this.openText(text, name) };
    const { run, kind, step } = this.steps.info(this.place);
    if (this.isLinked) history.replaceState(null, "", `#e=${run},${kind},${step},${at.task},${at.joint}`);
    this.isLinked = true; // from the second one on: opening the page leaves its address
    this.page.replaceChildren(this.drawTasks(), make("div", { class: "episode" }, title, tools,
      task ? make("details", {}, make("summary", { class: "part" }, "task, as the data have it"), make("pre", {}, ...visible(clipped(JSON.stringify(task, null, 1), 20000)[0]))) : null,
      drawEpisode(record, returns, path, act, at.query),
      record.turns.some((turn) => turn.advantages) ? null : note("No advantages were recorded for this step: colors show the return minus the mean of the group."),
      record.turns[0].prompts.length > 1 && path.length > 1 ? readersPicture(record, path) : null));
    if (focused) this.page.querySelector(`[data-do="${focused}"]`)?.focus();
  }

  /** Return the tasks of the step, a line each, with a button for each episode. */
  drawTasks() {
    const { record, returns, at } = this, { items, prompts, acts } = record.turns[0];
    const texts = items.map((_, p) => prompts[Math.max(acts.findIndex((agent) => agent[p]), 0)][p]), all = items.flatMap((_, p) => episodesOf(record, returns, p).map(({ gain }) => gain)).filter((x) => x !== null);
    const [low, high] = [smallest(all), largest(all)];
    const common = texts.length > 1 ? texts.reduce((n, text) => { let k = 0; while (k < n && text[k] === texts[0][k]) k += 1; return k; }, texts[0].length) : 0;
    const start = common > 60 ? texts[0].lastIndexOf(" ", common - 1) + 1 : 0, tokens = new RegExp(`(?:${SPECIAL})(?:\\s*(?:system|user|assistant)\\b)?`, "gi");
    const line = (p) => {
      const ranked = episodesOf(record, returns, p), isOpen = p === at.task, some = ranked.length > CHOICES && !(isOpen && at.all)
        ? [...ranked.slice(0, CHOICES / 2), ...ranked.slice(-CHOICES / 2)] : ranked;
      const choose = (j) => () => { Object.assign(at, { task: p, joint: j, choices: {} }); this.draw(); this.page.querySelector(".choice.on")?.focus(); };
      const share = (gain) => (gain === null || high === low ? 0 : ((gain - low) / (high - low)) * 55);
      const buttons = some.map(({ j, gain }) => make("button", { class: isOpen && j === at.joint ? "choice on" : "choice", onclick: choose(j),
        style: `--share: ${share(gain).toFixed(0)}%`, "aria-label": `task ${p + 1}, episode with return ${number(gain)}`, ...(isOpen && j === at.joint ? { "aria-current": "true" } : {}) },
      gain === null ? "–" : number(Number(gain.toPrecision(2)))));
      if (some.length < ranked.length) buttons.splice(CHOICES / 2, 0, make("button", { class: "link", onclick: () => { Object.assign(at, { task: p, all: true }); this.draw(); } }, `… ${ranked.length - some.length} more …`));
      const [text] = clipped(texts[p].slice(start).replace(tokens, " ").trim(), 110);
      return make("div", { class: isOpen ? "task on" : "task" }, make("div", { class: "excerpt" }, make("b", {}, `${p + 1} `), start ? "… " : "", ...visible(text.replaceAll("\n", " "))),
        make("div", { class: "mean" }, `mean ${number(meanOf(ranked.map(({ gain }) => gain)))}`), make("div", { class: "choices" }, ...buttons));
    };
    const shown = items.length <= TASKS + 2 || at.tasks ? items.map((_, p) => p) : [...new Set([...items.keys()].slice(0, TASKS)).add(at.task)];
    return make("div", { class: "tasks" }, make("div", { class: "part" }, `${items.length > 1 ? `${items.length} tasks; each` : "Each"} number is the return${whose(returns)} of an episode, best first`),
      ...shown.map(line), shown.length < items.length ? make("button", { onclick: () => { at.tasks = true; this.draw(); } }, `${items.length - shown.length} more tasks`) : null);
  }

  /** Fill in the drawer and show it. Escape closes it; the focus goes back. */
  openDrawer(...content) {
    this.dialog.replaceChildren(make("form", { method: "dialog" }, make("button", { class: "close" }, "close (Esc)")), ...content.filter(Boolean));
    this.dialog.showModal();
    this.dialog.scrollTop = 0;
  }

  openText(text, title) {
    this.openDrawer(make("h3", {}, title), note(`${text.length.toLocaleString("en")} characters. Control characters and special tokens are named.`),
      make("div", { class: "exact words", dir: "auto", tabindex: "0" }, ...visible(text)));
  }

  /** Show the other completions of a message. j: the joint action in which it is. */
  openGroup({ t, n, p, g }, j) {
    const { record, returns, at } = this, turn = record.turns[t], group = groupOf(record, returns, t, n, p), most = largest(group.map(({ lead }) => Math.abs(lead ?? 0)));
    const others = (action, k) => action.filter((x, m) => m !== n && x === turn.joint[j][m]).length * 1000 - k;
    const follow = (own) => () => {
      const [best] = turn.joint.map((action, k) => [k, action]).filter(([, action]) => action[n] === own).sort((a, b) => others(b[1], b[0]) - others(a[1], a[0]));
      const choices = Object.fromEntries(Object.entries(at.choices).filter(([turnOf]) => Number(turnOf) < t));
      if (t) choices[t] = best[0];
      Object.assign(at, { choices, ...(t ? {} : { joint: best[0] }) });
      this.dialog.close();
      this.draw();
      this.focusOn(t, n);
    };
    const card = (message, rank) => make("div", { class: message.g === g ? "message on" : "message", style: leadStyle(message.lead, most) },
      make("div", { class: "who" }, make("b", {}, `${rank + 1}. `), numbersLine(message, message.reward), " ",
        message.g === g ? make("span", { class: "tag" }, "in this episode") : make("button", { class: "link", onclick: follow(message.g) }, "show its episode")),
      message.tokens ? shadedTokens(message.tokens) : textBlock(message.text, 6000, at.query));
    const prompt = promptAt(record, t, n, p), isTied = group.length > 1 && group.every(({ gain }) => gain !== null && gain === group[0].gain);
    this.openDrawer(make("h3", {}, `${agentName(n)}${record.turns.length > 1 ? `, turn ${t}` : ""}: ${group.length} completion${group.length === 1 ? "" : "s"} for one prompt, ${isTied ? "all with the same return" : "best first"}`),
      group.length === 1 ? note("Only one was sampled for this prompt. Other episodes of the task are above the lanes.") : null,
      turn.joint.length > group.length ? note("Reward and return are means over the joint actions that have the completion.") : null,
      make("details", {}, make("summary", {}, `the exact prompt that ${agentName(n)} read (${prompt.length.toLocaleString("en")} characters)`), make("div", { class: "exact words", dir: "auto" }, ...visible(prompt))),
      group.some(({ tokens }) => tokens) ? note("Tokens are shaded by log-probability when they were sampled: the stronger, the less likely. Point at one for its numbers.") : null,
      ...group.map(card), record.kind === "train" ? whatIf(this.data, record, { t, n, text: turn.completions[n][p][g] }, at.task, this.path.map(([, joint]) => joint)) : null);
  }

  /** Show episodes of the same task side by side. entries: [title, record, task, place]. */
  sideBySide(title, entries, more = null) {
    let isBest = true;
    const columns = make("div", { class: "beside" });
    const draw = () => columns.replaceChildren(...entries.map(([name, record, p, place]) => {
      const returns = jointReturns(record.turns, gammaOf(this.data, record)), ranked = episodesOf(record, returns, p), { j, gain } = isBest ? ranked[0] : ranked.at(-1);
      const act = { group: () => this.goTo(place, { task: p, joint: j }), exact: (text, of) => this.openText(text, of) };
      return make("div", { class: "episode thread" }, make("h4", {}, make("button", { class: "link", onclick: act.group }, name), ` return${whose(returns)} ${number(gain)}, mean of ${ranked.length}: ${number(meanOf(ranked.map((x) => x.gain)))}`),
        drawEpisode(record, returns, episodePath(record.turns, p, j), act));
    }));
    const pick = make("select", { "aria-label": "episode", onchange: () => { isBest = pick.value === "best"; draw(); } }, make("option", { value: "best" }, "best episode"), make("option", { value: "worst" }, "worst episode"));
    const back = make("button", { onclick: () => this.draw() }, "back to the step");
    draw();
    this.page.replaceChildren(make("div", { class: "tools" }, make("b", {}, title), pick, back), more || "", columns);
    back.focus();
  }

  /** Look for a task in steps, and return [place, record, task] of those that have it, up to `most`. */
  async find(task, places, most = Infinity) {
    const round = this.round += 1, hits = [], progress = make("p", { class: "note", role: "status" });
    this.page.prepend(progress);
    for await (const [i, record] of this.steps.scan(places, () => this.round === round && hits.length < most, (done, all) => { progress.textContent = `looked at ${done} of ${all} steps`; })) {
      try {
        const p = record.turns[0].items.findIndex((_, node) => taskOf(record, node) === task);
        if (p >= 0) hits.push([i, record, p]);
      } catch (error) { continue; } // a damaged record has no such task
    }
    progress.remove();
    return this.round === round ? hits : null;
  }

  async overTime() {
    const { run } = this.steps.info(this.place), task = taskOf(this.record, this.at.task), hits = await this.find(task, this.steps.of(run));
    if (!hits) return;
    const trained = hits.filter(([, record]) => record.kind === "train"), held = hits.filter(([, record]) => record.kind === "eval");
    const named = new Map(); // place -> its names
    const add = (name, hit) => { if (hit) named.set(hit, [...(named.get(hit) || []), name]); };
    add("first", trained[0]);
    add("middle", trained[Math.floor((trained.length - 1) / 2)]);
    add("newest", trained.at(-1));
    add("held-out first", held[0]);
    add("held-out newest", held.at(-1));
    const entries = [...named].map(([[place, record, p], names]) => [`${names.join(", ")}: step ${record.step}`, record, p, place]);
    const mean = trained.map(([, record, p]) => meanOf(episodesOf(record, jointReturns(record.turns, gammaOf(this.data, record)), p).map(({ gain }) => gain)));
    const curve = { x: trained.map(([, record]) => record.step), mean, interval: mean.map(() => null) };
    const of = trained.length ? whose(jointReturns(trained[0][1].turns, gammaOf(this.data, trained[0][1]))) : "";
    const picture = trained.length > 2 ? make("div", { class: "charts" }, chart(`this task: mean return${of}`, [{ label: "", curve, stroke: color(0), dash: "" }])) : null;
    this.sideBySide(`The same task in ${hits.length} of the steps that are in this page`, entries, picture);
  }

  async inOtherRuns() {
    const { run, step } = this.steps.info(this.place), { record, at: { task: p } } = this, task = taskOf(record, p), far = (i) => Math.abs(this.steps.index.step[i] - step);
    const entries = [[`${this.data.runs[run].name}, step ${step}`, record, p, this.place]];
    for (const [other, { name }] of this.data.runs.entries()) {
      if (other === run) continue;
      const hits = await this.find(task, this.steps.of(other, record.kind).sort((a, b) => far(a) - far(b)), 1);
      if (!hits) return;
      if (hits.length) entries.push([`${name}, step ${hits[0][1].step}`, hits[0][1], hits[0][2], hits[0][0]]);
    }
    this.sideBySide(entries.length > 1 ? "The same task in each run, at the nearest step" : "No other run has this task in this page", entries);
  }
}

function fillEpisodes(section, data) {
  if (section.children.length > 1) section.lastElementChild.remove(); // the sentence below
  if (data.steps.size) return new Episodes(section, data);
  section.append(note("These runs kept no completions: they learned from given data, or max_completions_mb was 0."));
  return null;
}
