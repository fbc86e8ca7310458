"""Grid planning and Sudoku: rewards computed by hand, and solvers that make no mistake."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest

from experiments.environments import fuzz
from jmarl.envs.games.grid import GridPlanning, distances
from jmarl.envs.games.sudoku import Sudoku, filled_squares, solutions, units

RNG = np.random.default_rng(0)
# W . . .     The walker at the upper left, the goal below it behind a wall: 4 moves.
# # . . .
# G . . .
TASK = {"size": 4, "walls": [[1, 2]], "walker": [1, 1], "goal": [1, 3]}


@pytest.mark.parametrize(
    "messages, reward, solved, bumps",
    [
        (["right down left", "down left stay"], 1.0, 1, 0),  # right, down, down, left: the last moves are not made
        (["right down left", "down down stay"], 0.5 * (1 - 1 / 4), 0, 0),  # past the goal's row, then left
        (["", ""], 0.0, 0, 0),
        (["down down down", "left up left"], 0.0, 0, 6),  # into the wall and the border: it stays in place
        (["Right!", "DOWN."], 0.5 * (1 - 2 / 4), 0, 0),
        (["rightdown", "downs"], 0.0, 0, 0),  # no move words
        (["right right right", "stay stay stay"], 0.0, 0, 0),  # farther away than at the start: not below 0
        (["right down left up", "down left"], 1.0, 1, 0),  # the fourth word is not read
    ],
)
def test_grid_rewards_equal_those_computed_by_hand(messages, reward, solved, bumps):
    env = GridPlanning(2, moves=3)
    state, _ = env.reset(TASK, RNG)
    step = env.step(state, messages, RNG)
    assert step.reward == pytest.approx(reward) and step.done
    assert (step.info["solved"], step.info["bumps"]) == (solved, bumps)


@pytest.mark.parametrize(
    "messages, reward, solved, bumps",
    [
        (["right down stay", "down left stay"], 1.0, 1, 0),
        (["right down stay", "down left up"], 1.0, 1, 1),  # at the goal a move into the wall is lost
        (["right down left", "down left down"], 0.5 * (1 - 1 / 4), 0, 1),  # past the goal, into the border, and on
        (["right down down", "down left up"], 1.0, 1, 0),  # past the goal and back
        (["right down stay", "down left right"], 0.5 * (1 - 1 / 4), 0, 0),  # off the goal
    ],
)
def test_a_walker_that_does_not_stop_must_be_at_the_goal_at_the_end(messages, reward, solved, bumps):
    env = GridPlanning(2, moves=3, stop=False)
    state, _ = env.reset(TASK, RNG)
    step = env.step(state, messages, RNG)
    assert step.reward == pytest.approx(reward) and step.done and len(step.state.path) == 7
    assert (step.info["solved"], step.info["bumps"]) == (solved, bumps)


def test_passing_the_goal_earns_the_closeness_at_the_end_of_the_turn():
    """The same words with and without stopping; a turn that ends at the goal is the last one."""
    past_goal, task = ["right right", "right right"], {"size": 4, "walls": [], "walker": [1, 1], "goal": [3, 1]}
    steps = {}
    for stop in (True, False):
        env = GridPlanning(2, moves=2, max_turns=2, stop=stop)
        state, _ = env.reset(task, RNG)
        steps[stop] = env.step(state, past_goal, RNG)
    assert steps[True].reward == 1.0 and steps[True].done and steps[True].state.path[-1] == (3, 1)
    assert steps[False].reward == 0.5 * (1 - 1 / 2) and not steps[False].done and steps[False].state.path[-1] == (4, 1)
    last = env.step(steps[False].state, ["left stay", "stay stay"], RNG)
    assert last.reward == 0.75 and last.done and last.info["solved"] == 1.0


def test_hostile_messages_do_not_break_a_walk_that_does_not_stop():
    """Over three turns nothing raises, and the rewards are in their range."""
    num_actions, low, high = fuzz(GridPlanning(stop=False, max_turns=3), 1000, seed=0)
    assert num_actions >= 1000 and -0.5 < low <= high <= 1.0


def test_the_prompt_says_whether_the_walker_stops_at_the_goal():
    for stop, words in ((True, "at the goal it stops"), (False, "only if it is there after the last move")):
        assert words in GridPlanning(stop=stop).reset(TASK, RNG)[1][0]


def test_grid_rewards_of_an_episode_sum_to_its_closeness():
    env = GridPlanning(2, moves=1, max_turns=3)
    state, _ = env.reset(TASK, RNG)
    rewards = []
    for messages in (["right", "down"], ["up", "stay"], ["down", "down"]):
        step = env.step(state, messages, RNG)
        state, rewards = step.state, [*rewards, step.reward]
    assert rewards == pytest.approx([0.25, -0.125, 0.25]) and step.done  # 2, 3 and 1 of 4 moves are left
    assert env.render(state) == "· · . .\n# · . .\nG W . .\n. . . ."


@pytest.mark.parametrize("stop", [True, False])
@pytest.mark.parametrize("num_agents, size, walls", [(2, 4, 2), (1, 4, 2), (3, 6, 9)])
def test_the_solver_reaches_every_goal(num_agents, size, walls, stop):
    env = GridPlanning(num_agents, moves=6 // num_agents, size=size, walls=walls, stop=stop)
    for task in env.tasks("train", 200):
        state, _ = env.reset(task, RNG)
        assert env.step(state, env.solve(state), RNG).reward == 1.0


def test_agents_that_plan_alone_overshoot():
    """Alternating moves of plans for the whole way: worse than a shared plan, and far worse without stopping."""
    solved = {}
    for stop in (True, False):
        alone, env = GridPlanning(1, moves=3, stop=stop), GridPlanning(2, moves=3, stop=stop)
        rewards = []
        for task in env.tasks("train", 1000):
            state, _ = env.reset(task, RNG)
            rewards.append(env.step(state, alone.solve(state) * 2, RNG).reward)
        solved[stop] = np.mean(np.array(rewards) == 1)
    assert 0.5 < solved[True] < 0.7 and 0.25 < solved[False] < 0.45


def test_distances_are_lengths_of_shortest_paths():
    """Compare with powers of the adjacency matrix."""
    walls, size = frozenset({(1, 2), (2, 2), (3, 3)}), 3
    places = [p for p in itertools.product((1, 2, 3), repeat=2) if p not in walls]
    adjacency = np.array([[abs(a - c) + abs(b - d) == 1 for c, d in places] for a, b in places])
    moves_to_goal = distances((1, 1), size, walls)
    for i, place in enumerate(places):
        lengths = [k for k in range(9) if np.linalg.matrix_power(adjacency.astype(int), k)[places.index((1, 1)), i]]
        assert moves_to_goal.get(place) == (min(lengths) if lengths else None)


# 1 2 | 3 4      A = 4 at row 1, B = 1 at row 2, C = 4 at row 4
# 3 4 | 1 2
# 2 1 | 4 3
# 4 3 | 2 1
PUZZLE = {"puzzle": "1230340221430321"}


def test_a_sudoku_episode_has_the_rewards_computed_by_hand():
    env = Sudoku()
    state, observations = env.reset(PUZZLE, RNG)
    assert observations[1] is None and "A B C" in observations[0]
    step = env.step(state, ["4 2 4", ""], RNG)
    assert step.reward == pytest.approx(0.5 * 2 / 3) and not step.done and step.observations[0] is None
    assert "A = 4, B = 2, C = 4" in step.observations[1]
    step = env.step(step.state, ["", "B is wrong"], RNG)
    assert step.reward == 0 and not step.done
    assert step.info["flagged_wrong"] == 1.0 and step.info["flagged_right"] == 0.0
    last = env.step(step.state, ["1 3 3", ""], RNG)
    assert last.reward == pytest.approx(0.5 / 3 + 0.5) and last.done and last.info["solved"] == 1.0


@pytest.mark.parametrize(
    "first, check, second, rewards",
    [
        ("4 1 4", "ok", None, [1.0, 0.0]),
        ("4 1", "C", "4", [0.5 * 2 / 3, 0.0, 0.5 / 3 + 0.5]),  # a missing digit is wrong
        ("4 1 4", "A", "3", [1.0, 0.0, 0.5 * 2 / 3 - 1]),  # a right digit replaced by a wrong one
        ("4 1 4", "Z P 7", None, [1.0, 0.0]),  # not blanks of this puzzle
        ("9 5 0", "ABE AA Abc", None, [0.0, 0.0]),  # neither digits nor names of this puzzle
        ("424", "AB", "4 1", [0.5 * 2 / 3, 0.0, 0.5 / 3 + 0.5]),  # runs
        ("4141", "ok", None, [0.0, 0.0]),  # one more than expected
        ("The first is 2, so 414.", "ok", None, [1.0, 0.0]),
        ("4 1 4, not 222", "ok", None, [1.0, 0.0]),
        ("41 4", "A B C", "4 1 4 4", [0.5 / 3, 0.0, 0.5 * 2 / 3 + 0.5]),  # 41 is no digit, so 4 is the first and only digit
    ],
)
def test_sudoku_rewards_of_each_turn(first, check, second, rewards):
    env = Sudoku()
    state, _ = env.reset(PUZZLE, RNG)
    actual = []
    for t, message in enumerate([first, check, second][: len(rewards)]):
        step = env.step(state, ["", message] if t == 1 else [message, ""], RNG)
        state, actual = step.state, [*actual, step.reward]
    assert actual == pytest.approx(rewards) and step.done


def test_there_are_288_filled_squares_and_every_puzzle_has_one_solution():
    assert len(set(filled_squares())) == 288 == len(filled_squares())
    assert Counter(map(len, units())) == {4: 12} and Counter(i for unit in units() for i in unit) == dict.fromkeys(range(16), 3)
    env = Sudoku(blanks=(6, 8))
    for task in env.tasks("eval", 50):
        puzzle = tuple(map(int, task["puzzle"]))
        assert len(solutions(puzzle)) == 1 and 6 <= puzzle.count(0) <= 8


@pytest.mark.parametrize("single", [False, True])
def test_perfect_players_solve_a_puzzle_that_was_filled_at_random(single):
    env, rng = Sudoku(single=single), np.random.default_rng(1)
    for task in env.tasks("train", 100):
        state, _ = env.reset(task, rng)
        messages, total = [" ".join(map(str, rng.integers(1, 5, len(state.filled))))] * env.num_agents, 0.0
        for _ in range(env.max_turns):
            step = env.step(state, messages, rng)
            state, total = step.state, total + step.reward
            if step.done:
                break
            messages = [text or "" for text in env.solve(state)]
        assert total == pytest.approx(1.0)


@pytest.mark.parametrize("text", ["12", "0" * 16, "1" * 16, "12303402214303x1", None])
def test_malformed_puzzles_are_refused(text):
    with pytest.raises(ValueError, match="puzzle"):
        Sudoku().reset({"puzzle": text}, RNG)


def test_invalid_options_are_refused():
    for cls, options, message in (
        (Sudoku, dict(blanks=(0, 2)), r"blanks=\(0, 2\): give \(fewest, most\)"),
        (Sudoku, dict(max_turns=0), "max_turns=0: give at least 1"),
        (GridPlanning, dict(num_agents=0), "num_agents=0, .*: all must be at least 1"),
        (GridPlanning, dict(size=1), "size=1, .*: size must be 2 to 9"),
    ):
        with pytest.raises(ValueError, match=message):
            cls(**options)


def test_malformed_grids_are_refused():
    with pytest.raises(ValueError, match="at its goal or cannot reach it"):
        GridPlanning().reset(TASK | {"walls": [[1, 2], [2, 1]]}, RNG)
    with pytest.raises(ValueError, match="has no goal"):
        GridPlanning().reset({k: v for k, v in TASK.items() if k != "goal"}, RNG)
