"""The building games: every part of the rewards computed by hand, plans, turns, solutions, data."""

from __future__ import annotations

import itertools
import json
import math
import time
from collections import Counter
from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jmarl.envs.games.blocks import Cell
from jmarl.envs.games.building import Building
from jmarl.envs.games.house_build import HouseBuild, stock_limits
from jmarl.envs.games.house_plans import read_plan
from jmarl.envs.games.str_build import FONT, PALETTES, StrBuild, picture, target_cells
from jmarl.envs.vector import LockStep, Step

RNG = np.random.default_rng(0)
NIGHTLY = pytest.mark.nightly
LETTER_I = sorted(target_cells("I"))


def place(cells: Iterable[Cell], block: str) -> str:
    """Return the commands that place a block into cells."""
    return "\n".join(f"/setblock {x} {y} {z} {block}" for x, y, z in cells)


def play_turn(env: Building, task: dict, *messages: str) -> Step:
    """Return the first step of an episode."""
    state, _ = env.reset(task, RNG)
    return env.step(state, messages, RNG)


def solve(env: Building, task: dict) -> list[str | None]:
    return env.solve(env.reset(task, RNG)[0])


# StrBuild

CORNERS = [(0, 0, 0), (4, 4, 0)]  # of the wall of an I, both empty there
BACKGROUND = sorted(set(itertools.product(range(5), range(5), [0])) - set(LETTER_I))
BOTH_ENDS = place(LETTER_I[:1], "obsidian") + "\n" + place(LETTER_I[-1:], "white_concrete")
TOUCHING = place(LETTER_I[:1], "stone") + "\n" + place([(1, 1, 0)], "oak_planks")
WALL_CASES = {  # messages of both builders, coverage, extra, adjacent, builders that lack a kind of their palette
    "empty": ("", "", 0, 0, 0, 2),
    "prose": ("Sure, I can help!", "Done.", 0, 0, 0, 2),
    "all stone": (place(LETTER_I, "stone"), "", 1, 0, 1, 2),
    "all stone, and both kinds of the other on top": (place(LETTER_I, "stone"), BOTH_ENDS, 1, 0, 6 / 8, 1),
    "a block of the other's palette": ("", place(LETTER_I, "stone"), 0, 0, 0, 2),
    "a block of nobody's palette": (place(LETTER_I, "gold"), place(LETTER_I, "gold"), 0, 0, 0, 2),
    "agent 2 overwrites agent 1": (place(LETTER_I, "stone"), place(LETTER_I, "obsidian"), 1, 0, 1, 2),
    "one cell": (place(LETTER_I[:1], "stone"), "", 1 / 9, 0, 0, 2),
    "corners, too much": (place(CORNERS, "stone"), "", 0, 2 / 16, 0, 2),
    "all of the background in one kind": (place(BACKGROUND, "stone"), "", 0, 1, 1, 2),
    "both kinds on two cells that touch": (TOUCHING, "", 1 / 9, 1 / 16, 0, 1),
    "outside of the wall": (place([(5, 0, 0), (0, 5, 0), (0, 0, 1), (-1, 0, 0)], "stone"), "", 0, 0, 0, 2),
    "cleared again": (place(LETTER_I, "stone") + "\n" + place(LETTER_I, "air"), "", 0, 0, 0, 2),
    "cleared by the other": (place(LETTER_I, "stone"), place(LETTER_I[1:], "air"), 1 / 9, 0, 0, 2),
    "fill is not for walls": ("/fill 0 0 0 4 4 0 stone", "", 0, 0, 0, 2),
}  # fmt: skip


@pytest.mark.parametrize("name", WALL_CASES)
def test_the_worth_of_a_wall_equals_that_computed_by_hand(name):
    first, second, coverage, extra, adjacent, missing = WALL_CASES[name]
    step = play_turn(StrBuild(), {"string": "I"}, first, second)
    assert step.parts["coverage"] == pytest.approx(2 * coverage) and step.parts["extra"] == pytest.approx(-1.5 * extra)
    assert step.parts["adjacent"] == pytest.approx(-adjacent) and step.parts["palette"] == -0.25 * missing
    assert step.reward == pytest.approx(2 * coverage - 1.5 * extra - adjacent - 0.25 * missing) and step.done


