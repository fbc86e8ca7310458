"""Reward functions: processors in closed form, parameters passed by name, invalid values, errors and timeouts."""

import asyncio
import functools
import math
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from fractions import Fraction

import math_verify
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jmarl.comlrl.utils.reward_processor
import jmarl.envs.rewards
from jmarl.envs.calls.time_limit import SIGNAL
from jmarl.envs.reward_environment import RewardEnvironment
from jmarl.envs.reward_values import MAX_ABS_REWARD, RewardError, first_faults, process_rewards, reward_result, reward_values
from jmarl.envs.rewards import ERROR_WINDOW, RewardProcessors, make_reward, story_length_ratio
from jmarl.processes.ending import Interrupted

# --- helpers ---------------------------------------------------------------------------------------------------------


def score(reward, completions, *, prompts=None, batch_items=None, seed=0):
    num_joint = len(completions[0])
    prompts = [f"p{j}" for j in range(num_joint)] if prompts is None else prompts
    batch_items = [{"id": j} for j in range(num_joint)] if batch_items is None else batch_items
    return reward(completions, prompts, batch_items, np.random.default_rng(seed))


def returning(value, **kwargs):
    """Score three joint actions with a two-agent reward that returns `value`."""
    return score(make_reward(lambda a, b: value, num_agents=2, **kwargs), [["a", "b", "c"], ["d", "e", "f"]])


# --- processors ------------------------------------------------------------------------------------------------------

CLOSED_FORMS = [
    (RewardProcessors.identity(), lambda x: x),
    (RewardProcessors.scale(factor=100.0), lambda x: 100.0 * x),
    (RewardProcessors.shift(value=-4), lambda x: x - 4),
    (RewardProcessors.clamp(min_val=-1.0, max_val=2.0), lambda x: min(max(x, -1.0), 2.0)),
    (RewardProcessors.sigmoid_scale(), lambda x: 1 / (1 + math.exp(-x))),
    (RewardProcessors.exponential_scale(factor=0.5), lambda x: math.copysign(math.exp(0.5 * abs(x)) - 1, x)),
    (RewardProcessors.normalize_by_length(max_len=10), lambda x: x),
    (RewardProcessors.chain([RewardProcessors.shift(1), RewardProcessors.scale(10)]), lambda x: 10 * (x + 1)),
    (RewardProcessors.chain([]), lambda x: x),
]


@pytest.mark.parametrize(("processor", "formula"), CLOSED_FORMS)
def test_processor_is_its_formula_on_floats_and_elementwise_on_arrays(processor, formula):
    values = [-3.0, -0.25, 0.0, 0.5, 1.0, 7.0]
    expected = [formula(x) for x in values]
    np.testing.assert_allclose([processor(x) for x in values], expected, rtol=1e-14)
    np.testing.assert_allclose(processor(np.array(values).reshape(2, 3)), np.reshape(expected, (2, 3)), rtol=1e-14)
    assert all(isinstance(float(processor(x)), float) and np.ndim(processor(x)) == 0 for x in values)


def test_processors_have_defaults():
    for make in (RewardProcessors.scale, RewardProcessors.shift, RewardProcessors.normalize_by_length):
        assert make()(3.0) == 3.0
    assert RewardProcessors.clamp()(99.0) == 10.0
    assert RewardProcessors.clamp()(-99.0) == -10.0


@settings(deadline=None)
@given(st.floats(-700, 700).filter(lambda x: x == 0 or abs(x) > 1e-300), st.floats(0.001, 1.0))  # or the product is 0
def test_exponential_scale_is_odd_and_preserves_the_sign(x, factor):
    f = RewardProcessors.exponential_scale(factor)
    assert f(-x) == -f(x)
    assert np.sign(f(x)) == np.sign(x)
    assert abs(f(x)) >= factor * abs(x)  # e^y - 1 >= y


@settings(deadline=None)
@given(st.floats(allow_nan=False))
def test_sigmoid_scale_never_overflows_and_is_symmetric(x):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        y = RewardProcessors.sigmoid_scale()(x)
    assert 0.0 <= y <= 1.0
    assert y + RewardProcessors.sigmoid_scale()(-x) == pytest.approx(1.0)


@pytest.mark.parametrize(("length", "share"), [(0, 0.0), (5, 0.5), (10, 1.0), (500, 1.0)])
def test_normalize_by_length_scales_short_texts_down(length, share):
    assert RewardProcessors.normalize_by_length(max_len=10)(4.0, text_length=length) == 4.0 * share


def test_processors_get_the_length_of_the_joint_action_as_text_length():
    texts = [["abc", "", "a" * 50], ["de", "", "b"]]  # 5, 0, 51 characters
    short = RewardProcessors.normalize_by_length(max_len=10)
    constant = lambda a, b: [4.0] * len(a)  # noqa: E731
    for processors in (short, [short], RewardProcessors.chain([short])):
        result = score(make_reward(constant, num_agents=2, processors=processors), texts)
        assert result.total.tolist() == [2.0, 0.0, 4.0]
    chained = RewardProcessors.chain([short, RewardProcessors.shift(1.0)])
    assert score(make_reward(constant, num_agents=2, processors=chained), texts).total.tolist() == [3.0, 1.0, 5.0]


@pytest.mark.parametrize("make", [lambda: RewardProcessors.clamp(2, 1), lambda: RewardProcessors.normalize_by_length(0)])
def test_invalid_arguments_of_processors_are_refused(make):
    with pytest.raises(ValueError, match=r"min_val=2, max_val=1|got 0"):
        make()


def test_comlrl_module_path_has_the_same_class():
    assert jmarl.comlrl.utils.reward_processor.RewardProcessors is RewardProcessors


# --- the story reward ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("len1", "len2", "expected"), [
    (10, 20, 1.0),
    (10, 25, 1.0),
    (10, 30, 1.0),
    (10, 10, math.exp(-1.0)),
    (10, 50, math.exp(-2.0)),
    (4, 0, math.exp(-2.0)),
    (0, 0, 0.0),
    (0, 9, 0.0),
])  # fmt: skip
def test_story_reward_closed_form(len1, len2, expected):
    assert story_length_ratio(["x" * len1], ["y" * len2]) == [pytest.approx(expected)]


