// The page of completions: joint actions of a step with their rewards, a search, and one prompt over the run.

const PAGE = 150; // joint actions that are drawn at once

/** Return the mean of numbers that are not null; null without any. */
function meanOf(values) {
  const valid = values.filter((x) => x !== null);
  return valid.length ? valid.reduce((a, b) => a + b) / valid.length : null;
}

/** Return the joint actions of node p in turn t, the best first; those without a valid reward last. */
function jointActions(record, t, p) {
  const turn = record.turns[t];
  const numbersOf = (table, j) => Object.entries(table || {}).map(([name, x]) => [name, x[p][j]]).filter(([, x]) => x !== null);
  const actions = turn.joint.map((chosen, j) => ({
    record, t, p, j,
    rewards: turn.rewards[p][j],
    reward: meanOf(turn.rewards[p][j]),
    parts: numbersOf(turn.parts, j),
    measures: numbersOf(turn.measures, j), // runs of older versions have all numbers in parts
    texts: turn.completions.map((agent, n) => (turn.acts[n][p] ? agent[p][chosen[n]] : null)),
  }));
  return actions.sort((a, b) => (b.reward ?? -Infinity) - (a.reward ?? -Infinity));
}

/** Return [tag, joint action] of those that are picked: all of a node, or its best, worst and random ones. */
function picked(actions, pick) {
  if (pick === "all" || actions.length < 2) return actions.map((action) => ["", action]);
  const [best, ...others] = actions, worst = others.pop();
  const { record, p } = best;
  const random = others.length ? others[(Math.max(record.step - 1, 0) * 7919 + p * 104729) % others.length] : null;
  const all = [["best", best], ["random", random], ["worst", worst]];
  return all.filter(([tag, action]) => action && (pick === "some" || pick === tag));
}

/** Return text as nodes, with what was searched for marked. */
function marked(text, query) {
  if (!query) return [text];
  const lower = text.toLowerCase(), nodes = [];
  let start = 0;
  for (let at = lower.indexOf(query); at >= 0; at = lower.indexOf(query, start)) {
    nodes.push(text.slice(start, at), make("mark", {}, text.slice(at, at + query.length)));
    start = at + query.length;
  }
  return [...nodes, text.slice(start)];
}

function rewardText(rewards) {
  const different = rewards.some((x) => x !== rewards[0]);
  return different ? rewards.map(number).join(" | ") : number(rewards[0]);
}

/** Return a joint action: its reward, the parts of it and measures, then the completions of all agents side by side. */
function drawAction([tag, action], query, before) {
  const cells = action.texts.map((text, n) => {
    const agent = { "data-agent": `${agentName(n)}: ` }; // shown where the agents do not fit beside each other
    if (!text) return make("div", { class: "text empty", ...agent }, text === null ? "does not act" : "empty");
    return make("div", { class: "text", ...agent }, ...marked(text, query));
  });
  const head = make("div", {}, before || null, make("div", {}, make("span", { class: "reward" }, rewardText(action.rewards)), " ",
    tag ? make("span", { class: "tag" }, tag) : null),
  ...action.parts.map(([name, value]) => make("div", { class: "part" }, `${name} ${number(value)}`)),
  action.measures.length ? make("div", { class: "part heading" }, "measures") : null,
  ...action.measures.map(([name, value]) => make("div", { class: "part" }, `${name} ${number(value)}`)),
  make("div", { class: "part" }, `joint action ${action.j + 1}`));
  const line = make("div", { class: "joint" }, head, ...cells);
  line.style.setProperty("--agents", action.texts.length);
  return line;
}

/** Return the prompts of a node, once if all agents that act read the same. */
function drawPrompts(turn, p, query) {
  const read = turn.prompts.map((agent, n) => [n, agent[p]]).filter(([n]) => turn.acts[n][p]);
  const same = read.every(([, text]) => text === read[0][1]);
  return (same ? read.slice(0, 1) : read).map(([n, text]) =>
    make("div", { class: "prompt" }, same ? "" : `${agentName(n)}: `, ...marked(text, query)));
}

