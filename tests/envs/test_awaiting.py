"""`async def` of users: rewards, formatters, transitions, environments and tools are awaited, all completions at once."""

from __future__ import annotations

import asyncio
import functools
import gc
import threading
import time

import numpy as np
import pytest

from jmarl.envs.base import Step, TextEnvironment
from jmarl.envs.calls.awaiting import awaited, is_async, wait_for_all
from jmarl.envs.reward_environment import RewardEnvironment
from jmarl.envs.reward_values import RewardError
from jmarl.envs.rewards import RewardProcessors, make_reward
from jmarl.envs.tools.registry import Tool, ToolRegistry
from jmarl.envs.vector import LockStep

TEXTS = ["a", "bb", "", "dddd"]
LENGTHS = [1.0, 2.0, 0.0, 4.0]


def score(reward, texts=TEXTS, seed=0):
    return reward([texts], ["p"] * len(texts), [{"id": j} for j in range(len(texts))], np.random.default_rng(seed))


async def length(text):
    await asyncio.sleep(0.01)
    return float(len(text))


async def plain(completions):
    await asyncio.sleep(0.01)
    return [float(len(text)) for text in completions]


async def with_columns(completions, id, **kwargs):
    assert len(id) == len(completions) and "rng" in kwargs
    return [await length(text) for text in completions]


async def one_by_one(completions):
    for text in completions:
        yield float(len(text))


def list_of_coroutines(completions):
    return [length(text) for text in completions]


def returns_an_awaitable(completions):
    return asyncio.gather(*map(length, completions))


async def returns_a_list_of_coroutines(completions):
    return [length(text) for text in completions]


def returns_a_coroutine(completions):
    return plain(completions)


class Judge:
    async def __call__(self, completions):
        return await plain(completions)

    async def method(self, completions):
        return await plain(completions)


FUNCTIONS = [
    plain, with_columns, one_by_one, list_of_coroutines, returns_a_list_of_coroutines, returns_a_coroutine, Judge(),
    Judge().method, functools.partial(with_columns, extra=1), lambda completions: plain(completions),
]  # fmt: skip


@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize("func", FUNCTIONS)
def test_async_rewards_are_awaited(func, batched):
    reward = make_reward(func, num_agents=1, batched=batched, timeout=60)
    assert score(reward).total.tolist() == LENGTHS

    async def cell():  # of a notebook: a loop runs
        task = asyncio.create_task(asyncio.sleep(0, "other"))
        return score(reward).total.tolist(), await task

    assert asyncio.run(cell()) == (LENGTHS, "other")


@pytest.mark.parametrize("batched", [True, False])
def test_what_a_plain_function_gathers_is_awaited_in_the_default_loop(batched):
    """Python makes that loop itself where no other was used before."""
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    assert score(make_reward(returns_an_awaitable, num_agents=1, batched=batched)).total.tolist() == LENGTHS
    asyncio.set_event_loop(None)
    loop.close()


def test_all_completions_are_awaited_at_once():
    waiting, most = 0, 0

    async def counts(completions):
        nonlocal waiting, most
        waiting += 1
        most = max(most, waiting)
        await asyncio.sleep(0.05)
        waiting -= 1
        return [1.0]

    assert score(make_reward(counts, num_agents=1, batched=False)).total.tolist() == [1.0] * 4
    assert most == 4


def test_one_loop_serves_all_calls_of_a_thread():
    """HTTP clients are bound to the loop of their first use."""
    loops = []

    async def reward(completions):
        loops.append(asyncio.get_running_loop())
        return [0.0] * len(completions)

    for _ in range(2):
        score(make_reward(reward, num_agents=1))
    thread = threading.Thread(target=lambda: score(make_reward(reward, num_agents=1)))
    thread.start()
    thread.join()
    gc.collect()
    assert loops[0] is loops[1] is not loops[2] and not loops[0].is_closed() and loops[2].is_closed()


async def fails(completions):
    if "bb" in completions:
        raise ZeroDivisionError("mine")
    return await plain(completions)


async def exits(completions):
    if "bb" in completions:
        raise SystemExit(3)
    return await plain(completions)


