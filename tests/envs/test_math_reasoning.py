"""The environments of mathematics: rewards computed by hand, turns, and what agents read and never read."""

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
from jmarl.envs.math.planner import MathPlanner, has_answer
from jmarl.envs.math.problems import MathProblemGenerator
from jmarl.envs.math.reasoning import MAX_QUOTE, MathReasoning, MathReasoningEnvironment, quote, shows_steps
from jmarl.envs.math.verifier import MathVerifier
from jmarl.envs.vector import LockStep, Step

TASK = {"id": "t", "question": "Ann has 12 apples and buys 30 more. How many?", "answer": "42"}
RNG = np.random.default_rng(0)


def play(env: MathReasoning, *messages: str, task: dict = TASK) -> list[Step]:
    """Play an episode and return its steps. The agent that acts writes the next message."""
    (state, observations), steps = env.reset(task, RNG), []
    for message in messages:
        step = env.step(state, [message if text is not None else "" for text in observations], RNG)
        state, observations = step.state, step.observations
        steps.append(step)
        assert not step.done or message is messages[-1]
    return steps


def rewards(steps: list[Step]) -> list:
    return [step.reward for step in steps]


# ---- a solver alone


@pytest.mark.parametrize(
    ("message", "reward", "solved", "unparsable"),
    [("Answer: 42", 1.0, 1, 0), ("Answer: 43", 0.0, 0, 0), ("no idea", -0.3, 0, 1),
     ("Answer: 41 or 42", -0.3, 0, 1), ("", -0.3, 0, 1)],
)  # fmt: skip
def test_the_reward_is_the_score_of_the_answer(message, reward, solved, unparsable):
    [step] = play(MathReasoning(), message)
    assert step.reward == reward and step.done and step.info == {"solved": solved, "unparsable": unparsable}


def test_attempts_end_with_a_correct_one():
    env = MathReasoning(max_turns=3)
    steps = play(env, "Answer: 41", "who knows", "Answer: 42")
    assert rewards(steps) == [0.0, -0.3, 1.0] and [step.done for step in steps] == [False, False, True]
    assert [step.done for step in play(env, "Answer: 42")] == [True]
    assert play(env, "1", "2", "3")[-1].done
    prompt = steps[0].observations[0]
    assert prompt.startswith(TASK["question"]) and "Answer: 41" in prompt and "not the right answer" in prompt


def test_feedback_does_not_depend_on_the_right_answer():
    """So it does not tell whether an attempt is close, too high or too low."""
    env = MathReasoning(max_turns=2)
    for message in ("Answer: 41", "Answer: 84/2", "nothing", "1000000", "Answer: -42", "Answer: 0.1"):
        texts = {play(env, message, task=TASK | {"answer": gold})[0].observations[0] for gold in ("42.5", "43", "999", "-1/3")}
        assert len(texts) == 1
    for task in env.tasks("train", 300):
        state, [first] = env.reset(task, RNG)
        feedback = env.step(state, ["Answer: 123456789"], RNG).observations[0].replace("123456789", "")
        assert re.findall(r"\d", feedback) == re.findall(r"\d", task["question"])  # only digits of the question
        assert feedback.startswith(first)


def test_shown_steps_are_true_equations_that_begin_with_a_number_of_the_question():
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
        assert not shows_steps(text, question)  # no new result
    for text in ("12 + 30 = 43", "1 + 1 = 2", "12 + 30", "", "12 / 0 = 1", "= = =", "12 + 30 = 42.5"):
        assert not shows_steps(text, question)
    env = MathReasoning(steps_bonus=True)
    assert env.reward_range == (-0.3, 1.2)
    assert rewards(play(env, "12 + 30 = 42\nAnswer: 42")) == [1.2] and rewards(play(env, "Answer: 42")) == [1.0]
    assert rewards(play(env, "12 + 30 = 42\nAnswer: 41")) == [0.0]  # steps alone earn nothing
    assert play(env, "12 + 30 = 42\nAnswer: 41")[0].info["steps"] == 1.0


# ---- with a verifier


@pytest.mark.parametrize(("messages", "solver_rewards", "verifier_rewards"), [
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
])  # fmt: skip
def test_solver_and_verifier_have_rewards_of_their_own(messages, solver_rewards, verifier_rewards):
    steps = play(MathVerifier(), *messages)
    by_agent = np.array(rewards(steps)).T
    assert np.allclose(by_agent, [solver_rewards, verifier_rewards])
    assert [step.done for step in steps] == [False] * (len(steps) - 1) + [True]
    scores = {"Answer: 42": 1.0, "hm": -0.3}
    solution = messages[2] if len(messages) > 2 else messages[0]
    assert math.isclose(by_agent[0].sum(), scores.get(solution, 0.0), abs_tol=1e-12)  # the score of the last answer
    assert steps[-1].info["solved"] == float(solution == "Answer: 42")


