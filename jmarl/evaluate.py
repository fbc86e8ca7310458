"""Play held-out prompts without learning."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

from jmarl.config import TrainConfig
from jmarl.environment import Environment
from jmarl.generate import Asking, answered, sample_team
from jmarl.order import EVAL
from jmarl.returns import mean_and_interval, valid_mean
from jmarl.rollout import Rollout, playing
from jmarl.team import Team


class Evaluation(NamedTuple):
    mean: float  # return, which with one turn is the reward, over valid joint actions
    interval: float  # half of the 95 % interval of the mean, over prompts
    rollout: Rollout


def evaluate(team: Team, params: Sequence[Any], items: Sequence[dict], env: Environment, cfg: TrainConfig) -> Evaluation:
    """Mean return on items, `cfg.eval_generations` completions each, at `cfg.eval_temperature`; episodes do not branch.

    The random keys do not depend on the training step, so two evaluations differ only by what was learned.
    """
    return answered(evaluating(team, items, env, cfg), partial(sample_team, team, params))


def evaluating(team: Team, items: Sequence[dict], env: Environment, cfg: TrainConfig) -> Asking[Evaluation]:
    """`evaluate` as a generator that asks for completions, as `rollout.playing` does."""
    episodes = cfg.eval_episodes()
    how: dict[str, Any] = dict(seed=cfg.seed, step=0, group=cfg.eval_generations, purpose=EVAL)
    rollout = yield from playing(team, items, env, cfg.eval_sampling(), episodes, **how)
    rewards = rollout.joint_returns[0].mean(-1)  # [P, J]: a joint reward, or the mean over agents
    # An invalid joint action counts nowhere; a prompt of nothing else drops out, and with no prompt left the mean is NaN.
    mean, interval = mean_and_interval(valid_mean(rewards))
    return Evaluation(float(mean), float(interval), rollout)
