"""Leagues: who sits where, what is learned from, which slots are met, and runs that resume."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from jmarl.config import TrainConfig
from jmarl.envs.base import Step, TextEnvironment
from jmarl.envs.vector import vectorize
from jmarl.files.checkpoint import saved_steps
from jmarl.league.choice import probabilities, win_rates
from jmarl.league.league import LeagueSampler, empty_slots
from jmarl.league.ratings import Crosstable
from jmarl.league.seats import Seated, Seating, players_of
from jmarl.logs.completions_file import read_completions
from jmarl.randomness import LEAGUE as LEAGUE_NUMBERS
from jmarl.randomness import Randomness
from jmarl.runs.checks import check_settings
from jmarl.runs.start import start
from jmarl.runs.train import train
from jmarl.sampling.generate import SampleRequest, pad, sample_team, texts_of, tokenize, tokens_of
from tests.house import HOUSE
from tests.running import ROOT
from tests.runs.training_process import WORDS, tiny_team

LEAGUE = dict(snapshots=2, every=2, share=0.5)
NASH = LEAGUE | dict(sample="nash")
STRANGER = "tests.league.test_league:tells"
WITH_STRANGER = LEAGUE | dict(strangers=[STRANGER])
BASE = HOUSE | dict(num_updates=5, num_prompts=4, num_generations=3, max_new_tokens=4, learning_rate=1e-2)


class Duel(TextEnvironment):
    """Two agents write at once, or one after the other; the longer text wins."""

    roles, reward_range = ("first", "second"), (-1.0, 1.0)

    def __init__(self, in_turns: bool = False):
        self.in_turns, self.max_turns = in_turns, 2 if in_turns else 1

    def tasks(self, split="train", count=100, seed=0):
        return [{"prompt": f"{a} {b}"} for a in WORDS[:4] for b in WORDS[4:]][:count]

    def reset(self, task, rng):
        return (task["prompt"], ""), [task["prompt"], None if self.in_turns else task["prompt"]]

    def step(self, state, messages, rng):
        prompt, first = state
        if self.in_turns and not first:
            return Step((prompt, messages[0] or " "), [None, f"{prompt} {messages[0]}"], [0, 0], False)
        texts = [first if self.in_turns else messages[0], messages[1]]
        result = float(np.sign(len(texts[0]) - len(texts[1])))
        return Step(state, ["", ""], [result, -result], True)


def tells(prompt):
    """A stranger."""
    return f"{prompt} two"


def run(in_turns=False, directory=None, league=LEAGUE, **fields):
    env = Duel(in_turns)
    turns = dict(num_turns=2, branching="chain") if in_turns else {}
    cfg = TrainConfig.of(**{**BASE, **turns, "output_dir": directory and str(directory), **fields}, league=league)
    team, params = tiny_team()
    return train(team, env, env.tasks(count=8), cfg, params=params)


def records(directory):
    return [record for record in read_completions(directory / "completions.jsonl.gz") if record["kind"] == "train"]


def met_of(record):
    """Return what a record says of the opponents of its episodes."""
    return [task["league"] for task in record["tasks"] if "league" in task]


def rows(directory):
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run over two turns, with slots and a stranger, and its directory."""
    directory = tmp_path_factory.mktemp("league")
    return run(True, directory, WITH_STRANGER, save_every=1, save_total_limit=10), directory


def test_players_sit_where_the_seats_say():
    """Each node is read by one player for each agent that acts; what the opponent writes is what the environment reads."""
    seats, env = [Seating(-1), Seating(0, 1), Seating(1, 0)], RecordingDuel()
    seated = Seated(env, [seat.holders(2, seat.opponent + 1) for seat in seats], 2, 3)
    states, prompts = seated.reset([{"prompt": text} for text in "abc"], np.random.default_rng(0))
    assert prompts == [["a", "b", None], ["a", None, "c"], [None] * 3, [None, "b", None], [None, None, "c"], [None] * 3]
    actions = [[f"{player}{b}" for b in range(3)] for player in range(6)]
    seated.step(states, actions, np.random.default_rng(0))
    assert env.read == [["00", "01", "42"], ["10", "31", "12"]]


class RecordingDuel:
    """Keeps what it was given."""

    def reset(self, items, rng):
        return items, [[item["prompt"] for item in items]] * 2

    def step(self, states, actions, rng):
        self.read = [list(row) for row in actions]
        return vectorize(Duel()).step([(state["prompt"], "") for state in states], actions, rng)

    def observe(self, after):
        raise AssertionError("the episodes have one turn")


