"""Sample and reward a turn in parts: the number of parts, and joining the answers of the environment."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from jmarl.config import Episodes
from jmarl.envs.base import Answer
from jmarl.envs.reward_values import RewardResult
from jmarl.rollout.turns import concatenate_numbers


def num_parts(count: int, episodes: Episodes) -> int:
    """Return the number of equal parts in which `count` prompts are sampled. Turns that continue from caches need one part."""
    whole = episodes.history == "append" and episodes.num_turns > 1
    return 1 if whole else math.gcd(count, episodes.sample_parts)


def join_answers(answers: Sequence[Answer]) -> Answer:
    """Concatenate the answers to the joint actions of all parts."""
    if len(answers) == 1:
        return answers[0]
    results = [answer.result for answer in answers]
    sizes = [len(result.total) for result in results]
    starts = np.cumsum([0, *sizes])
    joined = RewardResult(
        np.concatenate([result.total for result in results]),
        concatenate_numbers([result.parts for result in results], sizes),
        np.concatenate([result.invalid for result in results]),
        np.concatenate([result.rewards for result in results]),
        {int(start) + j: why for result, start in zip(results, starts, strict=False) for j, why in result.faults.items()},
        sum(result.num_raised for result in results),
        concatenate_numbers([result.measures for result in results], sizes),
    )
    after = [state for answer in answers for state in answer.after]
    return Answer(joined, np.concatenate([answer.done for answer in answers]), after)
