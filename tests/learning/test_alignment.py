"""Advantage alignment: what it adds to advantages, in a game by hand and in a run, and what it is refused for."""

from __future__ import annotations

from types import SimpleNamespace

import jax
import numpy as np
import pytest

from jmarl.algorithms import AlgorithmRow, resolve
from jmarl.config import TrainConfig
from jmarl.envs.base import Step, TextEnvironment
from jmarl.envs.vector import vectorize
from jmarl.models.stack import unstack
from jmarl.rl.advantages import alignment
from jmarl.rl.losses import policy_gradient
from jmarl.rl.returns import discounted
from jmarl.rollout.make_batches import added_to_advantages, rollout_batches
from jmarl.rollout.turns import Rollout
from jmarl.runs.checks import check_settings
from jmarl.runs.kinds.rollouts import play_step, sampler_of
from jmarl.runs.start import start
from jmarl.runs.train import train
from tests.batches import loss_inputs
from tests.house import HOUSE
from tests.runs.training_process import ITEMS, WORDS, tiny_team

TURNS = dict(num_turns=2, branching="chain", gamma=0.5)
BASE = TrainConfig.of(**HOUSE, **TURNS, algorithm="adalign", align_coef=2.0, adam_eps=1e-4)


class Trade(TextEnvironment):
    """Two agents give each other the length of what they write; episodes end at different times."""

    roles, reward_range, max_turns = ("first", "second"), (-99.0, 99.0), 2

    def __init__(self, in_turns: bool = False):
        self.in_turns = in_turns

    def reset(self, task, rng):
        return (0, task["prompt"]), self.prompts(0, task["prompt"])

    def prompts(self, turn, text):
        return [None if self.in_turns and turn % 2 != n else f"{text} {WORDS[n]}" for n in range(2)]

    def step(self, state, messages, rng):
        (turn, text), (a, b) = state, map(len, messages)
        done = turn == 1 or (a + b) % 5 == 0
        return Step((turn + 1, text), self.prompts(turn + 1, text), [b - a / 2, a - b / 2], done)


def dilemma(*games, gamma=0.5, parents=None):
    """The rollout of one task: `games` are episodes, each with the choices of both agents in all rounds."""
    payoffs = {"CC": (3, 3), "DD": (1, 1), "DC": (5, 0), "CD": (0, 5)}
    first = np.array([[payoffs[game[0]] for game in games]], float)  # [1, G, 2]
    parents = list(range(len(games))) if parents is None else parents
    second = np.array([[payoffs[games[g][1]]] for g in parents], float)  # [G, 1, 2]
    returns = discounted([first, second], [np.zeros(1, int), np.array(parents)], gamma)
    turns = [
        SimpleNamespace(parents=np.array(x), items=np.zeros(len(x), int), group_size=g)
        for x, g in (([0], len(games)), (parents, 1))
    ]
    return Rollout(2, turns, tuple(returns), ())


def added(rollout, coef, gamma=0.5):
    algorithm = resolve(TrainConfig.of(algorithm="adalign", align_coef=coef, num_turns=2, branching="chain"))
    return [x.tolist() for x in added_to_advantages(algorithm, rollout, gamma)]


def test_two_rounds_of_the_dilemma_by_hand():
    """With gamma 1/2: returns of CC CC are 4.5 and 3 for both, those of DC CD 5 and 0, and 2.5 and 5. Against the other
    episode, A is -1/2, 3 and 2, -2 in the first, and the opposite in the second. So 2 (1/2 A_0) A'_1 is 1, 1 and 6, 6."""
    first, second = added(dilemma(["CC", "CC"], ["DC", "CD"]), coef=2.0)
    assert first == [[[0, 0]], [[0, 0]]] and second == [[[1], [1]], [[6], [6]]]
    assert added(dilemma(["CC", "CC"], ["DC", "CD"]), coef=0.0)[1] == [[[0], [0]], [[0], [0]]]


def test_nodes_of_later_turns_may_have_any_order():
    games = ["CC", "CD"], ["DC", "DD"], ["DD", "DD"]
    _, in_order = added(dilemma(*games), 1.0)
    _, mixed = added(dilemma(*games, parents=[2, 0, 1]), 1.0)
    assert mixed == [[row[2], row[0], row[1]] for row in in_order] and np.ptp(in_order) > 1


def test_the_past_is_discounted_by_its_distance():
    terms = alignment(np.array([[1.0, 2.0, 4.0], [1.0, 1.0, 1.0]]), gamma=0.5, coef=1.0)
    np.testing.assert_allclose(terms, [[0, 0.5, 1.25], [0, 1.0, 3.0]])
    np.testing.assert_allclose(alignment(np.ones((2, 3)), gamma=1.0, coef=3.0), [[0, 3, 6]] * 2)
    assert not alignment(np.ones((2, 3)), gamma=0.0, coef=1.0).any()


