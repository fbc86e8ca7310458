"""The environments of mathematics: rewards worked by hand, turns, what is read and what never is, data."""

from __future__ import annotations

import math
import pickle
import re
import time
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jmarl.envs import make
from jmarl.envs.math.data import Rows, load_tasks, of_gsm8k, of_svamp
from jmarl.envs.math.problems import MathProblemGenerator
from jmarl.envs.math.reasoning import (
    QUOTED,
    MathPlanner,
    MathReasoning,
    MathReasoningEnvironment,
    MathVerifier,
    has_answer,
    quoted,
    shows_steps,
)
from jmarl.envs.vector import LockStep

TASK = {"id": "t", "question": "Ann has 12 apples and buys 30 more. How many?", "answer": "42"}
RNG = np.random.default_rng(0)


def played(env, *messages, task=TASK):
    """Steps of an episode; a message is of whoever acts."""
    (state, observations), steps = env.reset(task, RNG), []
    for message in messages:
        state, observations, reward, done, info, _ = step = env.step(
            state, [message if text is not None else "" for text in observations], RNG
        )
        steps.append(step)
        assert done == (message is messages[-1]) or not done
    return steps


def rewards(steps):
    return [step.reward for step in steps]


# ---- a solver alone


@pytest.mark.parametrize(
    ("message", "reward", "solved", "unparsable"),
    [("Answer: 42", 1.0, 1, 0), ("Answer: 43", 0.0, 0, 0), ("no idea", -0.3, 0, 1),
     ("Answer: 41 or 42", -0.3, 0, 1), ("", -0.3, 0, 1)],
)  # fmt: skip
def test_the_reward_is_of_the_answer(message, reward, solved, unparsable):
    [step] = played(MathReasoning(), message)
    assert step.reward == reward and step.done and step.info == {"solved": solved, "unparsable": unparsable}


def test_attempts_until_one_is_correct():
    env = MathReasoning(max_turns=3)
    steps = played(env, "Answer: 41", "who knows", "Answer: 42")
    assert rewards(steps) == [0.0, -0.3, 1.0] and [step.done for step in steps] == [False, False, True]
    assert [step.done for step in played(env, "Answer: 42")] == [True]
    assert played(env, "1", "2", "3")[-1].done
    again = steps[0].observations[0]
    assert again.startswith(TASK["question"]) and "Answer: 41" in again and "not the right answer" in again


def test_feedback_says_the_same_whatever_is_right():
    """So it holds nothing of the answer: not whether an attempt is near, too high or too low."""
    env = MathReasoning(max_turns=2)
    for message in ("Answer: 41", "Answer: 84/2", "nothing", "1000000", "Answer: -42", "Answer: 0.1"):
        texts = {
            played(env, message, task=TASK | {"answer": gold})[0].observations[0] for gold in ("42.5", "43", "999", "-1/3")
        }
        assert len(texts) == 1
    for task in env.tasks("train", 300):
        state, [first] = env.reset(task, RNG)
        said = env.step(state, ["Answer: 123456789"], RNG).observations[0]
        plain = said.replace("123456789", "")
        assert re.findall(r"\d", plain) == re.findall(r"\d", task["question"])  # no digit that is not the question's
        assert plain.startswith(first)


def test_shown_steps_are_true_equations_that_begin_with_the_question():
    question = "Ann has 12 apples and 30 pears, in 1,000 bags."
    assert (
        shows_steps("12 + 30 = 42", question) and shows_steps("So $12 \\times 30 = 360$", question.replace("30", "3")) is False
    )
    assert (
        shows_steps("1,000 / 8 = 125", question)
        and shows_steps("30 - 40 = -10", question)
        and shows_steps("12×2=24.", question)
    )
    for text in ("12 + 0 = 12", "12 × 1 = 12", "30 - 18 = 12"):
        assert not shows_steps(text, question)  # nothing new
    for text in ("12 + 30 = 43", "1 + 1 = 2", "12 + 30", "", "12 / 0 = 1", "= = =", "12 + 30 = 42.5"):
        assert not shows_steps(text, question)
    env = MathReasoning(steps_bonus=True)
    assert env.reward_range == (-0.3, 1.2)
    assert rewards(played(env, "12 + 30 = 42\nAnswer: 42")) == [1.2] and rewards(played(env, "Answer: 42")) == [1.0]
    assert rewards(played(env, "12 + 30 = 42\nAnswer: 41")) == [0.0]  # steps alone earn nothing
    assert played(env, "12 + 30 = 42\nAnswer: 41")[0].info["steps"] == 1.0


# ---- with a verifier


