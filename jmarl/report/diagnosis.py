"""Say what is wrong with a run, as a colleague would who has read its rows and completions: at most eight sentences.

The rules are the functions in `CHECKS`, and the table `rules.yaml` with the threshold, its source and the sentence of each. A
rule reads the evidence of one run and its threshold, and yields signs: how strong it is (0 to 1), the updates that show it, and
values for the sentence. The strongest sign of a rule is said. It is a hint: a run may look so for a good reason.
"""

from __future__ import annotations

import functools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml

from jmarl.logs.completions_file import NAME, TRAIN
from jmarl.report.completions import judged_records
from jmarl.report.evidence import SMALL, Evidence, evidence_of
from jmarl.report.load import RecordedRun, load_runs

MAX_SENTENCES, MIN_UPDATES = 8, 10  # said of a run; that a run needs to be judged
MIN_PAIRS = 50  # of joint actions that are compared
SHORT = 8  # tokens of an answer that needs no end: a move, a word, a number
MIN_SECONDS = 0.1  # of a phase in a step: tiny runs lose no time
Signs = Iterator[tuple[float, tuple[int, int], dict[str, Any]]]


class Finding(NamedTuple):
    """What a rule says of a run. severity: 0 to 1; 0 if no rule fires. updates: the first and the last one that show it."""

    rule: str
    severity: float
    updates: tuple[int, int]
    text: str


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def no_progress(e: Evidence, limit: float) -> Signs:
    """How far the reward came of the way from its start to the best reward. A reward that is constant, as of a game in which
    one wins what the other loses, says nothing."""
    rewards = e.series("reward/mean")
    if len(rewards.steps) >= 2 * MIN_UPDATES and np.ptp(rewards.values) > SMALL:
        start, end = rewards.start(), rewards.end()
        if end - start <= limit * (e.high - start):
            yield 1.0, rewards.span(), dict(start=start, end=end, best=e.high)


def entropy_collapsed(e: Evidence, limit: float) -> Signs:
    """Entropy late in the run against that of the first update, where the reward did not rise after it fell so far."""
    rewards = e.series("reward/mean")
    for agent, series in e.of_agents("entropy").items():
        start, end = float(series.values[0]), series.end()
        if start > SMALL and end < limit * start:
            low = series.where(series.values < limit * start)
            after = rewards.where(rewards.steps >= low.steps[0])
            if not after.values.size or after.end() - after.start() <= 0.1 * (e.high - e.low):
                yield 1 - end / start, low.span(), dict(agent=e.name(agent), start=start, end=end, when=low.steps[0])


def no_variance(e: Evidence, limit: float) -> Signs:
    """Share of completions in groups of equal advantages, over the updates in which the reward is not near its best."""
    rewards = e.series("reward/mean")
    for agent, series in e.of_agents("zero_variance_share").items():
        counted = series.where(~np.isin(series.steps, rewards.steps[e.at_top(rewards.values)]))
        if len(counted.steps) >= max(5, len(series.steps) / 5) and (share := float(counted.values.mean())) >= limit:
            yield share, counted.where(counted.values >= limit).span(), dict(agent=e.name(agent), share=percent(share))


def cut(e: Evidence, limit: float) -> Signs:
    """Share of completions that did not end before max_new_tokens, late in the run, where no return rose by a quarter of
    the way to the best one: tasks may be solved in max_new_tokens. Answers of a word or a number that have all been as long as
    they may be since the first update are as they should be, and so are those that may not end earlier."""
    most, returns, lengths = e.run.settings.get("max_new_tokens"), e.of_agents("return").values(), e.of_agents("length")
    if most is None or e.run.settings.get("min_new_tokens", 0) >= most:
        return
    if any(x.end() - x.start() > 0.25 * (max(e.high, x.values.max()) - x.values.min()) for x in returns):
        return
    for agent, series in e.of_agents("ended").items():
        lengths_are_equal = agent in lengths and bool((lengths[agent].values == most).all())
        is_whole = lengths_are_equal and most <= SHORT and not series.values.any()
        if (share := 1 - series.end()) >= limit and not is_whole:
            yield share, series.late().span(), dict(agent=e.name(agent), share=percent(share), most=most)


