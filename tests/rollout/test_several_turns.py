"""Episodes of several turns: trees and chains, prompts and returns, and caches that later turns continue from."""

from __future__ import annotations

import dataclasses
import functools
from functools import partial

import jax
import numpy as np
import pytest

from jmarl.config import Episodes, TrainConfig
from jmarl.envs.reward_environment import RewardEnvironment, default_formatter
from jmarl.envs.rewards import make_reward
from jmarl.envs.vector import LockStep
from jmarl.logs.rollout_log import rollout_metrics
from jmarl.models.hub.agents import Agent
from jmarl.randomness import Randomness
from jmarl.rl.returns import credit, discounted, joint_actions
from jmarl.rollout.make_batches import to_batches
from jmarl.rollout.play import play
from jmarl.runs.train import train
from jmarl.sampling.generate import sample_team
from jmarl.team import make_team
from jmarl.types import TRACES
from tests.house import HOUSE, ITEMS
from tests.rollout.scored import assert_sampled_logprobs_are_those_of_scoring

SETTINGS = TrainConfig.of(**HOUSE, compute_dtype="float32").sampling  # what runs make of "auto", so their programs


@pytest.fixture(scope="module")
def agents(tiny_config, tiny_tokenizer, random_agent):
    return [random_agent(tiny_config(), tiny_tokenizer, seed) for seed in range(3)]


@pytest.fixture(scope="module")
def pair(agents):
    return make_team(agents[:2])


@pytest.fixture(scope="module")
def brief(agents):
    """A pair that often ends its completions early: the end's logit is four times as far from 0 as the others."""
    stop = agents[0].tokenizer.eos_token_id
    params = [agent.params | {"embed": agent.params["embed"].copy()} for agent in agents[:2]]
    for tree in params:
        tree["embed"][stop] *= 4
    return make_team([Agent("brief", a.config, tree, a.tokenizer) for a, tree in zip(agents, params, strict=False)])


def indices(*completions, agents=2, group=3, mode="aligned"):
    """Return the rewards of scripted completions: the sum of the indices, from 1, of a joint action's completions."""
    joint = joint_actions(mode, agents, group)
    return np.tile((joint + 1).sum(-1), len(completions[0]) // len(joint)).tolist()


def answer(prompt, agent_completions, num_agents, prompt_history_per_agent, response_history_per_agent):
    """Return prompts: each agent reads the item and what the other one has just written."""
    return [f"{prompt} {agent_completions[1 - i]}" for i in range(num_agents)]


def play_pair(
    pair, reward, items=ITEMS, group=3, transition=answer, settings=SETTINGS, formatters=None, seed=0, sample=None, **episodes
):
    team, params = pair
    env = reward
    if callable(reward):
        formatters = formatters or [default_formatter] * team.num_agents
        env = RewardEnvironment(make_reward(reward, num_agents=team.num_agents), formatters, transition)
    sample = sample or partial(sample_team, team, params)
    return play(sample, team, items, env, settings, Episodes(**episodes), group, Randomness(seed, step=0))


# --- returns -------------------------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("mode, cross_credit, gamma, leaves, roots", [
    ("aligned", "mean", 1.0, [2, 4, 6], [6, 8, 10]),
    ("aligned", "mean", 0.5, [2, 4, 6], [4, 6, 8]),
    ("cross", "mean", 1.0, [3, 4, 5], [7, 8, 9]),
    ("cross", "sum", 1.0, [9, 12, 15], [21, 24, 27]),
])  # fmt: skip
def test_the_tree_of_the_specification(pair, mode, cross_credit, gamma, leaves, roots):
    """Section 1: two agents, three completions, two turns; returns of both agents, nodes and joint rewards of two items."""
    reward = functools.partial(indices, mode=mode)
    got = play_pair(pair, reward, num_turns=2, joint_mode=mode, cross_credit=cross_credit, gamma=gamma)
    assert got.returns[0].tolist() == [[roots] * 2] * 2
    assert got.returns[1].tolist() == [[leaves] * 2 * (3 if mode == "aligned" else 9)] * 2
    nodes, steps = (4, 12) if mode == "aligned" else (10, 90)
    assert sum(len(turn.items) for turn in got.turns) == 2 * nodes
    assert sum(turn.rewards[..., 0].size for turn in got.turns) == 2 * steps
    assert rollout_metrics(pair[0], got)["env_steps"] == 2 * steps