async def hangs(completions):
    if "bb" in completions:
        await asyncio.sleep(60)
    return await plain(completions)


async def hangs_without_await(completions):
    if "bb" in completions:
        time.sleep(60)
    return [float(len(text)) for text in completions]


@pytest.mark.parametrize(("func", "words"), [
    (fails, "ZeroDivisionError: mine"),
    (exits, "exit(3) was called"),
    (hangs, "within timeout=0.5 seconds"),
    (hangs_without_await, "within timeout=0.5 seconds"),
])  # fmt: skip
def test_errors_and_late_calls_are_counted_as_those_of_plain_functions(func, words):
    began = time.monotonic()
    result = score(make_reward(func, num_agents=1, batched=False, on_error="mask", timeout=0.5))
    assert time.monotonic() - began < 10
    assert words in result.faults[1] and "joint action 1" in result.faults[1] and result.invalid[1]
    if func is not hangs_without_await:  # what waits beside it is late too
        assert result.num_raised == 1 and result.total[[0, 2, 3]].tolist() == [1.0, 0.0, 4.0]
    with pytest.raises(RewardError, match="joint action 1"):
        score(make_reward(func, num_agents=1, batched=False, timeout=0.5))
    assert awaited(length("abc")) == 3  # the loop goes on


def test_a_keyboard_interrupt_ends_all_calls():
    ended = []

    async def interrupted(completions):
        if "bb" in completions:
            raise KeyboardInterrupt
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(completions)

    with pytest.raises(KeyboardInterrupt):
        score(make_reward(interrupted, num_agents=1, batched=False, on_error="mask"))
    assert len(ended) == 3 or ended == [["a"]]  # those that had begun
    assert wait_for_all([length("abc"), 5]) == [3, 5]


def test_calls_that_run_at_once_draw_from_their_own_generators():
    async def draws(completions, rng):
        await asyncio.sleep(0.01 / (1 + len(completions[0])))  # the last begins first
        return [rng.random()]

    reward = make_reward(draws, num_agents=1, batched=False)
    assert score(reward).total.tolist() == score(reward).total.tolist()
    assert len(set(score(reward).total)) == 4


def test_formatters_and_transitions_may_be_async():
    async def formatter(item, external_prompts=None):
        return item["prompt"] + (external_prompts or "")

    async def transition(agent_completions, **_):
        return [f" {await length(text):g}" for text in agent_completions]

    env, rng = RewardEnvironment(plain, [formatter], transition), np.random.default_rng(0)
    states, prompts = env.reset([{"prompt": "q"}], rng)
    answer = env.step(states, [["abc"]], rng)
    assert (prompts, answer.result.total.tolist(), env.observe(answer.after)[1]) == ([["q"]], [3.0], [["q 3"]])


class AsyncEnvironment(TextEnvironment):
    async def reset(self, task, rng):
        return task, [task["prompt"]]

    async def step(self, state, messages, rng):
        return Step(state, [], await length(messages[0]), True)


def test_environments_and_tools_may_be_async():
    env, rng = LockStep(AsyncEnvironment()), np.random.default_rng(0)
    states, prompts = env.reset([{"prompt": "q"}, {"prompt": "r"}], rng)
    assert prompts == [["q", "r"]] and env.step(states, [["ab", "c"]], rng).result.total.tolist() == [2.0, 1.0]

    async def run(text):
        return f"{await length(text):g}"

    schema = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
    registry = ToolRegistry([Tool("length", "says the length", schema, run, {"text": "a"})])
    assert registry.call("length", {"text": "abc"}) == (True, "3")


def test_an_async_processor_is_refused():
    async def processor(x):
        return x

    with pytest.raises(TypeError, match="async def: give a plain function"):
        make_reward(plain, num_agents=1, processors=processor)
    with pytest.raises(TypeError, match="async def: give a plain function"):
        RewardProcessors.chain([processor])


def test_async_functions_are_known_before_they_are_called():
    assert all(map(is_async, (plain, one_by_one, Judge(), Judge().method, functools.partial(plain))))
    assert not any(map(is_async, (returns_a_coroutine, len, Judge)))