@pytest.mark.parametrize("rounds", [1, 2, 3])
def test_right_verdicts_sum_to_1_whatever_the_solver_does(rounds):
    """So the verifier gains nothing by keeping the solver wrong."""
    env = MathVerifier(rounds=rounds)
    assert env.reward_range == (-1.3, 1.3)
    wrong, right = ("Answer: 41", "WRONG"), ("Answer: 42", "CORRECT")
    for k in range(rounds):
        values = np.array(rewards(play(env, *wrong * k, *right)))
        assert math.isclose(values[:, 1].sum(), 1.0) and np.allclose(values[1 : 2 * k : 2, 1], 1 / rounds)
        mistaken = play(env, *wrong * k, "Answer: 41", "CORRECT")
        assert math.isclose(sum(step.reward[1] for step in mistaken), k / rounds)  # a wrong CORRECT gets 0 and ends it
        assert mistaken[-1].done
    unsolved = np.array(rewards(play(env, *wrong * rounds, "Answer: 41")))
    assert math.isclose(unsolved[:, 1].sum(), 1.0)
    stalled = play(env, *("Answer: 42", "WRONG") * rounds, "Answer: 42")
    assert sum(step.reward[1] for step in stalled) == 0
    silent = play(env, *("Answer: 41", "?") * rounds, "Answer: 41")
    assert math.isclose(sum(step.reward[1] for step in silent), -0.3)


def test_solver_and_verifier_take_turns_and_read_each_other():
    steps = play(MathVerifier(rounds=2), "Answer: 41, so", "no! WRONG", "Answer: 43", "WRONG", "Answer: 42")
    acting = [[text is not None for text in step.observations] for step in steps[:-1]]
    assert acting == [[False, True], [True, False]] * 2 and steps[-1].done
    assert "Answer: 41, so" in steps[0].observations[1] and TASK["question"] in steps[0].observations[1]
    assert "no! WRONG" in steps[1].observations[0] and "Answer: 41, so" in steps[1].observations[0]
    infos = [step.info for step in steps]
    assert len({tuple(info) for info in infos}) == 1
    assert [info["verdict_right"] for info in infos[1:]] == [1, 1, 1, 1] and math.isnan(infos[0]["verdict_right"])
    assert [info["revised"] for info in infos[2:]] == [0, 0, 1]


def test_no_prompt_tells_whether_a_verdict_is_right():
    env = MathVerifier()
    for verdict in ("WRONG", "?"):
        texts = {
            tuple(play(env, "Answer: 7", verdict, "Answer: 7", task=TASK | {"answer": gold})[1].observations) for gold in "78"
        }
        assert len(texts) == 1


# ---- with a planner


def test_the_planner_writes_first_and_the_solver_reads_the_plan():
    env = MathPlanner()
    state, observations = env.reset(TASK, RNG)
    assert observations[1] is None and TASK["question"] in observations[0]
    steps = play(env, "Add both numbers.", "12 + 30 = 42. Answer: 42")
    assert rewards(steps) == [0.0, 1.0] and steps[0].observations[0] is None
    assert "Add both numbers." in steps[0].observations[1] and TASK["question"] in steps[0].observations[1]
    assert rewards(play(env, "p", "hm")) == [0.0, -0.3] and rewards(play(env, "p", "41")) == [0.0, 0.0]
    assert [step.info["plan_has_answer"] for step in steps] == [0, 0]
    assert [step.info["plan_has_answer"] for step in play(env, "12 + 30 = 42, I think so.", "?")] == [1, 1]


def test_an_answer_in_a_plan_is_detected():
    assert has_answer("First 42, then 7", TASK) and not has_answer("First add 12 and 30", TASK) and not has_answer("", TASK)
    roots = {"question": "q", "answer": "2, 3", "kind": "set"}
    assert has_answer("x = 2 or x = 3", roots) and not has_answer("factor it, 2 is a root", roots)


# ---- all three

NAMES = ("math", "math_verifier", "math_planner")


@pytest.mark.parametrize("name", NAMES)
def test_right_answers_earn_the_maximum_and_nonsense_the_minimum(name):
    env = make(name)
    tasks = env.tasks("train", 60) + env.tasks("eval", 20)
    lockstep = LockStep(env)
    for template, expected in (("Answer: {}\nCORRECT", 1.0), ("nothing{:.0}", -0.3)):
        states, observations = lockstep.reset(tasks, RNG)
        total = np.zeros((len(tasks), env.num_agents))
        texts = [template.format(task["answer"]) for task in tasks]
        for _ in range(env.max_turns):
            messages = [texts if prompts[0] is not None else [""] * len(tasks) for prompts in observations]
            answer = lockstep.step(states, messages, RNG)
            total += answer.result.rewards.reshape(len(tasks), -1)
            if answer.done.all():
                break
            states, observations = lockstep.observe(answer.after)
        assert np.allclose(total, expected)