def test_story_reward_accepts_other_targets_and_partials():
    assert story_length_ratio(["ab"], ["abc"], target_min=1, target_max=1) == [math.exp(-0.5)]
    assert story_length_ratio(["a", ""], ["a" * 99, "a"], target_max=math.inf) == [1.0, 0.0]
    partial = functools.partial(story_length_ratio, target_min=1, target_max=1)
    result = score(make_reward(partial, num_agents=2, processors=RewardProcessors.scale(factor=100.0)), [["ab"], ["ab"]])
    assert result.total.tolist() == [100.0]
    assert not result.parts and result.measures["story_length_ratio"].tolist() == [1.0]  # of the raw reward


# --- what the user's documents write ---------------------------------------------------------------------------------


def test_a_reward_that_returns_one_value_needs_batched_false():
    reward = lambda a, b: [abs(max(len(b[0]), 1) / max(len(a[0]), 1) - 3.0)]  # noqa: E731
    texts = [["a", "aa", ""], ["bbb", "bb", "b" * 5]]
    result = score(make_reward(reward, num_agents=2, batched=False), texts)
    assert result.total.tolist() == [0.0, 2.0, 2.0]
    message = (
        r"'lambda' returned 0.0 for joint actions 0 to 2: return a list of 3 numbers, or \[\[agent 1.*; batched=False of make"
    )
    with pytest.raises(ValueError, match=message):
        score(make_reward(reward, num_agents=2, batched=True), texts)


@pytest.mark.parametrize("batched", [True, False])
def test_batched_and_single_calls_see_the_same_joint_actions(batched):
    calls = []

    def reward(completions1, completions2, batch_items, prompts):
        calls.append((completions1, completions2, batch_items, prompts))
        return [len(a) - len(b) + item["id"] for a, b, item in zip(completions1, completions2, batch_items, strict=True)]

    result = score(make_reward(reward, num_agents=2, batched=batched), [["aaa", "a"], ["b", "bbbb"]])
    assert result.total.tolist() == [2.0, -2.0]
    whole = (["aaa", "a"], ["b", "bbbb"], [{"id": 0}, {"id": 1}], ["p0", "p1"])
    split = [(["aaa"], ["b"], [{"id": 0}], ["p0"]), (["a"], ["bbbb"], [{"id": 1}], ["p1"])]
    assert calls == ([whole] if batched else split)


def test_a_function_that_mutates_its_lists_does_not_affect_the_next_function():
    def greedy(a, b, batch_items, prompts):
        for values in (a, b, batch_items, prompts):
            values.clear()
        return [1.0, 1.0]

    texts = [["x", "xx"], ["y", "yy"]]
    result = score(make_reward([greedy, lambda a, b: [len(x) for x in a]], num_agents=2), texts)
    assert result.measures["lambda"].tolist() == [1.0, 2.0]
    assert texts == [["x", "xx"], ["y", "yy"]]


# --- parameters by name ----------------------------------------------------------------------------------------------


RECEIVED: list[dict] = []  # the arguments of each call
ITEMS, PROMPTS = [{"id": 0}], ["p0"]


def note(**received):
    RECEIVED.append(received)
    return [1.0]


def items_last(a, b, batch_items):
    return note(a=a, b=b, batch_items=batch_items)


def items_first(batch_items, a, b):
    return note(a=a, b=b, batch_items=batch_items)


def all_in_another_order(a, b, rng, prompts=None, batch_items=None):
    return note(a=a, b=b, rng=rng, prompts=prompts, batch_items=batch_items)


def after_other_defaults(a, b, target_min=2.0, batch_items=None, target_max=3.0, prompts=()):
    return note(a=a, b=b, batch_items=batch_items, prompts=prompts, targets=(target_min, target_max))


def any_keyword(a, b, **kwargs):
    return note(a=a, b=b, **kwargs)


def one_named_any_keyword(batch_items, a, b, **kwargs):
    return note(a=a, b=b, batch_items=batch_items, **kwargs)


def nothing_else(a, b, scale=5.0):
    return note(a=a, b=b, scale=scale)


def with_a_column(a, b, id):
    return note(a=a, b=b, id=id)


class CallableReward:
    def __call__(self, a, b, rng=None, batch_items=None):
        return note(a=a, b=b, rng=rng, batch_items=batch_items)

    def method(self, a, b, prompts):
        return note(a=a, b=b, prompts=prompts)


@functools.wraps(after_other_defaults)
def decorated(a, b, **kwargs):
    return after_other_defaults(a, b, **kwargs)


def configured(threshold, a, b, batch_items=None):
    return note(a=a, b=b, threshold=threshold, batch_items=batch_items)


