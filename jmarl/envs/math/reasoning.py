"""Math reasoning: a team answers mathematical questions, alone, with a verifier, or after a plan.

Task: a question and its exact answer, made by `math_problems` (the default, nothing downloaded) or from GSM8K or SVAMP
(`math_data`); how answers are read and compared stands in `math_answers`. Score of a solution, `s`:

    1       the answer is correct
    0       it is wrong
    -0.3    no answer of the kind that is asked for can be read

`MathReasoning` (`math`), one solver with max_turns attempts: the reward of each attempt is its s; the episode is over with a
correct one. With `steps_bonus` (off by default), a correct attempt gets 0.2 more if it shows its steps: a true equation of two
numbers ("12 + 5 = 17") that begins with a number of the question and comes to something new: neither of the two, nor a number
of the question. What later attempts read is the question, the attempt before and that it is wrong, or what kind of answer
could not be read: never what is right, nor how near the attempt is.

`MathVerifier` (`math_verifier`), a solver and a verifier, by turns: the solver answers, the verifier reads the solution and
says CORRECT or WRONG and why, then, unless it said CORRECT, the solver reads that and answers anew; `rounds` times. Rewards,
one an agent: the solver gets s for its first answer, and for a later one what it is better than the one before, s - s', so
that the sum is the last s; the verifier gets 1 for a verdict that is right, 0 for one that is not, and -0.3 where it said
neither, each divided by `rounds`. CORRECT ends the episode; if it is right it is paid for the rounds that are left, too. So
right verdicts add up to 1, whatever the solver does, and the verifier gains nothing by keeping it wrong. The verdict is the
last of the two words, in capital letters (INCORRECT and NOT CORRECT are WRONG). Its reward does not depend on what the solver
makes of it. As long as hardly any solution is right, WRONG is nearly always the right verdict.

`MathPlanner` (`math_planner`), a planner and a solver: the planner reads the question and writes a plan, then the solver reads
both and answers; both get s of the answer. A planner may just write the answer: that is allowed, and measured.

Metrics: `solved` (the standing answer is correct), `unparsable`; `steps` where there is a bonus for them; of the verifier's
last verdict `verdict_right` and `verdict_read`, of the solver's last revision `revised` (1 better, 0, -1 worse), NaN before
there is one; of the planner `plan_has_answer` (the right answer is the plan's, or one of its numbers). Left out: partial
credit, judging the steps of a solution, answers with variables, proofs.
"""

from __future__ import annotations

import math
import re
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from jmarl.envs.base import Step, TextEnvironment
from jmarl.envs.math.answers import FORMS, KINDS, Verdict, check, read_gold
from jmarl.envs.math.data import SOURCES, Rows, load_tasks
from jmarl.envs.math.numbers import Unreadable, number, numbers, spelled
from jmarl.envs.math.problems import MathProblemGenerator

SCORES = {"correct": 1.0, "wrong": 0.0, "unparsable": -0.3}
STEPS_BONUS = 0.2
QUOTED = 1200  # characters of what another wrote


class Problems(Protocol):
    """Where tasks come from."""

    def tasks(self, split: str = "train", count: int = 100, seed: int = 0) -> list[dict]: ...

    def describe(self) -> dict: ...


class Episode(NamedTuple):
    """A task, and what was made of it so far."""

    task: dict
    turn: int = 0
    solution: str = ""  # the solver's last
    status: str = ""  # of its answer: correct, wrong or unparsable
    said: str = ""  # by the verifier or the planner
    facts: tuple[float | None, ...] = (None, None, None)  # verdict_right, verdict_read, revised


def quoted(text: str) -> str:
    """What another agent wrote, in a prompt: its end, if it is long, as text that any tokenizer takes."""
    text = text[-QUOTED:].encode("utf-8", "replace").decode().replace("\0", " ").strip()
    return text or "(nothing)"


def ask(task: dict) -> str:
    percent = " The number is in percent." if task.get("unit") == "%" else ""
    return f"{task['question'].strip()}\n\nSolve it step by step. End with {FORMS[task.get('kind', 'number')]}.{percent}"


def said_of(task: dict) -> str:
    """The answer as it is asked for."""
    answer = task["answer"]
    if task.get("kind") == "set" and not set(answer) & set("={"):
        answer = " or ".join(f"x = {root}" for root in answer.split(", "))
    return f"Answer: {answer}"


def judged(text: str, task: dict) -> Verdict:
    kind, unit = task.get("kind", "number"), task.get("unit", "")
    return check(text, task["answer"], kind, unit, bool(task.get("lowest_terms")))


_TERM = r"([0-9][0-9.,]{0,15}+)"
_EQUATION = re.compile(rf"(?<![0-9.,]){_TERM} ?([-+*/x×÷−]) ?{_TERM} ?= ?(-?{_TERM})")


