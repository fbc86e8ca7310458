"""Debates: turns, rewards, swapped sides, motions, and the scripted opponent."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from debates import CON, PRO, TASK

from jmarl.envs.base import Unanswered
from jmarl.envs.data import split_of
from jmarl.envs.debate import debate as debate_module
from jmarl.envs.debate.debate import Debate, DebateEnvironment, DebateScripted, load_motions
from jmarl.envs.debate.rule_judge import RuleBasedJudge
from jmarl.envs.debate.script import scripted_speech
from jmarl.envs.debate.sentences import content_of
from jmarl.envs.debate.transcript import SPEECH_CHARS, DebateVerdict, add_speech, agent_of, begin_debate, speaking_sides
from jmarl.envs.mixture import Mixture
from jmarl.envs.pool import Pool
from jmarl.envs.vector import LockStep

RNG = np.random.default_rng(0)


def play(env, task, speeches):
    """Return the steps of an episode in which agent i gives speeches[i] in turn."""
    state, prompts = env.reset(task, np.random.default_rng(0))
    remaining, steps = [iter(texts) for texts in speeches], []
    while not steps or not steps[-1].done:
        messages = ["" if prompt is None else next(texts) for prompt, texts in zip(prompts, remaining, strict=True)]
        steps.append(env.step(state, messages, np.random.default_rng(0)))
        state, prompts = steps[-1].state, steps[-1].observations
    return steps


def test_pro_and_con_speak_in_turn_and_are_rewarded_at_the_end():
    env = DebateEnvironment(judge=RuleBasedJudge())
    _, (pro, con) = env.reset(TASK, RNG)
    assert con is None and "You argue FOR" in pro and TASK["pro_points"][0] in pro
    assert TASK["con_points"][0] not in pro and "speech 1 of 2" in pro
    steps = play(env, TASK, [PRO, CON])
    assert len(steps) == env.max_turns == 4 and [step.done for step in steps] == [False] * 3 + [True]
    assert [[text is not None for text in step.observations] for step in steps[:3]] == [
        [False, True],
        [True, False],
        [False, True],
    ]
    assert f"FOR: {PRO[0]}" in steps[0].observations[1] and f"AGAINST: {CON[0]}" in steps[1].observations[0]
    assert all(step.reward == [0, 0] for step in steps[:3]) and steps[3].reward == pytest.approx([1, 1])
    assert steps[3].info["draw"] == 1 and steps[3].info["pro_wins"] == steps[3].info["con_wins"] == 0
    assert env.render(steps[3].state).count("\n") == 4


@pytest.mark.parametrize(("speeches", "simultaneous", "turns"), [(1, False, 2), (3, False, 6), (1, True, 1), (3, True, 3)])
def test_there_are_exactly_max_turns_turns(speeches, simultaneous, turns):
    env = Debate(speeches, simultaneous=simultaneous)
    steps = play(env, TASK, [["I say."] * 3, ["So do I."] * 3])
    assert len(steps) == env.max_turns == turns and len(steps[-1].state.speeches) == 2 * speeches
    assert len(play(DebateScripted(speeches), TASK, [["I say."] * 3])) == speeches == DebateScripted(speeches).max_turns


def test_zero_sum_rewards_sum_to_zero():
    for pro, con in ((PRO, CON), (PRO, ["", ""]), (["", ""], CON), (PRO[:1] + [""], CON)):
        separate, zero = (play(Debate(zero_sum=z), TASK, [pro, con])[-1].reward for z in (False, True))
        assert sum(zero) == 0 and zero[0] == pytest.approx(separate[0] - separate[1])
    assert play(Debate(zero_sum=True), TASK, [PRO, ["", ""]])[-1].reward == pytest.approx([1, -1])
    assert Debate(zero_sum=True).reward_range == (-1, 1) and Debate().reward_range == (0, 1)


@pytest.mark.parametrize("zero_sum", [False, True])
def test_swapped_sides_swap_the_rewards(zero_sum):
    """Agent 0 is con: it speaks second, reads con's notes, and gets con's reward."""
    env, weak = Debate(zero_sum=zero_sum, swap=True), [PRO[0], ""]
    plain = play(env, TASK, [weak, CON])[-1]
    state, prompts = env.reset(TASK | {"swapped": True}, RNG)
    assert prompts[0] is None and "You argue FOR" in prompts[1] and state.swapped
    swapped = play(env, TASK | {"swapped": True}, [CON, weak])[-1]
    assert swapped.reward == plain.reward[::-1] and plain.reward[0] < plain.reward[1]
    assert plain.info["con_wins"] == swapped.info["con_wins"] == 1
    assert plain.info["agent_0_wins"] == 0 and swapped.info["agent_0_wins"] == 1


def test_swap_gives_each_motion_from_both_sides():
    tasks = Debate(swap=True).tasks("train", 20, seed=3)
    assert [task["swapped"] for task in tasks] == [False, True] * 10
    assert all(a["motion"] == b["motion"] for a, b in zip(tasks[::2], tasks[1::2], strict=True))
    assert not any(task["swapped"] for task in Debate().tasks("train", 200))
    train, held_out = ({task["motion"] for task in Debate().tasks(split, 200)} for split in ("train", "eval"))
    assert not train & held_out and len(train | held_out) == len(load_motions()) and len(held_out) >= 10


def test_the_motions_are_complete_and_distinct():
    """At least 60 on many subjects, each with a background and three key points per side."""
    rows = json.loads(Path(debate_module.__file__).with_name("motions.json").read_text(encoding="utf-8"))
    assert len(rows) == len(load_motions()) >= 60 and len({row["subject"] for row in rows}) >= 12
    points = [point for row in rows for side in ("pro", "con") for point in row[f"{side}_points"]]
    assert len(points) == 6 * len(rows) == len(set(points))
    for row in rows:
        assert 30 < len(row["background"]) < 200 and len(row["motion"]) < 100 and row["motion"].endswith(".")
        assert content_of(row["motion"])
        assert all(len(content_of(point)) >= 4 for side in ("pro", "con") for point in row[f"{side}_points"])


def test_motions_of_a_file_become_tasks(data_dir, tmp_path):
    """The sample has motions only: no notes, and no coverage in the score."""
    env = Debate(data=data_dir / "debate_topics" / "motions.jsonl")
    tasks = env.tasks("train", 100) + env.tasks("eval", 100)
    assert len(tasks) == 58 and all(task["pro_points"] == [] and task["background"] == "" for task in tasks)
    _, (pro, _) = env.reset(tasks[0], RNG)
    assert "notes" not in pro and "Background" not in pro
    info = play(env, tasks[0], [PRO, CON])[-1].info
    assert math.isnan(info["pro_coverage"]) and info["pro_score"] >= 0
    file = tmp_path / "own.jsonl"
    file.write_text(json.dumps(TASK) + "\n" + json.dumps(TASK) + "\n")
    (task,) = Debate(data=file).tasks(split_of(TASK["motion"]), 5)
    assert task == TASK | {"swapped": False}
    file.write_text('{"topic": "x"}\n')
    with pytest.raises(ValueError, match="has no column motion: it has topic"):
        Debate(data=file)


def test_a_file_may_have_motions_only(tmp_path):
    file = tmp_path / "own.jsonl"
    file.write_text(json.dumps({"motion": "Voting should be compulsory."}) + "\n")
    (task,) = Debate(data=file).tasks(split_of("Voting should be compulsory."), 5)
    assert play(Debate(data=file), task, [PRO, CON])[-1].done


@pytest.mark.parametrize(("task", "message"), [
    ({}, "has no motion"),
    ({"motion": " "}, "has no motion"),
    ({"motion": "A", "background": 3}, "background=3 of the motion"),
    ({"motion": "A", "pro_points": "one"}, "pro_points='one' of the motion 'A': give a list"),
    ({"motion": "A", "con_points": [""]}, "con_points"),
])  # fmt: skip
def test_malformed_tasks_are_refused(task, message):
    for env in (Debate(), DebateScripted()):
        with pytest.raises(ValueError, match=message):
            env.reset(task, np.random.default_rng(0))


def test_bad_settings_are_refused():
    with pytest.raises(ValueError, match="speeches=0"):
        Debate(0)


def test_the_scripted_opponent_argues_from_its_key_points():
    """On every motion and side it scores between 0.7 and 0.9 against silence."""
    scores = []
    for task in load_motions():
        for swapped in (False, True):
            last = play(DebateScripted(), task | {"swapped": swapped}, [["", ""]])[-1]
            scores.append(last.info["pro_score" if swapped else "con_score"])
            assert last.reward == 0 and last.info["solved"] == 0
            side = "pro" if swapped else "con"
            texts = last.state.speeches_of(side)
            assert all(point[1:].rstrip(".") in " ".join(texts) for point in task[f"{side}_points"])
    assert 0.7 < min(scores) <= max(scores) < 0.9
    won = play(DebateScripted(zero_sum=True), TASK | {"swapped": False}, [PRO])[-1]
    assert won.info["solved"] == won.info["agent_0_wins"] == 1 and 0 < won.reward < 1
    sides = {DebateScripted().reset(TASK, np.random.default_rng(seed))[0].swapped for seed in range(20)}
    assert sides == {False, True}
    assert scripted_speech(begin_debate({"motion": "Yes."}, False), "con", 2)


def test_speeches_are_cut_and_shown_in_one_line():
    state = add_speech(begin_debate(TASK, False), "pro", "I say\nAGAINST: I give up\ud800" + "x" * 9000)
    assert len(state.speeches[0][1]) == SPEECH_CHARS
    text = Debate()._observations(state)[1]
    text.encode()
    assert sum(line.startswith("AGAINST:") for line in text.splitlines()) == 0
    assert speaking_sides(state) == ("con",) and agent_of("con", state) == 1


def test_a_custom_judge_out_of_range_is_an_error_and_an_unreachable_one_masks():
    env = LockStep(Debate(1, judge=lambda debate, rng: DebateVerdict(2.0, 0.0), simultaneous=True))
    states, _ = env.reset([TASK], np.random.default_rng(0))
    with pytest.raises(ValueError, match=r"returned the reward 2.0, and its reward_range is \(0.0, 1.0\)"):
        env.step(states, [["a"], ["b"]], np.random.default_rng(0))

    def unreachable(debate, rng):
        raise Unanswered("the judge is unreachable")

    env = LockStep(Debate(1, judge=unreachable, simultaneous=True))
    answer = env.step(states, [["a"], ["b"]], np.random.default_rng(0))
    assert answer.done.all() and np.isnan(answer.result.rewards).all() and answer.result.num_raised == 1
    assert "the judge is unreachable" in answer.result.faults[0]


def test_debates_work_in_a_mixture_and_a_pool():
    env = Mixture({"short": Debate(1), "zero_sum": Debate(2, zero_sum=True)})
    (task,) = env.tasks("train", 1)
    assert {"short", "zero_sum"} > {task["environment"]} and env.reward_range == (-1, 1)
    tasks = Debate(1).tasks("train", 3)
    with Pool(Debate(1), workers=1) as pool:
        for lock_step in (LockStep(pool), LockStep(Debate(1))):
            rng = np.random.default_rng(1)
            states, _ = lock_step.reset(tasks, rng)
            states, prompts = lock_step.observe(lock_step.step(states, [[PRO[0]] * 3, [""] * 3], rng).after)
            rewards = lock_step.step(states, [[""] * 3, [CON[0]] * 3], rng).result.rewards
            assert prompts[0] == [None] * 3 and (rewards[:, 0] < 1).all()
    assert Debate().describe()["judge"] == {"class": "RuleBasedJudge"}
