"""Dynamic sampling: which prompts are replaced, what the new batches hold, and that resuming is exact."""

from __future__ import annotations

import functools
import json

import jax
import numpy as np
import pytest

from jmarl.algorithms import resolve
from jmarl.config import TrainConfig
from jmarl.envs.reward_environment import RewardEnvironment
from jmarl.envs.rewards import make_reward
from jmarl.models.stack import unstack
from jmarl.randomness import tasks_of
from jmarl.rl.returns import discounted
from jmarl.rollout.dynamic_sampling import further_items, informative, select
from jmarl.rollout.make_batches import to_batches
from jmarl.rollout.turns import Rollout
from jmarl.runs.kinds.rollouts import play_step, sampler_of
from jmarl.runs.start import start
from jmarl.runs.train import train
from jmarl.team import Team, make_team
from jmarl.types import TRACES
from tests.batches import loss_inputs
from tests.house import HOUSE
from tests.rollout.scored import assert_sampled_logprobs_are_those_of_scoring

BASE = TrainConfig.of(**HOUSE, mesh="agent=1")
# All of a bucket, and so are the prompts of second turns: batches of any of them need the same programs.
ITEMS = [{"prompt": text} for text in ("flat The", "three pears", "flat a", "market", "flat b", "question")]


@pytest.fixture(scope="module")
def agents(tiny_config, tiny_tokenizer, random_agent):
    return [random_agent(tiny_config(), tiny_tokenizer, seed) for seed in range(2)]


def teaches(a, b, prompts):
    """Return equal rewards on items that begin with flat, and else the mean of the characters, which hardly two texts share."""
    pairs = zip(a, b, prompts, strict=True)
    return [1.0 if prompt.startswith("flat") else np.mean([ord(c) / 100 for c in x + y + "a"]) for x, y, prompt in pairs]


def answer(agent_completions, **_):
    return [f"seven apples and three pears {text}" for text in agent_completions[::-1]]


def environment(cfg, reward=teaches):
    return RewardEnvironment(
        make_reward(reward, num_agents=2), [lambda item: item["prompt"]] * 2, answer if cfg.episodes.num_turns > 1 else None
    )


def run(agents, reward=teaches, items=ITEMS, **changes):
    cfg = BASE.replace(**changes)
    return jax.device_get(train(Team.of(agents), environment(cfg, reward), items, cfg).state)


def rows_of(directory):
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def played_on(agents, tasks, further, shared_weights=False, reward=teaches, **changes):
    cfg = BASE.replace(**changes)
    team, params = make_team(agents, shared_weights)
    setup, state = start(team, params, cfg)
    rollout = play_step(sampler_of(setup, state), setup, tasks, environment(cfg, reward), 0, lambda draw: further[draw - 1])
    return team, params, rollout


# --- which prompts -------------------------------------------------------------------------------------------------------


def test_items_of_further_rounds_follow_from_seed_and_step():
    """Items that the step does not have come first, each once; then the step's own items."""
    rounds = [further_items(5, draw, [3, 1], 7, seed=2) for draw in (1, 2, 3, 4)]
    assert sorted(sum(rounds, [])[:5]) == [0, 2, 4, 5, 6] and sorted(sum(rounds, [])[5:7]) == [1, 3]
    assert rounds == [further_items(5, draw, [3, 1], 7, seed=2) for draw in (1, 2, 3, 4)]
    for step, seed in ((6, 2), (5, 3)):
        assert rounds != [further_items(step, draw, [3, 1], 7, seed) for draw in (1, 2, 3, 4)]
    assert [further_items(5, draw, [0], 30, seed=2)[0] for draw in range(1, 30)] != [i for i in tasks_of(5, 30, 30, 2) if i]
    assert further_items(0, 1, [0, 1], 2, seed=0) in ([0, 1], [1, 0]), "nothing else in the data set"


