"""Rollouts of one turn: prompts, joint actions, rewards, credited returns and batches."""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import numpy as np
import pytest

from jmarl.algorithms import resolve
from jmarl.config import Episodes, TrainConfig
from jmarl.envs.reward_environment import RewardEnvironment
from jmarl.envs.rewards import make_reward
from jmarl.evaluation.evaluate import evaluate
from jmarl.learning.optimizer import init_stack
from jmarl.models.stack import unstack
from jmarl.randomness import EVAL, Randomness
from jmarl.rl.returns import credit, joint_actions
from jmarl.rollout.make_batches import pad_nodes, to_batches, to_turns, used_rows
from jmarl.rollout.play import play
from jmarl.rollout.turns import Turn
from jmarl.sampling.generate import SampleRequest, bucket, pad, sample_team, tokenize
from jmarl.team import make_team
from jmarl.types import TRACES
from tests.batches import update_stack
from tests.house import HOUSE
from tests.rollout.scored import assert_sampled_logprobs_are_those_of_scoring

NEW, GROUP = HOUSE["max_new_tokens"], HOUSE["num_generations"]
SETTINGS = TrainConfig.of(**HOUSE, compute_dtype="float32").sampling  # what runs make of "auto", so their programs
ITEMS = [{"prompt": "The answer", "tag": 1}, {"prompt": "seven apples and three pears", "tag": 2}]
nightly = partial(pytest.param, marks=pytest.mark.nightly)
FORMATTERS = [lambda item: item["prompt"], lambda item: f"{item['prompt']} or {item['tag']}"]


@pytest.fixture(scope="module")
def agents(tiny_config, tiny_tokenizer, random_agent):
    return [random_agent(tiny_config(), tiny_tokenizer, seed) for seed in (0, 1)]


@pytest.fixture(scope="module")
def pair(agents):
    """Two agents of one architecture: one stack."""
    return make_team(agents)


@pytest.fixture(scope="module")
def mixed(agents, tiny_config, make_tokenizer, random_agent):
    """Three agents. The first and the last share a stack; the second has its own tokenizer."""
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["unusual"])
    other = random_agent(tiny_config("qwen2", vocab_size=321), tokenizer, 2)
    return make_team([agents[0], other, agents[1]])


def lengths_reward(a, b):
    """Return rewards that show which texts form a joint action."""
    return [len(x) + 1000 * len(y) for x, y in zip(a, b, strict=True)]


def play_pair(pair, reward=lengths_reward, items=ITEMS, group=GROUP, settings=SETTINGS, joint_mode="aligned", **randomness):
    team, params = pair
    sample, randomness = partial(sample_team, team, params), Randomness(**dict(seed=0, step=0) | randomness)
    env = reward if isinstance(reward, RewardEnvironment) else RewardEnvironment(make_reward(reward, num_agents=2), FORMATTERS)
    return play(sample, team, items, env, settings, Episodes(joint_mode=joint_mode), group, randomness)


@pytest.fixture(scope="module")
def played(pair):
    return play_pair(pair)


# --- joint actions and credit --------------------------------------------------------------------------------------------


def test_joint_actions():
    assert joint_actions("aligned", 3, 2).tolist() == [[0, 0, 0], [1, 1, 1]]
    assert joint_actions("cross", 2, 2).tolist() == [[0, 0], [0, 1], [1, 0], [1, 1]]
    assert joint_actions("cross", 3, 3).shape == (27, 3)


@pytest.mark.parametrize(
    "mode, cross_credit, expected", [("aligned", "mean", [2, 4]), ("cross", "mean", [2.5, 3.5]), ("cross", "sum", [5, 7])]
)
def test_credit_of_the_example_of_the_specification(mode, cross_credit, expected):
    """The reward is the sum of the two indices, 1 or 2 each; these are the leaves of section 1, the same for both agents."""
    joint = joint_actions(mode, 2, 2)
    rewards = np.repeat((joint + 1).sum(-1, keepdims=True), 2, 1)[None].astype(float)
    assert credit(rewards, joint, 2, cross_credit).tolist() == [[expected], [expected]]


