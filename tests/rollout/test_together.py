"""Functions that run together: the order of calls, exceptions, and that no thread remains."""

from __future__ import annotations

import _thread
import contextvars
import threading
import time
import traceback
from functools import partial

import jax
import numpy as np
import pytest

from jmarl.config import TrainConfig
from jmarl.envs.reward_environment import RewardEnvironment, default_formatter
from jmarl.envs.reward_values import RewardError
from jmarl.envs.rewards import make_reward
from jmarl.rollout.together import CallersEnvironment, run_together
from jmarl.runs.kinds.rollouts import play_step, sampler_of
from jmarl.runs.kinds.seeds import join_states, play_together, runs_of
from jmarl.runs.start import start
from jmarl.team import make_team


@pytest.fixture(autouse=True)
def no_thread_is_left():
    before = threading.enumerate()
    yield
    assert threading.enumerate() == before


def test_an_environment_is_called_in_the_callers_thread_and_its_errors_are_raised():
    """Time limits by signals, as those of math_verify, work only there."""

    async def reward(a):
        assert threading.current_thread() is threading.main_thread()
        return [1 / len(text) for text in a]

    def format_prompt(item):
        assert threading.current_thread() is threading.main_thread()
        return item["prompt"]

    def play(texts, request):
        world, rng = (
            CallersEnvironment(RewardEnvironment(reward, [format_prompt], transition), request),
            np.random.default_rng(0),
        )
        states, prompts = world.reset([{"prompt": "q"}], rng)
        answer = world.step(states, [[request(texts)]], rng)
        return prompts, answer.result.total.tolist(), world.observe(answer.after)[1]

    def transition(agent_completions, **_):
        return agent_completions

    plays = [partial(play, "ab"), partial(play, "abcd")]
    results = run_together(plays, lambda requests: requests)
    assert results == [([["q"]], [0.5], [["ab"]]), ([["q"]], [0.25], [["abcd"]])]
    with pytest.raises(RewardError, match="ZeroDivisionError"):
        run_together([*plays, partial(play, "")], lambda requests: requests)


def counts(calls, number, requests, fails_at=None):
    """A function that requests something `requests` times, and notes that it does."""

    def function(request):
        replies = []
        for i in range(requests):
            calls.append((number, i))
            if i == fails_at:
                raise ZeroDivisionError(f"function {number}")
            replies.append(request(10 * number + i))
        calls.append((number, "returns"))
        return replies

    return function


def test_functions_run_one_after_the_other_and_their_requests_are_answered_together():
    calls, answered = [], []

    def answer(requests):
        answered.append(dict(requests))
        calls.append("answer")
        assert threading.current_thread() is threading.main_thread()
        return {number: -request for number, request in requests.items()}

    results = run_together([counts(calls, number, requests) for number, requests in enumerate((2, 0, 3))], answer)
    assert results == [[0, -1], [], [-20, -21, -22]]
    assert answered == [{0: 0, 2: 20}, {0: 1, 2: 21}, {2: 22}], "functions that have returned are left out"
    assert calls == [
        (0, 0), (1, "returns"), (2, 0), "answer", (0, 1), (2, 1), "answer", (0, "returns"), (2, 2), "answer", (2, "returns")
    ]  # fmt: skip


@pytest.mark.parametrize("fails_at", [0, 1])
@pytest.mark.parametrize("number", [0, 1, 2])
def test_an_exception_of_one_function_ends_all_and_is_raised_with_its_traceback(number, fails_at):
    calls = []
    functions = [counts(calls, i, 3, fails_at if i == number else None) for i in range(3)]
    with pytest.raises(ZeroDivisionError, match=f"function {number}") as error:
        run_together(functions, lambda requests: requests)
    assert "function" in [frame.name for frame in traceback.extract_tb(error.tb)]
    assert calls[-1] == (number, fails_at), "no function goes on after it"


def test_waiting_functions_can_clean_up_but_not_continue():
    """Even a function that catches everything and makes another request."""
    cleaned = []

    def stubborn(request):
        for _ in range(3):
            try:
                request(0)
            except BaseException as error:
                cleaned.append(type(error).__name__)
        return request(0)

    with pytest.raises(ZeroDivisionError):
        run_together([stubborn, counts([], 1, 1, fails_at=0)], lambda requests: requests)
    assert cleaned == ["Cancelled"] * 3


