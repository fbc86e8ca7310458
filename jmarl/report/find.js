// Find messages in all steps that are in the page, and save them as a table.

const MAX_HITS = 5000; // messages that are listed and saved
const ROWS = 100; // that are drawn at once
const leastFirst = (name) => (a, b) => (a[name] ?? Infinity) - (b[name] ?? Infinity) || b.step - a.step; // the newest first where they are equal
const mostFirst = (name) => (a, b) => (b[name] ?? -Infinity) - (a[name] ?? -Infinity) || b.step - a.step;
const ORDERS = { newest: (a, b) => b.step - a.step, first: (a, b) => a.step - b.step, best: mostFirst("return"), worst: leastFirst("return"),
  praised: mostFirst("advantage"), blamed: leastFirst("advantage"), longest: (a, b) => b.text.length - a.text.length };
const NUMBERS = ["reward", "return", "advantage", "length"];

/** Save a text as a file. */
function save(name, kind, text) {
  const link = make("a", { href: URL.createObjectURL(new Blob([text], { type: kind })), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}

/** Return rows as CSV. A text that a spreadsheet would take for a formula begins with an apostrophe. */
function csvOf(names, rows) {
  const field = (x) => {
    if (x === null || x === undefined) return "";
    if (typeof x === "number" || typeof x === "boolean") return String(x);
    const text = String(x).replaceAll("\u0000", "\u2400");
    return `"${(/^[\s]*[=+\-@]|^[\t\r\n]/.test(text) ? `'${text}` : text).replaceAll('"', '""')}"`;
  };
  return `${[names, ...rows.map((row) => names.map((name) => row[name]))].map((row) => row.map(field).join(",")).join("\r\n")}\r\n`;
}

/** Return a message as a row of a table: what is found, listed and saved. */
function rowOf(data, place, record, returns, [t, n, p, g]) {
  const message = messageOf(record, returns, t, n, p, g), turn = record.turns[t], numbers = {};
  const used = turn.joint.map((_, j) => j).filter((j) => turn.joint[j][n] === g);
  for (const name of [...Object.keys(turn.parts || {}), ...Object.keys(turn.measures || {})]) {
    numbers[name] = meanOf(used.map((j) => (turn.parts?.[name] || turn.measures?.[name])[p]?.[j] ?? null));
  }
  return { run: data.runs[record.run].name, kind: record.kind, step: record.step, task: turn.items[p], turn: t, agent: n, role: roles[n] || "",
    node: p, completion: g, reward: message.reward, return: message.gain, advantage: message.advantage, length: message.length, cut: message.cut,
    masked: message.masked, fault: turn.fault || "", text: message.text, prompt: promptAt(record, t, n, p), numbers, place };
}

class Finder {
  /** data: of the page; steps: its `Steps`; open(row): shows the episode of a message. */
  constructor(data, steps, open) {
    Object.assign(this, { data, steps, open, hits: [], count: 0, round: 0 });
    const field = (label, name, more = {}) => {
      this[name] = make("input", { type: "search", onkeydown: (event) => { if (event.key === "Enter") this.find(); }, ...more });
      return make("label", {}, `${label} `, this[name]);
    };
    const select = (label, name, options) => {
      this[name] = make("select", {}, ...options.map(([value, text]) => make("option", { value }, text)));
      return make("label", {}, `${label} `, this[name]);
    };
    const box = (label, name) => {
      this[name] = make("input", { type: "checkbox" });
      return make("label", {}, this[name], label);
    };
    const runs = data.runs.length > 1 ? [["", "all"], ...data.runs.map((run, i) => [i, run.name])] : [["", "this one"]];
    const small = { type: "number", class: "small", step: "any" };
    this.said = make("span", { class: "part", role: "status" });
    this.table = make("div", {});
    this.button = make("button", { id: "find", onclick: () => this.find() }, "find");
    this.saves = make("span", { hidden: "" }, ...["csv", "jsonl"].map((kind) => make("button", { "data-save": kind, onclick: () => this.save(kind) }, `save as ${kind.toUpperCase()}`)));
    this.element = make("details", { class: "finder" }, make("summary", {}, "Find messages: by text, task, agent, step, reward, what was cut …"),
      make("div", { class: "fields" }, field("text", "text", { id: "find-text" }), field("in the task or prompt", "task"), select("agent", "agent", [["", "any"]]),
        data.runs.length > 1 ? select("run", "run", runs) : null, select("steps", "kind", [["", "training and held-out"], ["train", "training"], ["eval", "held-out"]]),
        field("from step", "low", small), field("to step", "high", small)),
      make("div", { class: "fields" }, select("number", "name", [["", "any"]]), field("at least", "least", small), field("at most", "most", small),
        box("cut at the limit", "cut"), box("masked", "masked"), box("with a fault", "fault"),
        select("order", "order", [["newest", "newest first"], ["first", "oldest first"], ["best", "best return first"], ["worst", "worst return first"],
          ["praised", "largest advantage first"], ["blamed", "smallest advantage first"], ["longest", "longest first"]]),
        this.button, make("button", { onclick: () => { this.isStopped = true; } }, "stop"), this.saves, this.said), this.table);
  }

  /** Offer the agents and the reward parts of a record. */
  offer(record) {
    const fill = (list, options) => {
      const value = list.value;
      if (list.options.length === options.length && options.every(([key], i) => list.options[i].value === String(key))) return;
      list.replaceChildren(...options.map(([key, text]) => make("option", { value: key }, text)));
      list.value = value;
    };
    fill(this.agent, [["", "any"], ...record.turns[0].prompts.map((_, n) => [n, agentName(n)])]);
    const names = new Set(record.turns.flatMap((turn) => [...Object.keys(turn.parts || {}), ...Object.keys(turn.measures || {})]));
    fill(this.name, [["", "any"], ...NUMBERS.map((name) => [name, name]), ...[...names].map((name) => [`part ${name}`, name])]);
  }

  /** Return whether a row is wanted. */
  wants(row) {
    const value = this.name.value.startsWith("part ") ? row.numbers[this.name.value.slice(5)] : row[this.name.value];
    const least = this.least.value === "" ? -Infinity : Number(this.least.value), most = this.most.value === "" ? Infinity : Number(this.most.value);
    return (this.agent.value === "" || row.agent === Number(this.agent.value))
      && (!this.cut.checked || row.cut) && (!this.masked.checked || row.masked) && (!this.fault.checked || row.fault)
      && (!this.name.value || (value !== null && value !== undefined && value >= least && value <= most))
      && (!this.query || row.text.toLowerCase().includes(this.query));
  }

  async find() {
    const round = this.round += 1, { index } = this.steps, run = this.run && this.run.value !== "" ? Number(this.run.value) : null;
    const low = Number(this.low.value || 0), high = this.high.value === "" ? Infinity : Number(this.high.value);
    const places = this.steps.of(run, this.kind.value).filter((i) => index.step[i] >= low && index.step[i] <= high), here = places.filter((i) => this.steps.isHere(i));
    if (this.order.value === "newest") here.reverse();
    if (!this.name.value && (this.least.value || this.most.value)) this.name.value = "return"; // a limit is a limit of something
    Object.assign(this, { hits: [], count: 0, query: this.text.value.trim().toLowerCase() });
    const task = this.task.value.trim().toLowerCase();
    let damaged = 0;
    this.isStopped = false;
    const say = (done) => {
      const away = places.length - here.length ? `; ${places.length - here.length} more are not in this page` : "";
      this.said.textContent = `${this.count} messages in ${done} of ${here.length} steps${away}${this.count > MAX_HITS ? `; ${MAX_HITS} are listed` : ""}` +
        (damaged ? `; ${damaged} damaged records were left out` : "");
    };
    for await (const [i, record] of this.steps.scan(here, () => this.round === round && !this.isStopped, say)) {
      if (this.round !== round) return; // another search has begun
      try {
        const returns = jointReturns(record.turns, gammaOf(this.data, record));
        for (const at of messagesIn(record)) {
          const row = rowOf(this.data, i, record, returns, at);
          const about = task && `${row.prompt}\n${JSON.stringify(record.tasks?.[row.task] ?? "")}`.toLowerCase();
          if (!this.wants(row) || (task && !about.includes(task))) continue;
          this.count += 1;
          this.hits.push(row);
        }
      } catch (error) { damaged += 1; }
      if (this.hits.length > 2 * MAX_HITS) this.hits = this.hits.sort(ORDERS[this.order.value]).slice(0, MAX_HITS);
    }
    if (this.round !== round) return;
    if (this.isStopped) this.said.textContent += "; stopped"; else say(here.length);
    this.hits = this.hits.sort(ORDERS[this.order.value]).slice(0, MAX_HITS);
    this.draw();
  }

  draw() {
    const names = ["where", "turn", "agent", "return", "advantage", "length", "text"], body = make("tbody");
    const named = (name, text) => make("td", { class: "number", "data-name": name }, text);
    const line = (row) => make("tr", {},
      make("td", {}, make("button", { class: "link hit", onclick: () => this.open(row) },
        `${this.data.runs.length > 1 ? `${row.run}, ` : ""}${row.kind === "eval" ? "held-out " : ""}step ${row.step}, task ${row.task + 1}`)),
      named("turn", String(row.turn)), make("td", {}, agentName(row.agent)), named("return", number(row.return)), named("advantage", row.advantage === null ? "–" : signed(row.advantage)),
      named("length", row.length === null ? "–" : String(row.length)),
      make("td", { class: "excerpt" }, ...[row.cut && "cut", row.masked && "masked", row.fault && "fault"].filter(Boolean).map((word) => make("span", { class: "flag" }, word)),
        textBlock(excerpt(row.text, this.query), 240, this.query, () => this.open(row))));
    const rest = [...this.hits], next = () => {
      body.append(...rest.splice(0, ROWS).map(line));
      if (rest.length) more.textContent = `${rest.length} more`; else more.remove();
    };
    const more = make("button", { onclick: next });
    this.table.replaceChildren(make("table", { class: "hits" }, make("thead", {}, make("tr", {}, ...names.map((name) => make("th", {}, name)))), body), more);
    this.saves.hidden = !this.hits.length;
    if (!this.hits.length) this.table.replaceChildren(note("No message is like that."));
    next();
  }

  save(kind) {
    const names = ["run", "kind", "step", "task", "turn", "agent", "role", "node", "completion", "reward", "return", "advantage", "length", "cut", "masked", "fault"];
    const parts = [...new Set(this.hits.flatMap((row) => Object.keys(row.numbers)))];
    const rows = this.hits.map(({ place, numbers, ...row }) => ({ ...Object.fromEntries(parts.map((name) => [`part ${name}`, numbers[name]])), ...row }));
    if (kind === "csv") save("messages.csv", "text/csv", csvOf([...names, ...parts.map((name) => `part ${name}`), "text", "prompt"], rows));
    else save("messages.jsonl", "application/jsonl", rows.map((row) => `${JSON.stringify(row)}\n`).join(""));
  }
}

/** Return a part of a text with what was searched for. */
function excerpt(text, query) {
  const at = query ? text.toLowerCase().indexOf(query) : 0;
  return at > 80 ? `… ${text.slice(at - 60)}` : text;
}
