"""Rewards of teams that build with blocks, each part and edge by a case worked by hand; commands; data; the best solutions."""

from __future__ import annotations

import itertools
import json
import math
import time
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jmarl.envs.games.blocks import Command, boxes, commands_for, read_commands
from jmarl.envs.games.house_build import HouseBuild, limits, read_plan
from jmarl.envs.games.str_build import FONT, PALETTES, StrBuild, picture, target
from jmarl.envs.vector import LockStep

RNG = np.random.default_rng(0)
I = sorted(target("I"))  # noqa: E741


def put(cells, block):
    return "\n".join(f"/setblock {x} {y} {z} {block}" for x, y, z in cells)


def once(env, task, *messages):
    state, _ = env.reset(task, RNG)
    return env.step(state, messages, RNG)


def best(env, task):
    return env.solve(env.reset(task, RNG)[0])


# Commands


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("/setblock 1 2 0 stone", [((1, 2, 0), (1, 2, 0), "stone")]),
        ("setblock 1 2 0 minecraft:Stone", [((1, 2, 0), (1, 2, 0), "stone")]),
        ("/fill 3 2 1 0 4 1 glass", [((0, 2, 1), (3, 4, 1), "glass")]),
        ("- /setblock 1 1 0 a\n2. /setblock 2 1 0 b", [((1, 1, 0),) * 2 + ("a",), ((2, 1, 0),) * 2 + ("b",)]),
        ("```\n/setblock 1 1 0 a\n```", [((1, 1, 0),) * 2 + ("a",)]),
        ("Use `/setblock 1 1 0 a` first", [((1, 1, 0),) * 2 + ("a",)]),
        ("/setblock 1 1 0 a /setblock 2 1 0 b", [((1, 1, 0),) * 2 + ("a",), ((2, 1, 0),) * 2 + ("b",)]),
        ("/setblock -1 +2 0 a", [((-1, 2, 0),) * 2 + ("a",)]),
        ("I will build the letter now.\n\n", []),
        ("/kill @e\n/give me stone", []),
        ("/setblock 1 2 stone", [None]),
        ("/setblock 1 2 0", [None]),
        ("/setblock 1.0 2 0 stone", [None]),
        ("/setblock ~1 2 0 stone", [None]),
        ("/setblock nan inf 1e9 stone", [None]),
        ("/setblock 99999 0 0 stone", [None]),
        ("/setblock ² 0 0 stone", [None]),
        ("/setblock ١ 0 0 stone", [None]),
        ("/fill 0 0 0 1 1 1 stone hollow", [None]),
        ("/setblock 0 0 0 stone and so on", [None]),
    ],
)
def test_commands_are_read(text, expected):
    assert read_commands(text, 10) == [None if of is None else Command(*of) for of in expected]


def test_the_first_commands_are_read_and_no_more():
    text = put([(x, 0, 0) for x in range(9)], "stone")
    assert [command.low[0] for command in read_commands(text, 4)] == [0, 1, 2, 3]
    assert len(read_commands("/setblock\n" * 9, 4)) == 4, "those that cannot be read count too"


@given(st.sets(st.tuples(*[st.integers(0, 4)] * 3), max_size=60))
def test_boxes_hold_each_cell_once(cells):
    found = [c for low, high in boxes(cells) for c in itertools.product(*map(lambda a, b: range(a, b + 1), low, high))]
    assert len(found) == len(cells) and set(found) == cells


def test_a_full_box_is_one_box():
    assert boxes(itertools.product(range(3), range(4), range(5))) == [((0, 0, 0), (2, 3, 4))]
    assert commands_for({(0, 0, 0): "a", (1, 0, 0): "a", (5, 5, 5): "b"}) == "/fill 0 0 0 1 0 0 a\n/setblock 5 5 5 b"


# StrBuild