def test_credit_of_rewards_per_agent_and_of_invalid_ones():
    """Each agent gets the mean of its own reward.

    An invalid joint action counts nowhere; with no valid one the return is NaN.
    """
    joint = joint_actions("cross", 2, 2)
    rewards = np.stack([joint[:, 0] * 10.0 + joint[:, 1], -joint[:, 1] * 1.0], -1)[None]  # [1, 4, 2]
    assert credit(rewards, joint, 2).tolist() == [[[0.5, 10.5]], [[0, -1]]]
    rewards[0, [0, 1]] = np.nan  # all with agent 0's first completion
    got = credit(rewards, joint, 2)
    assert np.isnan(got[0, 0, 0]) and got[0, 0, 1] == 10.5 and got[1].tolist() == [[0, -1]]
    rewards[0, 2] = np.nan  # only (1, 1) is left
    assert np.isnan(credit(rewards, joint, 2)[1, 0, 0])


# --- playing -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode, count", [("aligned", GROUP), ("cross", GROUP**2)])
def test_rewards_are_those_of_the_texts_of_each_joint_action(pair, mode, count):
    """The reward of prompt p and joint action j is that of exactly those texts; the reward function gets the items and
    prompts."""
    seen = {}

    def reward(a, b, batch_items, prompts, rng):
        seen.update(items=batch_items, prompts=prompts, random=rng.random())
        return lengths_reward(a, b)

    got = play_pair(pair, reward=reward, joint_mode=mode)
    assert got.turns[0].rewards.shape == (2, count, 2) and got.turns[0].joint.shape == (count, 2)
    first, second = got.turns[0].texts
    for p in range(2):
        for j, (g, h) in enumerate(got.turns[0].joint):
            assert got.turns[0].rewards[p, j].tolist() == [len(first[p][g]) + 1000 * len(second[p][h])] * 2
    assert seen["items"] == [item for item in ITEMS for _ in range(count)]
    assert seen["prompts"] == [item["prompt"] for item in ITEMS for _ in range(count)]
    assert seen["random"] == np.random.default_rng((0, 0, 0)).random()


def test_texts_are_the_chosen_tokens_without_special_ones(pair, played, tiny_tokenizer):
    turn = played.turns[0]
    tokens, mask = turn.completions[0].tokens, turn.completions[0].action_mask
    for place in np.ndindex(2, 2, GROUP):
        agent, p, g = place
        assert turn.texts[agent][p][g] == tiny_tokenizer.decode(tokens[place][mask[place]], skip_special_tokens=True)
    assert len({text for agent in turn.texts for prompt in agent for text in prompt}) == 2 * 2 * GROUP


def test_texts_follow_from_seed_step_and_purpose(pair, played):
    """Equal ones give equal texts, and other seeds, steps and purposes give other texts."""
    assert play_pair(pair).turns[0].texts == played.turns[0].texts
    for change in (dict(step=1), dict(seed=1), dict(purpose=EVAL)):
        assert play_pair(pair, **change).turns[0].texts != played.turns[0].texts


def test_an_invalid_reward_masks_its_joint_action(pair):
    """With NaN for one joint action its returns are NaN, the others stay, and it is counted."""
    got = play_pair(pair, reward=lambda a, b: [float("nan"), *range(1, len(a))])
    assert got.turns[0].invalid == 1 and np.isnan(got.returns[0][:, 0, 0]).all()
    assert np.isfinite(np.delete(got.returns[0].reshape(2, -1), 0, 1)).all()
    assert np.isnan(to_batches(pair[0], got)[0].rewards[:, 0, 0]).all()


# --- batches -------------------------------------------------------------------------------------------------------------


