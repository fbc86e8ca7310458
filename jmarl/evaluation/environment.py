"""The environment of a run, an evaluation or cross-play: of anything that users give as one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jmarl.envs.base import Environment, TextEnvironment
from jmarl.envs.messages import SimulatedEnvironment
from jmarl.envs.reward_environment import RewardEnvironment, default_formatter
from jmarl.envs.rewards import RewardFunction
from jmarl.envs.vector import vectorize
from jmarl.team import Team

Reward = Callable | Environment | TextEnvironment | SimulatedEnvironment  # also what `make_reward` returns


def as_environment(team: Team, reward: Reward, num_turns: int) -> Environment:
    """Return the environment for a team of what users give as one: a function (plain, or from `make_reward`) gets the prompts
    of its items.

    num_turns: the limit for a `SimulatedEnvironment` that declares none. Raises TypeError for anything else, ValueError for
    functions for another number of agents."""
    env: Any = vectorize(reward, num_turns)
    missing = [name for name in ("reset", "step", "observe") if not callable(getattr(env, name, None))]
    if isinstance(env, type):
        raise TypeError(f"{env.__name__} is a class: give an environment, {env.__name__}(...)")
    if isinstance(env, RewardFunction) or (missing and callable(env)):
        env, missing = RewardEnvironment(env, [default_formatter] * team.num_agents), []
    if missing:
        raise TypeError(
            f"reward is a {type(env).__name__} without {', '.join(missing)}: give make_reward(function, num_agents="
            f"{team.num_agents}) or an environment; one of a single episode is a TextEnvironment, or goes into "
            f"LockStep(env, {team.num_agents})"
        )
    return env.for_agents(team.num_agents) if isinstance(env, RewardEnvironment) else env
