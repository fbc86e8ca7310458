"""The influence of messages: by the public scoring function, exactly 0 where nobody can listen, and in a run's log."""

from __future__ import annotations

import json
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from jmarl.config import TrainConfig
from jmarl.envs.base import Step, TextEnvironment
from jmarl.envs.vector import vectorize
from jmarl.league.talk import SwappedMessages, fault_of_messages, influence_of_agents, influences, siblings, swap_loss
from jmarl.models.stack import unstack
from jmarl.runs.checks import check_seeds, check_settings
from jmarl.runs.kinds.rollouts import params_of, play_step, sampler_of
from jmarl.runs.start import start
from jmarl.runs.train import train
from jmarl.sampling.scoring import score
from tests.house import HOUSE
from tests.runs.training_process import ITEMS, tiny_team

BASE = TrainConfig.of(**HOUSE, num_turns=2, algorithm="magrpo", talk_every=2, talk_swap=True)


class Whisper(TextEnvironment):
    """The first agent writes a message; the second one reads it, unless it is deaf, and answers."""

    roles, reward_range, max_turns = ("speaker", "listener"), (0.0, 99.0), 2

    def __init__(self, deaf: bool = False):
        self.deaf = deaf

    def reset(self, task, rng):
        return (0, task["prompt"]), [task["prompt"], None]

    def step(self, state, messages, rng):
        turn, prompt = state
        text = prompt if self.deaf else f"{prompt} {messages[0]}"
        return Step((1, prompt), [None, text], float(len(messages[1])), turn == 1)


def played(deaf=False):
    """The setup of a step, its parameters and its rollout."""
    team, params = tiny_team()
    setup, state = start(team, params, BASE)
    rollout = play_step(sampler_of(setup, state), setup, ITEMS[:2], vectorize(Whisper(deaf)), 0)
    return setup, params_of(state), rollout


@pytest.fixture(scope="module")
def told():
    return played()