def test_walls_have_the_published_values_and_the_worst_wall_the_minimum():
    worth = {name: play_turn(StrBuild(), {"string": "I"}, *WALL_CASES[name][:2]).reward for name in WALL_CASES}
    assert worth["all stone"] == 0.5 and worth["empty"] == -0.5
    assert worth["all of the background in one kind"] == StrBuild().reward_range[0] == -3


def test_one_builder_alone_lacks_the_palette_of_the_other():
    alternating = "\n".join(f"/setblock {x} {y} 0 {PALETTES[0][(x + y) % 2]}" for x, y, _ in LETTER_I)
    assert play_turn(StrBuild(), {"string": "I"}, alternating, "").reward == 1.75


def test_each_builder_has_half_of_the_commands():
    text = "\n".join([place([(0, 0, 0)], "air")] * 149 + [place(LETTER_I[:2], "stone")])
    step = play_turn(StrBuild(), {"string": "I"}, text, text)
    assert step.info["accepted"] == 150 + 149 and step.info["refused"] == 1  # builder 2 has no stone
    assert step.parts["coverage"] == pytest.approx(2 / 9)
    assert play_turn(StrBuild(max_commands=2), {"string": "I"}, place(LETTER_I, "stone"), "").info["accepted"] == 1


def test_letters_are_five_by_five_and_all_different():
    assert sorted(FONT) == [chr(c) for c in range(65, 91)] and len(set(FONT.values())) == 26
    for glyph in FONT.values():
        assert len(rows := glyph.split()) == 5 and all(len(row) == 5 and set(row) <= set("#.") for row in rows)
    assert [len(row) for row in picture("ICML")] == [26] * 5, "two empty columns between letters"


def test_render_shows_the_wall():
    env = StrBuild()
    step = play_turn(env, {"string": "I"}, place([(2, 0, 0), (0, 4, 0)], "stone"), place([(2, 1, 0)], "obsidian"))
    assert env.render(step.state).splitlines() == ["S###.", "..#..", "..#..", "..B..", ".#S#."]  # O would be oak planks


# HouseBuild