@pytest.mark.long
@pytest.mark.nightly
@pytest.mark.parametrize("mode, nodes, steps", [("aligned", 4, 12), ("cross", 28, 756)])
def test_counts_of_three_agents(agents, mode, nodes, steps):
    """Section 1: N = 3, G = 3, T = 2. Of two agents the test above counts them."""

    def transition(prompt, num_agents, **history):
        return [prompt] * num_agents

    reward = functools.partial(indices, agents=3, mode=mode)
    got = play_pair(make_team(agents), reward, ITEMS[:1], transition=transition, num_turns=2, joint_mode=mode)
    assert sum(len(turn.items) for turn in got.turns) == nodes
    assert sum(turn.rewards[..., 0].size for turn in got.turns) == steps


def test_returns_over_missing_children_and_invalid_rewards():
    """Two nodes of two joint actions, of which only 1 and 2 have a child. First one leaf is invalid, then both of one child."""
    first = np.array([[[1.0], [2.0]], [[3.0], [4.0]]])
    leaves = np.array([[[10.0], [np.nan]], [[30.0], [50.0]]])
    got = discounted([first, leaves], [np.arange(2), np.array([1, 2])], 0.5)
    assert got[0][..., 0].tolist() == [[1, 2 + 5], [3 + 20, 4]]
    leaves[0, 0] = np.nan
    got = discounted([first, leaves], [np.arange(2), np.array([1, 2])], 0.5)[0][..., 0]
    assert np.isnan(got[0, 1]) and got[0, 0] == 1 and got[1].tolist() == [23, 4]


def test_returns_of_three_turns_by_hand():
    """A chain of one: 1 + g (2 + g 4), whatever values say by default; and the mean over the two joint actions of a child."""
    one = [np.full((1, 1, 1), r) for r in (1.0, 2.0, 4.0)]
    for values in (None, [np.full((1, 1), 7.0)] * 3):
        assert discounted(one, [np.zeros(1, int)] * 3, 0.5, values)[0].item() == 1 + 0.5 * (2 + 0.5 * 4)
    tree = [np.array([[[1.0]]]), np.array([[[2.0], [6.0]]])]
    assert discounted(tree, [np.zeros(1, int)] * 2, 1.0)[0].item() == 5
    assert credit(tree[1], joint_actions("aligned", 1, 2), 2).tolist() == [[[2, 6]]]


# --- what is read --------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_children_read_what_the_transition_returns(pair):
    """The prompt of each child names its own parent's completions, and histories hold all turns.

    Formatters with `external_prompts` get the text; for others the text is the prompt.
    """
    calls = []

    def transition(**arguments):
        calls.append(arguments)
        return [f"<{arguments['agent_completions'][i]}>" for i in range(2)]

    formatters = [lambda item: "start", lambda item, external_prompts=None: f"{item['prompt']}|{external_prompts}"]
    got = play_pair(pair, indices, transition=transition, formatters=formatters, num_turns=3)
    first, second, third = got.turns
    assert first.prompts == [["start", "start"], [f"{item['prompt']}|None" for item in ITEMS]]
    assert second.items.tolist() == [0] * 3 + [1] * 3 and third.items.tolist() == [0] * 9 + [1] * 9
    for before, after in ((first, second), (second, third)):
        for node, parent in enumerate(after.parents):
            p, j = divmod(parent, 3)
            assert after.prompts[0][node] == f"<{before.texts[0][p][j]}>"
            assert after.prompts[1][node] == f"{ITEMS[after.items[node]]['prompt']}|<{before.texts[1][p][j]}>"
    last = calls[-1]  # of the last node of the second turn, its last joint action
    assert last["prompt"] == ITEMS[1]["prompt"] and last["num_agents"] == 2
    assert last["prompt_history_per_agent"] == [["start", second.prompts[0][5]], [first.prompts[1][1], second.prompts[1][5]]]
    assert last["response_history_per_agent"] == [[first.texts[a][1][2], second.texts[a][5][2]] for a in (0, 1)]
    assert last["agent_completions"] == [second.texts[a][5][2] for a in (0, 1)]


@pytest.mark.long
def test_a_transition_that_returns_no_list_of_texts_is_an_error(pair):
    for returned, message in (
        (["one"], "returned 1 texts for 2 agents"),
        ("both", "returned 'both' for 2 agents"),
        (["one", 2], "returned 2 for agent 1"),
    ):
        with pytest.raises(ValueError, match=message):
            play_pair(pair, indices, transition=lambda returned=returned, **_: returned, num_turns=2)