def shows_steps(text: str, question: str) -> bool:
    """Is there a true equation that begins with a number of the question, and whose result is new?"""
    given = numbers(question)
    for a, sign, b, c, _ in _EQUATION.findall(re.sub(r"[$*]{2}|[$\\]", "", text[-4 * QUOTED :])):
        try:
            left, right, result = (number(spelled(part.rstrip(".,"))).exact for part in (a, b, c))
        except Unreadable:
            continue
        new = result not in given and result not in (left, right)
        if new and left in given and right is not None and result == _computed(left, sign, right):
            return True
    return False


def _computed(a: Fraction | None, sign: str, b: Fraction) -> Fraction | None:
    if a is None or (sign in "/÷" and not b):
        return None
    return a + b if sign == "+" else a - b if sign in "-−" else a / b if sign in "/÷" else a * b


class MathReasoning(TextEnvironment):
    """One solver; see the module.

    generator: where tasks come from, by default `MathProblemGenerator`, of difficulties from 1 to 3 or `difficulty_range`.
    data: gsm8k or svamp instead; data_path: from a JSON Lines file with their fields instead of the hub. max_turns: attempts.
    steps_bonus: 0.2 for shown steps.
    """

    roles = ("solver",)
    reward_range = (-0.3, 1.0)
    data_sets = tuple(source.hub for source in SOURCES.values())

    def __init__(
        self,
        generator: Problems | None = None,
        *,
        difficulty_range: tuple[int, int] | None = None,
        data: str | None = None,
        data_path: str | Path | None = None,
        max_turns: int = 1,
        steps_bonus: bool = False,
    ):
        if sum(source is not None for source in (generator, difficulty_range, data)) > 1:
            raise ValueError("a generator, difficulty_range and data are three sources of tasks: give one of them")
        if data_path is not None and data is None:
            raise ValueError(f"data_path={str(data_path)!r} without data: say gsm8k or svamp, whose fields the file has")
        if max_turns < 1:
            raise ValueError(f"max_turns={max_turns}: give at least 1")
        rows = None if data is None else Rows(load_tasks(data, data_path))
        self.generator: Problems = generator or rows or MathProblemGenerator(difficulty_range or (1, 3))
        self.max_turns, self.steps_bonus = max_turns, steps_bonus
        if steps_bonus:
            self.reward_range = (-0.3, 1.0 + STEPS_BONUS)

    def tasks(self, split: str = "train", count: int = 100, seed: int = 0) -> list[dict]:
        return self.generator.tasks(split, count, seed)

    def describe(self) -> dict[str, Any]:
        return super().describe() | {"tasks": self.generator.describe(), "steps_bonus": self.steps_bonus}

    def reset(self, task, rng):
        missing = [name for name in ("question", "answer") if not isinstance(task.get(name), str) or not task[name].strip()]
        if missing:
            raise ValueError(f"task {task!r:.80} has no text in {', '.join(missing)}: it needs question and answer")
        if task.get("kind", "number") not in KINDS:
            raise ValueError(f"task {task!r:.80} is of kind {task['kind']!r}: choose {', '.join(KINDS)}")
        read_gold(task["answer"], task.get("kind", "number"), task.get("unit", ""))
        return Episode(task), self.first(task)

    def first(self, task: dict) -> list[str | None]:
        """What each agent reads at first."""
        return [ask(task)]

    def step(self, state, messages, rng):
        found = judged(messages[0], state.task)
        solved = found.status == "correct"
        info = {"solved": float(solved), "unparsable": float(found.status == "unparsable")}
        reward = SCORES[found.status]
        if self.steps_bonus:
            info["steps"] = float(shows_steps(messages[0], state.task["question"]))
            reward += STEPS_BONUS * info["steps"] * solved
        state = state._replace(turn=state.turn + 1, solution=messages[0], status=found.status)
        again = f"{ask(state.task)}\n\nYour last attempt:\n{quoted(messages[0])}\n\n{found.why} Try again."
        return Step(state, [again], reward, solved or state.turn >= self.max_turns, info)

    def solve(self, state: Episode) -> list[str | None]:
        """The answer, without how it is found."""
        return [said_of(state.task)]

    def render(self, state: Episode) -> str:
        parts = [f"{state.task['question']}\n(answer: {state.task['answer']}; turn {state.turn})"]
        parts += [f"{name}: {quoted(text)}" for name, text in (("solution", state.solution), ("other", state.said)) if text]
        return "\n\n".join([*parts, state.status]).strip()


MathReasoningEnvironment = MathReasoning