SLAB_LAYERS = [{"y": 0, "rows": ["SS", "SS"]}, {"y": 1, "rows": ["AA", "AA"]}]
SLAB = {"inventory": {"S": "stone", "A": "air"}, "target_spec": {"layers": SLAB_LAYERS}}
TWO = {"inventory": {"S": "stone", "G": "glass", "A": "air"}, "target_spec": {"layers": [{"y": 0, "rows": ["SSGG", "AAAA"]}]}}
FRONT, BACK, ALL = "/fill 0 0 0 1 0 0 stone", "/fill 0 0 1 1 0 1 stone", "/fill 0 0 0 1 0 1 stone"
THREE = FRONT + "\n/setblock 0 0 1 stone"
WRONG = "/setblock 1 0 0 glass\n/setblock 3 0 0 stone"
HOUSE_CASES = {  # task, messages of both builders, match, extra, idle, overlap, short
    "nothing": (SLAB, "", "", 0, 0, 2, 0, 0),
    "shared out": (SLAB, FRONT, BACK, 1, 0, 0, 0, 0),
    "three and one": (SLAB, THREE, "/setblock 1 0 1 stone", 1, 0, 0, 0, 0),
    "three by one alone": (SLAB, THREE, "", 3 / 4, 0, 1, 0, 0),
    "more than one has": (SLAB, ALL, "", 0, 0, 2, 0, 1),
    "more than is left, then what is left": (SLAB, FRONT + "\n" + BACK + "\n/setblock 0 0 1 stone", "", 3 / 4, 0, 1, 0, 1),
    "what was cleared is used up": (SLAB, f"{FRONT}\n{FRONT.replace('stone', 'air')}\n{FRONT}", BACK, 1 / 2, 0, 1, 0, 1),
    "the same cells": (SLAB, FRONT, FRONT, 1 / 2, 0, 1, 1, 0),
    "one cell of both": (SLAB, FRONT, "/fill 1 0 0 1 0 1 stone", 3 / 4, 0, 0, 1 / 3, 0),
    "one too much": (SLAB, FRONT, BACK + "\n/setblock 0 1 0 stone", 4 / 5, 1 / 5, 0, 0, 0),
    "cleared by the other": (SLAB, FRONT, "/fill 0 0 0 1 1 1 air", 0, 0, 2, 0, 0),
    "the worst": (SLAB, "/setblock 0 1 0 stone\n" + ALL, "/setblock 0 1 0 stone\n" + ALL, 0, 1, 2, 1, 2),
    "outside": (SLAB, "/fill 0 0 0 2 0 0 stone", "/fill 0 0 0 9999 9999 9999 stone", 0, 0, 2, 0, 0),
    "a kind that the house has not": (SLAB, "/setblock 0 0 0 gold", "/setblock 0 0 0 tnt", 0, 0, 2, 0, 0),
    "the wrong kinds": (TWO, "/setblock 0 0 0 stone\n/setblock 2 0 0 glass", WRONG, 2 / 4, 0, 1, 0, 0),
    "a wrong one overwritten": (TWO, "/setblock 0 0 0 glass", "/setblock 0 0 0 stone", 1 / 4, 0, 1, 1, 0),
}  # fmt: skip


@pytest.mark.parametrize("name", HOUSE_CASES)
def test_the_reward_of_a_house_equals_that_computed_by_hand(name):
    task, first, second, match, extra, idle, overlap, short = HOUSE_CASES[name]
    step = play_turn(HouseBuild(), task, first, second)
    expected = {"match": 2 * match, "extra": -0.5 * extra, "idle": -0.25 * idle, "overlap": -0.5 * overlap}
    expected["short"] = -0.25 * short
    assert {part: step.parts[part] for part in expected} == pytest.approx(expected)
    assert step.reward == pytest.approx(sum(expected.values())) and step.info["solved"] == (match == 1)


def test_the_worst_house_earns_the_least():
    assert play_turn(HouseBuild(), *HOUSE_CASES["the worst"][:3]).reward == HouseBuild().reward_range[0] == -2


def test_each_builder_has_three_quarters_of_the_blocks_of_a_plan():
    plan = {(i, 0, 0): kind for i, kind in enumerate("a" * 1 + "b" * 2 + "c" * 3 + "d" * 68)}
    assert stock_limits(plan) == {"a": 1, "b": 1, "c": 2, "d": 51}


def test_render_shows_the_house_beside_its_plan():
    env = HouseBuild()
    step = play_turn(env, TWO, "/setblock 0 0 0 stone", "/setblock 1 0 0 glass\n/setblock 0 0 1 stone")
    assert env.render(step.state).splitlines() == ["S stone, G glass", "y=0", "Sg..  SSGG", "s...  ...."]


def test_generated_houses_are_complete():
    for task in HouseBuild().tasks("train", 60):
        (width, height, depth), plan = read_plan(task)
        assert width in (4, 5, 6) and depth in (4, 5, 6) and 4 <= height <= 7
        assert all((x, 0, z) in plan for x in range(width) for z in range(depth)), "a floor"
        assert all((x, y, z) in plan for y in (1, 2) for x, z in [(0, 0), (width - 1, depth - 1)]), "corners"
        assert sum(block.endswith("door") for block in plan.values()) == 2
        assert not any((x, y, z) in plan for x in range(1, width - 1) for z in range(1, depth - 1) for y in (1, 2)), "empty"
        roof = {(x, z) for x in range(width) for z in range(depth) if any((x, y, z) in plan for y in range(3, height))}
        assert len(roof) == width * depth, "a roof over all"


