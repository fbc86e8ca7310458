"""Missing and too long prompts: all items are checked before anything runs; long prompts are cut or left out by
`long_prompts`."""

from __future__ import annotations

import json
import time
from functools import partial

import jax
import numpy as np
import pytest

from jmarl.config import Episodes, TrainConfig
from jmarl.envs.base import Step, TextEnvironment
from jmarl.envs.reward_environment import RewardEnvironment, default_formatter
from jmarl.envs.rewards import make_reward
from jmarl.envs.vector import LockStep
from jmarl.models.hub.tokenize import chat_prompt, encode_prompts
from jmarl.randomness import Randomness
from jmarl.rollout.make_batches import to_batches
from jmarl.rollout.play import play
from jmarl.rollout.prompt_check import items_that_fit
from jmarl.runs.train import train
from jmarl.sampling.generate import sample_team
from jmarl.team import Team, make_team
from jmarl.types import TRACES
from tests.house import HOUSE
from tests.matrix import product
from tests.rollout.scored import assert_sampled_logprobs_are_those_of_scoring

CONTEXT, NEW = 128, HOUSE["max_new_tokens"]
SHORT = [{"prompt": text} for text in ("The answer", "apples", "question", "pears")]
LONG = {"prompt": "7" * 100 + "3" * 50}  # a token a digit
ITEMS = [*SHORT[:2], LONG, *SHORT[2:], {"prompt": "7" * 130}]
TWO = [SHORT[0], LONG]  # one batch has both
CFG = TrainConfig.of(**HOUSE, compute_dtype="float32")  # what runs make of "auto", so their programs


@pytest.fixture(scope="module")
def agents(tiny_config, tiny_tokenizer, random_agent):
    return [random_agent(tiny_config(max_positions=CONTEXT), tiny_tokenizer, seed) for seed in (0, 1)]


def lengths(a, b):
    return [len(x) - 2 * len(y) for x, y in zip(a, b, strict=True)]


def refuses(a, b):
    raise AssertionError("the reward was called")


def run(agents, items, reward=lengths, formatters=None, eval_items=(), **changes):
    reward = RewardEnvironment(reward, formatters) if formatters else reward
    return train(Team.of(agents), reward, items, TrainConfig.of(**HOUSE | changes), eval_items=eval_items)


def played(agents, env, items=SHORT[:2], **episodes):
    """Return a rollout of two items, of three completions each."""
    team, params = make_team(agents)
    sample, randomness = partial(sample_team, team, params), Randomness(seed=0, step=0)
    return play(sample, team, items, env, CFG.sampling, Episodes(**episodes), 3, randomness)


def same(first, second):
    left, right = (jax.tree.leaves(jax.device_get(of.state.stacks[0].params)) for of in (first, second))
    assert all((x == y).all() for x, y in zip(left, right, strict=True))


def test_values_for_templates_that_no_prompt_is_put_into_are_warned_of(agents):
    (team, _), cfg = make_team(agents), CFG.replace(chat_template_kwargs={"thinks": True})
    env = RewardEnvironment(lengths, [default_formatter] * 2)
    with pytest.warns(UserWarning, match="chat_template_kwargs={'thinks': True} has no effect on prompts that are texts"):
        items_that_fit(team, env, SHORT, (), cfg)
    items_that_fit(team, env, [{"prompt": [{"role": "user", "content": "Hi"}]}], (), cfg)  # warnings are errors
    items_that_fit(team, env, SHORT, (), cfg.replace(chat=[False, True]))


# --- before anything runs ------------------------------------------------------------------------------------------------


def test_a_long_prompt_of_any_item_is_an_error_before_anything_runs(agents):
    """The error has their number, the longest, its item and agent, and what to do.

    Nothing is traced and no reward is called.
    """
    before = TRACES.copy()
    formatters = [default_formatter, lambda item: item["prompt"] + "9"]
    message = (
        "2 of 6 items have a prompt too long .* of item 2 for agent 1, has 151 tokens; with max_new_tokens=4 that is 155, "
    )
    with pytest.raises(
        ValueError, match=message + "and the context is 128: set long_prompts='truncate_left' or 'drop', lower max"
    ):
        run(agents, ITEMS, refuses, formatters, num_prompts=1)
    message = "1 of 2 held-out items have a prompt too long .* of item 1 for agent 0, has 150 tokens"
    with pytest.raises(ValueError, match=message):
        run(agents, SHORT, refuses, eval_items=[SHORT[0], LONG])
    assert TRACES.copy() == before