class MathVerifier(MathReasoning):
    """A solver and a verifier by turns; see the module. rounds: how often the verifier speaks."""

    roles = ("solver", "verifier")
    reward_range = (-1.3, 1.3)

    def __init__(self, generator: Problems | None = None, *, rounds: int = 1, **options: Any):
        if rounds < 1:
            raise ValueError(f"rounds={rounds}: give at least 1")
        if "max_turns" in options:
            raise ValueError("max_turns is for a solver alone: give rounds, and there are 1 + 2 * rounds turns")
        super().__init__(generator, max_turns=1 + 2 * rounds, **options)
        self.rounds = rounds
        if self.steps_bonus:
            raise ValueError("steps_bonus is for a solver alone")

    def first(self, task):
        return [ask(task), None]

    def step(self, state, messages, rng):
        return self._verdict(state, messages[1]) if state.turn % 2 else self._solution(state, messages[0])

    def solve(self, state):
        """Of the verifier the right word. Demonstrate it with `slips`: on right answers alone it would be shown only one."""
        if state.turn % 2:
            return [None, "CORRECT" if state.status == "correct" else "WRONG"]
        return [*super().solve(state), None]

    def _solution(self, state: Episode, message: str) -> Step:
        found, before = judged(message, state.task), SCORES.get(state.status)
        gain, facts = SCORES[found.status] - (before or 0.0), state.facts
        if before is not None:
            facts = (*facts[:2], float(gain > 0) - float(gain < 0))
        state = state._replace(turn=state.turn + 1, solution=message, status=found.status, facts=facts)
        read = (
            f"A student was asked:\n{state.task['question']}\n\nThe student wrote:\n{quoted(message)}\n\n"
            "Is the student's answer right? Check it step by step, say what is wrong if anything is, and end with the word "
            "CORRECT or the word WRONG."
        )
        return Step(state, [None, read], [gain, 0.0], state.turn >= self.max_turns, self._info(state))

    def _verdict(self, state: Episode, message: str) -> Step:
        words = re.findall(r"\b(?:NOT CORRECT|INCORRECT|CORRECT|WRONG)\b", message)
        right = bool(words) and (words[-1] == "CORRECT") == (state.status == "correct")
        facts = (float(right), float(bool(words)), state.facts[2])
        state = state._replace(turn=state.turn + 1, said=message, facts=facts)
        read = (
            f"{ask(state.task)}\n\nYour solution:\n{quoted(state.solution)}\n\nA verifier says:\n{quoted(message)}\n\n"
            "The verifier may be mistaken. Write your solution again, better if it can be."
        )
        done = words[-1:] == ["CORRECT"]
        paid = self.rounds - (state.turn // 2 - 1) if done else 1  # rounds
        reward = (float(right) if words else SCORES["unparsable"]) * paid / self.rounds
        return Step(state, [read, None], [0.0, reward], done, self._info(state))

    def _info(self, state: Episode) -> dict[str, float]:
        names = ("verdict_right", "verdict_read", "revised")
        facts = {name: math.nan if of is None else of for name, of in zip(names, state.facts, strict=True)}
        return {"solved": float(state.status == "correct"), "unparsable": float(state.status == "unparsable")} | facts


class MathPlanner(MathReasoning):
    """A planner, then a solver; see the module."""

    roles = ("planner", "solver")

    def __init__(self, generator: Problems | None = None, **options: Any):
        if "max_turns" in options:
            raise ValueError("max_turns is for a solver alone: a plan and a solution are two turns")
        super().__init__(generator, max_turns=2, **options)
        if self.steps_bonus:
            raise ValueError("steps_bonus is for a solver alone")

    def first(self, task):
        return [
            f"{task['question'].strip()}\n\nWrite a short plan: which steps lead to the answer, and in which order. Another "
            "agent reads your plan and carries it out.",
            None,
        ]

    def solve(self, state):
        """Of the planner the answer too: a task comes without its steps."""
        said = said_of(state.task)
        return [None, said] if state.turn else [said, None]

    def step(self, state, messages, rng):
        if not state.turn:
            state = state._replace(turn=1, said=messages[0])
            read = f"{ask(state.task)}\n\nA plan of another agent:\n{quoted(messages[0])}"
            has = float(has_answer(messages[0], state.task))
            return Step(state, [None, read], 0.0, False, {"solved": 0.0, "unparsable": 0.0, "plan_has_answer": has})
        found = judged(messages[1], state.task)
        state = state._replace(turn=2, solution=messages[1], status=found.status)
        info = {"solved": float(found.status == "correct"), "unparsable": float(found.status == "unparsable")}
        info["plan_has_answer"] = float(has_answer(state.said, state.task))
        return Step(state, [None, None], SCORES[found.status], True, info)


def has_answer(plan: str, task: dict) -> bool:
    """Is the right answer in a plan: as its answer, or for one number as any of its numbers?"""
    if task.get("kind", "number") != "number":
        return judged(plan, task).status == "correct"
    [(_, (gold,))] = read_gold(task["answer"], "number", task.get("unit", ""))
    return gold.exact in numbers(plan[-QUOTED:]) or judged(plan, task).status == "correct"