@pytest.mark.long
def test_influence_is_a_difference_of_scored_logprobs(told):
    """Each of 3 completions of a listener, under its message and under the 2 others of the same item."""
    setup, params, rollout = told
    before, turn = rollout.turns
    spec, weights = setup.team.stacks[0], unstack(params[0], 1)
    tokens, mask = (np.asarray(x)[1].reshape(18, -1) for x in (turn.completions[0].tokens, turn.completions[0].action_mask))
    rows = [spec.tokenizer(prompt)["input_ids"] for prompt in turn.prompts[1]]
    ids = np.array([[*row, *[0] * (32 - len(row))] for row in rows])
    scored = score(weights, spec.config, ids, np.array([*map(len, rows)]), np.broadcast_to(tokens, (6, *tokens.shape)))
    logprobs = np.where(mask, scored.logprobs, 0).sum(-1).reshape(6, 6, 3)  # of the message of node q, completions of node p
    expected = np.zeros((6, 3))
    for p, g in np.ndindex(6, 3):
        others = [logprobs[q, p, g] for q in range(6) if q // 3 == p // 3 and q != p]
        expected[p, g] = logprobs[p, p, g] - np.log(np.mean(np.exp(others)))
    assert turn.items.tolist() == [0, 0, 0, 1, 1, 1] and np.abs(expected).max() > 1e-3
    influence = influences(setup, params, turn, siblings(before, turn))
    np.testing.assert_allclose(influence[1], expected, atol=2e-5)
    assert influence_of_agents(setup, params, rollout) == {"talk/agent_1/influence": pytest.approx(expected.mean(), abs=1e-5)}


@pytest.mark.long
def test_where_the_listener_is_deaf_influence_is_exactly_0():
    assert influence_of_agents(*played(deaf=True)) == {"talk/agent_1/influence": 0.0}


@pytest.mark.long
def test_equal_messages_have_exactly_no_influence(told):
    """Beside others, which do."""
    setup, params, rollout = told
    before, turn = rollout.turns
    [(ids, lengths)], nodes = turn.encoded, np.array([0, 0, 0, 3, 4, 5])
    turn = turn._replace(encoded=((np.asarray(ids)[:, nodes], np.asarray(lengths)[:, nodes]),))
    influence = influences(setup, params, turn, siblings(before, turn))[1]
    assert not influence[:3].any() and influence[3:].all()


class Recorded:
    """Keeps what it was given."""

    def reset(self, items, rng):
        return items, [[item["prompt"] for item in items]] * 2

    def step(self, states, actions, rng):
        self.read = [list(row) for row in actions]


def test_first_messages_are_read_on_the_next_task():
    """Three tasks with a group of two; later turns are as they were written."""
    env = SwappedMessages(recorded := Recorded())
    states, _ = env.reset([{"prompt": text} for text in "abc"], None)
    for expected in ("efabcd", "abcdef"):
        env.step([state for state in states for _ in range(2)], ["abcdef", "ABCDEF"], None)
        assert ["".join(row) for row in recorded.read] == [expected, expected.upper()]


def test_the_swap_loss_is_what_the_mean_return_falls_by():
    def rollout(returns, rewards=0.0):
        turn = SimpleNamespace(rewards=np.array([[[rewards, np.nan]]]))
        return SimpleNamespace(turns=[turn, turn], joint_returns=[np.array(returns)])

    assert swap_loss(rollout([1.0, 3.0, np.nan]), Recorded(), lambda env: rollout([0.5, 0.0])) == 1.75
    assert fault_of_messages(rollout([1.0])) == "" and "earns rewards" in fault_of_messages(rollout([1.0], rewards=1.0))
    assert fault_of_messages(SimpleNamespace(turns=[None])) == "ends all episodes"


def test_siblings_follow_one_node_of_a_tree_or_one_item_of_chains():
    before = SimpleNamespace(joint=np.zeros((2, 2)))
    tree = SimpleNamespace(items=np.zeros(5, int), parents=np.array([0, 1, 2, 4, 5]), group_size=2)
    assert siblings(before, tree).tolist() == [[1], [0], [-1], [4], [3]]
    chains = SimpleNamespace(items=np.array([1, 0, 1, 1]), parents=np.arange(4), group_size=1)
    assert siblings(before, chains).tolist() == [[2, 3], [-1, -1], [0, 3], [0, 2]]


@pytest.mark.long
def test_a_run_logs_it_every_second_update_and_learns_the_same(tmp_path):
    results = {}
    for name, changes in {"on": {}, "off": dict(talk_every=0, talk_swap=False)}.items():
        team, params = tiny_team()
        cfg = BASE.replace(output_dir=str(tmp_path / name), save_every=0, save_models=False, tensorboard=False, **changes)
        results[name] = jax.device_get(train(team, Whisper(), ITEMS[:2], cfg, params=params).state.stacks[0].params)
        rows = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
        assert ["talk/agent_1/influence" in row for row in rows] == [name == "on", False]
        assert ["talk/swap_loss" in row for row in rows] == [name == "on", False]
        assert not any("talk/agent_0/influence" in row for row in rows)
    assert jax.tree.all(jax.tree.map(np.array_equal, *results.values()))


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(num_turns=1), "num_turns=1 does not go with talk_every=2: nobody reads what another wrote"),
        (dict(num_generations=1), "num_generations must be 2 or more where talk_every=2, which compares the messages"),
        (dict(history="append"), "history must be none where talk_every=2, where agents would read their own words again"),
        (dict(joint_mode="cross"), "joint_mode must be aligned where talk_every=2"),
        (dict(num_prompts=1), "num_prompts must be 2 or more where talk_swap=True, which exchanges messages between"),
        (dict(sample_parts=2), "sample_parts must be 1 where talk_swap=True"),
        (dict(dynamic_sampling=1), "dynamic_sampling must be 0 where talk_swap=True"),
        (dict(snapshots=1), r"talk_swap=True does not go with a league \(snapshots=1"),
        (dict(talk_every=0), "talk_swap must be False where talk_every=0"),
        (dict(algorithm="madpo", num_turns=1), "talk_every=2 has no effect for algorithm='madpo'"),
    ],
)
def test_settings_that_do_not_fit_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        check_settings(BASE.replace(**changes))


def test_several_seeds_are_refused():
    with pytest.raises(ValueError, match="talk_every=2 is for one seed in a program"):
        check_seeds([0, 1], BASE)
