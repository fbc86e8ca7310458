"""Play held-out items without learning."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from jmarl.config import TrainConfig
from jmarl.envs.base import Environment
from jmarl.envs.reward_environment import RewardEnvironment
from jmarl.envs.rows import Rows, read_rows
from jmarl.evaluation.statistics import mean_and_interval, valid_mean
from jmarl.randomness import EVAL, Randomness
from jmarl.rl.returns import pass_at_k
from jmarl.rollout.play import play
from jmarl.rollout.turns import Rollout
from jmarl.sampling.generate import Sampler, sample_team
from jmarl.team import Team


class Evaluation(NamedTuple):
    """The result of an evaluation."""

    mean: float  # return (with one turn the reward) over valid joint actions
    interval: float  # half of the 95 % interval of the mean, over prompts
    rollout: Rollout
    notes: Mapping[str, float] = {}  # further metrics

    def __repr__(self) -> str:  # without the rollout
        return f"Evaluation(mean={self.mean:.4g}, interval={self.interval:.2g})"


def evaluate(
    team: Team, params: Sequence[Any], items: Rows, env: Environment, cfg: TrainConfig, *, part: int = 0
) -> Evaluation:
    """Return the mean return on items, of `eval_generations` completions each at `eval_temperature`.

    Episodes do not branch. The random keys do not depend on the training step, so two evaluations differ only by what was
    learned.

    Args:
        team: the team.
        params: parameters [A, ...] of each stack.
        items: what the episodes are about, in anything that `jmarl.envs.rows.read_rows` reads.
        env: writes the prompts and rewards joint actions.
        cfg: the settings.
        part: number of the items' part, if they are evaluated in several calls, which differ in their random numbers.
    """
    return summarize(play_held_out(partial(sample_team, team, params), team, read_rows(items), env, cfg, part=part))


def play_held_out(
    sample: Sampler, team: Team, items: Sequence[dict], env: Environment, cfg: TrainConfig, *, part: int = 0
) -> Rollout:
    """Play episodes on held-out items with the settings of evaluations; see `play` for `sample`, `evaluate` for `part`."""
    env = env.for_agents(team.num_agents) if isinstance(env, RewardEnvironment) else env
    settings, episodes, randomness = cfg.eval_sampling(), cfg.eval_episodes(), Randomness(cfg.run.seed, part, EVAL)
    return play(sample, team, items, env, settings, episodes, cfg.run.eval_generations, randomness)


def summarize(rollout: Rollout) -> Evaluation:
    """Return the mean return of a rollout and its 95 % interval over prompts."""
    rewards = rollout.joint_returns[0].mean(-1)  # [P, J]: a joint reward, or the mean over agents
    # An invalid joint action counts nowhere. A prompt with no valid one is left out; with no prompt left the mean is NaN.
    mean, interval = mean_and_interval(valid_mean(rewards))
    return Evaluation(float(mean), float(interval), rollout)


def in_last_turn(rollout: Rollout, values: Sequence[np.ndarray]) -> np.ndarray:
    """Return the value in the last turn of each episode [P, J]. The episodes do not branch. values: per turn [P * J]."""
    last = [np.array(x, float) for x in values]
    for t in range(len(last) - 1, 0, -1):
        last[t - 1][rollout.turns[t].parents] = last[t]
    return last[0].reshape(rollout.turns[0].rewards.shape[:2])


def last_parts(rollout: Rollout) -> dict[str, np.ndarray]:
    """Return each part of the reward in the last turn of each episode [P, J]; NaN where it has no value."""
    return last_numbers(rollout, [turn.parts for turn in rollout.turns])


def last_measures(rollout: Rollout) -> dict[str, np.ndarray]:
    """Return each measure in the last turn of each episode [P, J]; NaN where it has no value."""
    return last_numbers(rollout, [turn.measures for turn in rollout.turns])


def last_numbers(rollout: Rollout, tables: Sequence[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Return the numbers of the last turn of each episode [P, J] by name. tables: of each turn, name -> [P * J]."""
    missing = [np.full(turn.rewards[..., 0].size, np.nan) for turn in rollout.turns]
    names = dict.fromkeys(name for table in tables for name in table)
    return {
        name: in_last_turn(rollout, [table.get(name, nan) for table, nan in zip(tables, missing, strict=True)])
        for name in names
    }


def is_success(name: str, values: np.ndarray) -> bool:
    """Return whether a part of the reward or a measure says if episodes succeeded: it is called `solved` and is 0 or 1."""
    return name.split("/")[-1] == "solved" and set(values[np.isfinite(values)]) <= {0.0, 1.0}  # `math/solved` of a mixture too


def numbers(result: Evaluation) -> dict[str, float]:
    """Return what is logged of an evaluation.

    The return; the mean of each part of the reward and of each measure in the last turns of the episodes; if one of them is
    called `solved` and is 0 or 1, pass@k for k = 1, 2, 4, ... and all samples, with 95 % intervals over prompts; and its notes.
    """
    row = {"eval/reward": result.mean, "eval/reward_ci95": result.interval}
    parts, measures = last_parts(result.rollout), last_measures(result.rollout)
    row |= {f"eval/reward/{name}": float(valid_mean(last.reshape(-1))) for name, last in parts.items()}
    row |= {f"eval/measures/{name}": float(valid_mean(last.reshape(-1))) for name, last in measures.items()}
    for name, last in (parts | measures).items():
        if is_success(name, last):
            prefix = name.removesuffix("solved")
            samples = last.shape[1]
            for k in sorted({1 << i for i in range(samples.bit_length())} | {samples}):
                mean, interval = mean_and_interval(pass_at_k(last, k))
                row |= {f"eval/{prefix}pass@{k}": float(mean), f"eval/{prefix}pass@{k}_ci95": float(interval)}
    return row | {f"eval/{name}": value for name, value in result.notes.items()}