@pytest.mark.parametrize("chat", [False, True])
def test_the_check_agrees_with_encode_prompts(agents, chat):
    """Texts of all lengths around the limit, in letters of one to four bytes: too long are those that `encode_prompts`
    refuses."""
    (team, _), rng = make_team(agents[:1]), np.random.default_rng(0)
    texts = ["".join(rng.choice(list("the a7日🙂"), size=n)) for n in range(40, 130)]
    around = len(encode_prompts(agents[0].tokenizer, ["7"], CONTEXT, 0, chat)[0]) - 1
    texts += ["7" * (CONTEXT - NEW - around + n) for n in (-1, 0, 1, 2)]  # a token a digit
    cfg, tokenizer = CFG.replace(chat=chat, long_prompts="drop"), agents[0].tokenizer
    fit = []
    for text in texts:
        try:
            fit += [text] * bool(encode_prompts(tokenizer, [text], CONTEXT, NEW, chat))
        except ValueError:
            assert len(tokenizer.encode(chat_prompt(tokenizer, text) if chat else text)) > CONTEXT - NEW
    env = RewardEnvironment(make_reward(lambda a: [1.0], num_agents=1), [default_formatter])
    with pytest.warns(UserWarning, match=f"{len(texts) - len(fit)} of 94 items .* are left out"):
        fitting, *_ = items_that_fit(team, env, [{"prompt": text} for text in texts], [], cfg)
    assert [item["prompt"] for item in fitting] == fit and 0 < len(fit) < len(texts)


def test_an_empty_prompt_of_any_item_is_an_error_before_anything_runs(agents):
    with pytest.raises(ValueError, match="the prompt of item 3 for agent 0 is empty"):
        run(agents, [*SHORT[:3], {"prompt": ""}], refuses, num_prompts=1)