@pytest.mark.long
def test_nodes_above_the_threshold_do_not_continue(pair):
    """Strictly above, by the mean of the node: item 0's joint actions have 1, 2 and 3 (mean 2), item 1's 2, 2.5 and 2.5.

    Padding is masked: three of six children are played, in a program for four, of which the fourth has no weight.
    """

    def reward(a, b):
        return [1, 2, 3, 2, 2.5, 2.5] if len(a) == 6 else [0] * len(a)

    got = play_pair(pair, reward, num_turns=2, early_termination_threshold=2.0)
    assert got.turns[1].items.tolist() == [0] * 3 and got.turns[1].parents.tolist() == [0, 1, 2]
    assert len(play_pair(pair, reward, num_turns=2, early_termination_threshold=1.9).turns) == 1
    chains = play_pair(pair, reward, num_turns=2, early_termination_threshold=2.0, branching="chain")
    assert chains.turns[1].parents.tolist() == [0, 1, 3], "a chain goes on by its own reward: 1 and 2 do, 3 and 2.5 do not"
    assert chains.turns[1].completions[0].tokens.shape[1] == 4 and all(len(texts) == 3 for texts in chains.turns[1].texts)
    (batch,) = jax.device_get(to_batches(pair[0], chains))
    played = np.isfinite(batch.rewards[..., 0]).sum(1)
    assert played.tolist() == [6 + 3] * 2 and np.isfinite(batch.rewards[:, : 6 + 3]).all()


@pytest.mark.long
@pytest.mark.parametrize("branching", ["tree", "chain"])
def test_rounding_is_not_above_the_threshold(pair, branching):
    """The mean of three times 0.1 is 0.1, and not the 0.10000000000000002 of adding them up."""
    episodes = dict(num_turns=2, branching=branching, early_termination_threshold=0.1)
    got = play_pair(pair, lambda a, b: [0.1] * len(a), **episodes)
    assert len(got.turns) == 2


@pytest.mark.long
def test_a_joint_action_without_a_valid_reward_has_no_children(pair):
    def reward(a, b):
        return [float("nan"), *[1] * 5] if len(a) == 6 else [1] * len(a)

    got = play_pair(pair, reward, num_turns=2)
    assert got.turns[1].parents.tolist() == [1, 2, 3, 4, 5]
    assert np.isnan(got.returns[0][:, 0, 0]).all() and (got.returns[0].reshape(2, 6)[:, 1:] == 2).all()


# --- batches -------------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_batch_of_a_tree(pair):
    """It holds all nodes of both turns; a node is a group; scoring what was sampled gives its log-probabilities."""
    got = play_pair(pair, lambda a, b: [len(x) for x in a], num_turns=2)
    (batch,) = to_batches(pair[0], got)
    assert all(isinstance(x, np.ndarray) for x in jax.tree.leaves(batch)), "no program runs for it"
    assert batch.tokens.shape[:3] == (2, 2 + 6, 3)
    assert batch.groups[0, :, 0].tolist() == [*range(8)] and (batch.groups == batch.groups[..., :1]).all()
    np.testing.assert_array_equal(batch.rewards, np.concatenate(got.returns, 1).astype(np.float32))
    assert_sampled_logprobs_are_those_of_scoring(*pair, [batch])


@pytest.mark.long
def test_a_batch_of_chains(pair):
    """Every row is a node; the rows of one turn of all episodes of an item are a group."""
    got = play_pair(pair, lambda a, b: [len(x) for x in a], num_turns=2, branching="chain")
    assert [turn.rewards.shape for turn in got.turns] == [(2, 3, 2), (6, 1, 2)]
    (batch,) = jax.device_get(to_batches(pair[0], got))
    assert batch.tokens.shape[:3] == (2, 6 + 6, 1)
    assert batch.groups[0, :, 0].tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]
    expected = np.concatenate([r.reshape(2, -1) for r in got.returns], 1)
    np.testing.assert_array_equal(batch.rewards[..., 0], expected.astype(np.float32))
    assert_sampled_logprobs_are_those_of_scoring(*pair, [batch])