@pytest.mark.parametrize(
    ("messages", "of_solver", "of_verifier"),
    [
        (("Answer: 42", "fine. CORRECT"), [1.0, 0.0], [0.0, 1.0]),
        (("Answer: 41", "CORRECT"), [0.0, 0.0], [0.0, 0.0]),
        (("Answer: 41", "12 + 30 is not 41. WRONG", "Answer: 42"), [0.0, 0.0, 1.0], [0.0, 1.0, 0.0]),
        (("Answer: 42", "WRONG", "Answer: 42"), [1.0, 0.0, 0.0], [0.0, 0.0, 0.0]),
        (("Answer: 42", "WRONG", "hm"), [1.0, 0.0, -1.3], [0.0, 0.0, 0.0]),
        (("hm", "WRONG", "Answer: 42"), [-0.3, 0.0, 1.3], [0.0, 1.0, 0.0]),
        (("Answer: 41", "I cannot say", "Answer: 43"), [0.0, 0.0, 0.0], [0.0, -0.3, 0.0]),
        (("Answer: 41", "CORRECT? No: INCORRECT", "Answer: 42"), [0.0, 0.0, 1.0], [0.0, 1.0, 0.0]),
        (("Answer: 41", "It is NOT CORRECT", "Answer: 42"), [0.0, 0.0, 1.0], [0.0, 1.0, 0.0]),
        (("Answer: 42", "not WRONG but CORRECT"), [1.0, 0.0], [0.0, 1.0]),
        (("Answer: 42", "correct", "Answer: 42"), [1.0, 0.0, 0.0], [0.0, -0.3, 0.0]),
    ],
)
def test_solver_and_verifier(messages, of_solver, of_verifier):
    steps = played(MathVerifier(), *messages)
    found = np.array(rewards(steps)).T
    assert np.allclose(found, [of_solver, of_verifier])
    assert [step.done for step in steps] == [False] * (len(steps) - 1) + [True]
    last = {"Answer: 42": 1.0, "hm": -0.3}
    solution = messages[2] if len(messages) > 2 else messages[0]
    assert math.isclose(found[0].sum(), last.get(solution, 0.0), abs_tol=1e-12)  # the sum is the score of what stands
    assert steps[-1].info["solved"] == float(solution == "Answer: 42")


@pytest.mark.parametrize("rounds", [1, 2, 3])
def test_right_verdicts_add_up_to_1_whatever_the_solver_does(rounds):
    """So keeping the solver wrong gains nothing."""
    env = MathVerifier(rounds=rounds)
    assert env.reward_range == (-1.3, 1.3)
    wrong, right = ("Answer: 41", "WRONG"), ("Answer: 42", "CORRECT")
    for k in range(rounds):
        found = np.array(rewards(played(env, *wrong * k, *right)))
        assert math.isclose(found[:, 1].sum(), 1.0) and np.allclose(found[1 : 2 * k : 2, 1], 1 / rounds)
        said = played(env, *wrong * k, "Answer: 41", "CORRECT")
        assert math.isclose(sum(step.reward[1] for step in said), k / rounds)  # a wrong CORRECT gets 0 and ends it
        assert said[-1].done
    kept = np.array(rewards(played(env, *wrong * rounds, "Answer: 41")))
    assert math.isclose(kept[:, 1].sum(), 1.0)
    stalled = played(env, *("Answer: 42", "WRONG") * rounds, "Answer: 42")
    assert sum(step.reward[1] for step in stalled) == 0
    silent = played(env, *("Answer: 41", "?") * rounds, "Answer: 41")
    assert math.isclose(sum(step.reward[1] for step in silent), -0.3)


def test_they_act_by_turns_and_read_each_other():
    steps = played(MathVerifier(rounds=2), "Answer: 41, so", "no! WRONG", "Answer: 43", "WRONG", "Answer: 42")
    acting = [[text is not None for text in step.observations] for step in steps[:-1]]
    assert acting == [[False, True], [True, False]] * 2 and steps[-1].done
    assert "Answer: 41, so" in steps[0].observations[1] and TASK["question"] in steps[0].observations[1]
    assert "no! WRONG" in steps[1].observations[0] and "Answer: 41, so" in steps[1].observations[0]
    infos = [step.info for step in steps]
    assert len({tuple(info) for info in infos}) == 1
    assert [info["verdict_right"] for info in infos[1:]] == [1, 1, 1, 1] and math.isnan(infos[0]["verdict_right"])
    assert [info["revised"] for info in infos[2:]] == [0, 0, 1]