RNG = object()  # stands for "the generator of this step"
BY_NAME = [
    (items_last, {"batch_items": ITEMS}),
    (items_first, {"batch_items": ITEMS}),
    (lambda a, batch_items, b: note(a=a, b=b, batch_items=batch_items), {"batch_items": ITEMS}),
    (all_in_another_order, {"rng": RNG, "prompts": PROMPTS, "batch_items": ITEMS}),
    (after_other_defaults, {"batch_items": ITEMS, "prompts": PROMPTS, "targets": (2.0, 3.0)}),
    (lambda a, b, *, scale=5.0, prompts, batch_items=(): note(a=a, b=b, scale=scale, prompts=prompts, batch_items=batch_items),
     {"batch_items": ITEMS, "prompts": PROMPTS, "scale": 5.0}),
    (lambda a, b, scale=5.0, batch_items=None, /: note(a=a, b=b, batch_items=batch_items, scale=scale),
     {"batch_items": ITEMS, "scale": 5.0}),
    (lambda *c, batch_items=None, scale=5.0: note(a=c[0], b=c[1], batch_items=batch_items, scale=scale),
     {"batch_items": ITEMS, "scale": 5.0}),
    (lambda prompts, *c: note(a=c[0], b=c[1], prompts=prompts), {"prompts": PROMPTS}),
    (lambda a, *prompts: note(a=a, b=prompts[0]), {}),
    (any_keyword, {"rng": RNG, "prompts": PROMPTS, "batch_items": ITEMS, "id": [0]}),
    (one_named_any_keyword, {"rng": RNG, "prompts": PROMPTS, "batch_items": ITEMS, "id": [0]}),
    (nothing_else, {"scale": 5.0}),
    (CallableReward(), {"rng": RNG, "batch_items": ITEMS}),
    (CallableReward().method, {"prompts": PROMPTS}),
    (decorated, {"batch_items": ITEMS, "prompts": PROMPTS, "targets": (2.0, 3.0)}),
    (functools.partial(configured, 0.5), {"threshold": 0.5, "batch_items": ITEMS}),
    (functools.partial(nothing_else, scale=7.0), {"scale": 7.0}),
    (functools.partial(after_other_defaults, target_min=1.0), {
        "batch_items": ITEMS, "prompts": PROMPTS, "targets": (1.0, 3.0)}),
    # arguments set in a partial are not overwritten
    (functools.partial(items_last, batch_items="mine"), {"batch_items": "mine"}),
    (functools.partial(items_first, "mine"), {"batch_items": "mine"}),
    (functools.partial(one_named_any_keyword, "mine"), {"batch_items": "mine", "rng": RNG, "prompts": PROMPTS, "id": [0]}),
    (functools.partial(any_keyword, rng="mine"), {"rng": "mine", "prompts": PROMPTS, "batch_items": ITEMS, "id": [0]}),
    (functools.partial(any_keyword, id="mine"), {"id": "mine", "rng": RNG, "prompts": PROMPTS, "batch_items": ITEMS}),
    # columns of the items
    (with_a_column, {"id": [0]}),
    (lambda *c, id, batch_items: note(a=c[0], b=c[1], id=id, batch_items=batch_items), {"id": [0], "batch_items": ITEMS}),
    (lambda a, b, other=7, id=None, /: note(a=a, b=b, other=other, id=id), {"id": [0], "other": 7}),
    (lambda prompts, a, b, *, id: note(a=a, b=b, prompts=prompts, id=id), {"id": [0], "prompts": PROMPTS}),
    (functools.partial(with_a_column, id="mine"), {"id": "mine"}),
]  # fmt: skip


@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize(("func", "expected"), BY_NAME)
def test_parameters_are_passed_by_name(func, expected, batched):
    RECEIVED.clear()
    rng = np.random.default_rng(0)
    result = make_reward(func, num_agents=2, batched=batched)([["x"], ["y"]], PROMPTS, ITEMS, rng)
    assert result.total.tolist() == [1.0]
    expected = {key: rng if value is RNG else value for key, value in expected.items()}
    assert [{"a": ["x"], "b": ["y"], **expected}] == RECEIVED


def test_rng_is_the_callers_generator():
    reward = make_reward(lambda a, rng: rng.random(len(a)), num_agents=1)
    one, same, other = (score(reward, [["a", "b"]], seed=s).total for s in (1, 1, 2))
    assert one.tolist() == same.tolist() == np.random.default_rng(1).random(2).tolist()
    assert one.tolist() != other.tolist()


@pytest.mark.parametrize(
    ("func", "num_agents", "words"),
    [
        (items_last, 3, ["items_last(a, b, batch_items)", "takes 2 ", "needed: 3 "]),
        (nothing_else, 3, ["nothing_else(a, b, scale=5.0)", "takes 2 ", "needed: 3 "]),  # scale is not a completion
        (lambda a, *, b: [1.0], 2, ["lambda(a, *, b)", "takes 1 ", "requires ['b']", "needed: 2 "]),
        (lambda completions2, completions1: [1.0], 2, ["completions2, completions1 have two meanings"]),
        (lambda agent2_texts, agent10_texts, agent1_texts: [1.0], 3, ["agent2_texts, agent10_texts, agent1_texts have two"]),
        (functools.partial(configured, 0.5, ["x"]), 2, ["configured", "takes 1 ", "needed: 2 "]),
        (lambda: [1.0], 2, ["takes 0 ", "needed: 2 "]),
        ("not a function", 1, ["no signature"]),
    ],
)
def test_a_signature_that_does_not_fit_the_team_is_refused(func, num_agents, words):
    with pytest.raises(TypeError) as error:
        make_reward([func], num_agents=num_agents)
    assert all(word in str(error.value) for word in words), str(error.value)


@pytest.mark.parametrize(("func", "num_agents", "items", "words"), [
    (items_last, 1, [{"id": 0}], ["items_last(a, b, batch_items) needs a column 'b'", "['id']"]),
    (lambda a, b, *, cfg: [1.0], 2, [{"id": 0}], ["needs a column 'cfg', and item 0 has none"]),
    (lambda a, id: [1.0], 1, [{"id": 0}, {}], ["needs a column 'id', and item 1 has none"]),
    (lambda completions, completion_ids: [1.0], 1, [{}], ["needs a column 'completion_ids', which TRL gives"]),
    (lambda answer, story: [1.0], 2, [{"answer": 1}], ["'answer' has two meanings", "agent 0"]),
    (lambda a, answer, *rest: [1.0], 3, [{"answer": 1}], ["'answer' has two meanings", "agent 1"]),
    (lambda completions: [1.0], 1, [{"completions": 1}], ["'completions' has two meanings"]),
    (lambda a, prompts: [1.0], 1, [{"prompts": 1}], ["'prompts' has two meanings", "rename the column"]),
    (lambda a, rng=None: [1.0], 1, [{"rng": 1}], ["'rng' has two meanings"]),
    (lambda a, **kwargs: [1.0], 1, [{"batch_items": 1}], ["'batch_items' has two meanings"]),
    (lambda a, b, **kwargs: [1.0], 2, [{"completions": 1}], ["'completions' has two meanings"]),
])  # fmt: skip
@pytest.mark.parametrize("on_error", ["raise", "mask"])
def test_a_name_without_a_column_or_with_two_meanings_is_refused(func, num_agents, items, words, on_error):
    reward = make_reward(func, num_agents=num_agents, on_error=on_error)
    with pytest.raises(ValueError) as error:
        score(reward, [["x"] * len(items)] * num_agents, batch_items=items)
    assert all(word in str(error.value) for word in words), str(error.value)
    with pytest.raises(ValueError):  # before anything is sampled
        RewardEnvironment(reward, [lambda item: "p"] * num_agents).first_prompts(items)


