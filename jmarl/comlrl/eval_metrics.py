"""Metrics of held-out completions: the mean reward and return of each turn, under CoMLRL's names, and those of the user:
`eval_logger` measures each sample, `eval_aggregator` sums the samples up.

    def eval_logger(agent_completions_turns, test_cases, entry_points, prompts):  # [N][samples][turns], [samples], ...
        return [{"longer": float(len(b[-1]) > len(a[-1]))} for a, b in zip(*agent_completions_turns)]

    def eval_aggregator(metrics, num_turns):  # what eval_logger returned
        return {"longer": sum(row["longer"] for row in metrics) / len(metrics)}

The run then logs `eval/longer` beside `eval/reward`. A sample is an episode: one per held-out item, or eval_generations.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jmarl.columns import EPISODES, join_numbers
from jmarl.envs.calls.copies import copied, copies
from jmarl.evaluation.statistics import valid_mean
from jmarl.rollout.turns import Rollout

Rows = Sequence[Mapping[str, Any]]  # of each sample
EvalLogger = Callable[..., Rows]
EvalAggregator = Callable[..., Mapping[str, float]]
Split = Callable[[str, Mapping[str, Any]], list[str]]


@dataclasses.dataclass
class RolloutSample:
    """One completion of an agent, as metrics_callback gets it. Numbers are arrays [1]."""

    agent_idx: int
    prompt: str
    completion: str
    reward: np.ndarray
    returns: np.ndarray
    metadata: dict[str, Any]  # turn_idx, generation_idx and batch_item


MetricsCallback = Callable[[list[RolloutSample]], Mapping[str, float]]


class EvalMetrics:
    """Measures a rollout on held-out items.

    turn_1/reward_mean is the mean reward in the first turn, turn_1/expected_return the mean of the undiscounted sum of rewards
    from that turn on, both after processing and over the episodes that reach the turn with a valid reward.

    Args:
        logger: takes by keyword what its signature names of agent_completions_turns [N][samples][turns]; of the samples' items
            their `test` as test_cases, `entry_point` as entry_points and `prompt` as prompts ("" where missing); and the items
            themselves as batch_items. It returns one dict per sample. None: no metrics of the user.
        aggregator: takes these dicts, and num_turns if its signature names it; returns numbers by name. None: the mean of each
            metric over the samples that have it.
        callback: takes the `RolloutSample`s of an item, of all agents and turns, and returns numbers by name, which are
            averaged over the items.
        split: (completion, item) -> the texts of the roles, if one model writes for all of them; the functions then see roles.
    """

    def __init__(
        self,
        logger: EvalLogger | None = None,
        aggregator: EvalAggregator | None = None,
        callback: MetricsCallback | None = None,
        split: Split | None = None,
    ):
        for name, value in (("eval_logger", logger), ("eval_aggregator", aggregator), ("metrics_callback", callback)):
            if value is not None and not callable(value):
                raise TypeError(f"{name}= is a function, got {type(value).__name__}")
        if logger is None and aggregator is not None:
            raise TypeError("eval_aggregator= has no effect without eval_logger=, whose metrics it sums up: give both")
        self.logger, self.aggregator, self.callback, self.split = logger, aggregator, callback, split

    def __call__(self, items: Sequence[Mapping], rollout: Rollout) -> dict[str, float]:
        """Return the metrics of a rollout on these items."""
        tables = [self._of_user(self.logger, items, rollout)] if self.logger else []
        if self.callback is not None:
            rows = [self.callback(samples) for samples in samples_of_items(items, rollout, self.split)]
            if not all(isinstance(row, Mapping) for row in rows):
                raise TypeError(f"metrics_callback= returned {rows[0]!r:.80}: return a dict of metrics")
            tables.append(means(rows))
        return join_numbers(turn_means(rollout), *tables)

    def _of_user(self, logger: EvalLogger, items: Sequence[Mapping], rollout: Rollout) -> dict[str, float]:
        samples = copies(dict(items[i]) for i in rollout.turns[0].items for _ in rollout.turns[0].joint)
        completions = completions_of_episodes(rollout)
        if self.split is not None:
            completions = texts_of_roles(completions[0], samples, self.split)
        given = {
            "agent_completions_turns": completions,
            "test_cases": [item.get("test", "") for item in samples],
            "entry_points": [item.get("entry_point", "") for item in samples],
            "prompts": [item.get("prompt", "") for item in samples],
            "batch_items": samples,
        }
        rows = logger(**named(logger, given))
        if not isinstance(rows, Sequence) or not all(isinstance(row, Mapping) for row in rows):
            raise TypeError(f"eval_logger= returned {rows!r:.80}: return a list with a dict of metrics for each sample")
        if self.aggregator is None:
            return means(rows)
        metrics = self.aggregator(rows, **named(self.aggregator, {"num_turns": rollout.num_turns}))
        if not isinstance(metrics, Mapping):
            raise TypeError(f"eval_aggregator= returned {metrics!r:.80}: return a dict of metrics")
        return {str(name): number(name, value) for name, value in metrics.items()}


def turn_means(rollout: Rollout) -> dict[str, float]:
    """Return the mean reward and return of each turn of episodes that do not branch, and where not all episodes have one the
    number of those that have; see `EvalMetrics`."""
    metrics, episodes = dict[str, float](), len(rollout.turns[0].items) * len(rollout.turns[0].joint)
    for t, (turn, returns) in enumerate(zip(rollout.turns, rollout.joint_returns, strict=True), 1):
        for name, values in ((f"turn_{t}/reward_mean", turn.rewards), (f"turn_{t}/expected_return", returns)):
            metrics[name] = float(valid_mean(values.reshape(-1)))
            if (known := int(np.isfinite(values).all(-1).sum())) < episodes:
                metrics[f"{name}{EPISODES}"] = float(known)
    return metrics


def joint_actions(rollout: Rollout) -> Iterator[tuple[int, int, int, int]]:
    """Yield the turn, node and number of each joint action, and the number of its episode, of episodes that do not branch: of
    the joint action of the first turn that it follows."""
    episodes = np.arange(0)
    for t, turn in enumerate(rollout.turns):
        size = len(turn.joint)
        episodes = np.repeat(episodes[turn.parents], size) if t else np.arange(len(turn.items) * size)
        yield from ((t, i // size, i % size, int(episode)) for i, episode in enumerate(episodes))


def completions_of_episodes(rollout: Rollout) -> list[list[list[str]]]:
    """Return the completions [N][episodes][turns] of episodes that do not branch."""
    first = rollout.turns[0]
    texts: list[list[list[str]]] = [[[] for _ in range(len(first.items) * len(first.joint))] for _ in first.texts]
    for t, p, j, episode in joint_actions(rollout):
        turn = rollout.turns[t]
        for n, completions in enumerate(turn.texts):
            texts[n][episode].append(completions[p][turn.joint[j, n]])
    return texts


def texts_of_roles(completions: list[list[str]], items: Sequence[Mapping], split: Split) -> list[list[list[str]]]:
    """Return the texts [roles][episodes][turns] of completions [episodes][turns] of one model."""
    by_episode = [[split(text, item) for text in turns] for turns, item in zip(completions, items, strict=True)]
    num_roles = len(by_episode[0][0])
    return [[[texts[role] for texts in turns] for turns in by_episode] for role in range(num_roles)]


def samples_of_items(items: Sequence[Mapping], rollout: Rollout, split: Split | None) -> list[list[RolloutSample]]:
    """Return the completions of each item, of all agents (or roles) and turns."""
    first = rollout.turns[0]
    samples: list[list[RolloutSample]] = [[] for _ in first.items]
    for t, p, j, episode in joint_actions(rollout):
        turn, owner = rollout.turns[t], episode // len(first.joint)
        item = copied(dict(items[first.items[owner]]))
        metadata = {"turn_idx": t, "generation_idx": j, "batch_item": item}
        for n in np.flatnonzero(turn.acts[:, p]):
            text = turn.texts[n][p][turn.joint[j, n]]
            reward, returns = (x[p, j, n : n + 1].copy() for x in (turn.rewards, rollout.joint_returns[t]))
            texts = {int(n): text} if split is None else dict(enumerate(split(text, item)))
            samples[owner] += [
                RolloutSample(agent, turn.prompts[n][p], part, reward, returns, dict(metadata)) for agent, part in texts.items()
            ]
    return samples


def named(function: Callable, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that a function's signature names, or all if it takes any (**kwargs)."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # some C functions have no signature
        return {}
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return dict(arguments)
    return {parameter.name: arguments[parameter.name] for parameter in parameters if parameter.name in arguments}


def means(rows: Rows) -> dict[str, float]:
    """Return the mean of each metric over the samples that have it, and where not all have it the number of those that do."""
    metrics, counts = dict[str, float](), dict[str, float]()
    for name in dict.fromkeys(name for row in rows for name in row):
        values = [number(name, row[name]) for row in rows if name in row]
        metrics[str(name)] = float(np.mean(values))
        if len(values) < len(rows):
            counts[f"{name}{EPISODES}"] = float(len(values))
    return join_numbers({}, metrics, counts)


def number(name: Any, value: Any) -> float:
    """Return a metric as a number. Raises TypeError for other values."""
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"the metric {name!r} of an evaluation is {value!r:.60}: eval_aggregator= must return numbers"
        ) from error
