// The steps that the runs recorded, and their completions: in packed parts of the page, unpacked when they are looked at, or
// asked of the server of `jmarl report --watch`.

const OPEN_PARTS = 6; // unpacked parts that stay in memory

/** Return the JSON value in compressed text in base64. */
async function unpack(text) {
  if (typeof DecompressionStream === "undefined") throw new Error("this page needs a browser of 2023 or newer");
  const data = atob(text.trim()), bytes = new Uint8Array(data.length);
  for (let i = 0; i < data.length; i += 1) bytes[i] = data.charCodeAt(i);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

class Steps {
  /** index: a list for each column, see `PackedSteps` in `completions.py`. A step is known by its place in these lists. */
  constructor(index, live) {
    this.index = index;
    this.live = live;
    this.parts = document.querySelectorAll("script.part");
    this.open = new Map(); // part -> promise of its records
    this.came = new Map(); // place -> record that came after the page was opened, or was asked for
  }

  get size() { return this.index.step.length; }

  /** Return the places of the steps of a run; of all runs if it is null. */
  of(run, kind) {
    const { run: runs, kind: kinds } = this.index, places = [];
    for (let i = 0; i < this.size; i += 1) if ((run === null || runs[i] === run) && (!kind || kinds[i] === kind)) places.push(i);
    return places;
  }

  info(i) {
    return { run: this.index.run[i], kind: this.index.kind[i], step: this.index.step[i], reward: this.index.reward[i] };
  }

  isHere(i) { return this.index.part[i] >= 0 || this.came.has(i); }

  /** Return the record of a step. Rejects with a sentence if it is not in the page and nobody can be asked. */
  async record(i) {
    if (this.came.has(i)) return this.came.get(i);
    if (this.index.part[i] >= 0) return (await this.part(this.index.part[i]))[this.index.at[i]];
    const { run, kind, step } = this.info(i);
    if (!this.live) {
      throw new Error(`Step ${step} was recorded, but is not in this file, which has every ${this.every}. step. ` +
        `“jmarl report RUN --steps ${step}” puts it in, and “jmarl report RUN --watch” reads any step when it is asked for.`);
    }
    const answer = await fetch(`step?run=${run}&name=${encodeURIComponent(this.names[run])}&kind=${kind}&step=${step}`, { cache: "no-store" });
    if (!answer.ok) throw new Error(await answer.text());
    return this.keep(i, await answer.json());
  }

  part(number) {
    const known = this.open.get(number);
    this.open.delete(number);
    this.open.set(number, known || unpack(this.parts[number].textContent));
    if (this.open.size > OPEN_PARTS) this.open.delete(this.open.keys().next().value);
    return this.open.get(number);
  }

  keep(i, record) {
    this.came.set(i, record);
    if (this.came.size > MAX_RECORDS) this.came.delete(this.came.keys().next().value); // it can be asked for again
    return record;
  }

  /** Take up a record that came from the server; return whether it is new. */
  add(record) {
    const known = this.came.size && [...this.came.values()].some((other) => keyOf(other) === keyOf(record));
    if (known || this.of(record.run, record.kind).some((i) => this.index.step[i] === record.step)) return false;
    let reward = null;
    try { reward = meanOf(record.turns[0].rewards.flat(2)); } catch (error) { reward = null; }
    for (const [name, value] of Object.entries({ run: record.run, kind: record.kind, step: record.step, part: -1, at: 0, reward })) {
      this.index[name].push(value);
    }
    this.keep(this.size - 1, record);
    return true;
  }

  /** Yield [place, record] of steps that are in the page, and now and then let the page draw. goes: whether to go on. */
  async* scan(places, goes, progress) {
    let done = 0, since = performance.now();
    for (const i of places) {
      if (!goes()) return;
      done += 1;
      if (this.isHere(i)) yield [i, await this.record(i)];
      if (performance.now() - since > 40) {
        progress(done, places.length);
        await new Promise((resolve) => { setTimeout(resolve); });
        since = performance.now();
      }
    }
  }
}

const keyOf = (record) => [record.run, record.kind, record.step, record.updates].join();
const MAX_RECORDS = 500; // of steps that came after the page was opened; older ones make room

/** Return the mean of numbers that are not null; null without any. */
function meanOf(values) {
  const valid = values.filter((x) => x !== null && x !== undefined);
  return valid.length ? valid.reduce((a, b) => a + b) / valid.length : null;
}