@pytest.mark.long
@pytest.mark.parametrize("in_turns", [False, True])
def test_opponents_write_what_their_weights_write_with_one_key_for_a_group(in_turns, tmp_path):
    """In the first update slot 0 is the team itself: what it wrote in its seat is sampled again from these weights."""
    result = run(in_turns, tmp_path, num_updates=1, learning_rate=1e-30)
    (record,) = records(tmp_path)
    team, params = tiny_team()
    players, env = players_of(team, 1), Duel(in_turns)
    both = [jax.tree.map(lambda x: np.concatenate([x, x]), jax.device_get(params[0]))]
    met = {p: task["league"]["seat"] for p, task in enumerate(record["tasks"]) if "league" in task}
    assert len(met) == 2 and {*met.values()} == {0, 1}
    for p, seat in met.items():
        for t, turn in enumerate(record["turns"]):
            nodes = [i for i, item in enumerate(turn["items"]) if item == p]
            if not any(turn["prompts"][seat][i] for i in nodes):
                continue  # the other agent's turn
            assert not any(turn["acts"][seat][i] for i in nodes)
            texts = [text for i in nodes for text in turn["completions"][seat][i]]
            if t == 0:
                assert len(set(texts)) == 1
            prompts = [[turn["prompts"][seat][nodes[0]]]] * 4
            encoded = pad(players, tokenize(players, prompts, result_sampling(), False))
            request = SampleRequest(encoded, result_sampling(), Randomness(0, 0), 1, np.full((4, 1), p, np.uint32), t)
            tokens = tokens_of(players, sample_team(players, both, request), 1)
            assert texts_of(players, tokens)[2 + seat][0][0] == texts[0]
    del result, env


def result_sampling():
    return TrainConfig.of(**BASE).sampling


@pytest.mark.long
def test_only_the_present_team_learns_and_no_opponent_compiles_anew(whole):
    result, directory = whole
    for record in records(directory):
        for p, task in enumerate(record["tasks"]):
            if "league" not in task:
                continue
            for turn in record["turns"]:
                nodes = np.flatnonzero(np.array(turn["items"]) == p)
                assert not np.array(turn["acts"])[task["league"]["seat"], nodes].any()
    compiles = [row["compiles"] for row in rows(directory)]
    kinds = ["stranger" in met_of(record)[0] for record in records(directory)]
    assert set(kinds[:4]) == {False, True} and compiles[-1] == compiles[3]


KILLED = """
import os, pathlib, signal, sys, time
from jmarl.files.checkpoint import saved_steps
from tests.league import test_league

calls, step, directory = 0, test_league.Duel.step, pathlib.Path(sys.argv[1])

def kill_in_the_third_update(self, *arguments):
    global calls
    calls += 1
    if calls > 3 * 4 * 3 * 2 + 5:  # updates, tasks, completions, turns
        while not saved_steps(directory / "checkpoints"):
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGKILL)
    return step(self, *arguments)

test_league.Duel.step = kill_in_the_third_update
test_league.run(True, directory, test_league.WITH_STRANGER, save_every=1)
"""


@pytest.mark.long
def test_a_league_resumes_bit_for_bit(whole, tmp_path):
    """Killed in the third update: slots, results and weights are those of the whole run."""
    result, directory = whole
    killed = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert killed.returncode == -signal.SIGKILL and saved_steps(tmp_path / "checkpoints")
    more = dict(resume=True, save_every=1, allow_changed="environment")  # the killed Duel has its own `step`
    resumed = run(True, tmp_path, WITH_STRANGER, **more)
    for x, y in zip(jax.tree.leaves(result.state.stacks), jax.tree.leaves(resumed.state.stacks), strict=True):
        np.testing.assert_array_equal(x, y)
    names = {name for row in rows(directory) for name in row if name.startswith("league/") and not name.endswith("copy_s")}
    assert {"league/elo", "league/elo_ci95", "league/stranger_0/winrate", "league/slot_1/winrate"} <= names
    own = [[{name: row.get(name) for name in names | {"reward/mean"}} for row in rows(path)] for path in (directory, tmp_path)]
    assert own[0] == own[1]
    assert records(directory)[-1] == records(tmp_path)[-1]


