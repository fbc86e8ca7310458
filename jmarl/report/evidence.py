"""What the rules of `diagnosis.py` read of a run: columns by update, groups of completions, tasks with their rewards.

Of long runs only some rows and records are read, evenly spaced: MAX_ROWS and MAX_RECORDS. Records of older versions have
neither returns nor lengths: rewards of their turn and characters stand for them.
"""

import json
import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jmarl.logs.completions_file import TRAIN
from jmarl.report.load import RecordedRun, roles_of
from jmarl.report.summary import columns_of

logger = logging.getLogger(__name__)

MAX_ROWS, MAX_RECORDS = 2000, 200
TOP = 0.9  # of the way from the lowest mean reward to the best reward: a team that is there has learned its tasks
SMALL = 1e-6  # smaller differences of rewards are rounding
TURN, AGENT = re.compile(r"turn_\d+/"), re.compile(r"(?:turn_\d+/)?agent_(\d+)/")


class WrittenGroup(NamedTuple):
    """The completions of one agent for one prompt."""

    step: int
    agent: int
    prompt: str
    texts: list[str]
    returns: np.ndarray  # [G], NaN where there is none
    lengths: list[int]  # [G] in tokens


class JudgedNode(NamedTuple):
    """The joint actions of all agents at one node of an episode."""

    step: int
    task: str  # equal for equal tasks
    rewards: np.ndarray  # [J], means over agents
    parts: dict[str, np.ndarray]  # [J] each
    texts: list[tuple[str, ...]]  # [J][N] what each agent wrote
    is_last: bool  # whether no later turn of its step has this task


class Series(NamedTuple):
    """A column by update, without numbers that are not finite."""

    steps: np.ndarray
    values: np.ndarray

    def where(self, index: Any) -> "Series":
        """Return the updates that an index of numpy chooses."""
        return Series(self.steps[index], self.values[index])

    def late(self) -> "Series":
        """Return the last third."""
        return self.where(slice(len(self.steps) * 2 // 3, None))

    def start(self) -> float:
        """Return the mean of the first tenth."""
        return float(self.values[: -(-len(self.values) // 10)].mean())

    def end(self) -> float:
        """Return the mean of the last third."""
        return float(self.late().values.mean())

    def span(self) -> tuple[int, int]:
        """Return the first and the last update."""
        return int(self.steps[0]), int(self.steps[-1])


class Evidence(NamedTuple):
    """What rules read of a run. low, high: the lowest mean reward of an update, and the best reward of a joint action."""

    run: RecordedRun
    rows: Sequence[Mapping[str, float]]
    columns: list[str]
    groups: list[WrittenGroup]
    nodes: list[JudgedNode]
    low: float = np.nan
    high: float = np.nan

    def series(self, name: str) -> Series:
        """Return a column; of several turns the mean over turns, unless the column is there without a turn."""
        known = [name] if name in self.columns else [c for c in self.columns if TURN.sub("", c, count=1) == name]
        values = {row["step"]: [row[c] for c in known if np.isfinite(row.get(c, np.nan))] for row in self.rows}
        means = {step: float(np.mean(x)) for step, x in values.items() if x}
        return Series(np.array([*means], int), np.array([*means.values()]))

    def of_agents(self, name: str) -> dict[int, Series]:
        """Return a column of each agent that has it."""
        agents = sorted({int(match[1]) for match in map(AGENT.match, self.columns) if match})
        series = {agent: self.series(f"agent_{agent}/{name}") for agent in agents}
        return {agent: x for agent, x in series.items() if x.values.size}

    def name(self, agent: int) -> str:
        """Return the role of an agent, or its number."""
        return dict(enumerate(roles_of(self.run.attempts))).get(agent, f"agent {agent}")

    def at_top(self, reward: np.ndarray | float) -> Any:
        """Return whether mean rewards are near the best one of the run."""
        return (reward >= self.low + TOP * (self.high - self.low)) & (self.high - self.low > SMALL)

    def is_solved(self) -> bool:
        """Return whether the mean reward of the last third of the run is near the best one."""
        rewards = self.series("reward/mean")
        return bool(rewards.values.size and self.at_top(rewards.end()))


def evidence_of(run: RecordedRun, records: Sequence[Mapping[str, Any]]) -> Evidence:
    """Return what rules read of a run. records: of its completions, see `completions_file`."""
    rows = run.rows[:: max(-(-len(run.rows) // MAX_ROWS), 1)]
    trained = [record for record in records if record["kind"] == TRAIN]
    trained = trained[:: max(-(-len(trained) // MAX_RECORDS), 1)]
    groups, nodes = list[WrittenGroup](), list[JudgedNode]()
    for record in trained:
        try:
            own = [group for turn in record["turns"] for group in groups_of(record["step"], turn)], nodes_of(record)
        except (LookupError, TypeError, ValueError) as error:  # of a file that something else wrote
            logger.warning("the completions of update %.20s are not judged: %.100r", record["step"], error)
            continue
        groups += own[0]
        nodes += own[1]
    e = Evidence(run, rows, [*columns_of(rows)], groups, nodes)
    rewards, best = e.series("reward/mean").values, e.series("reward/max").values
    return e._replace(low=rewards.min(), high=max([rewards.max(), *best])) if rewards.size else e


def groups_of(step: int, turn: Mapping[str, Any]) -> list[WrittenGroup]:
    """Return the groups of a turn. In records without returns these are the mean rewards of the joint actions that contain a
    completion."""
    rewards, joint, groups = np.array(turn["rewards"], float), np.array(turn["joint"], int), []
    for agent, acts in enumerate(turn["acts"]):
        for p in np.flatnonzero(acts):
            texts, own = turn["completions"][agent][p], rewards[p, :, agent]
            valid = np.isfinite(own)
            counts = np.bincount(joint[valid, agent], minlength=len(texts))
            sums = np.bincount(joint[valid, agent], own[valid], len(texts))
            returns = np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)
            if "returns" in turn:
                returns = np.array(turn["returns"][agent][p], float)
            lengths = turn["lengths"][agent][p] if "lengths" in turn else [*map(len, texts)]
            groups.append(WrittenGroup(step, agent, str(turn["prompts"][agent][p]), texts, returns, lengths))
    return groups


def nodes_of(record: Mapping[str, Any]) -> list[JudgedNode]:
    """Return the nodes of a step. Tasks are told apart by what agents read first, which the tasks in a record may lack."""
    first, nodes = record["turns"][0], []
    keys = dict(zip(first["items"], (json.dumps(read) for read in zip(*first["prompts"], strict=True)), strict=True))
    for t, turn in enumerate(record["turns"]):
        later = {item for after in record["turns"][t + 1 :] for item in after["items"]}
        rewards = np.array(turn["rewards"], float).mean(-1)
        parts = {name: np.array(values, float) for name, values in turn["parts"].items()}
        for p, item in enumerate(turn["items"]):
            own = {name: values[p] for name, values in parts.items()}
            nodes.append(JudgedNode(record["step"], keys[item], rewards[p], own, texts_of(turn, p), item not in later))
    return nodes


def texts_of(turn: Mapping[str, Any], p: int) -> list[tuple[str, ...]]:
    """Return what each agent wrote in each joint action of a node; an agent that did not act wrote nothing."""
    groups = [texts[p] if acts[p] else None for texts, acts in zip(turn["completions"], turn["acts"], strict=True)]
    return [tuple(own[g] if own else "" for own, g in zip(groups, action, strict=True)) for action in turn["joint"]]
