"""What formatters, rewards and transitions of trainers get in each turn: the facts of CoMLRL 1.4.3 (host only)."""

from __future__ import annotations

import inspect
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jmarl.comlrl.environment import TrainerEnvironment
from jmarl.comlrl.eval_metrics import turn_means
from jmarl.comlrl.rewards import bind_rewards
from jmarl.envs.rewards import RewardFunction
from jmarl.files.identity.fingerprint import of_reward

ITEM = {"prompt": "task", "answer": "42"}
RNG = np.random.default_rng(0)


def environment(reward=lambda a, b: [1.0], formatters=None, transition=None, *, passthrough=False, actor_critic=False):
    functions = RewardFunction(bind_rewards(reward, 2, actor_critic), num_agents=2, batched=False)
    formatters = formatters or [lambda item: "Q:" + item["prompt"], lambda item: "R:" + item["prompt"]]
    transition = transition or (lambda **_: ["next 0", "next 1"])
    return TrainerEnvironment(functions, formatters, transition, passthrough=passthrough, prompt_per_agent=actor_critic)


def play(env, turns=2):
    """Return the prompts [turn][N] of one episode, in which agent n writes `{n}.{turn}`."""
    states, prompts = env.reset([ITEM], RNG)
    seen = [[column[0] for column in prompts]]
    for turn in range(turns):
        answer = env.step(states, [[f"{n}.{turn}"] for n in range(2)], RNG)
        if turn < turns - 1:
            states, prompts = env.observe(answer.after)
            seen.append([column[0] for column in prompts])
    return seen


def test_the_text_of_the_transition_goes_through_the_formatters_as_the_items_prompt():
    assert play(environment()) == [["Q:task", "R:task"], ["Q:next 0", "R:next 1"]]


def test_with_passthrough_the_text_of_the_transition_is_the_prompt():
    """Also for formatters that take external_prompts."""
    formatters = [lambda item: "Q:" + item["prompt"], lambda item, external_prompts=None: f"{item['prompt']}{external_prompts}"]
    assert play(environment(formatters=formatters, passthrough=True)) == [["Q:task", "taskNone"], ["next 0", "next 1"]]


def test_a_formatter_that_takes_external_prompts_gets_the_text_twice_and_the_items_own_prompt():
    items = []

    def formatter(item, external_prompts=None):
        items.append((item, external_prompts))
        return item["prompt"]

    assert play(environment(formatters=[formatter] * 2))[1] == ["next 0", "next 1"]
    later = [(ITEM | {"prompt": f"next {n}", "_original_prompt": "task"}, f"next {n}") for n in range(2)]
    assert items == [(ITEM, None)] * 2 + later


def test_formatters_cannot_change_the_items_of_rewards():
    seen = []

    def reward(a, b, batch_items):
        seen.extend(batch_items)
        return [0.0]

    play(environment(reward, [lambda item: item.pop("prompt")] * 2))
    assert seen == [ITEM, ITEM]


def test_none_of_a_transition_is_the_agents_first_prompt():
    env = environment(transition=lambda **_: (None, "next"))
    assert play(env)[1] == ["Q:task", "R:next"]
    assert play(environment(transition=lambda **_: (None, "next"), passthrough=True))[1] == ["Q:task", "next"]


@pytest.mark.parametrize("texts", ["next", ["next"], ["a", "b", "c"], None, ["a", 1], {0: "a", 1: "b"}])
def test_a_transition_that_does_not_write_a_text_for_each_agent_raises(texts):
    with pytest.raises(ValueError, match="the transition returned"):
        play(environment(transition=lambda **_: texts))


def test_rewards_get_the_formatted_prompt_of_the_first_agent_and_later_its_text_of_the_transition():
    seen = []

    def reward(a, b, prompts=None):
        seen.append(prompts)
        return [0.0]

    play(environment(reward))
    assert seen == [["Q:task"], ["next 0"]]


def test_rewards_of_actor_critics_get_the_formatted_prompt_of_each_agent_in_every_turn():
    seen = []

    def reward(prompts, a, b):
        seen.append((prompts, a, b))
        return [0.0]

    play(environment(reward, actor_critic=True))
    assert seen == [(["Q:task", "R:task"], ["0.0"], ["1.0"]), (["Q:next 0", "R:next 1"], ["0.1"], ["1.1"])]


@pytest.mark.parametrize(("actor_critic", "later"), [(False, ["next 0", "next 1"]), (True, ["Q:next 0", "R:next 1"])])
def test_transitions_get_the_items_prompt_and_the_histories(actor_critic, later):
    calls = []

    def transition(**arguments):
        calls.append(arguments)
        return [f"next {n}" for n in range(arguments["num_agents"])]

    play(environment(transition=transition, actor_critic=actor_critic), turns=3)
    assert calls == [
        {
            "prompt": "task",
            "agent_completions": ["0.0", "1.0"],
            "num_agents": 2,
            "prompt_history_per_agent": [["Q:task"], ["R:task"]],
            "response_history_per_agent": [["0.0"], ["1.0"]],
        },
        {
            "prompt": "task",
            "agent_completions": ["0.1", "1.1"],
            "num_agents": 2,
            "prompt_history_per_agent": [["Q:task", later[0]], ["R:task", later[1]]],
            "response_history_per_agent": [["0.0", "0.1"], ["1.0", "1.1"]],
        },
    ]