CORNERS = [(0, 0, 0), (4, 4, 0)]  # of the wall of an I, both empty there
BACKGROUND = sorted(set(itertools.product(range(5), range(5), [0])) - set(I))
BOTH_ENDS = put(I[:1], "obsidian") + "\n" + put(I[-1:], "white_concrete")
TOUCHING = put(I[:1], "stone") + "\n" + put([(1, 1, 0)], "oak_planks")
STR_CASES = {  # messages of both, coverage, extra, adjacent, builders without their palette
    "empty": ("", "", 0, 0, 0, 2),
    "prose": ("Sure, I can help!", "Done.", 0, 0, 0, 2),
    "all stone": (put(I, "stone"), "", 1, 0, 1, 2),
    "all stone, and both kinds of the other on top": (put(I, "stone"), BOTH_ENDS, 1, 0, 6 / 8, 1),
    "a block of the other's palette": ("", put(I, "stone"), 0, 0, 0, 2),
    "a block of nobody's palette": (put(I, "gold"), put(I, "gold"), 0, 0, 0, 2),
    "agent 2 overwrites agent 1": (put(I, "stone"), put(I, "obsidian"), 1, 0, 1, 2),
    "one cell": (put(I[:1], "stone"), "", 1 / 9, 0, 0, 2),
    "corners, too much": (put(CORNERS, "stone"), "", 0, 2 / 16, 0, 2),
    "all of the background in one kind": (put(BACKGROUND, "stone"), "", 0, 1, 1, 2),
    "both kinds on two cells that touch": (TOUCHING, "", 1 / 9, 1 / 16, 0, 1),
    "outside of the wall": (put([(5, 0, 0), (0, 5, 0), (0, 0, 1), (-1, 0, 0)], "stone"), "", 0, 0, 0, 2),
    "cleared again": (put(I, "stone") + "\n" + put(I, "air"), "", 0, 0, 0, 2),
    "cleared by the other": (put(I, "stone"), put(I[1:], "air"), 1 / 9, 0, 0, 2),
    "fill is not for walls": ("/fill 0 0 0 4 4 0 stone", "", 0, 0, 0, 2),
}  # fmt: skip


@pytest.mark.parametrize("name", STR_CASES)
def test_the_worth_of_a_wall(name):
    first, second, coverage, extra, adjacent, missing = STR_CASES[name]
    step = once(StrBuild(), {"string": "I"}, first, second)
    assert step.info["coverage"] == pytest.approx(2 * coverage) and step.info["extra"] == pytest.approx(-1.5 * extra)
    assert step.info["adjacent"] == pytest.approx(-adjacent) and step.info["palette"] == -0.25 * missing
    assert step.reward == pytest.approx(2 * coverage - 1.5 * extra - adjacent - 0.25 * missing) and step.done


def test_published_values_of_a_wall_and_its_extremes():
    worth = {name: once(StrBuild(), {"string": "I"}, *STR_CASES[name][:2]).reward for name in STR_CASES}
    assert worth["all stone"] == 0.5 and worth["empty"] == -0.5
    assert worth["all of the background in one kind"] == StrBuild().reward_range[0] == -3


def test_one_builder_alone_lacks_the_palette_of_the_other():
    by_turns = "\n".join(f"/setblock {x} {y} 0 {PALETTES[0][(x + y) % 2]}" for x, y, _ in I)
    assert once(StrBuild(), {"string": "I"}, by_turns, "").reward == 1.75


def test_every_builder_has_half_of_the_commands():
    text = "\n".join([put([(0, 0, 0)], "air")] * 149 + [put(I[:2], "stone")])
    step = once(StrBuild(), {"string": "I"}, text, text)
    assert step.info["accepted"] == 150 + 149 and step.info["refused"] == 1  # builder 2 has no stone
    assert step.info["coverage"] == pytest.approx(2 / 9)
    assert once(StrBuild(max_commands=2), {"string": "I"}, put(I, "stone"), "").info["accepted"] == 1