def test_nobody_is_told_whether_a_verdict_is_right():
    env = MathVerifier()
    for said in ("WRONG", "?"):
        texts = {
            tuple(played(env, "Answer: 7", said, "Answer: 7", task=TASK | {"answer": gold})[1].observations) for gold in "78"
        }
        assert len(texts) == 1


# ---- with a planner


def test_planner_and_solver():
    env = MathPlanner()
    state, observations = env.reset(TASK, RNG)
    assert observations[1] is None and TASK["question"] in observations[0]
    steps = played(env, "Add both numbers.", "12 + 30 = 42. Answer: 42")
    assert rewards(steps) == [0.0, 1.0] and steps[0].observations[0] is None
    assert "Add both numbers." in steps[0].observations[1] and TASK["question"] in steps[0].observations[1]
    assert rewards(played(env, "p", "hm")) == [0.0, -0.3] and rewards(played(env, "p", "41")) == [0.0, 0.0]
    assert [step.info["plan_has_answer"] for step in steps] == [0, 0]
    assert [step.info["plan_has_answer"] for step in played(env, "12 + 30 = 42, I think so.", "?")] == [1, 1]


def test_an_answer_in_a_plan_is_noticed():
    assert has_answer("First 42, then 7", TASK) and not has_answer("First add 12 and 30", TASK) and not has_answer("", TASK)
    roots = {"question": "q", "answer": "2, 3", "kind": "set"}
    assert has_answer("x = 2 or x = 3", roots) and not has_answer("factor it, 2 is a root", roots)


# ---- all three

NAMES = ("math", "math_verifier", "math_planner")


@pytest.mark.parametrize("name", NAMES)
def test_an_oracle_gets_the_most_and_nonsense_the_least(name):
    env = make(name)
    tasks = env.tasks("train", 60) + env.tasks("eval", 20)
    world, seen = LockStep(env), []
    for right in (True, False):
        states, read = world.reset(tasks, RNG)
        total = np.zeros((len(tasks), env.num_agents))
        for _ in range(env.max_turns):
            said = "Answer: {}\nCORRECT" if right else "nothing{:.0}"
            texts = [said.format(task["answer"]) for task in tasks]
            answer = world.step(states, [texts if of[0] is not None else [""] * len(tasks) for of in read], RNG)
            total += answer.result.rewards.reshape(len(tasks), -1)
            if answer.done.all():
                break
            states, read = world.observe(answer.after)
        seen.append(total)
    assert np.allclose(seen[0], 1.0) and np.allclose(seen[1], -0.3)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_read_is_short_and_has_no_answer_of_its_own(name):
    """Two tasks that differ in their answer alone are read the same."""
    env = make(name)
    for kind, answers in {
        "number": ("42", "7"),
        "set": ("1, 2", "5, 6"),
        "assignments": ("x = 1, y = 2", "x = 5, y = 6"),
    }.items():
        texts = {tuple(env.reset(TASK | {"answer": a, "kind": kind}, RNG)[1]) for a in answers}
        assert len(texts) == 1
    long = "word " * 30_000
    for steps in (
        (played(env, long, long, long), played(env, "\ud800\0", "\ud800\0", "\ud800\0")) if name == "math_verifier" else ()
    ):
        for text in (text for step in steps for text in step.observations if text is not None):
            assert len(text) < 2 * QUOTED + 800 and text.encode() and "\0" not in text
    assert quoted("") == "(nothing)" and quoted("a" * 5000) == "a" * QUOTED


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ({}, "no text in question, answer"),
        ({"question": "2 + 2?"}, "no text in answer"),
        ({"question": " ", "answer": "4"}, "no text in question"),
        ({"question": "2 + 2?", "answer": 4}, "no text in answer"),
        ({"question": "2 + 2?", "answer": "four"}, "answer='four' cannot be read as a number"),
        ({"question": "2 + 2?", "answer": "4", "kind": "word"}, "of kind 'word': choose number, set, interval, assignments"),
    ],
)
def test_malformed_tasks_are_refused(task, message):
    with pytest.raises(ValueError, match=message):
        MathReasoning().reset(task, RNG)


@pytest.mark.parametrize(
    ("cls", "options", "message"),
    [
        (MathReasoning, dict(max_turns=0), "max_turns=0"),
        (MathReasoning, dict(data="math"), "unknown data set 'math': choose gsm8k, svamp"),
        (MathReasoning, dict(data_path="x.jsonl"), "say gsm8k or svamp"),
        (MathReasoning, dict(generator=MathProblemGenerator(), data="gsm8k"), "give one of them"),
        (MathReasoning, dict(difficulty_range=(1, 2), data="svamp"), "give one of them"),
        (MathReasoning, dict(difficulty_range=(1, 4)), "between 1 and 3"),
        (MathVerifier, dict(rounds=0), "rounds=0"),
        (MathVerifier, dict(steps_bonus=True), "for a solver alone"),
        (MathPlanner, dict(steps_bonus=True), "for a solver alone"),
    ],
)
def test_options_that_make_no_sense_are_refused(cls, options, message):
    with pytest.raises(ValueError, match=message):
        cls(**options)