def test_batches_hold_the_samples_and_their_returns(pair, played):
    """Each agent's own prompts, log-probabilities over the whole vocabulary, and the return of exactly that completion."""
    prompts = played.turns[0].prompts
    assert prompts == [[f(item) for item in ITEMS] for f in FORMATTERS]
    (batch,) = jax.device_get(to_batches(pair[0], played))
    assert batch.prompts.shape == (2, 2, 32) and batch.tokens.shape == (2, 2, GROUP, NEW)
    np.testing.assert_array_equal(batch.rewards, played.returns[0].astype(np.float32))
    np.testing.assert_array_equal(batch.old_logprobs, played.turns[0].completions[0].logprobs)
    for place in np.ndindex(2, 2):
        ids = batch.prompts[place][: batch.prompt_lengths[place]]
        assert pair[0].stacks[0].tokenizer.decode(ids) == prompts[place[0]][place[1]]
    assert_sampled_logprobs_are_those_of_scoring(*pair, [batch])


@pytest.mark.parametrize("groups", [(3, 3), (3, 1)])
@pytest.mark.parametrize("shared_weights", [False, True])
def test_numbers_of_rows_are_put_back_to_their_turns(agents, groups, shared_weights):
    """Also where a row is one completion, agents do not act, and a batch of several seeds has rows behind its own."""
    rng, (team, _) = np.random.default_rng(0), make_team([agents[0]] * 2, shared_weights)
    turns, numbers = list[Turn](), list[np.ndarray]()
    for group, nodes, max_nodes in zip(groups, (2, 5), (2, 6), strict=True):
        acts, texts, joint = rng.random((2, nodes)) < 0.7, [[[""] * group] * nodes] * 2, np.zeros((group, 2), int)
        rewards, items = np.zeros((nodes, group, 2)), np.arange(nodes)
        turns.append(Turn([], acts, texts, joint, rewards, {}, 0, "", items, items, (), (), max_nodes))
        numbers.append(np.where(acts[..., None], rng.random((2, nodes, group)), np.nan))
    single, stacks = groups[0] != groups[1], list[np.ndarray | None]()
    padded = [pad_nodes(team, turn, x, np.nan) for turn, x in zip(turns, numbers, strict=True)]
    for i, rows in enumerate(used_rows(team, turns, single)):
        parts = [x[i].reshape(len(x[i]), -1, 1) if single else x[i] for x in padded]
        own = np.concatenate(parts, 1)
        if rows is not None:
            own = np.where(rows[..., None] < 0, np.nan, own[np.arange(len(own))[:, None], rows])
        stacks.append(np.pad(own, ((0, 0), (0, 3), (0, 0)), constant_values=9.0))
    for got, expected in zip(to_turns(team, turns, stacks), numbers, strict=True):
        np.testing.assert_array_equal(got, expected)
    assert all(np.isnan(x).all() for x in to_turns(team, turns, [None] * len(team.stacks)))


@pytest.mark.parametrize("steps, expected", [(1, 2), (2, 2), (3, 4), (4, 4), (5, 6), (7, 7), (8, 8)])
def test_token_axes_are_cut_to_quarters(pair, played, steps, expected):
    """Of 7 or 8 new tokens; never shorter than the longest completion."""
    size = 7 if steps == 7 else 8
    done = played.turns[0].completions[0]
    padded = [np.pad(x, ((0, 0),) * 3 + ((0, size - NEW),)) for x in done[:4]]
    longer = dict(zip(done._fields, padded, strict=False)) | {"steps": np.full(2, steps)}
    turn = played.turns[0]._replace(completions=(done._replace(**longer),))
    cut = played._replace(turns=(turn,))
    (batch,) = to_batches(pair[0], cut)
    assert batch.tokens.shape[-1] == batch.action_mask.shape[-1] == batch.old_logprobs.shape[-1] == expected


