"""Draw the tasks of a game at random, each in the split that a hash of it decides; or shuffle all tasks of a small game."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from jmarl.envs.data import check_split, split_of


def draw_tasks(draw: Callable[[], tuple[str, dict] | None], split: str, count: int, max_draws: int) -> list[dict]:
    """Return `count` distinct tasks of a split; fewer if `max_draws` draws do not yield as many.

    Args:
        draw: returns a task with a text that identifies it, or None if the draw is not a valid task.
        split: train or eval.
        count: number of tasks.
        max_draws: number of draws.
    """
    check_split(split)
    tasks: dict[str, dict] = {}
    for _ in range(max_draws):
        if len(tasks) == count:
            break
        drawn = draw()
        if drawn is None:
            continue
        key, task = drawn
        if split_of(key) == split:
            tasks[key] = task
    return list(tasks.values())


def all_tasks(tasks: Sequence[dict], split: str, count: int, seed: int) -> list[dict]:
    """Return up to `count` of all tasks of a game, in an order that the seed decides.

    Both splits have all of them: for games where a policy of one task says nothing of the others, so that tasks held out of
    training would measure chance.
    """
    check_split(split)
    return random.Random(seed).sample(tasks, min(count, len(tasks)))