def test_a_prompt_is_informative_if_its_advantages_are_not_all_zero(agents):
    """Compare `informative` with the advantages of the batch, with group and episode baselines.

    Invalid rewards count nowhere.
    """
    returns = np.zeros((2, 5, 3))
    returns[1, 0, 0] = returns[0, 2, 0] = 1e-3  # of one agent
    returns[:, 1] = [0.1, 0.1, 0.1 + 1e-7]  # equal
    returns[:, 3] = np.nan
    returns[:, 4] = [0.5, np.nan, 0.5]
    _, _, played = played_on(agents, ITEMS[:2], [])
    played = played._replace(turns=(played.turns[0]._replace(items=np.arange(5)),), returns=(returns,))
    assert informative(played, "turn").tolist() == [True, False, True, False, False]
    for grouping, expected in (("turn", [False] * 5), ("episode", [True, False, False, False, False])):
        turn_returns = np.zeros((2, 5, 3)), np.zeros((2, 5, 3))
        turn_returns[1][:, 0] = 1.0  # another return in the second turn
        two = played._replace(turns=played.turns * 2, returns=turn_returns)
        assert informative(two, grouping).tolist() == expected


def test_nodes_of_a_tree_are_separate_groups_and_rows_of_chains_are_not(agents):
    """Item 1 continues with two nodes, of returns 0 and 1."""
    _, _, played = played_on(agents, ITEMS[:2], [])
    later = played.turns[0]._replace(items=np.array([0, 1, 1]))
    for group, expected in ((3, [False, False]), (1, [False, True])):
        second = np.broadcast_to([[0.0], [0.0], [1.0]], (2, 3, group))
        two = played._replace(turns=(played.turns[0], later), returns=(np.zeros((2, 2, 3)), second))
        assert informative(two, "turn").tolist() == expected


@pytest.mark.long
def test_equal_returns_give_zero_advantages(agents):
    """The fact behind the method: zero variance in a group is an advantage of exactly 0 for its rows, and for no others."""
    rows = {name: resolve(BASE.replace(algorithm=name)) for name in ("magrpo", "marloo", "maremax", "dapo")}
    team, params, played = played_on(agents, ITEMS[:2], [])
    running = unstack(start(team, params, BASE)[1].stacks[0].running, 0)

    @jax.jit
    def results(batch):
        inputs = {name: loss_inputs(batch, running, agents[0].config, row) for name, row in rows.items()}
        return {name: (x.targets.advantages, metrics["zero_variance_share"]) for name, (x, metrics) in inputs.items()}

    for name, (advantages, share) in jax.device_get(results(unstack(to_batches(team, played)[0], 0))).items():
        assert (advantages[0] == 0).all() and np.abs(advantages[1]).max() > 0.1, name
        assert share == 0.5 or name == "dapo", "dapo leaves overlong rows out of the share"


# --- what is put together --------------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, marks=pytest.mark.nightly),  # the first turn of the next case
        {"num_turns": 2},
        {"num_turns": 2, "history": "append", "branching": "chain", "algorithm": "dr_mas", "gamma": 0.0},
        {"num_turns": 2, "joint_mode": "cross", "early_termination_threshold": 1.4},
        {"shared_weights": True, "num_turns": 2},
    ],
    ids=str,
)
def test_replaced_prompts_bring_their_rows_returns_and_texts(agents, changes):
    """Scoring every row of the batch gives the log-probabilities of the sampler, so prompt, history, tokens and
    log-probabilities belong together. The flat item is gone, returns are those of the rewards over the new tree, and texts are
    the decoded tokens."""
    agents = agents[:1] * 2 if "shared_weights" in changes else agents
    further = [[ITEMS[0], ITEMS[2]], [ITEMS[4], {"prompt": "a much longer prompt of seven words"}]]
    team, params, played = played_on(agents, [ITEMS[0], ITEMS[1]], further, dynamic_sampling=3, **changes)
    assert played.notes["dynamic/replaced"] == 0.5 and played.notes["dynamic/rounds"] == 2
    assert played.turns[0].prompts == [["a much longer prompt of seven words", ITEMS[1]["prompt"]]] * 2
    expected = discounted(
        [turn.rewards for turn in played.turns], [turn.parents for turn in played.turns], changes.get("gamma", 1.0)
    )
    jax.tree.map(np.testing.assert_array_equal, expected, list(played.joint_returns))
    assert_sampled_logprobs_are_those_of_scoring(team, params, to_batches(team, played))
    decode = functools.partial(agents[0].tokenizer.decode, skip_special_tokens=True)
    for turn in played.turns:
        done, (ids, lengths) = turn.completions[0], turn.encoded[0]
        shape = (2, -1)
        tokens, mask = (np.asarray(x).reshape(*shape, *x.shape[2:]) for x in (done.tokens, done.action_mask))
        ids, lengths = ids.reshape(*shape, ids.shape[-1]), lengths.reshape(shape)
        for n, p in np.ndindex(2, len(turn.items)):
            assert [decode(row[m]) for row, m in zip(tokens[n, p], mask[n, p], strict=True)] == turn.texts[n][p]
            assert decode(ids[n, p, : lengths[n, p]]).endswith(turn.prompts[n][p])