@pytest.mark.parametrize(
    "func", [lambda a, b: [1.0], lambda a, b, batch_items: [1.0], functools.partial(any_keyword, prompts=1, completions=2)]
)
def test_columns_that_a_function_does_not_get_have_any_name(func):
    result = score(make_reward(func, num_agents=2), [["x"], ["y"]], batch_items=[{"prompts": 1, "completions": 2, "answer": 3}])
    assert np.isfinite(result.total).all() and not result.invalid.any()


TRL_CALLS: list[dict] = []


def trl_style(prompts, completions, answer, **kwargs):
    TRL_CALLS.append({"prompts": prompts, "completions": completions, "answer": answer, **kwargs})
    return [1.0] * len(completions)


def trl_style_keywords(*, completions, answer=None, **kwargs):
    return trl_style(completions=completions, answer=answer, **kwargs)


def texts_only(completions, prompts):
    TRL_CALLS.append({"prompts": prompts, "completions": completions})
    return [1.0] * len(completions)


MESSAGES = [{"role": "user", "content": "q"}]


@pytest.mark.parametrize("func", [trl_style, trl_style_keywords, texts_only, functools.partial(trl_style, extra=1)])
def test_functions_in_the_form_of_trl_get_what_trl_gives(func):
    TRL_CALLS.clear()
    items = [{"prompt": MESSAGES, "answer": "4", "level": 1}, {"prompt": "p", "answer": "5", "level": 2}]
    score(make_reward(func, num_agents=1), [["x", "y"]], prompts=[MESSAGES, "p"], batch_items=items)
    (call,) = TRL_CALLS
    assert call["prompts"] == [MESSAGES, "p"]
    if func is texts_only:  # TRL calls no function without **kwargs
        assert call["completions"] == ["x", "y"]
    else:
        assert call["completions"] == [[{"role": "assistant", "content": "x"}], "y"]
        assert (call["answer"], call["level"], "prompt" in call) == (["4", "5"], [1, 2], False)


def test_an_answer_before_the_completions_is_the_column():
    def reward(answer, completions):
        return [float(a == c) for a, c in zip(answer, completions, strict=True)]

    items = [{"answer": "x"}, {"answer": "z"}]
    assert score(make_reward(reward, num_agents=1), [["x", "y"]], batch_items=items).total.tolist() == [1.0, 0.0]


@settings(deadline=None)
@given(st.integers(1, 6))
def test_a_variadic_signature_accepts_any_number_of_agents(num_agents):
    result = score(make_reward(lambda *c: [len(c)], num_agents=num_agents), [["x"]] * num_agents)
    assert result.total.tolist() == [num_agents]
    assert result.rewards.shape == (1, num_agents)


# --- several functions, weights, per-agent rewards -------------------------------------------------------------------


def up(a, b):
    return [len(x) for x in a]


def down(a, b):
    return [-len(x) for x in b]


TEXTS = [["a", "aa", "aaa"], ["bbbb", "b", ""]]


@pytest.mark.parametrize(
    ("kwargs", "expected"),
    [
        ({}, [-1.5, 0.5, 1.5]),  # equal weights 1/2
        ({"weights": [1.0, 1.0]}, [-3.0, 1.0, 3.0]),
        ({"weights": [0.5, 0.25]}, [-0.5, 0.75, 1.5]),
        ({"weights": [1.0, 0.0]}, [1.0, 2.0, 3.0]),
        ({"weights": [1.0, 1.0], "processors": RewardProcessors.clamp(-1, 1)}, [-1.0, 1.0, 1.0]),  # of the sum
        ({"weights": [1.0, 1.0], "processors": [RewardProcessors.scale(10.0), None]}, [6.0, 19.0, 30.0]),
        ({"weights": [1.0, 1.0], "processors": [RewardProcessors.clamp(0, 1), RewardProcessors.clamp(-1, 0)]}, [0, 0, 1]),
    ],
)
def test_total_is_the_weighted_sum_of_processed_values(kwargs, expected):
    """Parts add up to it; with a processor of the sum there are none. What functions return are measures, where it differs."""
    result = score(make_reward([up, down], num_agents=2, **kwargs), TEXTS)
    assert result.total.tolist() == expected
    assert bool(result.parts) != callable(kwargs.get("processors"))
    if result.parts:
        assert sum(result.parts.values()).tolist() == expected
    raw = result.parts | result.measures
    assert raw["up"].tolist() == [1.0, 2.0, 3.0] and raw["down"].tolist() == [-4.0, -1.0, 0.0]
    assert not result.invalid.any()
    assert result.faults == {}


@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize("processors", [None, [RewardProcessors.shift(5.0), None]])
def test_one_of_several_functions_may_leave_a_joint_action_to_the_others(batched, processors):
    """As in TRL, where None means that a function is for other tasks. What no function judges is masked."""

    def first(a, b):
        return [None if text == "a" else 1.0 for text in a]

    def second(a, b):
        return [None if text == "b" else 10.0 for text in b]

    reward = make_reward([first, second], num_agents=2, weights=[1.0, 1.0], processors=processors, batched=batched)
    result = score(reward, [["a", "x", "x", "a"], ["x", "b", "x", "b"]])
    shift = 0.0 if processors is None else 5.0
    assert result.total.tolist()[:3] == [10.0, 1.0 + shift, 11.0 + shift]
    assert result.invalid.tolist() == [False, False, False, True]
    assert result.faults == {3: "all reward functions returned None on joint action 3"}
    values = result.parts if processors is None else result.measures
    np.testing.assert_allclose(sum(result.parts.values()), result.total)
    assert np.isnan(values["first"]).tolist() == [processors is not None, False, False, True]


def test_functions_with_the_same_name_have_separate_parts():
    parts = score(make_reward([up, functools.partial(up), down, CallableReward()], num_agents=2), [["a"], ["b"]]).parts
    assert list(parts) == ["up", "up_2", "down", "CallableReward"]

    def up_2(a, b):
        return [0.0]

    parts = score(make_reward([lambda *c: [1.0], up, lambda *c: [2.0], up, up_2], num_agents=2), [["a"], ["b"]]).measures
    assert list(parts) == ["lambda", "up", "lambda_2", "up_2", "up_2_2"]
    assert [values.tolist() for values in parts.values()][::2] == [[1.0], [2.0], [0.0]]