# Both


@pytest.mark.parametrize("make", [StrBuild, HouseBuild])
def test_the_solution_of_every_task_earns_the_maximum(make):
    env = make()
    tasks = [*env.tasks("train", 150), *env.tasks("eval", 50)]
    assert len(tasks) == 200
    for task in tasks:
        step = play_turn(env, task, *solve(env, task))
        assert step.reward == pytest.approx(2) == env.reward_range[1] and step.info["solved"] and not step.info["refused"]


@pytest.mark.parametrize("make", [StrBuild, HouseBuild])
def test_later_turns_continue_the_building_and_rewards_sum_to_its_worth(make):
    env = make(num_turns=3)
    task = env.tasks("train", 1)[0]
    first, second = solve(env, task)
    state, prompts = env.reset(task, RNG)
    rewards, observations = [], [prompts]
    for messages in ((first, ""), ("", second), ("", "")):
        step = env.step(state, messages, RNG)
        state = step.state
        rewards.append(step.reward)
        observations.append(step.observations)
        if step.done:
            break
    assert len(rewards) == 2, "over when it is right"
    assert sum(rewards) == pytest.approx(2) and step.info["solved"] == 1
    for before, after in zip(*observations[:2], strict=True):
        assert after.startswith(before.split("You ")[0]) and len(after) > len(before)


def test_used_blocks_remain_used_in_later_turns():
    env = HouseBuild(num_turns=2)
    state, _ = env.reset(SLAB, RNG)
    step = env.step(state, ("/fill 0 1 0 1 1 0 stone", FRONT), RNG)
    assert (
        "You still have 1 stone" in step.observations[0]
        and "Too much, clear with air:\n0 1 0 1 1 0 stone" in step.observations[0]
    )
    assert step.reward == pytest.approx(2 * 2 / 6 - 0.5 * 2 / 4 - 0.25)
    step = env.step(step.state, ("/fill 0 1 0 1 1 0 air\n" + BACK, "/setblock 0 0 1 stone"), RNG)
    assert step.info["worth"] == pytest.approx(2 * 3 / 4 - 0.25) and step.parts["short"] == -0.25
    assert step.reward == pytest.approx(1.25 - (2 / 3 - 0.5) - 0.25) and step.done


def test_feedback_lists_what_is_wrong_with_a_wall():
    env = StrBuild(num_turns=2)
    state, _ = env.reset({"string": "I"}, RNG)
    feedback = env.step(state, (place([(0, 0, 0), (2, 0, 0), (2, 1, 0)], "stone"), ""), RNG).observations[0]
    assert "Too much, clear with air (x y): 0 0" in feedback and "the block to the right or above (x y): 2 0" in feedback
    assert "Empty, to be filled (x y): 1 0, 1 4, 2 2" in feedback and ".###." in feedback


def test_reward_ranges_of_several_turns():
    assert StrBuild(num_turns=2).reward_range == (-5, 5) and HouseBuild(num_turns=2).reward_range == (-4, 3)


@pytest.mark.parametrize("make", [StrBuild, HouseBuild])
@pytest.mark.parametrize("text", [
    "/setblock 0 0 0 stone\n" * 1_000_000,
    "/fill 0 0 0 999999999 999999999 999999999 stone\n" * 10_000,
    "/fill -9999 -9999 -9999 9999 9999 9999 air\n" * 10_000,
    "/fill 0 0 0 3 3 3 air\n" * 10_000,
    "/setblock " + "9" * 1_000_000,
    "/" * 1_000_000,
    "/setblock 1e5 NaN Infinity stone\n/setblock \ud800 \x00 🙂 stone\n" * 1000,
    "/setblock " + "1 " * 500_000,
])  # fmt: skip
def test_hostile_texts_are_read_quickly(make, text):
    env = make()
    task = env.tasks("train", 1)[0]
    start = time.perf_counter()
    step = play_turn(env, task, text, text)
    assert time.perf_counter() - start < 1 and math.isfinite(step.reward) and step.info["refused"] <= 300


