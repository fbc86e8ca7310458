// Draw an episode: a lane for each agent, its messages with their numbers, what it read, and who read whom.

const SHOWN = 1200; // characters of a message in a lane; its group has all of them
const NAMES = { 0: "NUL", 7: "BEL", 8: "BS", 9: "TAB", 10: "LF", 11: "VT", 12: "FF", 13: "CR", 27: "ESC", 127: "DEL", 160: "NBSP", 173: "SHY",
  8203: "ZWSP", 8204: "ZWNJ", 8205: "ZWJ", 8206: "LRM", 8207: "RLM", 8232: "LS", 8233: "PS", 8234: "LRE", 8235: "RLE", 8236: "PDF", 8237: "LRO",
  8238: "RLO", 8288: "WJ", 8294: "LRI", 8295: "RLI", 8296: "FSI", 8297: "PDI", 65279: "BOM", 65533: "REPLACEMENT" };
const SPECIAL = "<\\|[^|<>\\n]{1,40}\\|>|</?s>|<(?:bos|eos|pad|unk|stop|start_of_turn|end_of_turn)>|\\[/?INST\\]";
const UNSEEN = "[\\u0000-\\u0009\\u000b-\\u001f\\u007f-\\u00a0\\u00ad\\u200b-\\u200f\\u2028-\\u202e\\u2060\\u2066-\\u2069\\ufeff\\ufffd]";

/** Return a text as nodes: control characters and special tokens are named, and what was searched for is marked. Characters that
 * change the direction of what follows are replaced by their names. */
function visible(text, query = "") {
  const wanted = query ? `|${query.replace(/[.*+?^${}()|[\]\\]/g, "\\$&")}` : "", nodes = [];
  const pattern = new RegExp(`(${UNSEEN})|(${SPECIAL})${wanted}`, "giu");
  let start = 0;
  for (const match of text.matchAll(pattern)) {
    if (match.index > start) nodes.push(text.slice(start, match.index));
    if (match[1]) {
      const code = match[1].codePointAt(0), hex = `U+${code.toString(16).toUpperCase().padStart(4, "0")}`;
      nodes.push(make("span", { class: "unseen", title: hex }, NAMES[code] || hex));
    } else nodes.push(make(match[2] ? "span" : "mark", match[2] ? { class: "special" } : {}, match[0]));
    start = match.index + match[0].length;
  }
  return [...nodes, text.slice(start)];
}

/** Return a part of a text, at its beginning; it ends before no half of a character. */
function clipped(text, length) {
  if (text.length <= length) return [text, 0];
  const end = /[\ud800-\udbff]/.test(text[length - 1]) ? length - 1 : length;
  return [text.slice(0, end), text.length - end];
}

/** Return an element with a text, its first characters if it is long and a button for the others. */
function textBlock(text, shown, query = "", more = null) {
  const block = make("div", { class: "words", dir: "auto" });
  if (!text) { block.append(make("i", {}, "nothing")); return block; }
  const [start, left] = clipped(text, shown);
  block.append(...visible(start, query));
  if (left) {
    const whole = () => block.replaceChildren(...visible(text, query));
    const press = (event) => { event.stopPropagation(); (more || whole)(); };
    block.append(" … ", make("button", { class: "link", onclick: press, onkeydown: (event) => event.stopPropagation() },
      `${left.toLocaleString("en")} characters more`));
  }
  return block;
}

/** Return the tokens of a message, the less likely the more shaded. tokens: {texts, ids, logprobs}. */
function shadedTokens({ texts, ids, logprobs }) {
  const one = (text, i) => make("span", { class: "token", style: `--share: ${Math.min(-(logprobs[i] ?? 0) * 12, 70).toFixed(0)}%`,
    title: `token ${i} (id ${ids[i]}): log-probability ${number(logprobs[i])}, probability ${logprobs[i] === null ? "–" : number(Math.exp(logprobs[i]))}` }, ...visible(text));
  return make("div", { class: "words", dir: "auto" }, ...texts.slice(0, 4000).map(one), texts.length > 4000 ? ` … ${texts.length - 4000} more tokens` : "");
}

const signed = (x) => (x > 0 ? `+${number(x)}` : number(x));

/** Return the numbers of a message, as short words. */
function numbersLine(message, reward) {
  const chip = (name, text, more = {}) => make("span", { class: "chip", ...more }, make("span", {}, name), text);
  const { gain, advantage, lead, length, text } = message;
  return make("span", { class: "chips" },
    reward === null ? null : chip("reward", number(reward)), chip("return", number(gain)),
    advantage !== null ? chip("advantage", signed(advantage), { class: "chip lead" })
      : lead === null ? null : chip("to group", signed(lead), { class: "chip lead", title: "return minus the mean of the group: no advantage was recorded" }),
    length === null ? chip("length", `${text.length} characters`) : chip("length", `${length} token${length === 1 ? "" : "s"}`),
    message.cut ? make("span", { class: message.allCut ? "part" : "flag" }, message.allCut ? "cut, as its whole group" : "cut at the limit") : null,
    message.masked ? make("span", { class: "flag" }, "masked: not learned from") : null);
}