@pytest.mark.long
def test_a_team_of_two_stacks(mixed, agents, played):
    """Agents 0 and 2 are one stack and agent 1 another, with another tokenizer.

    Texts, prompts and returns belong to the right agents, and agent 0 writes what it writes in another team (same seed, stack
    and place).
    """
    team, _ = mixed
    assert [spec.order for spec in team.stacks] == [[0, 2], [1]] and team.num_agents == 3

    def reward(a, b, c):
        return [[len(x), 100 + len(y), 200 + len(z)] for x, y, z in zip(a, b, c, strict=True)]

    formatters = [FORMATTERS[0], lambda item: "unusual " + item["prompt"], FORMATTERS[1]]
    got = play_pair(mixed, RewardEnvironment(make_reward(reward, num_agents=3), formatters))
    assert got.turns[0].texts[0] == played.turns[0].texts[0]
    for agent in range(3):
        assert got.returns[0][agent].tolist() == [[100 * agent + len(t) for t in row] for row in got.turns[0].texts[agent]]
    first, second = jax.device_get(to_batches(team, got))
    np.testing.assert_array_equal(first.rewards, got.returns[0][[0, 2]].astype(np.float32))
    np.testing.assert_array_equal(second.rewards, got.returns[0][[1]].astype(np.float32))
    assert second.prompts[0, 0, 0] == 320, "the added token of agent 1's tokenizer"


@pytest.mark.long
def test_shared_weights_are_one_parameter_set_with_two_roles(agents):
    """A = 1; roles are side by side on the prompt axis with their own prompts, keys and returns."""
    team, params = make_team([agents[0]] * 2, shared_weights=True)
    assert jax.tree.leaves(params[0])[0].shape[0] == 1 and team.stacks[0].members == ((0, 1),)
    got = play_pair((team, params))
    (batch,) = jax.device_get(to_batches(team, got))
    assert batch.tokens.shape == (1, 4, GROUP, NEW)
    np.testing.assert_array_equal(batch.rewards[0], got.returns[0].reshape(4, GROUP).astype(np.float32))
    texts = [team.stacks[0].tokenizer.decode(ids[:n]) for ids, n in zip(batch.prompts[0], batch.prompt_lengths[0], strict=True)]
    assert texts == [prompt for role in got.turns[0].prompts for prompt in role]
    same = make_team([agents[0]] * 2)  # two copies instead: the same prompts and keys, so the same texts
    assert play_pair(same).turns[0].texts == got.turns[0].texts
    assert got.turns[0].texts[0] != got.turns[0].texts[1]


# --- lengths and compiles ------------------------------------------------------------------------------------------------


def test_buckets():
    assert [bucket(n) for n in (1, 16, 17, 32, 33, 100)] == [16, 16, 32, 32, 64, 128]


@pytest.mark.long
def test_the_number_of_compiles_is_bounded_by_the_buckets(pair):
    """Prompts of 1 to 60 tokens, with another seed, step and purpose each time, need three programs: for 16, 32 and 64
    tokens."""
    team, params = pair
    settings = dataclasses.replace(SETTINGS, temperature=0.875)  # of no other test: its programs are not there yet
    before = TRACES["sample"]
    widths = set()
    for n in range(1, 61, 4):
        encoded = pad(team, tokenize(team, [["a" * n], ["b" * n]], settings, chat=False))
        widths.add(encoded[0][0].shape[-1])
        request = SampleRequest(encoded, settings, Randomness(seed=n, step=n, purpose=n % 2), 1, np.arange(1))
        sample_team(team, params, request)
    assert widths == {16, 32, 64}
    assert TRACES["sample"] - before == len(widths)


def test_a_prompt_beyond_the_context_is_an_error_before_anything_runs(pair):
    """125 tokens and 4 new ones in a context of 128: no program is traced and no reward is called."""

    def reward(a, b):
        raise AssertionError("the reward was called")

    before = TRACES.copy()
    items = [ITEMS[0], {"prompt": "x" * 125, "tag": 3}]
    message = r"prompt 1 of agent 0 \('xxx.*has 125 tokens.*max_new_tokens=4 that is 129.*context of 128"
    with pytest.raises(ValueError, match=message):
        play_pair(pair, items=items, reward=reward)
    assert TRACES.copy() == before


def test_the_longest_prompt_that_fits(pair):
    """124 tokens and 4 new ones fill the context of 128 exactly."""
    team, params = pair
    encoded = pad(team, tokenize(team, [["x" * 124], ["y"]], SETTINGS, chat=False))
    assert encoded[0][0].shape == (2, 1, 128) and encoded[0][1].tolist() == [[124], [1]]