def test_a_large_house_is_cleared_three_hundred_times_quickly():
    rows = [["S" * 16] * 16] * 15 + [["A" * 16] * 16]
    task = {
        "inventory": {"S": "stone", "A": "air"},
        "target_spec": {"layers": [{"y": y, "rows": layer} for y, layer in enumerate(rows)]},
    }
    start = time.perf_counter()
    play_turn(HouseBuild(), task, *["/fill 0 0 0 15 15 15 air\n" * 150] * 2)
    assert time.perf_counter() - start < 2


@pytest.mark.parametrize("make", [StrBuild, HouseBuild])
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_rewards_of_any_commands_are_in_range_and_sum_to_the_worth(make, data):
    """Over several turns, through LockStep, which raises if a reward is outside its range."""
    env = make(num_turns=3)
    lockstep, rng = LockStep(env), np.random.default_rng(0)
    task = env.tasks("train", 3)[data.draw(st.integers(0, 2))]
    blocks = ["air", "stone", *(PALETTES[0] + PALETTES[1] if make is StrBuild else stock_limits(read_plan(task)[1]))]
    number, name = st.integers(-1, 6).map(str), st.sampled_from(["/setblock", "/fill"])
    command = st.tuples(name, number, number, number, number, number, number, st.sampled_from(blocks))
    line = command.map(lambda c: " ".join((*c[:4], c[7]) if c[0] == "/setblock" else c))
    states, _ = lockstep.reset([task], rng)
    total, worth, penalties = 0.0, 0.0, 0.0
    for _ in range(3):
        texts = [[data.draw(st.lists(line, max_size=12).map("\n".join))] for _ in range(2)]
        answer = lockstep.step(states, texts, rng)
        total += answer.result.rewards[0, 0] if answer.result.rewards.ndim > 1 else answer.result.rewards[0]
        worth = answer.result.measures["worth"][0]
        penalties += sum(answer.result.parts[name][0] for name in ("overlap", "short") if name in answer.result.parts)
        if answer.done[0]:
            break
        states, _ = lockstep.observe(answer.after)
    assert total == pytest.approx(worth + penalties)


@pytest.mark.parametrize("make", [StrBuild, HouseBuild])
def test_a_step_changes_neither_the_state_nor_the_environment(make):
    env = make(num_turns=2)
    task = env.tasks("train", 1)[0]
    state, _ = env.reset(task, RNG)
    before = repr((state, vars(env)))
    step = env.step(state, solve(env, task), RNG)
    assert repr((state, vars(env))) == before and env.step(state, solve(env, task), RNG) == step


@pytest.mark.parametrize(("make", "task", "message"), [
    (StrBuild, {}, "string=None"),
    (StrBuild, {"string": ""}, "letters A to Z"),
    (StrBuild, {"string": "Ä"}, "letters A to Z"),
    (StrBuild, {"string": "a1"}, "letters A to Z"),
    (HouseBuild, {}, "no inventory"),
    (HouseBuild, {"inventory": {"S": 1}}, "no inventory"),
    (HouseBuild, SLAB | {"target_spec": None}, "list of layers"),
    (HouseBuild, SLAB | {"target_spec": {"layers": [{"y": 0}]}}, "list of layers"),
    (HouseBuild, SLAB | {"target_spec": {"layers": [{"y": 1, "rows": ["S"]}]}}, "are not y = 0"),
    (HouseBuild, SLAB | {"target_spec": {"layers": [{"y": 0, "rows": ["SS", "S"]}]}}, "not all 2 rows of 2"),
    (HouseBuild, SLAB | {"target_spec": {"layers": [{"y": 0, "rows": ["SX"]}]}}, "lacks: X"),
    (HouseBuild, SLAB | {"target_spec": {"layers": [{"y": 0, "rows": ["AA"]}]}}, "all air"),
    (HouseBuild, SLAB | {"target_spec": {"layers": [{"y": 0, "rows": ["SS"]}]}}, "without air"),
    (HouseBuild, SLAB | {"target_spec": {"layers": [{"y": 0, "rows": ["SA" * 50] * 50}]}}, "4096 cells are allowed"),
])  # fmt: skip
def test_malformed_tasks_are_refused(make, task, message):
    with pytest.raises(ValueError, match=message):
        make().reset(task, RNG)