def test_letters_are_five_by_five_and_all_different():
    assert sorted(FONT) == [chr(c) for c in range(65, 91)] and len(set(FONT.values())) == 26
    for glyph in FONT.values():
        assert len(rows := glyph.split()) == 5 and all(len(row) == 5 and set(row) <= set("#.") for row in rows)
    assert [len(row) for row in picture("ICML")] == [26] * 5, "two empty columns between letters"


def test_a_picture_of_the_wall():
    env = StrBuild()
    step = once(env, {"string": "I"}, put([(2, 0, 0), (0, 4, 0)], "stone"), put([(2, 1, 0)], "obsidian"))
    assert env.render(step.state).splitlines() == ["S###.", "..#..", "..#..", "..B..", ".#S#."]  # O is of oak planks


# HouseBuild

SLAB_LAYERS = [{"y": 0, "rows": ["SS", "SS"]}, {"y": 1, "rows": ["AA", "AA"]}]
SLAB = {"inventory": {"S": "stone", "A": "air"}, "target_spec": {"layers": SLAB_LAYERS}}
TWO = {"inventory": {"S": "stone", "G": "glass", "A": "air"}, "target_spec": {"layers": [{"y": 0, "rows": ["SSGG", "AAAA"]}]}}
FRONT, BACK, ALL = "/fill 0 0 0 1 0 0 stone", "/fill 0 0 1 1 0 1 stone", "/fill 0 0 0 1 0 1 stone"
THREE = FRONT + "\n/setblock 0 0 1 stone"
WRONG = "/setblock 1 0 0 glass\n/setblock 3 0 0 stone"
HOUSE_CASES = {  # task, messages, then the parts: match, extra, idle, overlap, short
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
def test_the_reward_of_a_house(name):
    task, first, second, match, extra, idle, overlap, short = HOUSE_CASES[name]
    step = once(HouseBuild(), task, first, second)
    expected = {"match": 2 * match, "extra": -0.5 * extra, "idle": -0.25 * idle, "overlap": -0.5 * overlap}
    expected["short"] = -0.25 * short
    assert {part: step.info[part] for part in expected} == pytest.approx(expected)
    assert step.reward == pytest.approx(sum(expected.values())) and step.info["solved"] == (match == 1)


def test_the_worst_house_earns_the_least():
    assert once(HouseBuild(), *HOUSE_CASES["the worst"][:3]).reward == HouseBuild().reward_range[0] == -2


def test_limits_of_material():
    plan = {(i, 0, 0): kind for i, kind in enumerate("a" * 1 + "b" * 2 + "c" * 3 + "d" * 68)}
    assert limits(plan) == {"a": 1, "b": 1, "c": 2, "d": 51}


def test_a_picture_of_a_house():
    env = HouseBuild()
    step = once(env, TWO, "/setblock 0 0 0 stone", "/setblock 1 0 0 glass\n/setblock 0 0 1 stone")
    assert env.render(step.state).splitlines() == ["S stone, G glass", "y=0", "Sg..  SSGG", "s...  ...."]


def test_made_houses_are_houses():
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
def test_the_best_can_be_had_of_every_task(make):
    env = make()
    tasks = [*env.tasks("train", 150), *env.tasks("eval", 50)]
    assert len(tasks) == 200
    for task in tasks:
        step = once(env, task, *best(env, task))
        assert step.reward == pytest.approx(2) == env.reward_range[1] and step.info["solved"] and not step.info["refused"]


@pytest.mark.parametrize("make", [StrBuild, HouseBuild])
def test_turns_go_on_from_what_stands_and_add_up(make):
    env = make(num_turns=3)
    task = env.tasks("train", 1)[0]
    first, second = best(env, task)
    state, prompts = env.reset(task, RNG)
    rewards, seen = [], [prompts]
    for messages in ((first, ""), ("", second), ("", "")):
        step = env.step(state, messages, RNG)
        state = step.state
        rewards.append(step.reward)
        seen.append(step.observations)
        if step.done:
            break
    assert len(rewards) == 2, "over when it is right"
    assert sum(rewards) == pytest.approx(2) and step.info["solved"] == 1
    assert all(
        said.startswith(asked.split("You ")[0]) and len(said) > len(asked) for asked, said in zip(seen[0], seen[1], strict=True)
    )


def test_what_is_used_up_stays_so_in_later_turns():
    env = HouseBuild(num_turns=2)
    state, _ = env.reset(SLAB, RNG)
    step = env.step(state, ("/fill 0 1 0 1 1 0 stone", FRONT), RNG)
    assert (
        "You still have 1 stone" in step.observations[0]
        and "Too much, clear with air:\n0 1 0 1 1 0 stone" in step.observations[0]
    )
    assert step.reward == pytest.approx(2 * 2 / 6 - 0.5 * 2 / 4 - 0.25)
    step = env.step(step.state, ("/fill 0 1 0 1 1 0 air\n" + BACK, "/setblock 0 0 1 stone"), RNG)
    assert step.info["worth"] == pytest.approx(2 * 3 / 4 - 0.25) and step.info["short"] == -0.25
    assert step.reward == pytest.approx(1.25 - (2 / 3 - 0.5) - 0.25) and step.done


def test_feedback_says_what_is_wrong_with_a_wall():
    env = StrBuild(num_turns=2)
    state, _ = env.reset({"string": "I"}, RNG)
    said = env.step(state, (put([(0, 0, 0), (2, 0, 0), (2, 1, 0)], "stone"), ""), RNG).observations[0]
    assert "Too much, clear with air (x y): 0 0" in said and "the block to the right or above (x y): 2 0" in said
    assert "Empty, to be filled (x y): 1 0, 1 4, 2 2" in said and ".###." in said


def test_ranges_of_several_turns():
    assert StrBuild(num_turns=2).reward_range == (-5, 5) and HouseBuild(num_turns=2).reward_range == (-4, 3)


@pytest.mark.parametrize("make", [StrBuild, HouseBuild])
@pytest.mark.parametrize(
    "text",
    [
        "/setblock 0 0 0 stone\n" * 1_000_000,
        "/fill 0 0 0 999999999 999999999 999999999 stone\n" * 10_000,
        "/fill -9999 -9999 -9999 9999 9999 9999 air\n" * 10_000,
        "/fill 0 0 0 3 3 3 air\n" * 10_000,
        "/setblock " + "9" * 1_000_000,
        "/" * 1_000_000,
        "/setblock 1e5 NaN Infinity stone\n/setblock \ud800 \x00 🙂 stone\n" * 1000,
        "/setblock " + "1 " * 500_000,
    ],
)
def test_hostile_texts_take_no_time(make, text):
    env = make()
    task = env.tasks("train", 1)[0]
    start = time.perf_counter()
    step = once(env, task, text, text)
    assert time.perf_counter() - start < 1 and math.isfinite(step.reward) and step.info["refused"] <= 300


def test_a_great_house_cleared_three_hundred_times():
    rows = [["S" * 16] * 16] * 15 + [["A" * 16] * 16]
    task = {
        "inventory": {"S": "stone", "A": "air"},
        "target_spec": {"layers": [{"y": y, "rows": of} for y, of in enumerate(rows)]},
    }
    start = time.perf_counter()
    once(HouseBuild(), task, *["/fill 0 0 0 15 15 15 air\n" * 150] * 2)
    assert time.perf_counter() - start < 2


@pytest.mark.parametrize("make", [StrBuild, HouseBuild])
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_commands_stay_within_the_range(make, data):
    """Over several turns, through LockStep, which raises where a reward leaves its range; rewards add up."""
    env = make(num_turns=3)
    world, rng = LockStep(env), np.random.default_rng(0)
    task = env.tasks("train", 3)[data.draw(st.integers(0, 2))]
    blocks = ["air", "stone", *(PALETTES[0] + PALETTES[1] if make is StrBuild else limits(read_plan(task)[1]))]
    number, name = st.integers(-1, 6).map(str), st.sampled_from(["/setblock", "/fill"])
    command = st.tuples(name, number, number, number, number, number, number, st.sampled_from(blocks))
    line = command.map(lambda c: " ".join((*c[:4], c[7]) if c[0] == "/setblock" else c))
    states, _ = world.reset([task], rng)
    total, worth, faults = 0.0, 0.0, 0.0
    for _ in range(3):
        texts = [[data.draw(st.lists(line, max_size=12).map("\n".join))] for _ in range(2)]
        answer = world.step(states, texts, rng)
        total += answer.result.rewards[0, 0] if answer.result.rewards.ndim > 1 else answer.result.rewards[0]
        worth = answer.result.parts["worth"][0]
        faults += sum(answer.result.parts[name][0] for name in ("overlap", "short") if name in answer.result.parts)
        if answer.done[0]:
            break
        states, _ = world.observe(answer.after)
    assert total == pytest.approx(worth + faults)


@pytest.mark.parametrize("make", [StrBuild, HouseBuild])
def test_a_step_changes_no_state_and_no_environment(make):
    env = make(num_turns=2)
    task = env.tasks("train", 1)[0]
    state, _ = env.reset(task, RNG)
    before = repr((state, vars(env)))
    one = env.step(state, best(env, task), RNG)
    assert repr((state, vars(env))) == before and env.step(state, best(env, task), RNG) == one


@pytest.mark.parametrize(
    ("make", "task", "message"),
    [
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
    ],
)
def test_malformed_tasks_are_refused(make, task, message):
    with pytest.raises(ValueError, match=message):
        make().reset(task, RNG)


def test_bad_options_are_refused(tmp_path):
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


def test_the_published_strings(data_dir):
    env = StrBuild(data_dir / "house_build" / "str_build.csv")
    tasks = {split: env.tasks(split) for split in ("train", "eval")}
    assert len(tasks["train"]) == 8 and len(tasks["eval"]) == 2
    strings = [task["string"] for of in tasks.values() for task in of]
    assert sorted(strings) == ["C", "CLIM", "CM", "I", "ICML", "L", "LI", "LLM", "M", "MC"]
    assert all(once(env, {"string": text}, *best(env, {"string": text})).reward == pytest.approx(2) for text in strings)


def test_the_published_houses(data_dir):
    env = HouseBuild(data_dir / "house_build" / "data.json")
    assert len(env.houses) == 10 and (len(env.tasks("train")), len(env.tasks("eval"))) == (4, 1), "the ten have five plans"
    for task in env.houses:
        (width, height, depth), plan = read_plan(task)
        assert [width, height, depth] == task["target_spec"]["size"] == [6, 7, 7]
        counts = {task["inventory"][letter]: count for letter, count in task["count"].items() if letter != "A"}
        assert Counter(plan.values()) == counts
        assert once(env, task, *best(env, task)).reward == pytest.approx(2)
        assert len(env.reset(task, RNG)[1][0]) < 2500


@pytest.mark.parametrize(("name", "turns"), [("str_build", 2), ("house_build", 1), ("function_calling", 1)])
def test_the_experiment_trains(name, turns, tiny_dir, tmp_path, capsys):
    """On a tiny model: one update, and held-out tasks before and after it."""
    from experiments.building import BuildingConfig, run
    from experiments.report import report

    model = tiny_dir("llama", max_position_embeddings=4096)
    cfg = BuildingConfig(
        environment=name, model=str(model), num_turns=turns, num_updates=1, num_prompts=1, num_generations=2, held_out=1,
        max_new_tokens=4, output_dir=str(tmp_path / "run"),
    )  # fmt: skip
    result = run(cfg)
    assert len(result.rewards) == 1 and math.isfinite(result.rewards[0]) and result.after is not None
    report(cfg, result)
    printed = capsys.readouterr().out
    assert f"held-out after: reward {result.after.mean:.3f}," in printed, "one task has no interval"
    assert "mean reward of the last 1 updates" in printed
