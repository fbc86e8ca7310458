"""Math with a planner (`math_planner`): a planner writes a plan for the question, and a solver carries it out.

Task: as in `reasoning.py`. Two turns: the planner reads the question and writes a plan, then the solver reads the question and
the plan and answers. Joint reward: 0 for the plan, then the score of the answer as in `reasoning.py`, from -0.3 to 1.

A planner may simply write the answer. That is allowed, and measured: `plan_has_answer` is 1 if the right answer is the plan's
answer or, for a single number, one of its numbers. Other measures: `solved`, `unparsable`. Left out, because there is no exact
check for it: whether the plan is good.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from jmarl.envs.math.answers import read_gold
from jmarl.envs.math.numbers import find_numbers
from jmarl.envs.math.reasoning import (
    MAX_QUOTE,
    SCORES,
    MathEpisode,
    MathReasoning,
    TaskSource,
    answer_line,
    answer_metrics,
    check_solution,
    question_prompt,
    quote,
)
from jmarl.envs.vector import Step


class MathPlanner(MathReasoning):
    """A planner, then a solver; see the module. Arguments as in `MathReasoning`."""

    roles = ("planner", "solver")

    def __init__(
        self,
        generator: TaskSource | None = None,
        *,
        difficulty_range: tuple[int, int] | None = None,
        data: str | None = None,
        data_path: str | Path | None = None,
    ):
        super().__init__(generator, difficulty_range=difficulty_range, data=data, data_path=data_path, max_turns=2)

    def first_observations(self, task: dict) -> list[str | None]:
        return [
            f"{task['question'].strip()}\n\nWrite a short plan: which steps lead to the answer, and in which order. Another "
            "agent reads your plan and carries it out.",
            None,
        ]

    def solve(self, state: MathEpisode) -> list[str | None]:
        """Return the right answer, also as the plan, because a task has no steps."""
        answer = answer_line(state.task)
        return [None, answer] if state.turn else [answer, None]

    def step(self, state: MathEpisode, messages: Sequence[str], rng: np.random.Generator) -> Step:
        plan, solution = messages
        if not state.turn:
            state = state._replace(turn=1, comment=plan)
            prompt = f"{question_prompt(state.task)}\n\nA plan of another agent:\n{quote(plan)}"
            return Step(state, [None, prompt], 0.0, False, self._metrics(state))
        status = check_solution(solution, state.task).status
        state = state._replace(turn=2, solution=solution, status=status)
        return Step(state, [None, None], SCORES[status], True, self._metrics(state))

    def _metrics(self, state: MathEpisode) -> dict[str, float]:
        return answer_metrics(state.status) | {"plan_has_answer": float(has_answer(state.comment, state.task))}


def has_answer(plan: str, task: dict) -> bool:
    """Return whether the right answer is the answer of a plan or, for a task of kind number, one of the plan's numbers."""
    if check_solution(plan, task).status == "correct":
        return True
    if task.get("kind", "number") != "number":
        return False
    [(_, (gold,))] = read_gold(task["answer"], "number", task.get("unit", ""))
    return gold.exact in find_numbers(plan[-MAX_QUOTE:])