/** Return the line with the names of the columns. */
function agentNames(turn) {
  const line = make("div", { class: "joint part heads" }, make("div", {}, "reward"), ...turn.prompts.map((_, n) => make("div", {}, agentName(n))));
  line.style.setProperty("--agents", turn.prompts.length);
  return line;
}

/** Return what tells the prompt of an item from others: the prompts of its first turn. */
const promptOf = (record, item) => JSON.stringify(record.turns[0].prompts.map((agent) => agent[item]));

class Completions {
  constructor(section, data) {
    this.data = data;
    this.query = "";
    this.page = make("div", { id: "page" });
    const kinds = [["train", "training"], ["eval", "held-out"]].filter(([kind]) => data.live || data.completions.some((r) => r.kind === kind));
    this.run = this.select("run", data.runs.map((run, i) => [String(i), run.name]));
    this.kind = this.select("kind", kinds);
    this.pick = this.select("pick", [["some", "best, random, worst"], ["all", "all"], ["best", "best"], ["worst", "worst"]]);
    this.slider = make("input", { type: "range", min: "0", value: "0", "aria-label": "step", oninput: () => this.drawStep() });
    this.label = make("span", { id: "step-label" });
    this.search = make("input", { type: "search", placeholder: "search this step", "aria-label": "search", oninput: () => this.drawStep() });
    const move = (by) => () => { this.slider.value = Number(this.slider.value) + by; this.drawStep(); };
    const controls = make("div", { class: "controls" }, data.runs.length > 1 ? this.run : null, this.kind,
      make("button", { onclick: move(-1), "aria-label": "step before" }, "◀"), this.slider,
      make("button", { onclick: move(1), "aria-label": "next step" }, "▶"), this.label, this.pick, this.search,
      make("button", { id: "search-all", onclick: () => this.drawSearch() }, "search all steps"));
    const live = data.live ? "While a run goes on, steps are added that are the newest when this page asks; reload it for all. " : "";
    const thinned = data.every > 1 ? `To keep the file small, it has every ${data.every}. recorded step. ` : "";
    section.append(make("p", { class: "note" }, `${live}${thinned}Rewards are those of joint actions, with their parts below.`),
      controls, this.page);
    this.choose();
    this.slider.value = this.slider.max;
    this.drawStep();
  }

  select(name, options) {
    const choose = () => { if (name !== "pick") this.choose(); this.drawStep(); };
    return make("select", { "aria-label": name, onchange: choose }, ...options.map(([value, text]) => make("option", { value }, text)));
  }

  /** Choose the records of the run and kind. */
  choose() {
    const wanted = (record) => record.run === Number(this.run.value) && record.kind === this.kind.value;
    this.records = this.data.completions.filter(wanted);
    this.slider.max = Math.max(this.records.length - 1, 0);
    this.slider.value = Math.min(Number(this.slider.value), this.slider.max);
  }

  /** Take up records that came later. The step that is shown stays. */
  extend() {
    const record = this.records[Number(this.slider.value)];
    this.choose();
    if (record) this.slider.value = Math.max(this.records.indexOf(record), 0);
    if (record && this.records.includes(record)) this.nameStep(record);
    else this.drawStep();
  }

  nameStep(record) {
    const mean = meanOf(record.turns[0].rewards.flat(2));
    const which = record.turns.length > 1 ? "mean reward of turn 0" : "mean reward";
    this.label.textContent = `${this.name(record)} (${this.records.length} recorded), ${which} ${number(mean)}`;
  }

  name(record) {
    const when = record.kind === "eval" ? `held-out after ${record.updates} updates` : `step ${record.step}`;
    return this.data.runs.length > 1 ? `${this.data.runs[record.run].name}, ${when}` : when;
  }

  goTo(record) {
    [this.run.value, this.kind.value] = [String(record.run), record.kind];
    this.choose();
    this.slider.value = this.records.indexOf(record);
    this.drawStep();
  }

  /** Draw lines in parts of `PAGE`, with a button for the next one. lines: functions that return an element. */
  fill(lines, place) {
    const next = lines.splice(0, PAGE);
    place.append(...next.map((draw) => draw()));
    if (!lines.length) return;
    const more = make("button", { onclick: () => { more.remove(); this.fill(lines, place); } }, `${lines.length} more`);
    place.append(more);
  }