def clipped(e: Evidence, limit: float) -> Signs:
    """Share of tokens whose ratio is clipped, the mean over updates."""
    for agent, series in e.of_agents("clip_share").items():
        if (share := float(series.values.mean())) >= limit:
            given = {name: e.run.settings.get(name) for name in ("clip_eps_low", "clip_eps_high")}
            bounds = ", ".join(f"{name}={value}" for name, value in given.items() if value is not None)
            values = dict(agent=e.name(agent), share=percent(share), at=bounds and f" at {bounds}")
            yield share, series.where(series.values >= limit).span(), values


def same_text(e: Evidence, limit: float) -> Signs:
    """Share of the most frequent text of an agent among its answers to three or more prompts, late in the run."""
    steps = sorted({group.step for group in e.groups})
    late = [group for group in e.groups if group.step >= steps[len(steps) * 2 // 3]]
    for agent in sorted({group.agent for group in late}):
        own = [group for group in late if group.agent == agent]
        texts, prompts = Counter(text for group in own for text in group.texts), len({group.prompt for group in own})
        [(text, count)] = texts.most_common(1)
        if prompts >= 3 and (share := count / texts.total()) >= limit:
            values = dict(agent=e.name(agent), text=text[:40], share=percent(share), prompts=prompts)
            yield share, (own[0].step, own[-1].step), values


def idle_agent(e: Evidence, limit: float) -> Signs:
    """Relative change of an agent's entropy, where that of another one has at least halved."""
    series = {agent: x for agent, x in e.of_agents("entropy").items() if x.values[0] > SMALL}
    changes = {agent: abs(1 - x.end() / x.values[0]) for agent, x in series.items()}
    busy = max(changes, key=changes.__getitem__, default=0)
    for agent, change in changes.items():
        if change <= limit and changes[busy] >= 0.5:
            values = dict(agent=e.name(agent), busy=e.name(busy), change=percent(change), most=percent(changes[busy]))
            yield 1 - change, series[agent].span(), values


def no_influence(e: Evidence, limit: float) -> Signs:
    """Share of the pairs of joint actions in which only the text of this agent differs that have the same reward, where texts
    of another agent change it. Of episodes of one turn: in others a message may change what comes later."""
    pairs, equal = Counter[int](), Counter[int]()
    for node in e.nodes:
        if not node.is_last:
            return
        rewards = {texts: round(float(x), 6) for texts, x in zip(node.texts, node.rewards, strict=True) if np.isfinite(x)}
        for agent in range(len(node.texts[0])):
            alone = defaultdict(list)  # texts of the others -> rewards
            for texts, reward in rewards.items():
                alone[texts[:agent] + texts[agent + 1 :]].append(reward)
            pairs[agent] += sum(math.comb(len(own), 2) for own in alone.values())
            equal[agent] += sum(math.comb(count, 2) for own in alone.values() for count in Counter(own).values())
    shares = {agent: equal[agent] / count for agent, count in pairs.items() if count >= MIN_PAIRS}
    for agent, share in shares.items():
        if share >= limit and min(shares.values()) <= 0.95:
            values = dict(agent=e.name(agent), pairs=pairs[agent], share=percent(share))
            yield share, (e.nodes[0].step, e.nodes[-1].step), values


def parts_opposed(e: Evidence, limit: float) -> Signs:
    """Share of the variance of two parts of the reward that cancels in their sum, across the joint actions of a task or from
    node to node: -2 cov(a, b) / (var(a) + var(b))."""
    for names in combinations(sorted({name for node in e.nodes for name in node.parts}), 2):
        nodes = [node for node in e.nodes if {*names} <= node.parts.keys()]
        tables = [np.stack([node.parts[name] for name in names]) for node in nodes]
        tables = [x for table in tables if (x := table[:, np.isfinite(table).all(0)]).size]
        means = [np.stack([x.mean(1) for x in tables], 1)] if tables else []
        for where, rows in (("across the joint actions of a task", tables), ("from task to task", means)):
            a, b = centered(rows)
            power = (a**2).sum(), (b**2).sum()
            share = float(-2 * (a * b).sum() / sum(power)) if min(power) > SMALL and len(tables) >= MIN_UPDATES else 0.0
            if share >= limit:
                values = dict(first=names[0], second=names[1], share=percent(share), where=where)
                yield share, (nodes[0].step, nodes[-1].step), values


def centered(tables: Iterable[np.ndarray]) -> np.ndarray:
    """Return tables [2, K] side by side, each without its mean."""
    return np.concatenate([np.zeros((2, 0)), *(table - table.mean(1, keepdims=True) for table in tables)], 1)


def tasks_settled(e: Evidence, limit: float) -> Signs:
    """Share of tasks whose joint actions all have the lowest reward of the run, or from the start on all the highest."""
    rewards: defaultdict[str, list[np.ndarray]] = defaultdict(list)
    for node in e.nodes:
        if node.is_last and np.isfinite(node.rewards).any():
            rewards[node.task].append(node.rewards[np.isfinite(node.rewards)])
    ranges = [(x.min(), x.max()) for own in rewards.values() if len(own) >= 3 for x in [np.concatenate(own)]]
    low, high = min((x for x, _ in ranges), default=0.0), max((x for _, x in ranges), default=0.0)
    never, always = sum(x <= low + SMALL for _, x in ranges), sum(x >= high - SMALL for x, _ in ranges)
    if len(ranges) >= 4 and high - low > SMALL and never + always >= limit * len(ranges):
        updates = e.nodes[0].step, e.nodes[-1].step
        yield (never + always) / len(ranges), updates, dict(tasks=len(ranges), never=never, always=always)


def held_out_behind(e: Evidence, limit: float) -> Signs:
    """By how much training rewards outgrew those of held-out tasks, as a share of the range of rewards."""
    rewards, rows = e.series("reward/mean"), [x for x in e.run.evaluations if np.isfinite(x.get("eval/reward", np.nan))]
    if not rewards.values.size or len(rows) < 2:
        return
    values = dict(start=rewards.start(), end=rewards.end(), first=rows[0]["eval/reward"], last=rows[-1]["eval/reward"])
    gap, before, scale = values["end"] - values["last"], values["start"] - values["first"], e.high - e.low
    if scale > SMALL and min(gap, gap - before) >= limit * scale and gap >= 2 * rows[-1].get("eval/reward_ci95", 0.0):
        yield (gap - before) / scale, (int(rows[0]["eval/updates"]), int(rows[-1]["eval/updates"])), values


def length_learned(e: Evidence, limit: float) -> Signs:
    """Correlation of length and return within groups, where the mean length moved by a quarter that way."""
    for agent, series in e.of_agents("length").items():
        tables = [np.stack([group.lengths, group.returns]) for group in e.groups if group.agent == agent]
        lengths, returns = centered(table[:, np.isfinite(table[1])] for table in tables if np.isfinite(table[1]).any())
        scale = np.sqrt((lengths**2).sum() * (returns**2).sum())
        r = float((lengths * returns).sum() / scale) if scale > SMALL else 0.0
        growth = series.end() / max(series.start(), SMALL)
        if abs(r) >= limit and (growth >= 1.25 if r > 0 else growth <= 0.8):
            yield abs(r), series.span(), dict(agent=e.name(agent), r=r, start=series.start(), end=series.end())


def time_lost(e: Evidence, limit: float) -> Signs:
    """Share of the time that a phase other than sampling and updates takes, in the second half of the run."""
    rows = [row for row in e.rows[len(e.rows) // 2 :] if "time/step_s" in row]
    names = [name for name in e.columns if name.startswith("time/") and name != "time/step_s"]
    seconds = {name[5:]: sum(x for row in rows if np.isfinite(x := row.get(name, 0.0))) for name in names}
    for phase, remedy in rules()["time_lost"]["remedies"].items():
        share, mean = (seconds.get(phase, 0.0) / max(total, SMALL) for total in (sum(seconds.values()), len(rows)))
        if share >= limit and mean >= MIN_SECONDS:
            values = dict(share=percent(share), phase=phase, seconds=mean, remedy=remedy)
            yield share, (int(rows[0]["step"]), int(rows[-1]["step"])), values


CHECKS: tuple[Callable[[Evidence, float], Signs], ...] = (
    no_progress, entropy_collapsed, tasks_settled, no_variance, held_out_behind, length_learned, same_text, cut, idle_agent,
    no_influence, parts_opposed, clipped, time_lost,
)  # fmt: skip


@functools.cache
def rules() -> Mapping[str, Mapping[str, Any]]:
    """Return the table of rules by the name of their function."""
    return yaml.safe_load(Path(__file__).with_name("rules.yaml").read_text(encoding="utf-8"))


def judge(e: Evidence) -> list[Finding]:
    """Return what the rules say, the most severe first; one sentence if none fires."""
    updates = (int(e.rows[0]["step"]), int(e.rows[-1]["step"])) if e.rows else (0, 0)
    if updates[1] < MIN_UPDATES:
        text = f"Too early to say: the run has {updates[1]} updates, and the rules need {MIN_UPDATES}."
        return [Finding("too few updates", 0.0, updates, text)]
    findings, is_solved, rewards = [], e.is_solved(), e.series("reward/mean")
    for check in CHECKS:
        rule = rules()[check.__name__]
        if (rule["at_top"] or not is_solved) and (signs := [*check(e, rule["threshold"])]):
            strength, shown, values = max(signs, key=lambda sign: sign[0])
            text = visible(rule["says"].format(**values, updates="updates {} to {}".format(*shown)))
            findings.append(Finding(check.__name__, round(rule["weight"] * min(float(strength), 1.0), 3), shown, text))
    moved = f"; the mean reward went from {rewards.start():.3g} to {rewards.end():.3g}" if rewards.values.size else ""
    text = f"This run looks healthy: none of {len(CHECKS)} rules fires in updates {updates[0]} to {updates[1]}{moved}."
    return sorted(findings, key=lambda x: -x.severity)[:MAX_SENTENCES] or [Finding("healthy", 0.0, updates, text)]


def visible(text: str) -> str:
    """Return a sentence without control characters, which a terminal would obey."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def diagnose_runs(paths: Sequence[Path]) -> dict[str, list[Finding]]:
    """Return what the rules say of each run in directories, by the name of the run."""
    return {run.name: judge(evidence_of(run, judged_records(run.path / NAME))) for run in load_runs(paths)}


def top_findings(runs: Sequence[RecordedRun], records: Sequence[dict]) -> list[tuple[str, dict[str, str]]]:
    """Return what stands at the top of a page, at most eight sentences in all, each with links into the page by their words: to
    the chart of its rule, and to the first and the last step that show it, if the run recorded completions.

    records: with the number of their run as `run`."""
    of_runs = [[x for x in records if x["run"] == n] for n in range(len(runs))]
    said = [(n, finding) for n, run in enumerate(runs) for finding in judge(evidence_of(run, of_runs[n]))]
    said.sort(key=lambda x: -x[1].severity)
    quiet = [visible(runs[n].name) for n, finding in said if not finding.severity]
    which = ", ".join(quiet) if len(quiet) <= 3 else f"{len(quiet)} of {len(runs)} runs"
    rest = [(f"No rule fires in {which}.", dict[str, str]())] if quiet and len(runs) > 1 else []

    def linked(n: int, finding: Finding) -> tuple[str, dict[str, str]]:
        rule, name = rules().get(finding.rule, {}), f"{visible(runs[n].name)}: " * (len(runs) > 1)
        links = {"chart": f"#column={rule['chart']}"} if "chart" in rule else {}
        steps = finding.updates if finding.severity and of_runs[n] else ()
        links |= {f"episodes of update {step}": f"#e={n},{rule.get('kind', TRAIN)},{step}" for step in steps}
        return name + finding.text, links

    shown = [x for x in said if x[1].severity or len(runs) == 1]
    return [linked(*x) for x in shown[: MAX_SENTENCES - len(rest)]] + rest