@pytest.mark.long
def test_empty_places_are_filled_in_order(agents):
    """A round replaces the first of two prompts that are not informative, or both."""
    for further, expected in (((0, 3), (3, 2)), ((3, 1), (3, 1))):
        tasks, others = [[ITEMS[k] for k in numbers] for numbers in ((0, 2), further)]
        _, _, played = played_on(agents, tasks, [others], dynamic_sampling=1)
        assert played.turns[0].prompts[0] == [ITEMS[k]["prompt"] for k in expected]
        assert played.notes["dynamic/replaced"] == (0.5 if further == (0, 3) else 1) and played.notes["dynamic/rounds"] == 1


def test_select_keeps_which_agents_act(agents):
    team, _, played = played_on(agents, ITEMS[:2], [])
    turn = played.turns[0]._replace(acts=np.array([[True, True], [True, False]]))
    swapped = select(team, [played._replace(turns=(turn,))], [(0, 1), (0, 0)])
    assert swapped.turns[0].acts.tolist() == [[True, True], [False, True]]


def test_select_joins_an_episode_that_ended_and_one_that_continues(agents):
    team, _, played = played_on(agents, ITEMS[:2], [], num_turns=2)
    done = played.turns[0].completions[0]
    short = played.turns[0]._replace(completions=(done._replace(steps=done.steps - 1),))
    over = Rollout(2, (short,), played.joint_returns[:1], played.returns[:1])
    before, after = select(team, [played, over], [(1, 1), (0, 1)]).turns
    np.testing.assert_array_equal(before.completions[0].steps, done.steps)
    assert before.texts[0] == [played.turns[0].texts[0][1]] * 2
    assert after.items.tolist() == [1] * 3 and after.parents.tolist() == [3, 4, 5]
    assert after.texts == [texts[3:] for texts in played.turns[1].texts]


def test_selecting_all_items_of_a_rollout_returns_it_unchanged(agents):
    """All items of one of two rollouts, in order: every array is equal, padding included, and so is the fault of the reward."""

    def spoiled(a, b, prompts):
        return [x if k % 6 else float("nan") for k, x in enumerate(teaches(a, b, prompts))]

    team, _, played = played_on(agents, ITEMS[:2], [], num_turns=2, reward=spoiled)
    played = played._replace(returns=tuple(x * np.array([1, 2])[:, None, None] for x in played.returns))
    assert [turn.invalid for turn in played.turns] == [1, 3] and "nan" in played.turns[0].fault
    other = played._replace(turns=tuple(turn._replace(fault="another") for turn in played.turns))
    selected = select(team, [other, played], [(1, 0), (1, 1)])
    for before, same in zip(played.turns, selected.turns, strict=True):
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(same), jax.device_get(before))
    assert isinstance(selected, Rollout)
    jax.tree.map(
        np.testing.assert_array_equal, (selected.returns, selected.joint_returns), (played.returns, played.joint_returns)
    )


# --- whole runs ------------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_informative_prompts_are_not_replaced(agents):
    items = ITEMS[1::2]
    jax.tree.map(np.testing.assert_array_equal, run(agents, items=items, dynamic_sampling=2), run(agents, items=items))


