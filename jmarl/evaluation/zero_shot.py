"""The rewards of all pairings of several runs' agents: a matrix, self-play and the zero-shot score (host world, no jax).

`cross_play` plays them. Left out: scores by the number of runs that three or more agents come from (`mean` has all pairings).
"""

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from jmarl.evaluation.statistics import mean_and_interval, valid_mean

Texts = list[list[list[str]]]


def is_zero_sum(rewards: np.ndarray) -> bool:
    """Return whether the rewards [..., N] of the agents sum to 0 wherever they are valid."""
    sums = rewards.sum(-1)
    return bool(np.allclose(sums[np.isfinite(sums)], 0, atol=1e-6))


class Estimate(NamedTuple):
    mean: float
    interval: float  # half of the 95 % interval of the mean over items, for these runs: it says nothing about other runs


class CrossPlay(NamedTuple):
    """The rewards of every pairing. k runs, N agents, P items, J joint actions an item; an invalid joint action counts
    nowhere."""

    names: tuple[str, ...]  # [k] of the runs
    rewards: np.ndarray  # [k, ..., k, P, J, N]; at [i, j] agent 0 of run i with agent 1 of run j; NaN: invalid
    texts: tuple[Texts, ...]  # [k][N][P][G]
    fault: str = ""  # what was wrong with the first invalid joint action, or one whose reward was replaced
    raised: int = 0  # joint actions whose reward raised or was late

    @property
    def by_item(self) -> np.ndarray:
        """Mean reward of each pairing on each item, [k, ..., k, P]."""
        return valid_mean(self.rewards.mean(-1))

    @property
    def mean(self) -> np.ndarray:
        """Mean reward of each pairing, [k, ..., k]. With two agents: row i has agent 0 of run i, column j agent 1 of run j."""
        return mean_and_interval(self.by_item)[0]

    @property
    def interval(self) -> np.ndarray:
        """Half of the 95 % interval of each mean over items, [k, ..., k]."""
        return mean_and_interval(self.by_item)[1]

    @property
    def has_own(self) -> bool:
        """Whether agents earn different rewards."""
        valid = self.rewards[~np.isnan(self.rewards).any(-1)]
        return bool((valid != valid[:, :1]).any())

    @property
    def is_zero_sum(self) -> bool:
        """Whether the rewards of the agents sum to 0 in every joint action, so that their mean says nothing."""
        return self.has_own and bool(np.isfinite(self.rewards).any()) and is_zero_sum(self.rewards)

    @property
    def own(self) -> tuple[np.ndarray, np.ndarray]:
        """Mean reward of each agent in each pairing, and half of its 95 % interval over items, [N, k, ..., k] each."""
        valid = np.where(np.isnan(self.rewards).any(-1, keepdims=True), np.nan, self.rewards)
        return mean_and_interval(valid_mean(np.moveaxis(valid, -1, 0)))

    @property
    def self_play(self) -> Estimate:
        """Mean of the diagonal: the teams of the runs."""
        return _estimate(self._items()[0])

    @property
    def zero_shot(self) -> Estimate:
        """Mean of the pairings whose agents are not all of one run."""
        return _estimate(self._items()[1])

    @property
    def gap(self) -> Estimate:
        """Self-play minus zero-shot, item by item: differences in difficulty between items do not widen the interval."""
        own, other = self._items()
        return _estimate(own - other)

    @property
    def ratio(self) -> float:
        """Zero-shot over self-play; NaN if self-play is not above 0."""
        own, other = self.self_play.mean, self.zero_shot.mean
        return other / own if own > 0 else float("nan")

    @property
    def invalid(self) -> int:
        """Number of joint actions without a valid reward."""
        return int(np.isnan(self.rewards).any(-1).sum())

    @property
    def counted(self) -> np.ndarray:
        """Number of joint actions of each pairing with a valid reward, [k, ..., k]."""
        return (~np.isnan(self.rewards).any(-1)).sum((-2, -1))

    def _items(self) -> tuple[np.ndarray, np.ndarray]:
        """Return for each item [P] the mean over the pairings of agents of one run, and over the other pairings."""
        means = self.by_item.reshape(-1, self.by_item.shape[-1])  # [pairings, P]
        same = np.array([len(set(runs)) == 1 for runs in self._pairings()])
        return valid_mean(means[same].T), valid_mean(means[~same].T)

    def _pairings(self) -> Iterator[tuple[int, ...]]:
        """Return the runs of each pairing's agents."""
        return itertools.product(range(len(self.names)), repeat=self.rewards.ndim - 3)

    def table(self) -> str:
        """Return Markdown: two agents as a matrix, more as one row per pairing; then the scores.

        If agents earn different rewards, there is a table of each agent's own too; in a zero-sum game, where means over agents
        are 0, it is the only one, of two agents that of agent 0."""
        agents = self.rewards.ndim - 3
        tables = {} if self.is_zero_sum else {"": (self.mean, self.interval)}
        if self.has_own:
            shown = range(1 if self.is_zero_sum and agents == 2 else agents)
            tables |= {f"own reward of agent {n}": (self.own[0][n], self.own[1][n]) for n in shown}
        lines = []
        for title, values in tables.items():
            lines += [*(["", f"{title}:", ""] if title else []), *self._rows(*values)]
        lines = lines[1:] if lines[0] == "" else lines
        if not self.is_zero_sum:
            scores = {"self-play": self.self_play, "zero-shot": self.zero_shot, "gap": self.gap}
            texts = [f"{name} {score.mean:.3f} ± {score.interval:.3f}" for name, score in scores.items()]
            lines += ["", f"{', '.join(texts)}, ratio {self.ratio:.3f}"]
        if self.invalid:
            lines += ["", f"{self.invalid} of {self.rewards[..., 0].size} joint actions have no valid reward; {self.fault}"]
        if self.raised:
            lines += ["", f"{self.raised} of {self.rewards[..., 0].size} rewards raised an error or were late; {self.fault}"]
        return "\n".join(lines)

    def _rows(self, mean: np.ndarray, interval: np.ndarray) -> list[str]:
        """Return the lines of a Markdown table of numbers [k, ..., k] of all pairings."""
        counted, size, agents = self.counted, self.rewards.shape[-3] * self.rewards.shape[-2], self.rewards.ndim - 3
        cells = {
            runs: f"{mean[runs]:.3f} ± {interval[runs]:.3f}" + f" ({counted[runs]} of {size})" * bool(counted[runs] < size)
            for runs in self._pairings()
        }
        names = [name.replace("|", "\\|") for name in self.names]
        if agents == 2:
            head = ["agent 0 of \\ agent 1 of", *names]
            rows = [[name, *(cells[i, j] for j in range(len(names)))] for i, name in enumerate(names)]
        else:
            head = [*(f"agent {n} of" for n in range(agents)), "reward"]
            rows = [[*(names[i] for i in runs), cell] for runs, cell in cells.items()]
        return [f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *rows]]

    def summary(self) -> dict[str, Any]:
        """Return all numbers as JSON; NaN is None."""
        scores = {name: getattr(self, name)._asdict() for name in ("self_play", "zero_shot", "gap")}
        summary = dict(runs=list(self.names), mean=self.mean.tolist(), interval=self.interval.tolist(), **scores)
        counts = dict(items=self.rewards.shape[-3], invalid=self.invalid, raised=self.raised, counted=self.counted.tolist())
        own = {"own": dict(zip(("mean", "interval"), (x.tolist() for x in self.own), strict=True))} if self.has_own else {}
        return _plain(summary | dict(ratio=self.ratio) | counts | own)


def _estimate(by_item: np.ndarray) -> Estimate:
    mean, interval = mean_and_interval(by_item)
    return Estimate(float(mean), float(interval))


def _plain(x: Any) -> Any:
    """Replace numbers that are not finite by None."""
    if isinstance(x, dict):
        return {name: _plain(value) for name, value in x.items()}
    if isinstance(x, list):
        return [_plain(value) for value in x]
    return None if isinstance(x, float) and not np.isfinite(x) else x
