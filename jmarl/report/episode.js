// Episodes of a record: which messages belong together, what they earned, and who read whom. Nothing here draws.
//
// A node p of turn t is what the agents read together; it has joint actions j, each with one completion g of each agent n. Node p
// follows joint action `parents[p]` of the turn before, counted over all its nodes. See `jmarl.rl.returns`.

/** Return the node and joint action of each turn of an episode. choices: turn -> joint action where the episode branches; the
 * first one otherwise. */
function episodePath(turns, node, joint, choices = {}) {
  const path = [[node, joint]];
  for (let t = 1; t < turns.length; t += 1) {
    const [p, j] = path[t - 1], child = turns[t].parents.indexOf(p * turns[t - 1].joint.length + j);
    if (child < 0) break;
    path.push([child, Math.min(choices[t] ?? 0, turns[t].joint.length - 1)]);
  }
  return path;
}

/** Return the path to a node of a later turn, without that node: [[p, j], ...] of the turns before it. */
function pathTo(turns, t, p) {
  const path = [];
  for (let node = p, turn = t; turn > 0; turn -= 1) {
    const parent = turns[turn].parents[node], count = turns[turn - 1].joint.length;
    node = Math.floor(parent / count);
    path.unshift([node, parent % count]);
  }
  return path;
}

/** Return the discounted returns [turn][p][j][n] of joint actions, as `jmarl.rl.returns.discounted` has them without a critic. */
function jointReturns(turns, gamma) {
  const returns = [];
  for (let t = turns.length - 1; t >= 0; t -= 1) {
    const turn = turns[t], after = turns[t + 1], count = turn.joint.length;
    returns[t] = turn.rewards.map((node) => node.map((action) => [...action]));
    if (!after || !gamma) continue;
    after.items.forEach((_, child) => {
      const parent = after.parents[child], own = returns[t][Math.floor(parent / count)][parent % count];
      own.forEach((reward, n) => {
        const following = meanOf(returns[t + 1][child].map((action) => action[n]));
        own[n] = reward === null || following === null ? null : reward + gamma * following;
      });
    });
  }
  return returns;
}

/** Return the mean over the joint actions of node p with completion g of agent n. table: [p][j][n]. */
function meanWith(turn, table, n, p, g) {
  return meanOf(table[p].filter((_, j) => turn.joint[j][n] === g).map((action) => action[n]));
}

/** Return a message: completion g of agent n for node p in turn t, with all numbers that were recorded. Runs of older versions
 * have no `returns`, `advantages`, `lengths`, `cut` and `masked`: the return is computed, the others are null. */
function messageOf(record, returns, t, n, p, g) {
  const turn = record.turns[t], at = (name) => turn[name]?.[n]?.[p]?.[g] ?? null;
  const mean = turn.returns ? at("returns") : meanWith(turn, returns[t], n, p, g);
  return { t, n, p, g, text: turn.completions[n][p][g], reward: meanWith(turn, turn.rewards, n, p, g), gain: mean, advantage: at("advantages"),
    length: at("lengths"), tokens: at("tokens"), cut: Boolean(at("cut")), masked: Boolean(at("masked")) };
}

/** Return the completions of agent n for the prompt of node p, best first, those without a return last. `lead`: the advantage, or
 * where none was recorded the return minus the mean of the group. */
function groupOf(record, returns, t, n, p) {
  const group = record.turns[t].completions[n][p].map((_, g) => messageOf(record, returns, t, n, p, g));
  const mean = meanOf(group.map(({ gain }) => gain));
  const allCut = group.length > 1 && group.every(({ cut }) => cut); // as moves of one token are
  for (const message of group) {
    message.lead = message.advantage ?? (message.masked || message.gain === null || group.length < 2 ? null : message.gain - mean);
    message.allCut = allCut;
  }
  return group.sort((a, b) => (b.gain ?? -Infinity) - (a.gain ?? -Infinity));
}

/** Return by whose return episodes are ranked: null, the mean of all agents, or an agent, where the means of all episodes of the
 * step are equal and the returns are not, as in a game that one wins from the other: the first one whose returns differ; the first
 * one of all where every episode ended alike, so that such a step is ranked as the others of its run. */
function rankedBy(returns) {
  const differs = (values) => values.some((x) => x !== values[0]), all = returns[0].flat();
  if (!all.length || differs(all.map(meanOf))) return null;
  const agent = all[0].findIndex((_, n) => differs(all.map((gains) => gains[n])));
  if (agent >= 0) return agent;
  return differs(all[0]) ? 0 : null;
}

/** Return the words that say by whose return episodes are ranked; none where it is the mean of all agents. */
function whose(returns) {
  const by = rankedBy(returns);
  return by === null ? "" : ` of ${agentName(by)}`;
}

/** Return the episodes that begin at item p: {j, gain, gains}, best first. */
function episodesOf(record, returns, p) {
  const by = rankedBy(returns), all = returns[0][p].map((gains, j) => ({ j, gains, gain: by === null ? meanOf(gains) : gains[by] }));
  return all.sort((a, b) => (b.gain ?? -Infinity) - (a.gain ?? -Infinity));
}

/** Return the numbers of joint action j of node p by name. */
function numbersOf(table, p, j) {
  return Object.entries(table || {}).map(([name, x]) => [name, x[p]?.[j]]).filter(([, x]) => x !== null && x !== undefined);
}

const promptAt = (record, t, n, p) => record.turns[t].prompts[n][p] ?? "";

/** Return what tells the task of item p from others: the prompts of its first turn. */
const taskOf = (record, p) => JSON.stringify(record.turns[0].prompts.map((agent) => agent[p]));

/** Return whether a text stands in another one, not as a part of a longer word or number. */
function occursIn(text, whole) {
  const wanted = text.trim(), isWord = (c) => c !== undefined && /[\p{L}\p{N}_]/u.test(c);
  if (!wanted) return false;
  for (let at = whole.indexOf(wanted); at >= 0; at = whole.indexOf(wanted, at + 1)) {
    const before = isWord(wanted[0]) && isWord(whole[at - 1]), after = isWord(wanted.at(-1)) && isWord(whole[at + wanted.length]);
    if (!before && !after) return true;
  }
  return false;
}

/** Return who read whom: {from: [turn, agent], to: [turn, agent], short}, where a message stands in the next prompt of an agent.
 * short: of one or two characters, which may stand there by chance. */
function readings(record, path) {
  const { turns } = record, found = [], agents = turns[0].prompts.length;
  path.forEach(([p, j], t) => {
    for (let m = 0; m < agents; m += 1) {
      if (!turns[t].acts[m][p]) continue;
      const text = turns[t].completions[m][p][turns[t].joint[j][m]] || "";
      for (let n = 0; n < agents; n += 1) {
        const next = path.findIndex(([node], later) => later > t && turns[later].acts[n][node]);
        if (next < 0 || !occursIn(text, promptAt(record, next, n, path[next][0]))) continue;
        found.push({ from: [t, m], to: [next, n], short: text.trim().length < 3 });
      }
    }
  });
  return found;
}

/** Return the messages of a record: [turn, agent, node, completion]. */
function* messagesIn(record) {
  for (const [t, turn] of record.turns.entries()) {
    for (const [n, acts] of turn.acts.entries()) {
      for (const [p, isActive] of acts.entries()) if (isActive) for (const g of turn.completions[n][p].keys()) yield [t, n, p, g];
    }
  }
}