def test_invalid_options_and_files_are_refused(tmp_path):
    for options, message in ((dict(num_turns=0), "num_turns=0"), (dict(max_commands=1), "max_commands=1")):
        for make in (StrBuild, HouseBuild):
            with pytest.raises(ValueError, match=message):
                make(**options)
    with pytest.raises(ValueError, match="max_letters=0"):
        StrBuild(max_letters=0)
    (tmp_path / "words.csv").write_text("word\nI\n")
    with pytest.raises(ValueError, match="no row with a column string"):
        StrBuild(tmp_path / "words.csv")
    (tmp_path / "houses.json").write_text(json.dumps({"a": 1}))
    with pytest.raises(ValueError, match="no list of houses"):
        HouseBuild(tmp_path / "houses.json")


# Real data


def test_the_published_strings_become_tasks_that_the_solver_solves(data_dir):
    env = StrBuild(data_dir / "house_build" / "str_build.csv")
    tasks = {split: env.tasks(split) for split in ("train", "eval")}
    assert len(tasks["train"]) == 8 and len(tasks["eval"]) == 2
    strings = [task["string"] for split_tasks in tasks.values() for task in split_tasks]
    assert sorted(strings) == ["C", "CLIM", "CM", "I", "ICML", "L", "LI", "LLM", "M", "MC"]
    assert all(play_turn(env, {"string": text}, *solve(env, {"string": text})).reward == pytest.approx(2) for text in strings)


def test_the_published_houses_become_tasks_that_the_solver_solves(data_dir):
    env = HouseBuild(data_dir / "house_build" / "data.json")
    assert len(env.houses) == 10 and (len(env.tasks("train")), len(env.tasks("eval"))) == (4, 1), "the ten have five plans"
    for task in env.houses:
        (width, height, depth), plan = read_plan(task)
        assert [width, height, depth] == task["target_spec"]["size"] == [6, 7, 7]
        counts = {task["inventory"][letter]: count for letter, count in task["count"].items() if letter != "A"}
        assert Counter(plan.values()) == counts
        assert play_turn(env, task, *solve(env, task)).reward == pytest.approx(2)
        assert len(env.reset(task, RNG)[1][0]) < 2500


@pytest.mark.long
@pytest.mark.parametrize(("name", "turns"), [
    ("house_build", 1), pytest.param("str_build", 2, marks=NIGHTLY), pytest.param("function_calling", 1, marks=NIGHTLY),
])  # fmt: skip
def test_the_experiment_trains(name, turns, tiny_dir, tmp_path, capsys):
    """A tiny model, one update, and held-out tasks before and after it."""
    from experiments.building import BuildingConfig, run
    from experiments.report import report

    model = tiny_dir("llama", max_position_embeddings=4096)
    cfg = BuildingConfig.of(
        environment=name, model=str(model), num_turns=turns, num_updates=1, num_prompts=1, num_generations=2, held_out=1,
        max_new_tokens=4, output_dir=str(tmp_path / "run"),
    )  # fmt: skip
    result = run(cfg)
    assert len(result.rewards) == 1 and math.isfinite(result.rewards[0]) and result.after is not None
    report(cfg, result)
    printed = capsys.readouterr().out
    assert f"held-out after: reward {result.after.mean:.3f}," in printed, "one task has no interval"
    assert "mean reward of the last 1 updates" in printed