def test_seats_and_shares_are_as_the_settings_say():
    league = league_of(snapshots=4, opponent_share=0.5, opponents_at_once=2)
    for step in range(20):
        seats = league.seats(8, step)
        held = [seat for seat in seats if seat.opponent >= 0]
        assert len(held) == 4 and [sum(seat.seat == n for seat in held) for n in (0, 1)] == [2, 2]
        assert {seat.opponent for seat in held} == {0, 1} and seats == league.seats(8, step)


def league_of(**settings):
    team, params = tiny_team()
    cfg = TrainConfig.of(**BASE, **settings)
    setup, state = start(team, params, cfg)
    league = LeagueSampler(setup)
    league.take(state._replace(pending=tuple(empty_slots(params, cfg.league))))
    return league


def test_a_snapshot_takes_the_place_of_the_oldest():
    league, (_, params) = league_of(snapshots=2, snapshot_every=3), tiny_team()
    for step in range(10):
        now = [jax.tree.map(lambda x, step=step: x + step, stack) for stack in params]
        league.begin(step, now)
        league.slots[step + 1] = league.slots[step]
        ages = [age for age in range(step + 1) if age % 3 == 0][-2:]
        assert sorted(league.before(step).ages[league.before(step).ages >= 0]) == ages
    slot = league.slots[9].weights[int(np.argmax(league.slots[9].ages))]
    for x, y in zip(slot[0], jax.tree.leaves(params[0]), strict=True):
        np.testing.assert_array_equal(x, np.asarray(y) + 9)


def test_a_step_that_is_made_again_keeps_the_games_of_its_snapshot():
    league, (_, params) = league_of(snapshots=2, snapshot_every=1), tiny_team()
    league.begin(0, params)
    league.slots[1] = league.slots[0].adding(np.array([3.0, 0.0]), np.array([4.0, 0.0]), group=1)
    league.begin(1, params)
    once = league.slots[1]
    league.begin(1, params)
    assert once.results.points[1].tolist() == [3, 0, 0]
    for x, y in zip(jax.tree.leaves(once), jax.tree.leaves(league.slots[1]), strict=True):
        np.testing.assert_array_equal(x, y)


def test_no_more_items_are_seated_than_there_are():
    league = league_of(snapshots=1, opponent_share=1.0)
    assert [sum(seat.seat == n for seat in league.seats(3, 0) if seat.opponent >= 0) for n in (0, 1)] == [1, 1]


def test_slots_of_bfloat16_take_half_of_the_memory_and_play_with_rounded_weights():
    league, whole, (_, params) = league_of(snapshots=2, snapshot_dtype="bfloat16"), league_of(snapshots=2), tiny_team()
    for own in (league, whole):
        own.begin(0, params)
    sizes = [sum(x.nbytes for x in jax.tree.leaves(own.slots[0].weights)) for own in (league, whole)]
    assert sizes[1] == 2 * sizes[0]
    for x, y in zip(jax.tree.leaves(league.stacks), jax.tree.leaves(params), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x, np.concatenate([y, np.asarray(y).astype("bfloat16").astype(np.float32)]))


def test_slots_are_drawn_by_what_they_win():
    """PFSP's (1 - p)^2, slots that were never met first; a slot that always loses is never drawn. nash: the mixture of slots
    that have met others."""
    ages, won, games, no = np.array([0, 10, 20]), np.array([2.0, 0.0, 4.0]), np.array([4, 4, 4]), np.full((3, 3), np.nan)
    np.testing.assert_allclose(probabilities("winrate", ages, won, games, no), np.array([0.25, 1.0, 0.0]) / 1.25)
    assert probabilities("winrate", ages, won, np.array([4, 4, 0]), no).tolist() == [0, 0, 1]
    assert probabilities("winrate", ages, games.astype(float), games, no).tolist() == [1 / 3] * 3
    assert probabilities("latest", ages, won, games, no).tolist() == [0, 0, 1]
    assert probabilities("uniform", ages, won, games, no).tolist() == [1 / 3] * 3
    assert np.isnan(win_rates(won, np.array([4, 4, 0]))).tolist() == [False, False, True]
    assert probabilities("nash", ages, won, games, no).tolist() == [1 / 3] * 3
    rates = np.array([[np.nan, 0.9, np.nan], [0.1, np.nan, np.nan], [np.nan] * 3])
    assert probabilities("nash", ages, won, games, rates).tolist() == [1, 0, 0]
    points = np.array([[0, 87.5, 0], [88.5, 0, 0], [0, 0, 0]], np.float32)  # as checkpoints have them: nearly even
    near = Crosstable(points, np.zeros(3)).rates()[:2, :2]
    assert probabilities("nash", ages[:2], won[:2], games[:2], near).tolist() == [0, 1]
    cycle = np.array([[np.nan, 0.9, 0.2], [0.1, np.nan, 0.7], [0.8, 0.3, np.nan]])
    np.testing.assert_allclose(probabilities("nash", ages, won, games, cycle), np.array([0.2, 0.3, 0.4]) / 0.9)