def test_a_joint_reward_goes_to_every_agent_unchanged():
    value = 0.1  # 0.1 + 0.1 + 0.1 != 3 * 0.1
    result = score(make_reward(lambda a, b, c: [value], num_agents=3), [["x"]] * 3)
    assert result.rewards.tolist() == [[value] * 3]
    assert result.total.tolist() == [value]


@pytest.mark.parametrize("per_agent", [[[1, 3], [2, 2], [0, -4]], np.array([[1, 3], [2, 2], [0, -4]])])
def test_total_is_the_mean_of_per_agent_rewards(per_agent):
    result = returning(per_agent, processors=RewardProcessors.scale(2.0))
    assert result.rewards.tolist() == [[2.0, 6.0], [4.0, 4.0], [0.0, -8.0]]
    assert result.total.tolist() == [4.0, 4.0, -4.0]
    assert result.measures["lambda"].tolist() == [2.0, 2.0, -2.0]


def test_per_agent_and_joint_functions_add_up():
    reward = make_reward([lambda a, b: [[1.0, 3.0]], up], num_agents=2, weights=[1.0, 10.0])
    assert score(reward, [["aa"], ["b"]]).rewards.tolist() == [[21.0, 23.0]]


def test_without_joint_actions_no_function_is_called():
    result = score(make_reward(lambda a, b: 1 / 0, num_agents=2), [[], []])
    assert result.total.shape == (0,)
    assert result.rewards.shape == (0, 2)
    assert result.invalid.dtype == bool


# --- faults: values --------------------------------------------------------------------------------------------------

BAD_VALUES = [
    None, math.nan, math.inf, -math.inf, "1.0", b"1", "", 1e308,
    np.float32("nan"), 10**400, 1j, object(), {"reward": 1.0}, {1.0}, [None, None], [1.0, math.nan], ["1.0", 1.0],
]  # fmt: skip


def test_booleans_are_one_and_zero():
    booleans = [True, False, np.True_, np.array(False), [True, 0.5]]
    result = score(make_reward(lambda a, b: booleans, num_agents=2), [list("vwxyz")] * 2)
    assert not result.invalid.any() and result.rewards.tolist() == [[1, 1], [0, 0], [1, 1], [0, 0], [1, 0.5]]


@pytest.mark.parametrize("bad", BAD_VALUES, ids=lambda bad: "object" if type(bad) is object else repr(bad))
@pytest.mark.parametrize("batched", [True, False])
def test_an_invalid_value_masks_its_joint_action_only(bad, batched):
    def reward(a, b):
        return [bad if text == "bad" else 2.0 for text in a]

    result = score(make_reward(reward, num_agents=2, batched=batched), [["ok", "bad", "ok"], ["", "", ""]])
    assert result.invalid.tolist() == [False, True, False]
    assert np.isnan(result.total[1])
    assert np.isnan(result.rewards[1]).all()
    assert result.total[[0, 2]].tolist() == [2.0, 2.0]
    assert list(result.faults) == [1]
    assert "joint action 1" in result.faults[1]
    assert result.num_raised == 0


GOOD_VALUES = [
    2, 2.0, np.float64(2), np.float32(2), np.float16(2), np.int8(2), np.uint64(2), np.array(2.0), np.array(2),
    Fraction(2), [2.0, 2.0], (2, np.float32(2)), np.array([2.0, 2.0]),
]  # fmt: skip


@pytest.mark.parametrize("good", GOOD_VALUES, ids=repr)
def test_numbers_of_every_kind_are_accepted(good):
    result = returning([good, good, good])
    assert result.total.tolist() == [2.0, 2.0, 2.0]
    assert result.total.dtype == np.float64
    assert result.faults == {}


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.int32, np.int64])
def test_arrays_tuples_and_generators_are_accepted(dtype):
    for value in (np.array([1, 2, 3], dtype), (1, 2, 3), range(1, 4), (x for x in (1, 2, 3))):
        assert returning(value).total.tolist() == [1.0, 2.0, 3.0]


class Tensor:
    """Behaves like a GPU tensor: iterates over 0-d tensors, has float(), refuses conversion to numpy."""

    def __init__(self, *values):
        self.values = values

    def __iter__(self):
        if len(self.values) == 1:
            raise TypeError("iteration over a 0-d tensor")
        return (Tensor(v) for v in self.values)

    def __float__(self):
        return float(self.values[0])

    def __array__(self, *args, **kwargs):
        raise TypeError("can't convert a device tensor to numpy")


def test_arrays_of_other_libraries_are_accepted():
    assert returning(Tensor(1, 2, 3)).total.tolist() == [1.0, 2.0, 3.0]
    assert returning(Tensor(1, math.nan, 3)).invalid.tolist() == [False, True, False]


@pytest.mark.parametrize("one", [4, 4.0, np.float32(4), np.array(4.0), [4.0], np.array([4.0]), [[4.0, 4.0]]], ids=repr)
def test_one_value_for_one_joint_action_is_accepted(one):
    assert score(make_reward(lambda a, b: one, num_agents=2), [["x"], ["y"]]).total.tolist() == [4.0]


@pytest.mark.parametrize(
    ("value", "size"),
    [([1.0], 1), ([1.0, 2.0], 2), ([1.0] * 4, 4), ([], 0), (1.0, 1), (None, 1), ("abc", 1), ({0: 1, 1: 1, 2: 1}, 1)],
)
@pytest.mark.parametrize("on_error", ["raise", "mask", 0.0])
def test_a_wrong_number_of_values_raises_with_name_and_both_sizes(value, size, on_error):
    given = f"{size} values" if size != 1 else "None" if value is None else ""
    with pytest.raises(ValueError, match=rf"'lambda' returned {given}.* for joint actions 0 to 2: return a list of 3 numbers"):
        returning(value, on_error=on_error)


@pytest.mark.parametrize("value", [[1.0, [1.0], 1.0], np.ones((3, 3)), np.ones((3, 1))])
def test_a_wrong_number_of_agents_raises_with_name_and_both_sizes(value):
    with pytest.raises(ValueError, match=r"returned [13] values, .*, for joint action [01]: return a number, or 2, one per"):
        returning(value)


