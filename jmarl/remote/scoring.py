"""Call a served reward function, once with a whole step, as training calls it (host code, no jax)."""

from __future__ import annotations

from typing import Any

import numpy as np

from jmarl.envs.calls.arguments import BoundReward
from jmarl.envs.calls.awaiting import awaited
from jmarl.envs.calls.user_code import defined_text
from jmarl.envs.rewards import value_list
from jmarl.remote import environments_pb2 as pb
from jmarl.remote.catalog import CatalogReward
from jmarl.remote.gate import Caller, Code, GrpcRefusal, log
from jmarl.remote.refusals import type_name
from jmarl.remote.values import from_map, plain_numbers, to_map, to_value

Arguments = tuple[BoundReward, list[list[str]], list[dict], np.random.Generator]


async def score(reward: CatalogReward, request: pb.ScoreRequest, caller: Caller) -> pb.ScoreReply | GrpcRefusal:
    """Return the values of a reward function, and the state of its random numbers after the call."""
    name = request.reward
    try:
        arguments = read_arguments(reward, request)
        values, random = await reward.lane.run(lambda: call_reward(*arguments))
        rewards = to_value([plain_numbers(value) for value in values], f"what the reward {name} returned")
        return pb.ScoreReply(rewards=rewards, random=to_map(random, "random"))
    except GrpcRefusal as refused:
        return refused
    except Exception as error:
        log.error("request %s: the reward %s raised an error", caller.number, name, exc_info=error)
        return GrpcRefusal(Code.INTERNAL, f"the reward {name} raised {type_name(error)}; the server's log says more")


def read_arguments(reward: CatalogReward, request: pb.ScoreRequest) -> Arguments:
    """Return the function that is called, the completions, the items and the random numbers. Raises `GrpcRefusal`."""
    try:
        completions, items = [list(agent.texts) for agent in request.completions], [from_map(item) for item in request.items]
        if sizes := [len(texts) for texts in completions if len(texts) != len(items)]:
            raise ValueError(f"{sizes[0]} completions of an agent for {len(items)} items: give one for each")
        rng = np.random.default_rng(0)
        rng.bit_generator.state = from_map(request.random)
        bound = BoundReward(reward.function, request.reward, len(completions))
        bound.check(items)
    except (ValueError, TypeError, KeyError, OverflowError) as error:
        why = str(error).removesuffix(defined_text(reward.function))  # a path of this server
        raise GrpcRefusal(Code.INVALID_ARGUMENT, f"reward {request.reward}: {why}") from None
    return bound, completions, items, rng


def call_reward(
    bound: BoundReward, completions: list[list[str]], items: list[dict], rng: np.random.Generator
) -> tuple[list, Any]:
    """Return the values of a reward function, and the state of its random numbers after the call."""
    optional = {"batch_items": items, "prompts": [item.get("prompt") for item in items], "rng": rng}
    values = value_list(awaited(bound(completions, optional)))
    return values, rng.bit_generator.state