def test_a_generator_is_the_first_argument():
    env = MathReasoningEnvironment(MathProblemGenerator((2, 2), ["algebra"]))
    assert {(task["difficulty"], task["topic"]) for task in env.tasks("train", 20)} == {(2, "algebra")}
    own = SimpleNamespace(tasks=lambda split, count, seed: [TASK], describe=dict)
    assert MathVerifier(own).tasks() == [TASK] and MathPlanner(own).describe()["tasks"] == {}
    state, _ = env.reset(TASK, RNG)
    assert pickle.loads(pickle.dumps(state)) == state and "42" in env.render(state)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.text(max_size=200), min_size=3, max_size=3), st.sampled_from(NAMES))
def test_no_text_breaks_an_episode(messages, name):
    env = make(name)
    low, high = env.reward_range
    for step in played_until_done(env, messages):
        assert all(low <= reward <= high for reward in np.ravel(step.reward))


def played_until_done(env, messages):
    state, observations = env.reset(TASK, RNG)
    for message in messages:
        step = env.step(state, [message if text is not None else "" for text in observations], RNG)
        yield step
        if step.done:
            return
        state, observations = step.state, step.observations


def test_a_thousand_steps_a_second():
    """Of made tasks of all kinds, answered in sentences; this thread's time."""
    env = MathReasoning()
    tasks = env.tasks("train", 200)
    episodes = [env.reset(task, RNG)[0] for task in tasks]
    texts = [f"Let me think step by step. First 3 + 4 = 7. Then we go on.\nAnswer: {task['answer']}" for task in tasks]
    for _ in range(2):
        begin = time.thread_time()
        for state, text in zip(episodes, texts, strict=True):
            env.step(state, [text], RNG)
        took = time.thread_time() - begin
    assert len(tasks) / took > 1000


# ---- data


def test_rows_become_tasks():
    assert of_gsm8k({"question": "How?\n", "answer": "5 #### is\n#### -1,234,567"}) == ("How?", "-1234567")
    assert of_svamp({"Body": "If 3 go", "Question": "how many stay?", "Answer": 17.0}) == ("If 3 go, how many stay?", "17")
    assert of_svamp({"Body": "3 go.", "Question": "How many?", "Answer": 2.5}) == ("3 go. How many?", "5/2")


def test_percentages_are_asked_for_in_the_last_sentence(data_dir):
    tasks = load_tasks("gsm8k", data_dir / "gsm8k/main/train.jsonl.gz")
    percent = [task for task in tasks if task["unit"] == "%"]
    assert 50 < len(percent) < 80 and all("percent" in task["question"].lower() for task in percent)
    assert not any(
        re.search(r"how (much|many)[^,]*\?$", task["question"], re.I) and "percentage" not in task["question"]
        for task in percent
    )


@pytest.mark.parametrize(("name", "file"), [("gsm8k", "gsm8k/main/test.jsonl.gz"), ("svamp", "svamp/train.jsonl.gz")])
def test_data_sets_are_split_by_their_questions(data_dir, name, file):
    env = MathReasoning(data=name, data_path=data_dir / file)
    train, held_out = env.tasks("train", 10**6), env.tasks("eval", 10**6)
    everything = {task["question"] for task in load_tasks(name, data_dir / file)}
    assert len(train) + len(held_out) == len(everything) and 0.12 < len(held_out) / len(everything) < 0.28
    assert {task["question"] for task in train} | {task["question"] for task in held_out} == everything
    assert env.tasks("train", 9, seed=1) == env.tasks("train", 9, seed=1) != env.tasks("train", 9, seed=2)
    for task in train[:50]:
        assert rewards(played(env, f"It is {task['answer']}.", task=task)) == [1.0]
    with pytest.raises(ValueError, match="train or eval"):
        env.tasks("test")


def test_a_row_without_a_number_is_refused_with_its_place(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"question": "How many?", "answer": "#### 3"}\n{"question": "Who?", "answer": "#### Ann"}\n')
    with pytest.raises(ValueError, match="row 1 of .*rows.jsonl: answer='Ann' cannot be read"):
        load_tasks("gsm8k", file)
    assert Rows([TASK, TASK]).describe() in ({"rows": {"train": 1, "eval": 0}}, {"rows": {"train": 0, "eval": 1}})