/** Return the color of a lead as a style: blue above 0, orange below, the stronger the larger. */
function leadStyle(lead, most) {
  if (lead === null || lead === undefined || !most) return "--lead: var(--line); --share: 0%";
  const share = Math.min(Math.abs(lead) / most, 1);
  return `--lead: var(${lead < 0 ? "--c1" : "--c0"}); --share: ${(6 + 20 * share).toFixed(0)}%; --bar: ${(2 + 5 * share).toFixed(1)}px`;
}

/** Return a message of an agent as it stands in a lane. open: called when it is clicked, or by Enter. */
function messageCard(message, reward, most, open, query = "") {
  const press = (event) => { if (event.key === "Enter" || event.key === " ") { event.preventDefault(); open(); } };
  const click = () => { if (getSelection().isCollapsed) open(); };
  return make("div", { class: "message", role: "button", tabindex: "0", style: leadStyle(message.lead, most), onclick: click, onkeydown: press,
    "data-turn": message.t, "data-agent": message.n, "aria-label": `turn ${message.t}, ${agentName(message.n)}: show the other completions` },
  make("div", { class: "who" }, make("b", { style: `color: ${color(message.n)}` }, agentName(message.n)), " ", numbersLine(message, reward)),
  textBlock(message.text, SHOWN, query, open));
}

/** Return how many characters at their beginning two texts have in common, up to the end of a line; 0 if they are few. */
function commonStart(a, b) {
  let n = 0;
  while (n < Math.min(a.length, b.length) && a[n] === b[n]) n += 1;
  return n > 80 ? a.lastIndexOf("\n", n) + 1 || n : 0;
}

/** Return a prompt. What it has in common with the one before, at its beginning, is left out until it is asked for. */
function promptBlock(text, before, title, query, showExact) {
  const cut = commonStart(text, before || "");
  return make("div", { class: "prompt" }, make("div", { class: "part" }, title, " ",
    make("button", { class: "link", onclick: () => showExact(text, title) }, "exact prompt")),
  cut ? make("div", { class: "part" }, `as before for ${cut.toLocaleString("en")} characters, then:`) : null,
  textBlock(text.slice(cut), 700, query, () => showExact(text, title)));
}

/** Draw an episode.
 *
 * record: of its step; returns: of `jointReturns`; path: of `episodePath`; act: {group(message), exact(text, title)}; query: what is
 * marked in the texts. */
function drawEpisode(record, returns, path, act, query = "") {
  const { turns } = record, agents = turns[0].prompts.length, lanes = make("div", { class: view.thread ? "lanes thread" : "lanes", tabindex: "0", role: "group",
    "aria-label": "messages of the episode: arrow keys go from one to the next" });
  lanes.style.setProperty("--turns", path.length);
  const speaks = (n) => path.some(([p], t) => turns[t].acts[n][p]);
  const lane = new Map(Array.from({ length: agents }, (_, n) => n).filter(speaks).map((n, row) => [n, row + 3]));
  lanes.style.setProperty("--agents", lane.size);
  const put = (element, row, column, name = "") => {
    element.style.gridRow = row;
    element.style.gridColumn = column;
    if (name) element.classList.add(name);
    lanes.append(element);
  };
  for (const [n, row] of lane) put(make("div", { class: "lane" }, make("b", { style: `color: ${color(n)}` }, agentName(n))), row, 1);
  put(make("div", { class: "lane soft" }, "environment"), 2, 1);
  put(make("div", { class: "lane soft" }, "answer"), lane.size + 3, 1);
  for (const [n, row] of lane) if (n % 2 === 0) put(make("div", { class: "stripe" }), row, "1 / -1");
  const most = largest(path.flatMap(([p], t) => [...lane.keys()].filter((n) => turns[t].acts[n][p])
    .flatMap((n) => groupOf(record, returns, t, n, p).map(({ lead }) => Math.abs(lead ?? 0)))));
  const last = new Map(); // agent -> its prompt before
  path.forEach(([p, j], t) => {
    const turn = turns[t], active = [...lane.keys()].filter((n) => turn.acts[n][p]), read = active.map((n) => promptAt(record, t, n, p));
    const isShared = read.length > 0 && read.every((text) => text === read[0]);
    put(make("h4", {}, path.length > 1 ? `Turn ${t}` : ""), 1, t + 2);
    if (isShared) {
      const title = active.length > 1 ? `read by ${active.map(agentName).join(", ")}` : `read by ${agentName(active[0])}`;
      put(promptBlock(read[0], last.get(active[0]), title, query, act.exact), 2, t + 2);
    }
    for (const n of active) {
      const message = groupOf(record, returns, t, n, p).find(({ g }) => g === turn.joint[j][n]), text = promptAt(record, t, n, p);
      const own = isShared ? null : promptBlock(text, last.get(n), `read by ${agentName(n)}`, query, act.exact);
      put(make("div", { class: "cell" }, own, messageCard(message, turn.rewards[p][j][n], most, () => act.group(message, j), query)), lane.get(n), t + 2);
      last.set(n, text);
    }
    const numbers = [...numbersOf(turn.parts, p, j), ...numbersOf(turn.measures, p, j).map(([name, x]) => [name, x])];
    const rewards = turn.rewards[p][j], same = rewards.every((x) => x === rewards[0]);
    put(make("div", { class: "answer" }, make("span", { class: "chip" }, make("span", {}, "reward"),
      same ? number(rewards[0]) : rewards.map((x, n) => `${agentName(n)} ${number(x)}`).join(" · ")),
    ...numbers.map(([name, x]) => make("span", { class: "chip" }, make("span", {}, name), number(x))),
    turn.joint.length > 1 && t ? make("span", { class: "part" }, `joint action ${j + 1} of ${turn.joint.length}`) : null,
    turn.fault ? make("span", { class: "flag", title: "of the turn, over all its tasks" }, turn.fault) : null), lane.size + 3, t + 2);
  });
  lanes.addEventListener("keydown", moveFocus);
  return lanes;
}