@pytest.mark.long
def test_without_an_informative_prompt_the_first_prompts_stay(agents, tmp_path):
    """Two rounds find none; the update of the first prompts changes nothing."""
    before = jax.device_get(make_team(agents)[1][0])
    after = run(agents, items=ITEMS[::2], dynamic_sampling=2, output_dir=str(tmp_path))
    jax.tree.map(np.testing.assert_array_equal, after.stacks[0].params, before)
    rows = rows_of(tmp_path)
    assert [(row["dynamic/replaced"], row["dynamic/rounds"]) for row in rows] == [(0, 2)] * 2
    run(agents, items=ITEMS[::2], output_dir=str(tmp_path / "once"))
    for row, once in zip(rows, rows_of(tmp_path / "once"), strict=True):
        assert row["prefilled_tokens"] > 2 * once["prefilled_tokens"], "prompts of all three rounds are counted"


@pytest.mark.long
def test_no_group_of_an_update_has_zero_variance(agents, tmp_path):
    """Half of the items are flat: without dynamic sampling some updates have groups of equal returns, with it none.

    It compiles no program.
    """
    run(agents, num_updates=3, output_dir=str(tmp_path / "without"))
    compiled = TRACES["sample"]
    run(agents, num_updates=3, dynamic_sampling=4, output_dir=str(tmp_path / "with"))
    assert TRACES["sample"] == compiled
    shares = {name: [row["agent_0/zero_variance_share"] for row in rows_of(tmp_path / name)] for name in ("without", "with")}
    assert max(shares["without"]) > 0 and shares["with"] == [0, 0, 0]
    rows = rows_of(tmp_path / "with")
    assert "dynamic/replaced" not in rows_of(tmp_path / "without")[0]
    assert [row["dynamic/replaced"] for row in rows] == shares["without"]
    assert all(row["dynamic/rounds"] >= 1 for row in rows if row["dynamic/replaced"])
    assert any(row["dynamic/return"] != row["reward/mean"] for row in rows), "what was left out is told"


@pytest.mark.long
def test_a_resumed_run_is_bit_equal(agents, tmp_path):
    common = dict(num_updates=4, save_every=2, dynamic_sampling=2)
    whole = run(agents, **common, output_dir=str(tmp_path / "whole"))
    run(agents, **common | {"num_updates": 2}, output_dir=str(tmp_path / "parts"))
    parts = run(agents, **common, output_dir=str(tmp_path / "parts"), resume=True)
    jax.tree.map(np.testing.assert_array_equal, parts, whole)
    assert [row["dynamic/replaced"] for row in rows_of(tmp_path / "parts")] == [
        row["dynamic/replaced"] for row in rows_of(tmp_path / "whole")
    ]


def test_algorithms_without_a_group_baseline_refuse_it(agents):
    for algorithm in ("mareinforce", "remax", "rae", "iac", "maac", "ippo", "mappo"):
        message = f"dynamic_sampling=1 has no effect for algorithm='{algorithm}'.* it is for magrpo"
        with pytest.raises(ValueError, match=message):
            run(agents, dynamic_sampling=1, algorithm=algorithm)


def test_a_negative_number_of_rounds_is_refused():
    with pytest.raises(ValueError, match=r"dynamic_sampling=-1 is not allowed: dynamic_sampling must be >= 0 \(0 is off\)"):
        BASE.replace(dynamic_sampling=-1)


@pytest.mark.long
@pytest.mark.parametrize(("num_turns", "first", "mean"), [(1, 0, 1), (2, 0 + 1, (1 + 5 + 9) / 3)])
def test_the_mean_return_of_all_rounds_is_logged(agents, tmp_path, num_turns, first, mean):
    """Three rounds whose turns have the rewards 0, 1, 2, ... for all completions: none is informative.

    They play the same items with new random numbers.
    """
    texts = []

    def reward(a, b):
        texts.append(tuple(a))
        return [len(texts) - 1.0] * len(a)

    few = dict(num_updates=1, num_turns=num_turns, dynamic_sampling=2, output_dir=str(tmp_path))
    run(agents, reward, items=ITEMS[:2], **few)
    (row,) = rows_of(tmp_path)
    assert len(texts) == 3 * num_turns and (row["reward/mean"], row["dynamic/return"]) == (first, mean)
    first_turns = [set(round_texts) for round_texts in texts[::num_turns]]
    assert not first_turns[0] & first_turns[1] and not first_turns[1] & first_turns[2] and not first_turns[2] & first_turns[0]