A, B, PROMPTS, ROWS = ["0.0"], ["1.0"], ["Q:task"], [ITEM]


@pytest.mark.parametrize(
    ("reward", "arguments"),
    [
        (lambda a, b: (a, b), (A, B)),
        (lambda a, b, **optional: (a, b, optional), (A, B, {"prompts": PROMPTS, "batch_items": ROWS})),
        (lambda a, b, batch_items, prompts: (a, b, batch_items, prompts), (A, B, ROWS, PROMPTS)),
        (lambda a, b=None: (a, b), (A, B)),
        (lambda a, b=None, *, prompts=None: (a, b, prompts), (A, B, PROMPTS)),
        (lambda *completions: completions, (A, B)),
        (lambda *completions, batch_items=None, prompts=None: (*completions, batch_items, prompts), (A, B, ROWS, PROMPTS)),
        (lambda prompts, a, b: (prompts, a, b), (PROMPTS, A, B)),
        (lambda questions, a, b: (questions, a, b), (PROMPTS, A, B)),
        (lambda questions, a, b, *, batch_items=None: (questions, a, b, batch_items), (PROMPTS, A, B, ROWS)),
        (lambda questions, a, b, scale=2: (questions, a, b, scale), (PROMPTS, A, B, 2)),
        (lambda texts: texts, [A, B]),
        (lambda texts, *, prompts: (texts, prompts), ([A, B], PROMPTS)),
        (lambda texts, /, **optional: (texts, optional["batch_items"]), ([A, B], ROWS)),
        (lambda a, b, scale=2, *, batch_items=None: (a, b, scale, batch_items), (A, B, 2, ROWS)),
        (
            partial(lambda a, b, low, **optional: (a, b, low, optional), low=1),
            (A, B, 1, {"prompts": PROMPTS, "batch_items": ROWS}),
        ),
        (partial(lambda low, questions, a, b: (low, questions, a, b), 1), (1, PROMPTS, A, B)),
    ],
)
def test_rewards_of_every_signature_get_their_arguments(reward, arguments):
    seen = []

    def call(*args, **kwargs):
        seen.append(reward(*args, **kwargs))
        return [1.0]

    call.__signature__ = inspect.signature(reward)  # type: ignore[attr-defined]
    play(environment(call), turns=1)
    assert seen == [arguments]


def test_a_reward_of_one_agent_takes_completions_or_prompts_and_completions():
    for reward in (lambda texts: [len(texts[0])], lambda questions, texts: [len(texts[0]) * (questions == ["Q:task"])]):
        scored = RewardFunction(bind_rewards(reward, 1, False), num_agents=1, batched=False)
        assert scored([["four"]], ["Q:task"], [ITEM], RNG).total == [4.0]


@pytest.mark.parametrize("value", [[1.5], (1.5,), 1.5, np.array([1.5]), np.float32(1.5), [[1.5, 1.5]]])
def test_rewards_return_a_number_or_a_list_of_one(value):
    env = environment(lambda a, b: value)
    states, _ = env.reset([ITEM], RNG)
    assert env.step(states, [["x"], ["y"]], RNG).result.rewards.tolist() == [[1.5, 1.5]]


@pytest.mark.parametrize("value", [[1.0, 2.0], (1.0, 2.0), np.array([1.0, 2.0]), [[1.0, 2.0]]])
def test_rewards_of_actor_critics_may_return_one_number_per_agent(value):
    env = environment(lambda a, b: value, actor_critic=True)
    states, _ = env.reset([ITEM], RNG)
    assert env.step(states, [["x"], ["y"]], RNG).result.rewards.tolist() == [[1.0, 2.0]]


def test_too_many_numbers_for_one_joint_action_raise():
    """CoMLRL takes the first one and leaves out the others."""
    env = environment(lambda a, b: [1.0, 2.0])
    states, _ = env.reset([ITEM], RNG)
    with pytest.raises(ValueError, match=r"returned 2 values, .* for joint action \d+: return a number"):
        env.step(states, [["x"], ["y"]], RNG)


def test_fingerprints_name_the_users_reward_and_the_passthrough():
    """So a resumed run says that they have changed."""
    one, other = (lambda texts: [1.0]), (lambda texts: [2.0])
    assert of_reward(environment(one)) != of_reward(environment(other))
    assert of_reward(environment(one)) == of_reward(environment(one)) != of_reward(environment(one, passthrough=True))


def test_reward_and_return_of_each_turn_are_means_over_the_episodes_that_reach_it():
    turns = [
        SimpleNamespace(rewards=np.array(x, float), items=range(len(x)), joint=[0])
        for x in ([[[1.0, 1.0]], [[3.0, 5.0]]], [[[2.0, 2.0]]])
    ]
    returns = [np.array(x, float) for x in ([[[3.0, 3.0]], [[3.0, 5.0]]], [[[2.0, 2.0]]])]
    rollout: Any = SimpleNamespace(turns=turns, joint_returns=returns)
    assert turn_means(rollout) == {
        "turn_1/reward_mean": 2.5,
        "turn_1/expected_return": 3.5,
        "turn_2/reward_mean": 2.0,
        "turn_2/reward_mean_episodes": 1.0,
        "turn_2/expected_return": 2.0,
        "turn_2/expected_return_episodes": 1.0,
    }