# --- evaluation ----------------------------------------------------------------------------------------------------------


def test_evaluation_mean_and_interval(pair):
    """They are over prompts; invalid joint actions and prompts without a valid one count nowhere."""
    team, params = pair
    cfg = TrainConfig.of(max_new_tokens=NEW, eval_generations=GROUP, num_generations=GROUP)
    items = [*ITEMS, {"prompt": "of fruit", "tag": 3}]

    def reward(a, b):  # three prompts of three: means 2, 8 and nothing
        return [1, 2, 3, 7, float("nan"), 9, *[None] * 3]

    with pytest.warns(UserWarning, match="4 of 9 held-out episodes have no valid reward and are in no mean of it; reward "):
        result = evaluate(team, params, items, RewardEnvironment(make_reward(reward, num_agents=2), FORMATTERS), cfg)
    assert (result.episodes, result.invalid) == (9, 4) and "5 of 9 episodes" in repr(result)
    assert result.mean == 5 and result.interval == pytest.approx(12.706205 * np.std([2, 8], ddof=1) / np.sqrt(2))
    assert result.rollout.turns[0].invalid == 4
    none = make_reward(lambda a, b: [None] * len(a), num_agents=2)
    with pytest.warns(UserWarning, match="9 of 9 held-out episodes have no valid reward"):
        nothing = evaluate(team, params, items, RewardEnvironment(none, FORMATTERS), cfg)
    assert np.isnan(nothing.mean) and np.isnan(nothing.interval)


def test_stacked_agents_keep_their_order_and_weights(pair, agents):
    """In float32."""
    for a, agent in enumerate(agents):
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(unstack(pair[1][0], a)), agent.params)
    assert {x.dtype for x in jax.tree.leaves(pair[1])} == {np.dtype("float32")}


@pytest.mark.long
def test_a_batch_has_the_log_probs_of_the_truncated_distribution(pair):
    """importance_cap weighs by them. They are larger than those over the whole vocabulary."""
    got = play_pair(pair, settings=dataclasses.replace(SETTINGS, top_k=5))
    batch, done = to_batches(pair[0], got)[0], got.turns[0].completions[0]
    np.testing.assert_array_equal(batch.truncated_logprobs, done.truncated_logprobs[..., : batch.tokens.shape[-1]])
    assert (batch.truncated_logprobs > batch.old_logprobs + 1e-3).any()


# --- what a run must survive ---------------------------------------------------------------------------------------------


def updated(pair, got, algorithm="grpo", **changes):
    """Return the parameters of a stack before and after one update on a rollout, and its metrics."""
    cfg = TrainConfig.of(algorithm=algorithm, learning_rate=1e-2, num_generations=max(GROUP, 2), **changes)
    state, model = init_stack(jax.tree.map(np.copy, pair[1][0]), resolve(cfg)), pair[0].stacks[0].config
    before = jax.device_get(state.params)
    state, metrics = update_stack(state, to_batches(pair[0], got)[0], model=model, algorithm=resolve(cfg))
    return before, *jax.device_get((state.params, metrics))


def unchanged(before, after):
    return all((x == y).all() for x, y in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True))


def healthy(after, metrics):
    columns = {name: x for name, x in metrics.items() if name != "advantages"}  # infinite where nothing is learned
    finite = all(np.isfinite(x).all() for x in jax.tree.leaves((after, columns)))
    return finite and (metrics["skipped"] == 0).all()


BAD_REWARDS = [float("nan"), float("inf"), -float("inf"), None, "2", 1e308, np.float32("nan"), np.float64(1e308)]


