"""MRLM's data sets: preference pairs for DPO, and trajectories for SFT. Trainers also take files and lists of dicts.

Left out: drawing batches, which trainers do, and playing episodes (`jmarl collect` writes trajectories).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

import numpy as np

from jmarl.config.paths import expand_home
from jmarl.envs.data import Trajectory as TextTrajectory
from jmarl.envs.messages import Message, Observation, Reward
from jmarl.envs.rows import read_rows

Row = TypeVar("Row", "PreferencePair", "Trajectory")


@dataclass(frozen=True)
class PreferencePair:
    """Two completions of a prompt, of which the first was preferred."""

    prompt: str | Sequence[Message]
    chosen: str
    rejected: str
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain values."""
        prompt = self.prompt if isinstance(self.prompt, str) else [_chat_message(message) for message in self.prompt]
        return {"prompt": prompt, "chosen": self.chosen, "rejected": self.rejected, "metadata": dict(self.metadata)}

    @classmethod
    def from_dict(cls, row: Mapping[str, Any]) -> PreferencePair:
        """Return the pair of a dict."""
        prompt = row["prompt"] if isinstance(row["prompt"], str) else [Message.from_dict(m) for m in row["prompt"]]
        return cls(prompt, row["chosen"], row["rejected"], row.get("metadata", {}))


@dataclass(frozen=True)
class Trajectory:
    """The observations, actions and rewards of an episode."""

    observations: Sequence[Observation]
    actions: Sequence[Message]
    rewards: Sequence[Reward]
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.actions)

    def total_reward(self) -> float:
        """Return the sum of the rewards."""
        return float(sum(np.mean(reward.value) for reward in self.rewards))

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain values."""
        observations = [{"messages": [_chat_message(m) for m in x.messages], "done": x.done} for x in self.observations]
        actions, rewards = [_chat_message(action) for action in self.actions], [{"value": x.value} for x in self.rewards]
        return {"observations": observations, "actions": actions, "rewards": rewards, "metadata": dict(self.metadata)}

    @classmethod
    def from_dict(cls, row: Mapping[str, Any]) -> Trajectory:
        """Return the trajectory of a dict."""
        observations = [Observation.from_dict(x) for x in row["observations"]]
        actions, rewards = [Message.from_dict(x) for x in row["actions"]], [Reward.from_dict(x) for x in row["rewards"]]
        return cls(observations, actions, rewards, row.get("metadata", {}))


class _RowDataset(Generic[Row]):
    """A list of rows."""

    row_class: type[Any]

    def __init__(self, rows: Sequence[Row] | None = None):
        self._rows = list(rows or ())
        for row in self._rows:
            if not isinstance(row, self.row_class):
                raise TypeError(f"{type(self).__name__} has {self.row_class.__name__}s, got {row!r:.80}")

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Row:
        return self._rows[index]

    def __iter__(self) -> Iterator[Row]:
        return iter(self._rows)

    def add(self, row: Row) -> None:
        """Add a row."""
        self._rows.append(row)

    def to_rows(self) -> list[dict[str, Any]]:
        """Return the rows as dicts, as trainers read them."""
        return [row.to_dict() for row in self._rows]

    def split(self, train_ratio: float = 0.8, seed: int = 0) -> tuple[Self, Self]:
        """Return two data sets with the rows in random order, the first with `train_ratio` of them."""
        order = np.random.default_rng(seed).permutation(len(self._rows))
        count = int(len(order) * train_ratio)
        return type(self)([self._rows[i] for i in order[:count]]), type(self)([self._rows[i] for i in order[count:]])

    @classmethod
    def load(cls, path: str | os.PathLike) -> Self:
        """Read a JSON or JSON Lines file of rows."""
        return cls([cls.row_class.from_dict(row) for row in read_rows(Path(path))])

    def save(self, path: str | os.PathLike) -> None:
        """Write the rows as a JSON file."""
        Path(expand_home(path)).write_text(json.dumps(self.to_rows(), ensure_ascii=False, indent=1), encoding="utf-8")

    from_json, to_json = load, save


class PreferenceDataset(_RowDataset[PreferencePair]):
    """Preference pairs."""

    row_class = PreferencePair

    def __init__(self, pairs: Sequence[PreferencePair] | None = None):
        super().__init__(pairs)
        self.pairs = self._rows

    add_pair = _RowDataset.add


class TrajectoryDataset(_RowDataset[Trajectory]):
    """Trajectories."""

    row_class = Trajectory

    def __init__(self, trajectories: Sequence[Trajectory] | None = None):
        super().__init__(trajectories)
        self.trajectories = self._rows

    @classmethod
    def of_texts(cls, trajectories: Sequence[TextTrajectory]) -> TrajectoryDataset:
        """Return trajectories that a trainer holds; the reward of an episode is that of its last action."""
        rows = []
        for given in trajectories:
            rewards = [0.0] * (len(given.actions) - 1) + [given.reward]
            contents = [[{"role": "user", "content": x}] if isinstance(x, str) else x for x in given.observations]
            observations = [Observation([Message.from_dict(m) for m in messages]) for messages in contents]
            rows.append(Trajectory(observations, [Message("assistant", x) for x in given.actions], list(map(Reward, rewards))))
        return cls(rows)

    add_trajectory = _RowDataset.add

    def num_transitions(self) -> int:
        """Return the number of actions."""
        return sum(map(len, self._rows))

    def filter_by_reward(self, min_reward: float | None = None, max_reward: float | None = None) -> TrajectoryDataset:
        """Return the trajectories whose sum of rewards is in a range."""
        low, high = -np.inf if min_reward is None else min_reward, np.inf if max_reward is None else max_reward
        return TrajectoryDataset([row for row in self._rows if low <= row.total_reward() <= high])


def rows_of(dataset: Any) -> Any:
    """Return a data set of this module as dicts, and anything else as it is."""
    return dataset.to_rows() if isinstance(dataset, _RowDataset) else dataset


def _chat_message(message: Message) -> dict[str, str]:
    return {"role": str(message.role), "content": message.content}