def test_a_new_slot_plays_all_others_in_each_seat_equally_often():
    """With nash: the first agent earns more than the second, so equal seats give half of the points, where a group is one game;
    a slot's own games replace those that the team played before."""
    league = league_of(snapshots=3, opponents="nash", opponents_at_once=2)
    slots, seated = league.slots[0]._replace(ages=np.array([4, 2, 0])), []
    slots = slots._replace(results=slots.results.adding(0, np.array([0.0, 9.0, 9.0]), np.array([0.0, 9.0, 9.0])))
    league.draw = lambda slots, drawn: setattr(league, "drawn", drawn)
    league.drawn = np.zeros(2, int)

    def played(seats, randomness) -> Any:
        seated.append((seats, league.drawn.tolist(), randomness))
        return SimpleNamespace(joint_returns=[np.tile([1.0, -1.0], (len(seats), 3, 1))]), None

    results = league.rate(slots, 6, played, Randomness(0, 4)).results
    ((seats, drawn, randomness),) = seated
    assert drawn == [1, 2] and randomness.purpose == LEAGUE_NUMBERS
    assert sorted((seat.opponent, seat.seat) for seat in seats) == [(-1, 0)] * 2 + [(0, 0), (0, 1), (1, 0), (1, 1)]
    np.testing.assert_array_equal(results.points[0], [0, 1, 1, 0])
    np.testing.assert_array_equal(results.points[:, 0], [0, 1, 1, 0])


def test_a_new_slot_of_bfloat16_plays_the_others_with_its_rounded_weights():
    """With nash: what earned the points of a slot is what the slot has."""
    league = league_of(snapshots=2, snapshot_every=1, snapshot_dtype="bfloat16", opponents="nash")
    (_, params), stacks = tiny_team(), []

    def played(seats, randomness) -> Any:
        stacks.append(league.stacks)
        return SimpleNamespace(joint_returns=[np.zeros((len(seats), 3, 2))]), None

    for step in (0, 1):
        league.begin(step, params)
        league.slots[step + 1] = league.slots[step]
    league.rate(league.slots[1], 4, played, Randomness(0, 1))
    for x, y in zip(jax.tree.leaves(stacks), jax.tree.leaves(params), strict=True):
        np.testing.assert_array_equal(x, np.concatenate([np.asarray(y).astype("bfloat16").astype(np.float32)] * 2))


@pytest.mark.long
def test_nash_is_for_zero_sum_games():
    env = Duel()
    env.step = lambda state, messages, rng: Step(state, ["", ""], [1.0, 0.5], True)
    team, params = tiny_team()
    cfg = TrainConfig.of(**{**BASE, "num_updates": 1}, league=NASH)
    with pytest.raises(ValueError, match="opponents='nash' is for two agents whose rewards add up to 0"):
        train(team, env, env.tasks(count=8), cfg, params=params)


@pytest.mark.parametrize(
    "settings, match",
    [
        (dict(opponents_at_once=3), "opponents_at_once=3 is more than there are"),
        (dict(opponents="latest"), "opponents_at_once=2 is more than there are"),
        (dict(joint_mode="cross"), "joint_mode='cross' does not go with a league"),
        (dict(history="append", num_turns=2), "history='append' does not go with a league"),
        (dict(num_turns=2), "set branching='chain'"),
        (dict(async_steps=1), "async_steps=1 does not go with a league"),
        (dict(algorithm="remax"), "choose one that learns from rollouts"),
        (dict(algorithm="madpo_iter"), "does not go with a league|has no effect"),
        (dict(snapshots=0), "opponents_at_once=2 is not allowed: .* where snapshots=0"),
    ],
)
def test_what_a_league_is_not_for_is_refused(settings, match):
    with pytest.raises(ValueError, match=match):
        check_settings(TrainConfig.of(**{**BASE, "snapshots": 2, "opponents_at_once": 2, **settings}))