/** Go to the next message by the arrow keys: left and right along a lane, up and down in a turn. */
function moveFocus(event) {
  const step = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
  if (!step) return;
  const cards = [...event.currentTarget.querySelectorAll(".message")], here = cards.indexOf(document.activeElement);
  const place = (card) => [Number(card.dataset.turn), Number(card.dataset.agent)];
  if (!cards.length) return;
  event.preventDefault();
  if (here < 0) { cards[0].focus(); return; }
  const [t, n] = place(cards[here]);
  const ahead = cards.map((card) => [card, place(card)]).filter(([, [turn, agent]]) => (step[0] ? (turn - t) * step[0] > 0 : turn === t && (agent - n) * step[1] > 0));
  const far = ([, [turn, agent]]) => Math.abs(turn - t) * 100 + Math.abs(agent - n);
  ahead.sort((a, b) => far(a) - far(b));
  if (ahead.length) ahead[0][0].focus();
}

/** Return a picture of who read whom: a column for each turn, a row for each agent, an arrow from a message to the message of its
 * reader. */
function readersPicture(record, path) {
  const { turns } = record, edges = readings(record, path), agents = turns[0].prompts.length;
  const [left, wide, high] = [110, 74, 34], width = left + wide * path.length, height = high * agents + 26;
  const at = ([t, n]) => [left + wide * (t + 0.4), high * (n + 0.5) + 4];
  const svg = shape("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": "who reads whom, turn by turn", class: "readers",
    style: `max-width: ${width}px` });
  const marker = shape("marker", { id: "tip", viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 7, markerHeight: 7, orient: "auto-start-reverse" });
  marker.append(shape("path", { d: "M0 0L8 4L0 8Z", class: "tip" }));
  svg.append(marker);
  for (let n = 0; n < agents; n += 1) svg.append(shape("text", { x: left - 12, y: at([0, n])[1] + 4, "text-anchor": "end" }, clipped(agentName(n), 16)[0]));
  path.forEach((_, t) => svg.append(shape("text", { x: at([t, 0])[0], y: height - 6, "text-anchor": "middle" }, `turn ${t}`)));
  for (const { from, to, short } of edges) {
    const [[x1, y1], [x2, y2]] = [at(from), at(to)], length = Math.hypot(x2 - x1, y2 - y1) || 1, gap = 9;
    const [dx, dy] = [((x2 - x1) / length) * gap, ((y2 - y1) / length) * gap];
    const bend = y1 === y2 && to[0] - from[0] > 1 ? 14 : 0;
    svg.append(shape("path", { d: `M${x1 + dx} ${y1 + dy}Q${(x1 + x2) / 2} ${(y1 + y2) / 2 - bend * 2} ${x2 - dx} ${y2 - dy}`, class: "edge",
      style: `stroke: ${color(from[1])}`, "stroke-dasharray": short ? "3 3" : "none", "marker-end": "url(#tip)" }));
  }
  path.forEach(([p], t) => {
    for (let n = 0; n < agents; n += 1) {
      const [cx, cy] = at([t, n]);
      svg.append(shape("circle", turns[t].acts[n][p] ? { cx, cy, r: 6, style: `fill: ${color(n)}` } : { cx, cy, r: 2, class: "silent" }));
    }
  });
  const others = edges.filter(({ from, to }) => from[1] !== to[1]);
  const said = edges.length ? `${others.length} of ${edges.length} arrows go to another agent.` : "No message stands in a later prompt.";
  return make("details", { class: "who-reads" }, make("summary", {}, `Who reads whom: ${said}`), svg,
    make("p", { class: "note" }, "An arrow: the message stands, word by word, in the next prompt of its reader. Dashed: one or two characters, perhaps by chance."));
}
