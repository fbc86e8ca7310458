"""Read the replies of servers, and refuse those that no environment of the described kind gives: a server may be broken."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from jmarl.envs.base import Step, TextEnvironment
from jmarl.envs.vector import RANGE_TOLERANCE, Fault
from jmarl.remote import environments_pb2 as pb
from jmarl.remote.values import from_observation, from_result


class Garbage(Exception):
    """A reply that no server of this environment gives. The text ends a sentence that begins with the server."""


def read_start(reply: pb.ResetReply, env: TextEnvironment) -> tuple[str, list[Any]] | Fault:
    """Return the session and the first observations of an episode. Raises Garbage."""
    kind = reply.WhichOneof("result")
    if kind == "fault":
        return Fault(reply.fault.reason)
    if kind is None or not reply.start.session:
        raise Garbage("answered a reset without a session")
    try:
        observations = [from_observation(observation) for observation in reply.start.observations]
    except ValueError as error:
        raise Garbage(f"answered a reset with {error}") from error
    check_observations(observations, env)
    return reply.start.session, observations


def read_step(reply: pb.StepReply, number: int, env: TextEnvironment) -> Step | Fault:
    """Return a step without its state, whose numbers are not checked. Raises Garbage. number: of the step, from 1."""
    kind = reply.WhichOneof("result")
    if kind == "fault":
        return Fault(reply.fault.reason)
    if kind is None:
        raise Garbage("answered a step without a result")
    if reply.step.step != number:
        raise Garbage(f"says that step {number} was step {reply.step.step}")
    try:
        step = from_result(reply.step, None)
    except ValueError as error:
        raise Garbage(f"answered a step with {error}") from error
    if not step.done:
        check_observations(step.observations, env)
    return step


def check_observations(observations: Any, env: TextEnvironment) -> None:
    """Raise Garbage if there is not one observation for each agent, or if no agent acts."""
    if len(observations) != env.num_agents:
        raise Garbage(f"answered with {len(observations)} observations for {env.num_agents} agents")
    if all(text is None for text in observations):
        raise Garbage("lets no agent act in an episode that goes on")


def check_numbers(step: Step, env: TextEnvironment) -> None:
    """Raise Garbage for a reward, info or parts that are no numbers, or a reward out of range. NaN masks, as everywhere."""
    low, high = env.reward_range
    rewards: list[Any] = [*step.reward] if isinstance(step.reward, list | tuple) else [step.reward] * env.num_agents
    if len(rewards) != env.num_agents:
        raise Garbage(f"answered with {len(rewards)} rewards for {env.num_agents} agents")
    for place, value in [("the reward", x) for x in rewards] + [*step.info.items(), *step.parts.items()]:
        if not isinstance(value, int | float):
            raise Garbage(f"answered with {place} = {value!r:.80}, which is no number")
        try:
            float(value)
        except OverflowError as error:
            raise Garbage(f"answered with {place} that is too large for a number") from error
    for reward in rewards:
        if not (math.isnan(reward) or low - RANGE_TOLERANCE <= reward <= high + RANGE_TOLERANCE):
            raise Garbage(f"answered with the reward {reward}, which is outside {env.reward_range}")
    if step.parts and math.isfinite(total := float(np.mean(rewards))):
        parts = [float(x) for x in step.parts.values()]
        if not abs(sum(parts) - total) <= 1e-6 + 1e-5 * sum(map(abs, parts)):
            raise Garbage(f"answered with the reward {total:g} and parts that add up to {sum(parts):g}")