  drawStep() {
    const record = this.records[Number(this.slider.value)];
    this.query = this.search.value.trim().toLowerCase();
    if (!record) { this.page.replaceChildren(make("p", { class: "note" }, "No completions of this kind were kept.")); return; }
    this.nameStep(record);
    this.page.replaceChildren();
    this.fill(record.turns.flatMap((turn, t) => turn.items.map((_, p) => () => this.drawNode(record, t, p))), this.page);
  }

  /** Return a prompt and the joint actions on it; nothing if none has what was searched for. */
  drawNode(record, t, p) {
    const turn = record.turns[t], item = turn.items[p];
    const inPrompt = turn.prompts.some((agent) => agent[p].toLowerCase().includes(this.query));
    const has = ({ texts }) => inPrompt || texts.some((text) => text && text.toLowerCase().includes(this.query));
    const actions = jointActions(record, t, p).filter(has);
    if (!actions.length) return "";
    const title = record.turns.length > 1 ? `Turn ${t}, prompt ${item + 1}` : `Prompt ${item + 1}`;
    const parent = t ? [` after joint action ${(turn.parents[p] % record.turns[t - 1].joint.length) + 1}`] : [];
    const overRun = make("button", { class: "link over-run", onclick: () => this.drawOverRun(record, item) }, "over the run");
    const task = record.tasks[item];
    const shown = this.query ? actions.map((action) => ["", action]) : picked(actions, this.pick.value);
    return make("div", { class: "node" },
      make("div", {}, make("b", {}, title, ...parent), ` · mean reward ${number(meanOf(turn.rewards[p].flat()))} · `, overRun),
      ...drawPrompts(turn, p, this.query),
      task ? make("details", {}, make("summary", { class: "part" }, "task"), make("pre", {}, JSON.stringify(task, null, 1))) : null,
      agentNames(turn), ...shown.map((action) => drawAction(action, this.query)));
  }

  /** Draw what was written on one prompt, step by step. */
  drawOverRun(record, item) {
    const prompt = promptOf(record, item), lines = [];
    const sameRun = this.data.completions.filter((other) => other.run === record.run);
    for (const other of sameRun) {
      const place = other.turns[0].items.findIndex((_, p) => promptOf(other, p) === prompt);
      if (place < 0) continue;
      other.turns.forEach((turn, t) => turn.items.forEach((of, p) => {
        if (of !== place) return;
        const go = make("button", { class: "link", onclick: () => this.goTo(other) }, `${this.name(other)}${t ? `, turn ${t}` : ""}`);
        picked(jointActions(other, t, p), this.pick.value).forEach((action, i) => lines.push(() => drawAction(action, "", i ? null : go)));
      }));
    }
    const node = make("div", { class: "node over" }, make("b", {}, "One prompt over the run "),
      make("button", { onclick: () => this.goTo(record) }, "back"), ...drawPrompts(record.turns[0], item, ""),
      agentNames(record.turns[0]));
    this.page.replaceChildren(node);
    this.fill(lines, node);
  }

  /** Draw all joint actions of the run whose completions have what was searched for. */
  drawSearch() {
    const query = this.search.value.trim().toLowerCase(), lines = [];
    if (!query) { this.drawStep(); return; }
    for (const record of this.data.completions.filter(({ run }) => run === Number(this.run.value))) {
      record.turns.forEach((turn, t) => turn.items.forEach((_, p) => {
        for (const action of jointActions(record, t, p)) {
          if (!action.texts.some((text) => text && text.toLowerCase().includes(query))) continue;
          lines.push(() => drawAction(["", action], query,
            make("button", { class: "link", onclick: () => this.goTo(record) }, this.name(record))));
        }
      }));
    }
    const node = make("div", { class: "node" }, make("b", {}, `${lines.length} joint actions with “${query}” `),
      make("button", { onclick: () => this.drawStep() }, "back"));
    this.page.replaceChildren(node);
    this.fill(lines, node);
  }
}

function fillCompletions(section, data) {
  if (section.children.length > 1) section.lastElementChild.remove(); // the sentence below
  if (data.completions.length) return new Completions(section, data);
  section.append(make("p", { class: "note" }, "These runs kept no completions: they learned from given data, or max_completions_mb was 0."));
  return null;
}
