// What if an agent had said something else? The step is played again by `jmarl replay`: by the server, or in a terminal.

const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;

/** Return two episodes side by side: what differs, and the returns. answer: of `jmarl replay --json --say`, for an agent in turn t. */
function differences({ episode, replaced, returns }, agent, t) {
  const named = (title) => title.replace(/agent (\d+)/, (_, n) => agentName(Number(n))), titles = [...new Set([...Object.keys(episode), ...Object.keys(replaced)])];
  const changed = titles.filter((title) => episode[title] !== replaced[title]), missing = "nothing: the episode has ended";
  const cell = (texts, title) => {
    const cut = commonStart(episode[title] ?? "", replaced[title] ?? "");
    return make("td", {}, cut ? make("div", { class: "part" }, `equal for ${cut.toLocaleString("en")} characters, then:`) : null, textBlock((texts[title] ?? missing).slice(cut), SHOWN));
  };
  return make("div", {}, make("p", {}, `Return from turn ${t} on: `, ...returns.flatMap(({ was, is, difference }, n) => [n ? " · " : "", n === agent ? make("b", {}, agentName(n)) : agentName(n),
    ` ${number(was)} → ${number(is)} (${difference === 0 ? "as before" : signed(difference)})`])),
  changed.length ? make("table", {}, make("tr", {}, make("th", {}, "as it was"), make("th", {}, "what if")),
    ...changed.flatMap((title) => [make("tr", {}, make("th", { colspan: "2" }, named(title))), make("tr", {}, cell(episode, title), cell(replaced, title))])) : null,
  note(`${titles.length - changed.length} of ${titles.length} parts of the episode are equal, bit for bit${changed.length ? ", and not shown" : ""}.`));
}

/** Send a question to the server. progress: called with each line about how far it is; signal: ends it. Return the result. */
async function sendQuestion(question, progress, signal) {
  const response = await fetch("what-if", { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(question), signal });
  if (!response.ok) throw new Error(await response.text());
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = "", part = await reader.read(); !part.done; part = await reader.read()) {
    const lines = (rest + part.value).split("\n");
    rest = lines.pop();
    for (const line of lines.map((text) => JSON.parse(text))) {
      if (line.error) throw new Error(line.error);
      if (line.result) return line.result;
      if (line.progress) progress(line.progress);
    }
  }
  throw new Error("the server has ended");
}

/** Return a form that plays a step again in which a message is replaced. joint: joint action of each turn of its episode. */
function whatIf(data, record, { t, n, text }, task, joint) {
  const { run, step } = record, { name } = data.runs[run], entry = make("textarea", { rows: "3", maxlength: "20000", "aria-label": "what it says instead" }), command = make("code", { class: "words" });
  const status = make("p", { class: "note", role: "status" }), result = make("div");
  entry.defaultValue = text;
  const said = () => (entry.value === entry.defaultValue ? text : entry.value); // a field changes the ends of lines
  const write = () => { command.textContent = `jmarl replay RUN --step ${step} --task ${task} --joint ${joint.join(" ")} --agent ${n} --turn ${t} --say=${quoted(said())}`; };
  entry.addEventListener("input", write);
  write();
  let isBusy = false;
  const button = make("button", { onclick: async () => {
    if (isBusy) return;
    isBusy = true;
    const closed = new AbortController();
    button.closest("dialog").addEventListener("close", () => closed.abort(), { once: true });
    result.replaceChildren();
    status.textContent = "starting …";
    try {
      result.replaceChildren(differences(await sendQuestion({ run, name, step, task, agent: n, turn: t, joint, say: said() },
        (line) => { status.textContent = line; }, closed.signal), n, t));
      status.textContent = "";
    } catch (error) { status.textContent = `Not played: ${error.message}`; }
    isBusy = false;
  } }, "play the step again with it");
  return make("details", { class: "what-if" }, make("summary", {}, `What if ${agentName(n)} had said something else?`), entry, data.live ? make("div", { class: "tools" }, button) : null, status, result,
    note(data.live ? "It runs beside the run, at a lower priority, and ends when this is closed. In a terminal, RUN being the directory of the run:" : "jmarl report --watch has a button here. In a terminal, RUN being the directory of the run:"), command);
}
