"""Play held-out prompts without learning."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jmarl.config import JOINT_MODES, TrainConfig
from jmarl.rewards import RewardFunction
from jmarl.rollout import EVAL, Formatter, Rollout, play
from jmarl.team import Team


class Evaluation(NamedTuple):
    mean: float  # reward, over valid joint actions
    interval: float  # half of the 95 % interval of the mean, over prompts
    rollout: Rollout


def evaluate(
    team: Team,
    params: Sequence[Any],
    items: Sequence[dict],
    reward: RewardFunction,
    formatters: Sequence[Formatter],
    cfg: TrainConfig,
) -> Evaluation:
    """Mean reward on items, `cfg.eval_generations` completions each, at `cfg.eval_temperature`.

    The random keys do not depend on the training step, so two evaluations differ only by what was learned.
    """
    rollout = play(
        team,
        params,
        items,
        reward,
        formatters,
        cfg.eval_sampling(),
        seed=cfg.seed,
        step=0,
        group=cfg.eval_generations,
        joint_mode=JOINT_MODES[cfg.joint_mode],
        chat=cfg.chat,
        purpose=EVAL,
    )
    rewards = rollout.rewards.mean(-1)  # [P, J]: a joint reward, or the mean over agents
    # An invalid joint action counts nowhere; a prompt of nothing else drops out, and with no prompt left the mean is NaN.
    by_prompt = np.array([r[np.isfinite(r)].mean() for r in rewards if np.isfinite(r).any()])
    if not by_prompt.size:
        return Evaluation(float("nan"), float("nan"), rollout)
    interval = 1.96 * by_prompt.std(ddof=1) / np.sqrt(by_prompt.size) if by_prompt.size > 1 else float("nan")
    return Evaluation(float(by_prompt.mean()), float(interval), rollout)