@pytest.mark.long
def test_roles_are_separate_groups_if_an_episode_ends_early(agents):
    """One model in two roles, and the second item ends after its first turn: an item's turns are one group in each role."""

    class Short(Counting):
        def step(self, state, messages, rng):
            state, prompts, rewards, _ = super().step(state, messages, rng)
            return state, prompts, rewards, state["item"] == ITEMS[1]

    team, params = make_team(agents[:1] * 2, shared_weights=True)
    got = play_pair((team, params), LockStep(Short(), 2), num_turns=2, branching="chain")
    batch = to_batches(team, got, "episode")[0]
    assert np.bincount(batch.groups[np.isfinite(batch.rewards)]).tolist() == [6, 3, 6, 3]


# --- histories -----------------------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("branching, chat", [("tree", False), ("chain", True)])
def test_a_history_continues_from_cached_keys_and_values(brief, branching, chat):
    """Three turns.

    Prompts are the tokens of the conversation so far and of the new text. Log-probabilities sampled with the cache of the turn
    before are those of the whole conversation encoded from scratch, after completions of full length and after those that ended
    early.
    """
    episodes = dict(num_turns=3, history="append", branching=branching, chat=chat)
    got = play_pair(brief, indices_of_any, ITEMS[:1], transition=short, seed=3, **episodes)
    for turn in got.turns[:2]:
        assert {False, True} == set(np.asarray(turn.completions[0].ended & ~turn.completions[0].action_mask[..., -1]).ravel())
    assert_sampled_logprobs_are_those_of_scoring(*brief, to_batches(brief[0], got))
    assert all(done.cache is None for turn in got.turns for done in turn.completions)
    for before, after in zip(got.turns, got.turns[1:], strict=False):
        for agent in range(2):
            for node, parent in enumerate(after.parents):
                p, j = divmod(parent, len(before.joint))
                done = jax.device_get(before.completions[0])
                chosen = done.tokens[agent, p, j][done.action_mask[agent, p, j]]
                history = [*row_of(before, agent, p), *chosen]
                assert row_of(after, agent, node)[: len(history)] == history
                tail = brief[0].stacks[0].tokenizer.decode(row_of(after, agent, node)[len(history) :])
                assert "more" in tail and ("<|im_start|>user" in tail) == chat


def indices_of_any(a, b):
    return [len(x) for x in a]


def short(**_):
    return ["more", "more of it"]


def row_of(turn, agent, node):
    ids, lengths = turn.encoded[0]
    return ids[agent, node, : lengths[agent, node]].tolist()


@pytest.mark.long
def test_a_repetition_penalty_reads_the_whole_history(pair):
    """Then no cache is used."""
    requests = []

    def sample(request):
        requests.append(request)
        return sample_team(*pair, request)

    settings = dataclasses.replace(SETTINGS, repetition_penalty=1.5)
    got = play_pair(
        pair, indices_of_any, ITEMS[:1], transition=short, settings=settings, sample=sample, num_turns=2, history="append"
    )
    assert np.isfinite(got.turns[1].completions[0].logprobs).all()
    assert len(requests) == 2 and not any(request.keep_cache or request.past for request in requests)
    done = got.turns[0].completions[0]
    history = [*row_of(got.turns[0], 0, 0), *done.tokens[0, 0, 0][done.action_mask[0, 0, 0]]]
    assert requests[1].encoded[0][0][0, 0, : len(history)].tolist() == history


@pytest.mark.long
def test_stacks_and_shared_weights_continue_from_caches_too(agents, tiny_config, make_tokenizer, random_agent):
    """Two stacks, and one parameter set in two roles: scoring what was sampled gives its log-probabilities."""
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["unusual"])
    other = random_agent(tiny_config("qwen2", vocab_size=321), tokenizer, 5)
    for team in (make_team([agents[0], other]), make_team([agents[0]] * 2, shared_weights=True)):
        got = play_pair(team, indices_of_any, transition=short, num_turns=2, history="append")
        assert_sampled_logprobs_are_those_of_scoring(*team, to_batches(team[0], got))


@pytest.mark.long
def test_a_history_beyond_the_context_is_an_error(pair):
    with pytest.raises(ValueError, match=r"prompt 0 of a later turn .* more than the context of 128"):
        play_pair(pair, indices, ITEMS[:1], transition=lambda **_: ["x" * 130] * 2, num_turns=2, history="append")


# --- environments with state ---------------------------------------------------------------------------------------------


class Counting:
    """An environment that counts its turns in a state that it changes in place, ends after two, and rewards agent 1 with the
    count."""

    def reset(self, item, rng):
        return {"count": 0, "item": item}, [item["prompt"], "second"]

    def step(self, state, messages, rng):
        state["count"] += 1
        prompts = [f"{state['item']['prompt']} {state['count']}", messages[0]]
        return state, prompts, [0, state["count"]], state["count"] == 2