@pytest.mark.parametrize("name", NAMES)
def test_first_prompts_do_not_depend_on_the_answer(name):
    env = make(name)
    for kind, answers in {
        "number": ("42", "7"),
        "set": ("1, 2", "5, 6"),
        "assignments": ("x = 1, y = 2", "x = 5, y = 6"),
    }.items():
        texts = {tuple(env.reset(TASK | {"answer": a, "kind": kind}, RNG)[1]) for a in answers}
        assert len(texts) == 1


@pytest.mark.parametrize("message", ["word " * 30_000, "\ud800\0"])
def test_prompts_quote_messages_shortened_and_without_odd_characters(message):
    for step in play(MathVerifier(), message, message, message):
        for text in (text for text in step.observations if text is not None):
            assert len(text) < 2 * MAX_QUOTE + 800 and text.encode() and "\0" not in text
    assert quote("") == "(nothing)" and quote("a" * 5000) == "a" * MAX_QUOTE


@pytest.mark.parametrize(("task", "message"), [
    ({}, "no text in question, answer"),
    ({"question": "2 + 2?"}, "no text in answer"),
    ({"question": " ", "answer": "4"}, "no text in question"),
    ({"question": "2 + 2?", "answer": 4}, "no text in answer"),
    ({"question": "2 + 2?", "answer": "four"}, "answer='four' cannot be read as a number"),
    ({"question": "2 + 2?", "answer": "4", "kind": "word"}, "of kind 'word': choose number, set, interval, assignments"),
])  # fmt: skip
def test_malformed_tasks_are_refused(task, message):
    with pytest.raises(ValueError, match=message):
        MathReasoning().reset(task, RNG)


@pytest.mark.parametrize(("cls", "options", "message"), [
    (MathReasoning, dict(max_turns=0), "max_turns=0"),
    (MathReasoning, dict(data="math"), "unknown data set 'math': choose gsm8k, svamp"),
    (MathReasoning, dict(data_path="x.jsonl"), "give data=, gsm8k or svamp"),
    (MathReasoning, dict(generator=MathProblemGenerator(), data="gsm8k"), "give one of them"),
    (MathReasoning, dict(difficulty_range=(1, 2), data="svamp"), "give one of them"),
    (MathReasoning, dict(difficulty_range=(1, 4)), "between 1 and 3"),
    (MathVerifier, dict(rounds=0), "rounds=0"),
])  # fmt: skip
def test_invalid_options_are_refused(cls, options, message):
    with pytest.raises(ValueError, match=message):
        cls(**options)


@pytest.mark.parametrize("name", ["math_verifier", "math_planner"])
@pytest.mark.parametrize("option", [dict(steps_bonus=True), dict(max_turns=2)])
def test_options_of_a_solver_alone_are_refused_by_teams(name, option):
    with pytest.raises(ValueError, match=f"unexpected keyword argument '{next(iter(option))}'; its options are generator, "):
        make(name, **option)


def test_a_generator_is_the_first_argument():
    env = MathReasoningEnvironment(MathProblemGenerator((2, 2), ["algebra"]))
    assert {(task["difficulty"], task["topic"]) for task in env.tasks("train", 20)} == {(2, "algebra")}
    custom = SimpleNamespace(tasks=lambda split, count, seed: [TASK], describe=dict)
    assert MathVerifier(custom).tasks() == [TASK] and MathPlanner(custom).describe()["tasks"] == {}
    state, _ = env.reset(TASK, RNG)
    assert pickle.loads(pickle.dumps(state)) == state and "42" in env.render(state)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.text(max_size=200), min_size=3, max_size=3), st.sampled_from(NAMES))
def test_no_text_breaks_an_episode(messages, name):
    env = make(name)
    low, high = env.reward_range
    state, observations = env.reset(TASK, RNG)
    for message in messages:
        step = env.step(state, [message if text is not None else "" for text in observations], RNG)
        assert all(low <= reward <= high for reward in np.ravel(step.reward))
        if step.done:
            return
        state, observations = step.state, step.observations


def test_the_environment_makes_a_thousand_steps_per_second():
    """Generated tasks of all kinds, answered in sentences; CPU time of this thread."""
    env = MathReasoning()
    tasks = env.tasks("train", 200)
    episodes = [env.reset(task, RNG)[0] for task in tasks]
    texts = [f"Let me think step by step. First 3 + 4 = 7. Then we go on.\nAnswer: {task['answer']}" for task in tasks]
    for _ in range(2):
        start = time.thread_time()
        for state, text in zip(episodes, texts, strict=True):
            env.step(state, [text], RNG)
        seconds = time.thread_time() - start
    assert len(tasks) / seconds > 1000