@pytest.mark.slow
@pytest.mark.parametrize(("size", "count", "limit_s"), [(100, 100_000, 10), (400, 20_000, 24)])
def test_a_hundred_thousand_items_are_checked_in_seconds(agents, size, count, limit_s):
    """If every text must be encoded (400 characters in a context of 128: all are too long), the check is as fast as the
    tokenizer; of a fifth of the items in a fifth of two minutes."""
    team, _ = make_team(agents)
    texts = np.random.default_rng(0).choice(list("abcdefgh"), size=(count, size // 4)).tolist()
    items = [{"prompt": 4 * "".join(row)} for row in texts]
    env = RewardEnvironment(make_reward(lengths, num_agents=2), [default_formatter] * 2)
    began = time.monotonic()
    if size == 100:
        assert items_that_fit(team, env, items, [], CFG)[0] is items
    else:
        with pytest.raises(ValueError, match=f"{count} of {count} items"):
            items_that_fit(team, env, items, [], CFG)
    print(f"{size} characters: {time.monotonic() - began:.1f} s")
    assert time.monotonic() - began < limit_s


# --- None ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [0, 3])
def test_the_error_names_an_item_without_a_prompt(agents, wrong):
    """Also if it is not among those of the first update."""
    items = [dict(item, prompt=None) if i == wrong else item for i, item in enumerate(SHORT)]
    message = rf"agent 0's prompt is None \(of item {wrong}, {{'prompt': None}}\): give the row a prompt, .*in_turns=True"
    with pytest.raises(ValueError, match=message):
        run(agents, items, refuses, num_prompts=1)
    with pytest.raises(ValueError, match="agent 1's prompt is None .of item 0, {'prompt': 'The answer'}"):
        run(agents, SHORT, refuses, [default_formatter, lambda item: None])


@pytest.mark.long
def test_formatters_may_return_none_with_in_turns(agents):
    """Agent 0 acts in the first turn and agent 1 in the second: by its formatter, or by the transition alone."""

    def second(item, external_prompts=None):
        return external_prompts

    def on(agent_completions, **_):
        assert agent_completions[1] == ""
        return [None, f"seven apples and three pears: {agent_completions[0]}"]

    for formatters in ([default_formatter, second], [default_formatter, lambda item: None]):
        env = RewardEnvironment(make_reward(lengths, num_agents=2), formatters, on, in_turns=True)
        got = played(agents, env, num_turns=2, branching="chain")
        assert [turn.acts.all(1).tolist() for turn in got.turns] == [[True, False], [False, True]]
        cfg = CFG.replace(num_turns=2, branching="chain")
        assert np.isfinite(train(Team.of(agents), env, SHORT, cfg).rewards).all()


@pytest.mark.long
def test_none_in_a_later_turn_is_an_error_without_in_turns(agents):
    formatters = [default_formatter, lambda item, external_prompts=None: "first" if external_prompts is None else None]
    env = RewardEnvironment(make_reward(lengths, num_agents=2), formatters, lambda **_: ["a", "b"])
    with pytest.raises(ValueError, match="agent 1's prompt is None .of turn 1 of item {'prompt': 'The answer'}"):
        played(agents, env, num_turns=2)
    nobody = RewardEnvironment(make_reward(lengths, num_agents=2), [lambda item: None] * 2, in_turns=True)
    with pytest.raises(ValueError, match="no agent acts in a turn: all prompts are None .of item 0"):
        played(agents, nobody)


# --- drop and truncate_left ----------------------------------------------------------------------------------------------


@pytest.mark.long
def test_dropped_items_are_left_out_before_training(agents):
    """The run is bit-equal to one on the other items."""
    with pytest.warns(UserWarning, match="2 of 6 items .* has 150 tokens; .* these items are left out .long_prompts='drop'"):
        dropped = run(agents, ITEMS, long_prompts="drop")
    same(dropped, run(agents, SHORT))
    with pytest.raises(ValueError, match="1 of 1 items .* leaves none; lower max_new_tokens"):
        run(agents, [LONG], refuses, long_prompts="drop")
    (team, _), env = make_team(agents), RewardEnvironment(lengths, [default_formatter] * 2)
    with pytest.warns(UserWarning, match="1 of 2 held-out items .* are left out"):
        assert items_that_fit(team, env, SHORT, TWO, CFG.replace(long_prompts="drop"))[1] == SHORT[:1]


@pytest.mark.long
@pytest.mark.parametrize("chat", [False, True])
def test_long_prompts_are_cut_on_the_left_and_counted(agents, tmp_path, chat):
    """The run is bit-equal to one on items that were cut by hand."""
    room = CONTEXT - NEW - (len(agents[0].tokenizer.encode(chat_prompt(agents[0].tokenizer, ""))) if chat else 0)
    by_hand = [{"prompt": item["prompt"][-room:]} for item in TWO]
    with pytest.warns(UserWarning) as warned:
        cut = run(agents, TWO, long_prompts="truncate_left", chat=chat, output_dir=str(tmp_path))
    same(cut, run(agents, by_hand, chat=chat))
    messages = [str(one.message) for one in warned]
    assert "1 of 2 items have a prompt too long" in messages[0] and "such prompts are cut on the left" in messages[0]
    assert messages[1].startswith("prompts longer than the context are cut on the left (long_prompts='truncate_left'")
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["long_prompts"] for row in rows if "tokens" in row] == [2, 2]  # of two agents


def test_a_template_that_leaves_no_room_is_an_error(agents):
    with pytest.warns(UserWarning, match="2 of 2"), pytest.raises(ValueError, match="of which the chat template takes"):
        run(agents, TWO, refuses, chat=True, max_new_tokens=CONTEXT - 8, long_prompts="truncate_left")


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:1 of 2 items", "ignore:prompts longer", "ignore:update")
def test_rounds_of_pairs_and_dynamic_sampling_cut_long_prompts(agents, tmp_path):
    run(agents, TWO, algorithm="madpo_iter", comparator="initial", long_prompts="truncate_left")
    options = dict(dynamic_sampling=1, num_updates=1, long_prompts="truncate_left")
    run(agents, TWO, lambda a, b: [1.0] * len(a), output_dir=str(tmp_path), **options)
    row = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[0])
    assert row["long_prompts"] == 4, "of the first round and the further one"


class Writes(TextEnvironment):
    """An environment that writes its prompts itself, longer ones in the second turn."""

    roles, max_turns = ("a", "b"), 2

    def reset(self, task, rng):
        return task, [task["prompt"]] * 2

    def step(self, state, messages, rng):
        return Step(state, ["5" * 150] * 2, float(len(messages[0])), False)


@pytest.mark.long
def test_environments_that_write_their_prompts_can_drop_those_of_later_turns_only(agents):
    class OneTurn(Writes):
        max_turns = 1

    with pytest.raises(ValueError, match="long_prompts='drop' leaves items out before training, and this environment writes"):
        run(agents, SHORT, OneTurn(), long_prompts="drop")
    for long_prompts, what in (("truncate_left", "cut"), ("drop", "not read: their episodes end there")):
        cfg = CFG.replace(num_turns=2, branching="chain", long_prompts=long_prompts)
        assert items_that_fit(make_team(agents)[0], LockStep(Writes()), SHORT, (), cfg)[0] == SHORT
        with pytest.warns(UserWarning, match=f"prompts longer than the context are {what}"):
            got = played(agents, LockStep(Writes()), num_turns=2, branching="chain", long_prompts=long_prompts)
        assert len(got.turns) == (2 if long_prompts == "truncate_left" else 1)
        assert all(np.isfinite(returns).all() for returns in got.returns)


