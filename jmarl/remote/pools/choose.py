"""Choose where the environments and rewards of a task are called: the settings `pool`, `pool_workers` and `timeout`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from jmarl.config import TaskConfig
from jmarl.envs.base import TextEnvironment, class_name
from jmarl.envs.messages import SimulatedEnvironment, as_text_environment
from jmarl.envs.pool import Pool, Workers
from jmarl.envs.vector import InProcess, LockStep
from jmarl.remote.pools.ray_pool import RayPool

POOLS: dict[str, Callable[..., Workers]] = {"processes": Pool, "ray": RayPool}


def pool_of(task: TaskConfig) -> Callable[..., Workers] | None:
    """Return what makes the pool of a task from an environment or from rewards; None without one."""
    if task.pool is None:
        return None
    limit = {} if task.timeout is None else {"timeout": task.timeout}
    return partial(POOLS[task.pool], workers=task.pool_workers, **limit)


def in_pool(env: Any, task: TaskConfig, num_turns: int) -> Any:
    """Return an environment that is played in the pool of a task; env itself without one.

    num_turns: the limit for an environment that sets none."""
    pool = pool_of(task)
    if pool is None:
        return env
    if isinstance(env, LockStep) and not isinstance(env.engine, InProcess):
        raise ValueError(
            f"pool={task.pool!r} is not allowed for {class_name(env.env)}: its servers play it, in processes of their own "
            "with jmarl serve --workers; remove pool"
        )
    if not isinstance(env, TextEnvironment | SimulatedEnvironment):
        raise ValueError(
            f"pool={task.pool!r} is not allowed for {class_name(env)}: it answers all episodes of a step in one call, and "
            "a pool needs a TextEnvironment, which answers one; remove pool"
        )
    return LockStep(pool(as_text_environment(env, num_turns)))