def by_hand(rollout, gamma, coef):
    """A + the term of each completion, per turn [N, P, G], by loops over the episodes; NaN where its agent does not act."""
    items, group, agents = rollout.joint_returns[0].shape
    values, place = {}, [{(p, g): (p, g) for p in range(items) for g in range(group)}]
    for t, turn in enumerate(rollout.turns[1:], 1):
        before = [(p, j) for p in range(len(rollout.turns[t - 1].items)) for j in range(len(rollout.turns[t - 1].joint))]
        place.append({(p, 0): place[-1][before[parent]] for p, parent in enumerate(turn.parents)})
    for t, returns in enumerate(rollout.joint_returns):
        episodes = {place[t][p, j]: returns[p, j] for p, j in np.ndindex(returns.shape[:2])}
        for (item, g), own in episodes.items():
            others = [x for (other, h), x in episodes.items() if other == item and h != g]
            values[t, item, g] = own - np.mean(others, 0) if others else 0 * own
    expected = [np.full(x.shape, np.nan) for x in rollout.returns]
    for t, turn in enumerate(rollout.turns):
        for (p, j), (item, g) in place[t].items():
            past = sum(gamma ** (t - k) * values[k, item, g] for k in range(t)) + np.zeros(agents)
            for n in np.flatnonzero(turn.acts[:, p]):
                expected[t][n, p, j] = values[t, item, g][n] + coef * past[n] * values[t, item, g][1 - n]
    return expected


@pytest.fixture(scope="module", params=[False, pytest.param(True, marks=pytest.mark.nightly)], ids=["at once", "in turns"])
def played(request):
    """The setup, its state and the rollout of a step of two turns."""
    team, params = tiny_team()
    setup, state = start(team, params, BASE)
    rollout = play_step(sampler_of(setup, state), setup, ITEMS[:2], vectorize(Trade(request.param)), 0)
    assert len({turn.rewards[..., 0].size for turn in rollout.turns}) > 1
    return setup, state, rollout


def advantages_of(played, **changes):
    """The advantages [P, G, T] of each agent in the loss, and its rows with a return."""
    setup, state, rollout = played
    algorithm = resolve(BASE.replace(**changes))
    (batch,) = jax.device_get(rollout_batches(setup._replace(algorithm=algorithm), state, rollout)).stacks
    model, running = setup.team.stacks[0].config, state.stacks[0].running
    inputs = [loss_inputs(unstack(batch, n), unstack(running, n), model, algorithm)[0] for n in range(2)]
    return [np.asarray(x.targets.advantages)[..., 0][np.isfinite(batch.rewards[n])] for n, x in enumerate(inputs)]


@pytest.mark.long
def test_the_loss_weights_completions_by_the_formula(played):
    """Both agents act at once, or one after the other; episodes end at different times. An agent that does not act in a turn
    has an advantage there, too."""
    expected = by_hand(played[2], 0.5, 2.0)
    for n, values in enumerate(advantages_of(played)):
        wanted = np.concatenate([x[n].ravel() for x in expected])
        np.testing.assert_allclose(np.sort(values), np.sort(wanted[np.isfinite(wanted)]), rtol=1e-4, atol=1e-4)


@pytest.mark.long
def test_without_its_weight_it_is_marloo(played):
    """Bit for bit."""
    marloo, off, on = (
        np.concatenate(advantages_of(played, **changes))
        for changes in (dict(algorithm="marloo", align_coef=None), dict(align_coef=0.0), dict(align_coef=2.0))
    )
    np.testing.assert_array_equal(marloo, off)
    assert np.abs(on - off).max() > 1


@pytest.mark.parametrize(
    "changes, message",
    [
        (
            dict(branching="tree"),
            "branching='tree' does not go with algorithm='adalign' over several turns.*set branching=chain",
        ),
        (
            dict(joint_mode="counterfactual"),
            "joint_mode='counterfactual' does not go with algorithm='adalign' over several turns",
        ),
        (dict(advantage_scale="std"), "advantage_scale='std' does not go with algorithm='adalign'.*products of advantages"),
        (dict(num_generations=1), "num_generations=1 is too small for algorithm='adalign'"),
        (dict(algorithm="marloo"), "align_coef=2.0 has no effect for algorithm='marloo'; it is for adalign"),
        (dict(algorithm="dpo"), "align_coef=2.0 has no effect for algorithm='dpo'|learns from given data"),
    ],
)
def test_settings_that_do_not_fit_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        check_settings(BASE.replace(**changes))


@pytest.mark.parametrize("fields", [dict(baseline="ema"), dict(critic="own"), dict(grouping="episode")])
def test_rows_with_another_baseline_cannot_have_it(fields):
    with pytest.raises(ValueError, match="across_turns must be None beside a baseline, critic or grouping"):
        AlgorithmRow(policy_gradient, across_turns=alignment, **fields)


def test_another_number_of_agents_is_refused():
    team, params = tiny_team(count=3)
    with pytest.raises(ValueError, match="algorithm='adalign' is for two agents.*this team has 3"):
        train(team, Trade(), ITEMS[:2], BASE, params=params)