# --- later turns ---------------------------------------------------------------------------------------------------------


def longer_by_item(prompt, agent_completions, **_):
    """Return prompts of which that of agent 1 is too long for items of apples."""
    return ["and", "5" * 150 + "3" if prompt == "apples" else "more"]


def played_by_item(agents, items=SHORT[:2], **episodes):
    """Return a rollout whose later turns have a prompt that is too long for item 1."""
    reward = make_reward(lambda a, b: [1.0 + len(x) for x in a], num_agents=2)
    return played(agents, RewardEnvironment(reward, [default_formatter] * 2, longer_by_item), items, **episodes)


@pytest.mark.long
def test_a_long_prompt_of_a_later_turn_is_an_error(agents):
    """`error` is the default, also in the step of an environment."""
    with pytest.raises(ValueError, match="prompt 3 of agent 1 .'555.* has 151 tokens"):
        played_by_item(agents, num_turns=2, branching="chain", joint_mode="aligned")
    with pytest.raises(ValueError, match="prompt 0 of agent 0 .'555.* has 150 tokens"):
        played(agents, LockStep(Writes()), num_turns=2)


@pytest.mark.long
@pytest.mark.parametrize("branching, history", product(["tree", "chain"], ["none", "append"]))
def test_an_episode_ends_before_a_long_prompt_with_drop(agents, branching, history):
    """Its return is what it had until then, the other episode continues, and the prompt is counted and warned about."""
    options = dict(num_turns=3, branching=branching, history=history, gamma=0.5)
    with pytest.warns(UserWarning, match="prompts longer than the context are not read: their episodes end there"):
        got = played_by_item(agents, long_prompts="drop", **options)
    first, second = got.turns[:2]
    assert set(second.items) == {0} and got.notes["long_prompts"] == len(first.joint)
    np.testing.assert_array_equal(got.joint_returns[0][1], first.rewards[1])
    assert (got.joint_returns[0][0] > first.rewards[0]).all()
    assert all(np.isfinite(to_batches(make_team(agents)[0], got)[0].rewards).reshape(2, -1).any(1))
    with pytest.warns(UserWarning, match="their episodes end there"):
        alone = played_by_item(agents, items=SHORT[1:2] * 2, long_prompts="drop", **options)
    assert len(alone.turns) == 1, "where nothing is left, nothing more is played"


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:prompts longer")
def test_alternatives_end_with_the_episode_that_drop_ends(agents):
    options = dict(num_turns=2, branching="chain", joint_mode="counterfactual", long_prompts="drop")
    got = played_by_item(agents, **options)
    np.testing.assert_array_equal(got.joint_returns[0][1], got.turns[0].rewards[1])


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:prompts longer")
@pytest.mark.parametrize("history", ["none", "append"])
def test_log_probabilities_of_cut_conversations_are_those_of_the_cut_prompts(agents, history):
    """Three turns, of which agent 1's second and third are cut for one item.

    Rows fill the context and end in the last tokens of the prompt; the stored log-probabilities are those of a whole pass over
    the cut row. Cuts are counted.
    """
    got = played_by_item(agents, num_turns=3, branching="chain", history=history, long_prompts="truncate_left")
    assert got.notes["long_prompts"] == 2 * 3  # two turns, three episodes of one item
    cut = np.flatnonzero(got.turns[1].items == 1)
    ids, sizes = got.turns[1].encoded[0]
    assert sizes[1, cut].tolist() == [CONTEXT - NEW] * 3 and sizes[0, cut].max() < CONTEXT - NEW
    last = agents[0].tokenizer.encode("5553")
    assert all(ids[1, p, : sizes[1, p]][-4:].tolist() == last for p in cut)
    team, params = make_team(agents)
    assert_sampled_logprobs_are_those_of_scoring(team, params, to_batches(team, got))


def test_an_unknown_choice_is_refused():
    with pytest.raises(ValueError, match=r"long_prompts='left' is not allowed: .* one of \('error', 'truncate_left', 'drop'\)"):
        TrainConfig.of(long_prompts="left")