def test_an_exception_of_the_caller_ends_all_functions():
    def answer(requests):
        raise MemoryError("no room")

    with pytest.raises(MemoryError, match="no room"):
        run_together([counts([], number, 2) for number in range(3)], answer)


def test_a_keyboard_interrupt_ends_all_functions():
    """It reaches the caller while a function runs, which is waited for."""
    reached = []

    def busy(request):
        request(0)
        _thread.interrupt_main()
        time.sleep(0.2)
        reached.append("request")
        request(1)
        reached.append("after it")

    with pytest.raises(KeyboardInterrupt):
        run_together([counts([], 0, 4), busy], lambda requests: requests)
    assert reached == ["request"]


def test_functions_see_the_context_variables_of_the_caller():
    name = contextvars.ContextVar("name")
    name.set("of the caller")

    def function(request):
        before = name.get()
        name.set("of the function")
        request(0)
        return before, name.get(), np.geterr()["divide"]

    with np.errstate(divide="raise"):
        results = run_together([function, function], lambda requests: requests)
    assert results == [("of the caller", "of the function", "raise")] * 2
    assert name.get() == "of the caller"


def test_jax_settings_of_the_caller_hold_for_answers_only():
    """As the module's docstring says; jax keeps them in the thread."""

    def dtype(_=None):
        return str(jax.numpy.asarray(np.zeros(1)).dtype)

    with jax.enable_x64(True):
        (result,) = run_together([lambda request: (dtype(), request(0))], lambda requests: {0: dtype()})
    assert result == ("float32", "float64")


ITEMS = [{"prompt": text} for text in ("The answer", "seven apples and three pears", "is", "of fruit")]
SEEDS = (3, 0, 11)


@pytest.mark.long
@pytest.mark.parametrize("threshold", [pytest.param(None, marks=pytest.mark.nightly), 0.4])
def test_runs_together_play_what_each_plays_alone(tiny_config, tiny_tokenizer, random_agent, threshold):
    """The same texts and rewards, which draw random numbers and depend on the order of calls; with a threshold, episodes of the
    runs end at different times. Calls come run by run, turn by turn."""
    order = []

    def reward(a, b, rng):
        order.append(len(a))
        return [len(x) % 3 / 3 + 0.3 * rng.random() - len(y) % 2 for x, y in zip(a, b, strict=True)]

    def go_on(agent_completions, **_):
        return [f"{agent_completions[1 - n][:8]} {n}" for n in range(2)]

    agent = random_agent(tiny_config(), tiny_tokenizer, 0)
    team, params = make_team([agent, agent], lora=True)
    cfg = TrainConfig.of(
        num_prompts=2, num_generations=2, max_new_tokens=5, num_turns=3, branching="chain", lora_rank=2,
        early_termination_threshold=threshold, progress=False,
    )  # fmt: skip
    env = RewardEnvironment(make_reward(reward, num_agents=2), [default_formatter] * 2, go_on)
    started = [start(team, params, cfg.replace(seed=seed)) for seed in SEEDS]
    alone = [play_step(sampler_of(setup, state), setup, ITEMS, env, 0) for setup, state in started]
    order.clear()
    runs = runs_of(started[0][0], SEEDS)
    state = join_states([initial for _, initial in started], runs)

    plays = [partial(play_step, setup=setup, tasks=ITEMS, env=env, step=0) for setup in runs.alone]
    rollouts = play_together(runs, state, plays)
    for one, other in zip(alone, rollouts, strict=True):
        assert [turn.texts for turn in one.turns] == [turn.texts for turn in other.turns]
        for x, y in zip(one.turns, other.turns, strict=True):
            np.testing.assert_array_equal(x.rewards, y.rewards)
    sizes = [[turn.rewards[..., 0].size for turn in rollout.turns] for rollout in rollouts]
    assert (len({tuple(run_sizes) for run_sizes in sizes}) > 1) == bool(threshold), "with it, episodes end at different times"
    assert order == [run_sizes[t] for t in range(3) for run_sizes in sizes if t < len(run_sizes)]
