"""What the pairings of several runs' agents got: a matrix, self-play and the zero-shot score (host world, no jax).

`crossplay` plays them. Left out: pairings of three or more agents by how many runs they come from (`mean` has them all).
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import numpy as np

from jmarl.evaluation.statistics import mean_and_interval, valid_mean

Texts = list[list[list[str]]]


class Score(NamedTuple):
    mean: float
    interval: float  # half of the 95 % interval of the mean, over items; of these runs: it does not say what others would do


class CrossPlay(NamedTuple):
    """What every pairing got. k runs, N agents, P items, J joint actions an item; an invalid joint action counts nowhere."""

    names: tuple[str, ...]  # [k] of the runs
    rewards: np.ndarray  # N axes of length k, then [P, J, N]: at [i, j] agent 0 of run i with agent 1 of run j; NaN: invalid
    texts: tuple[Texts, ...]  # [k][N][P][G] that were written
    fault: str = ""  # what was wrong with the first invalid joint action

    @property
    def by_item(self) -> np.ndarray:
        """[k, ..., k, P]"""
        return valid_mean(self.rewards.mean(-1))

    @property
    def mean(self) -> np.ndarray:
        """[k, ..., k]; with two agents the matrix: row i has agent 0 of run i, column j agent 1 of run j."""
        return mean_and_interval(self.by_item)[0]

    @property
    def interval(self) -> np.ndarray:
        """[k, ..., k] half of the 95 % interval of each mean, over items."""
        return mean_and_interval(self.by_item)[1]

    @property
    def self_play(self) -> Score:
        """Mean of the diagonal: every run's own team."""
        return _score(self._items()[0])

    @property
    def zero_shot(self) -> Score:
        """Mean of all other pairings: those whose agents are not all of one run."""
        return _score(self._items()[1])

    @property
    def gap(self) -> Score:
        """Self-play minus zero-shot, item by item, so that how hard an item is does not widen the interval."""
        own, other = self._items()
        return _score(own - other)

    @property
    def ratio(self) -> float:
        """Zero-shot over self-play; NaN where that is not above 0."""
        own, other = self.self_play.mean, self.zero_shot.mean
        return other / own if own > 0 else float("nan")

    @property
    def invalid(self) -> int:
        return int(np.isnan(self.rewards).any(-1).sum())

    def _items(self) -> tuple[np.ndarray, np.ndarray]:
        """Of each item [P] the mean over the pairings of one run, and over the others."""
        of_pairings = self.by_item.reshape(-1, self.by_item.shape[-1])
        same = np.array([len(set(runs)) == 1 for runs in self._pairings()])
        return valid_mean(of_pairings[same].T), valid_mean(of_pairings[~same].T)

    def _pairings(self):
        return itertools.product(range(len(self.names)), repeat=self.rewards.ndim - 3)

    def table(self) -> str:
        """Markdown: two agents as a matrix, more as one row a pairing; then the scores."""
        mean, interval, agents = self.mean, self.interval, self.rewards.ndim - 3
        cells = {runs: f"{mean[runs]:.3f} ± {interval[runs]:.3f}" for runs in self._pairings()}
        names = [name.replace("|", "\\|") for name in self.names]
        if agents == 2:
            head = ["agent 0 of \\ agent 1 of", *names]
            rows = [[name, *(cells[i, j] for j in range(len(names)))] for i, name in enumerate(names)]
        else:
            head = [*(f"agent {n} of" for n in range(agents)), "reward"]
            rows = [[*(names[i] for i in runs), cell] for runs, cell in cells.items()]
        lines = [f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *rows]]
        scores = {"self-play": self.self_play, "zero-shot": self.zero_shot, "gap": self.gap}
        told = [f"{name} {score.mean:.3f} ± {score.interval:.3f}" for name, score in scores.items()]
        lines += ["", f"{', '.join(told)}, ratio {self.ratio:.3f}"]
        if self.invalid:
            lines += ["", f"{self.invalid} of {self.rewards[..., 0].size} joint actions have no valid reward; {self.fault}"]
        return "\n".join(lines)

    def summary(self) -> dict[str, Any]:
        """All numbers as JSON can hold them; what is not a number is None."""
        scores = {name: getattr(self, name)._asdict() for name in ("self_play", "zero_shot", "gap")}
        found = dict(runs=list(self.names), mean=self.mean.tolist(), interval=self.interval.tolist(), **scores)
        return _plain(found | dict(ratio=self.ratio, items=self.rewards.shape[-3], invalid=self.invalid))


def _score(by_item: np.ndarray) -> Score:
    mean, interval = mean_and_interval(by_item)
    return Score(float(mean), float(interval))


def _plain(x: Any) -> Any:
    if isinstance(x, dict):
        return {name: _plain(value) for name, value in x.items()}
    if isinstance(x, list):
        return [_plain(value) for value in x]
    return None if isinstance(x, float) and not np.isfinite(x) else x