@pytest.mark.long
@pytest.mark.parametrize("bad", BAD_REWARDS, ids=repr)
def test_a_bad_reward_changes_neither_parameters_nor_other_returns(pair, bad):
    """Of one of six joint actions: its return is NaN and counted, all else is finite, and the update learns from the other
    five, which may be NumPy scalars."""
    got = play_pair(pair, reward=lambda a, b: [1.0, bad, np.float32(2), np.int64(3), np.array(5.0), 6])
    assert got.turns[0].invalid == 1 and np.isnan(got.returns[0][:, 0, 1]).all() and np.isfinite(got.returns[0]).sum() == 10
    before, after, metrics = updated(pair, got)
    assert healthy(after, metrics) and (metrics["grad_norm"] > 0).all() and not unchanged(before, after)


@pytest.fixture(scope="module")
def silent(agents):
    """A pair that ends every completion at once: all hidden states point along the first axis, where the end is largest."""
    trees = [agent.params | {"embed": agent.params["embed"].copy()} for agent in agents]
    for tree, agent in zip(trees, agents, strict=True):
        tree["embed"][:, 0] = 1000
        tree["embed"][agent.tokenizer.eos_token_id, 0] = 1003
    return make_team([agent._replace(params=tree) for agent, tree in zip(agents, trees, strict=True)])


@pytest.mark.long
@pytest.mark.parametrize("algorithm", ["magrpo", "dapo", nightly("mareinforce")])
def test_completions_that_end_at_once_are_empty_texts(silent, algorithm):
    """They have one action, the end. Their equal lengths give no gradient, other rewards a finite one."""
    got = play_pair(silent)
    done = got.turns[0].completions[0]
    assert (done.action_mask.sum(-1) == 1).all() and done.ended.all()
    assert {text for agent in got.turns[0].texts for prompt in agent for text in prompt} == {""}
    assert np.isfinite(got.returns[0]).all() and (got.returns[0] == 0).all()
    before, after, metrics = updated(silent, got, algorithm)
    assert healthy(after, metrics) and (metrics["grad_norm"] == 0).all() and unchanged(before, after)
    before, after, metrics = updated(silent, play_pair(silent, reward=lambda a, b: range(len(a))), algorithm)
    assert healthy(after, metrics) and (metrics["grad_norm"] > 0).all() and not unchanged(before, after)


@pytest.mark.long
@pytest.mark.parametrize("algorithm", ["magrpo", "grpo", nightly("marloo"), nightly("dapo")])
def test_equal_rewards_give_no_gradient(pair, algorithm):
    before, after, metrics = updated(pair, play_pair(pair, reward=lambda a, b: [0.1] * len(a)), algorithm)
    assert healthy(after, metrics) and (metrics["grad_norm"] == 0).all() and unchanged(before, after)


@pytest.mark.long
@pytest.mark.parametrize("algorithm", ["magrpo", nightly("grpo")])
def test_a_group_of_one_gives_no_gradient_with_a_group_baseline(pair, algorithm):
    """Without a baseline it does."""
    got = play_pair(pair, group=1)
    before, after, metrics = updated(pair, got, algorithm)
    assert healthy(after, metrics) and (metrics["grad_norm"] == 0).all() and unchanged(before, after)
    before, after, metrics = updated(pair, got, "mareinforce")
    assert healthy(after, metrics) and (metrics["grad_norm"] > 0).all() and not unchanged(before, after)


@pytest.mark.long
def test_masked_rewards_alone_give_no_gradient(pair):
    before, after, metrics = updated(pair, play_pair(pair, reward=lambda a, b: [None] * len(a)))
    assert healthy(after, metrics) and (metrics["grad_norm"] == 0).all() and unchanged(before, after)


def test_joint_actions_on_which_a_reward_raised_are_counted(pair):
    """Also if a number replaces them, in which case `reward/invalid` does not count them."""

    def fails(a, b):
        raise ZeroDivisionError

    for on_error, invalid in (("mask", 6), (0.5, 0)):
        env = RewardEnvironment(make_reward(fails, num_agents=2, on_error=on_error), FORMATTERS)
        got = play_pair(pair, env)
        assert got.notes["reward/raised"] == 6 and got.turns[0].invalid == invalid
    assert "reward/raised" not in play_pair(pair).notes