@pytest.mark.long
@pytest.mark.parametrize("branching", ["tree", "chain"])
def test_states_that_are_changed_in_place_are_separate(pair, branching):
    """Siblings count for themselves; all end after two of four turns."""
    got = play_pair(pair, LockStep(Counting(), 2), num_turns=4, branching=branching)
    assert len(got.turns) == 2
    assert (got.turns[0].rewards == [0, 1]).all() and (got.turns[1].rewards == [0, 2]).all()
    assert got.turns[1].prompts[0] == [f"{item['prompt']} 1" for item in ITEMS for _ in range(3)]
    assert got.turns[1].prompts[1] == [got.turns[0].texts[0][p][g] for p in (0, 1) for g in (0, 1, 2)]
    assert got.returns[0].tolist() == [[[0] * 3] * 2, [[3] * 3] * 2]


# --- training ------------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_training_over_two_turns(agents, tmp_path):
    """There are metrics of each turn and of the whole, evaluations count all turns without a discount and do not branch, and a
    constant return changes nothing."""
    team, params = make_team(agents[:2])
    before = jax.device_get(params)
    options = dict(num_turns=2, gamma=0.5, eval_generations=3, output_dir=str(tmp_path))
    reward = make_reward(lambda a, b: [1.0] * len(a), num_agents=2)
    env = RewardEnvironment(reward, [default_formatter] * 2, answer)
    result = train(team, env, ITEMS, TrainConfig.of(**HOUSE | options), params=params, eval_items=ITEMS)
    assert result.rewards == [1.5, 1.5] and result.after.mean == 2.0
    assert len(result.after.rollout.turns[1].items) == 6
    jax.tree.map(np.testing.assert_array_equal, jax.device_get([s.params for s in result.state.stacks]), before)
    text = (tmp_path / "metrics.jsonl").read_text()
    for name in ("turn_0/reward/mean", "turn_1/agent_1/length", "reward/mean", "env_steps", "agent_0/loss"):
        assert f'"{name}"' in text


@pytest.mark.long
def test_later_turns_do_not_compile_at_every_step(agents):
    """Three updates of three turns need as many programs as one update."""
    team, params = make_team(agents[:2])
    cfg = TrainConfig.of(**HOUSE | dict(num_updates=3, num_prompts=1, num_turns=3, history="append"))
    counts = []

    def reward(a, b):
        counts.append(sum(TRACES.values()))
        return [len(x) for x in a]

    train(team, RewardEnvironment(reward, [default_formatter] * 2, short), ITEMS[:1], cfg, params=params)
    assert len(counts) == 9 and counts[-1] == counts[3], "the second and the third update traced nothing new"


def test_several_turns_need_a_transition(pair):
    team, params = pair
    cfg = TrainConfig.of(num_turns=2, progress=False)
    with pytest.raises(ValueError, match="num_turns=2 needs external_transition"):
        train(team, make_reward(indices, num_agents=2), ITEMS, cfg, params=params)
    with pytest.raises(ValueError, match="3 formatters for 2 agents"):
        train(team, RewardEnvironment(indices, [default_formatter] * 3, answer), ITEMS, cfg, params=params)
    with pytest.raises(ValueError, match="external_transition writes .* num_turns=1 has none"):
        train(team, RewardEnvironment(indices, [default_formatter] * 2, answer), ITEMS, TrainConfig(), params=params)
    with pytest.raises(TypeError, match="reward is a Counting without observe: .* LockStep"):
        train(team, Counting(), ITEMS, cfg, params=params)
    with pytest.raises(ValueError, match="early_termination_threshold=1.0 is not allowed"):
        TrainConfig.of(early_termination_threshold=1.0)
    with pytest.raises(ValueError, match=r"joint_mode must be one of .*aligned.*counterfactual.* for branching=chain"):
        TrainConfig.of(num_turns=2, branching="chain", joint_mode="cross")


def test_with_gamma_zero_an_invalid_turn_does_not_change_earlier_returns():
    """0 times an invalid reward would be NaN."""
    got = discounted([np.ones((1, 1, 1)), np.full((1, 1, 1), np.nan)], [np.zeros(1, int)] * 2, 0.0)
    assert got[0].item() == 1