def test_a_flat_list_over_agents_is_not_mistaken_for_per_agent_rewards():
    with pytest.raises(ValueError, match=r"returned 2 values, .*, for joint action 0: return a number, or \[\[agent 1"):
        score(make_reward(lambda a, b: [1.0, 2.0], num_agents=2, batched=False), [["x"], ["y"]])


def test_a_value_too_large_for_float32_masks_unless_a_processor_scales_it_down():
    assert returning([1.0, 1e308, -1e308]).invalid.tolist() == [False, True, True]
    scaled = returning([1.0, 1e308, 3.0], processors=RewardProcessors.scale(100.0))  # overflows float64 too
    assert scaled.invalid.tolist() == [False, True, False]
    assert returning([1.0, 1e308, -1e308], processors=RewardProcessors.clamp()).total.tolist() == [1.0, 10.0, -10.0]
    group = np.float32([MAX_ABS_REWARD, -MAX_ABS_REWARD, 0, 0])
    assert np.isfinite(group.std())


def test_opposite_overflows_of_two_functions_do_not_cancel_into_a_number():
    reward = make_reward([lambda a: [1e308], lambda a: [-1e308]], num_agents=1, weights=[100.0, 100.0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = score(reward, [["x"]])
    assert result.invalid.tolist() == [True]
    assert 0 in result.faults


def test_an_invalid_value_masks_the_parts_and_leaves_the_other_measure_unchanged():
    result = score(make_reward([up, lambda a, b: [1.0, math.nan, 1.0]], num_agents=2, weights=[1.0, 0.0]), TEXTS)
    assert result.invalid.tolist() == [False, True, False]
    assert np.isnan(result.parts["up"]).tolist() == np.isnan(result.measures["lambda"]).tolist() == [False, True, False]
    assert (result.parts | result.measures)["lambda"].tolist()[::2] == [1.0, 1.0] and "up" not in result.measures


@settings(deadline=None)
@given(st.lists(st.one_of(st.floats(), st.none(), st.text(max_size=3), st.booleans(), st.integers()), max_size=6))
def test_totals_are_finite_exactly_where_valid(values):
    reward = make_reward(lambda a: values, num_agents=1, processors=RewardProcessors.exponential_scale())
    result = score(reward, [["x"] * len(values)])
    assert np.isfinite(result.total).tolist() == (~result.invalid).tolist()
    assert sorted(result.faults) == np.flatnonzero(result.invalid).tolist()
    for value, valid in zip(values, ~result.invalid, strict=True):
        usable = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 41  # e^41.4 = 1e18
        assert valid or not usable


# --- validation as functions of arrays ---------------------------------------------------------------------------------


def test_reward_values_are_floats_with_nan_where_invalid():
    entries = [1, [2.0, True], [3.0, None], "4", math.nan]
    values, faults = reward_values(entries, 2, "reward 'f'", first=10)
    np.testing.assert_array_equal(values, [[1, 1], [2, 1], [3, np.nan], [np.nan] * 2, [np.nan] * 2])
    assert faults == {
        12: "reward 'f' returned None on joint action 12, not a number",
        13: "reward 'f' returned '4' on joint action 13, not a number",
        14: "reward 'f' returned nan on joint action 14, not a number",
    }
    with pytest.raises(ValueError, match="reward 'f' returned 3 values, .*, for joint action 0: return a number, or 2, one"):
        reward_values([[1, 2, 3]], 2, "reward 'f'")


def test_processors_skip_joint_actions_with_an_invalid_value():
    values, processor = np.array([[1.0, 2.0], [3.0, np.nan], [0.0, 4.0]]), lambda x, length: None if x == 0 else x * length
    processed, faults = process_rewards(processor, values, [10, 10, 1], "the weighted sum")
    np.testing.assert_array_equal(processed, [[10, 20], [3, np.nan], [np.nan, 4]])
    assert faults == {2: "the processor of the weighted sum returned None on joint action 2, not a number"}
    assert process_rewards(None, values, [1] * 3, "x")[0] is values


def test_a_reward_result_masks_whole_joint_actions_and_the_first_fault_counts():
    rewards = np.array([[1.0, 3.0], [2.0, np.nan], [2 * MAX_ABS_REWARD, 0.0]])
    result = reward_result(rewards, {}, {1: "no number"}, 1)
    np.testing.assert_array_equal(result.rewards, [[1, 3], [np.nan] * 2, [np.nan] * 2])
    np.testing.assert_array_equal(result.total, [2, np.nan, np.nan])
    assert result.invalid.tolist() == [False, True, True] and result.num_raised == 1
    assert result.faults[1] == "no number" and "joint action 2 is beyond 1e+18" in result.faults[2]
    assert first_faults({0: "a"}, {0: "b", 1: "c"}) == {0: "a", 1: "c"}


# --- faults: exceptions ----------------------------------------------------------------------------------------------


def fails_on_bad(a, b):
    if "bad" in a:
        raise ZeroDivisionError("no such score")
    return [2.0] * len(a)


BAD_TEXTS = [["ok", "bad", "ok"], ["", "", ""]]


@pytest.mark.parametrize(("batched", "joint_actions"), [(True, "joint actions 0 to 2"), (False, r"joint action 1\)")])
def test_on_error_raise_names_the_function_and_the_joint_action(batched, joint_actions):
    message = rf"'fails_on_bad' raised ZeroDivisionError: no such score \({joint_actions}"
    with pytest.raises(RewardError, match=message) as error:
        score(make_reward(fails_on_bad, num_agents=2, batched=batched), BAD_TEXTS)
    assert isinstance(error.value.__cause__, ZeroDivisionError)


@pytest.mark.parametrize(("batched", "masked"), [(True, [True] * 3), (False, [False, True, False])])
def test_on_error_mask_masks_and_counts_the_joint_actions_of_the_failed_call(batched, masked):
    result = score(make_reward(fails_on_bad, num_agents=2, batched=batched, on_error="mask"), BAD_TEXTS)
    assert result.invalid.tolist() == masked
    assert np.isnan(result.total).tolist() == masked
    assert result.num_raised == sum(masked)
    assert all("ZeroDivisionError" in text for text in result.faults.values())


@pytest.mark.parametrize("value", [-1.5, 0, 0.0])
def test_on_error_with_a_number_replaces_the_raw_value_and_reports_it(value):
    processors = RewardProcessors.shift(1.0)
    kwargs = {"num_agents": 2, "batched": False, "on_error": value, "processors": processors}
    result = score(make_reward(fails_on_bad, **kwargs), BAD_TEXTS)
    assert result.total.tolist() == [3.0, value + 1.0, 3.0]
    assert result.measures["fails_on_bad"][1] == value
    assert not result.invalid.any()
    assert result.num_raised == 1
    assert list(result.faults) == [1]
    # a returned value that is no number is still masked
    assert returning([1.0, None, 1.0], on_error=value).invalid.tolist() == [False, True, False]


def exits(a, b):
    raise SystemExit(0)


def fails_lazily(a, b):
    yield 1.0
    raise TypeError("late")


@pytest.mark.parametrize("func", [exits, fails_lazily])
def test_exit_and_errors_in_a_generator_are_errors_of_the_reward(func):
    with pytest.raises(RewardError, match=func.__name__):
        score(make_reward(func, num_agents=2), TEXTS)
    assert score(make_reward(func, num_agents=2, on_error="mask"), TEXTS).invalid.all()


@pytest.mark.parametrize("on_error", ["raise", "mask", -1.0])
@pytest.mark.parametrize("is_async", [False, True])
def test_an_interruption_of_the_run_is_no_error_of_a_reward(on_error, is_async):
    """Such as by a reward on servers, of which none answers: the run is saved and ends with 75."""

    def interrupted(a, b):
        raise Interrupted("because no server answers")

    async def waits(a, b):
        return interrupted(a, b)

    with pytest.raises(Interrupted, match="because no server answers"):
        score(make_reward(waits if is_async else interrupted, num_agents=2, on_error=on_error), TEXTS)


@pytest.mark.parametrize("timeout", [None, 60])
def test_a_keyboard_interrupt_is_not_masked(timeout):
    def interrupted(a, b):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        score(make_reward(interrupted, num_agents=2, on_error="mask", timeout=timeout), TEXTS)


def test_two_failing_functions_count_a_joint_action_once():
    result = score(make_reward([fails_on_bad, exits], num_agents=2, batched=False, on_error="mask"), BAD_TEXTS)
    assert result.num_raised == 3
    assert "fails_on_bad" in result.faults[1]
    assert "exits" in result.faults[0]


def test_errors_name_the_processor_which_never_sees_an_invalid_value():
    processor = lambda x: math.sqrt(x)  # noqa: E731
    with pytest.raises(RewardError, match=r"processor of up raised ValueError.*joint action 0"):
        score(make_reward(up, num_agents=2, processors=[RewardProcessors.chain([lambda x: -x, processor])]), TEXTS)
    assert returning([4.0, None, 9.0], processors=processor).total[[0, 2]].tolist() == [2.0, 3.0]
    assert returning([1.0, 2.0, 3.0], processors=lambda x: None if x == 2 else x).invalid.tolist() == [0, 1, 0]


# --- faults: calls that hang, and too many errors --------------------------------------------------------------------


@pytest.fixture
def hangs():
    """A reward that hangs on "bad" and catches what it can. It notes that it was ended, in the main thread."""
    ended = []

    def hangs_on_bad(a, b, rng):
        if "bad" in a:
            try:
                time.sleep(30)
            except Exception:
                raise AssertionError("a time limit that the reward catches") from None
            finally:
                ended.append(threading.current_thread() is threading.main_thread())
        return [2.0 + 0 * rng.random()] * len(a)

    yield hangs_on_bad
    assert ended and all(ended)
    assert not any(thread.name in ("reward", "time_limit") for thread in threading.enumerate())
    assert signal.getsignal(SIGNAL) is signal.SIG_DFL


@pytest.mark.parametrize(("batched", "masked"), [(True, [True] * 3), (False, [False, True, False])])
def test_a_call_that_hangs_is_ended_masked_and_counted(hangs, batched, masked):
    reward = make_reward(hangs, num_agents=2, batched=batched, on_error="mask", timeout=0.2)
    began = time.monotonic()
    result = score(reward, BAD_TEXTS)
    assert time.monotonic() - began < 5
    assert result.invalid.tolist() == np.isnan(result.total).tolist() == masked and result.num_raised == sum(masked)
    assert "'hangs_on_bad' raised TimeoutError: it did not return within timeout=0.2 seconds" in result.faults[1]


def test_a_call_that_hangs_follows_on_error(hangs):
    with pytest.raises(RewardError, match=r"did not return within timeout=0.2 .*joint action 1\).*; on_error='mask'"):
        score(make_reward(hangs, num_agents=2, batched=False, timeout=0.2), BAD_TEXTS)
    replaced = make_reward(hangs, num_agents=2, batched=False, on_error=-1.0, timeout=0.2)
    result = score(replaced, BAD_TEXTS)
    assert result.total.tolist() == [2.0, -1.0, 2.0] and result.num_raised == 1


def test_a_generator_that_hangs_is_timed_too(hangs):
    def lazily(a, b, rng):
        yield 1.0
        yield hangs(["bad"], b, rng)[0]

    texts = [["a", "b"], ["c", "d"]]
    assert score(make_reward(lazily, num_agents=2, on_error="mask", timeout=0.2), texts).invalid.all()


def test_draws_do_not_depend_on_late_calls():
    """Each timed call has its own generator, so later calls draw the same numbers whether or not it hangs."""

    def draws(a, b, rng):
        if "bad" in a:
            time.sleep(seconds.pop())
        return [rng.random() for _ in a]

    drawn, seconds = [], [0.5, 0.0]
    for _ in range(2):
        result = score(make_reward(draws, num_agents=2, batched=False, on_error="mask", timeout=0.1), BAD_TEXTS)
        drawn.append(result.total[[0, 2]].tolist())
    assert drawn[0] == drawn[1] and drawn[0][0] != drawn[0][1]


def test_in_another_thread_a_call_that_hangs_is_abandoned():
    end, results = threading.Event(), []
    reward = make_reward(lambda a: [float(end.wait(30))], num_agents=1, on_error="mask", timeout=0.1)
    thread = threading.Thread(target=lambda: results.append(score(reward, [["x"]])))
    thread.start()
    thread.join(20)
    end.set()
    assert "and was abandoned" in results[0].faults[0]
    for thread in threading.enumerate():
        if thread.name == "reward":
            thread.join(30)


def test_signals_of_others_are_passed_on_during_a_timed_call():
    received = []
    outer = signal.signal(SIGNAL, lambda number, frame: received.append(number))
    try:
        reward = make_reward(lambda a: [float(os.kill(os.getpid(), SIGNAL) or 1)], num_agents=1, timeout=60)
        assert score(reward, [["x"]]).total.tolist() == [1.0]
    finally:
        signal.signal(SIGNAL, outer)
    assert received == [SIGNAL]


def counts_errors_as_zero(completions):
    """The usual reward of a library with time limits by signals."""
    rewards = []
    for text in completions:
        try:
            rewards.append(float(math_verify.verify(math_verify.parse("$\\frac{1}{2}$"), math_verify.parse(f"${text}$"))))
        except Exception:
            rewards.append(0.0)
    return rewards


async def counts_errors_as_zero_later(completions):
    return counts_errors_as_zero(completions)


@pytest.mark.parametrize("timeout", [None, 60])
@pytest.mark.parametrize("func", [counts_errors_as_zero, counts_errors_as_zero_later])
def test_libraries_that_need_the_main_thread_work_with_a_time_limit_and_async(func, timeout):
    reward = make_reward(func, num_agents=1, timeout=timeout)
    assert score(reward, [["0.5", "0.6"]]).total.tolist() == [1.0, 0.0]

    async def cell():  # of a notebook: its event loop runs
        return score(reward, [["0.5", "0.6"]]).total.tolist(), await asyncio.sleep(0, "goes on")

    assert asyncio.run(cell()) == ([1.0, 0.0], "goes on")


@pytest.mark.parametrize("func", [fails_on_bad, exits, fails_lazily])
def test_a_timeout_does_not_change_calls_that_return(func):
    plain, timed = (
        score(make_reward(func, num_agents=2, batched=False, on_error="mask", timeout=t), BAD_TEXTS) for t in (None, 60)
    )
    np.testing.assert_array_equal(plain.rewards, timed.rewards)
    assert (plain.faults, plain.num_raised) == (timed.faults, timed.num_raised)


def test_a_call_that_hangs_does_not_keep_the_process_alive():
    code = """
import time
import numpy as np
from jmarl.envs.rewards import make_reward

def hangs(a):
    while True:
        time.sleep(1)

result = make_reward(hangs, num_agents=1, on_error="mask", timeout=0.1)([["x"]], ["p"], [{}], np.random.default_rng(0))
print("masked", result.num_raised)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "masked 1\n"), done.stderr


def failing(share, **kwargs):
    """Return a reward that fails on this share of ten joint actions, and the joint actions."""
    texts = [["bad"] * round(10 * share) + ["ok"] * (10 - round(10 * share)), [""] * 10]
    return make_reward(fails_on_bad, num_agents=2, batched=False, on_error="mask", **kwargs), texts


@pytest.mark.parametrize(("share", "allowed"), [(0.6, 0.5), (0.1, 0.0), (1.0, 0.9)])
def test_too_many_errors_raise(share, allowed):
    reward, texts = failing(share, max_error_share=allowed)
    for _ in range(ERROR_WINDOW - 1):
        score(reward, texts)
    message = (
        f"failed on {round(50 * share)} of the 50 joint actions of the last 5 batches, more than max_error_share={allowed}"
    )
    with pytest.raises(RewardError, match=f"{message}; at last: .*ZeroDivisionError"):
        score(reward, texts)


@pytest.mark.parametrize(("share", "allowed"), [(0.5, 0.5), (0.0, 0.0), (1.0, 1.0)])
def test_as_many_errors_as_allowed_do_not_raise(share, allowed):
    reward, texts = failing(share, max_error_share=allowed)
    assert [score(reward, texts).num_raised for _ in range(3 * ERROR_WINDOW)] == [round(10 * share)] * 15


def test_only_the_last_batches_count_for_max_error_share():
    reward, texts = failing(1.0)
    for _ in range(20):
        score(reward, [["ok"] * 10, [""] * 10])
    score(reward, texts)
    score(reward, texts)
    with pytest.raises(RewardError, match="failed on 30 of the 50 joint actions"):
        score(reward, texts)


def test_old_errors_and_invalid_values_do_not_count_for_max_error_share():
    """Invalid values are masked and in the log of every update, but the function did not fail."""
    reward, texts = failing(1.0)
    for n in range(20):
        score(reward, texts if n % ERROR_WINDOW < 2 else [["ok"] * 10, [""] * 10])
    none = make_reward(lambda a, b: [None] * len(a), num_agents=2, on_error="mask")
    assert all(score(none, texts).invalid.all() for _ in range(10))


# --- construction and sizes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kwargs", "words"), [
    ({"weights": [1.0]}, "2 reward functions need as many finite weights"),
    ({"weights": [1.0, math.nan]}, "finite weights"),
    ({"processors": [RewardProcessors.identity()]}, "1 processors for 2 reward functions"),
    ({"on_error": "ignore"}, "'ignore'"),
    ({"on_error": math.nan}, "nan"),
    ({"on_error": True}, "True"),
    ({"timeout": 0}, "timeout is a number of seconds > 0, or None .*, got 0"),
    ({"timeout": math.inf}, "got inf"),
    ({"max_error_share": 1.5}, r"max_error_share is in \[0, 1\], got 1.5"),
    ({"num_agents": 0}, "got 2 and 0"),
])  # fmt: skip
def test_invalid_settings_are_refused(kwargs, words):
    with pytest.raises(ValueError, match=words):
        make_reward([up, down], **{"num_agents": 2, **kwargs})
    with pytest.raises(ValueError, match="got 0 and 2"):
        make_reward([], num_agents=2)


@pytest.mark.parametrize(
    ("completions", "prompts", "items"),
    [([["a"]], ["p"], [{}]), ([["a"], []], ["p"], [{}]), ([["a"], ["b"]], [], [{}]), ([["a"], ["b"]], ["p"], [{}, {}])],
)
def test_lists_of_different_lengths_are_refused(completions, prompts, items):
    with pytest.raises(ValueError, match=r"2 agents .*'completions': \[1"):
        make_reward(up, num_agents=2)(completions, prompts, items, np.random.default_rng(0))
