"""Math with a verifier (`math_verifier`): a solver answers, a verifier judges the solution, and the solver revises it.

Task: as in `reasoning.py`. Roles act in turns: the solver answers; the verifier reads the solution and says CORRECT or WRONG
and why; unless it said CORRECT, the solver reads that and answers again. This is repeated `rounds` times. The verdict is the
last of the two words, in capital letters (INCORRECT and NOT CORRECT mean WRONG). CORRECT ends the episode.

Rewards of a step, one for each agent, from -1.3 to 1.3. With s the score of a solution in `reasoning.py` (1, 0 or -0.3):

    solver      s for its first answer; s - s' for a later one, where s' is the score of the answer before. The sum is the
                score of its last answer.
    verifier    1 for a right verdict, 0 for a wrong one, -0.3 if it said neither word, each divided by `rounds`. A right
                CORRECT, which ends the episode, is also paid for the remaining rounds.

So right verdicts sum to 1 whatever the solver does, and the verifier gains nothing by keeping the solver wrong. Its reward does
not depend on what the solver makes of the verdict. As long as hardly any solution is right, WRONG is nearly always the right
verdict.

Measures: `solved` and `unparsable` of the last answer; `verdict_right` and `verdict_read` of the last verdict; `revised` of the
last revision (1 better, 0 equal, -1 worse); NaN before there is one. Left out, because there is no exact check for it: whether
the verifier's reasons are right.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from jmarl.envs.math.reasoning import (
    SCORES,
    MathEpisode,
    MathReasoning,
    TaskSource,
    answer_metrics,
    check_solution,
    question_prompt,
    quote,
)
from jmarl.envs.vector import Step

_VERDICT = re.compile(r"\b(?:NOT CORRECT|INCORRECT|CORRECT|WRONG)\b")


class MathVerifier(MathReasoning):
    """A solver and a verifier in turns; see the module.

    Args:
        generator, difficulty_range, data, data_path: as in `MathReasoning`.
        rounds: how often the verifier speaks. An episode has at most 1 + 2 * rounds turns.
    """

    roles = ("solver", "verifier")
    reward_range = (-1.3, 1.3)

    def __init__(
        self,
        generator: TaskSource | None = None,
        *,
        rounds: int = 1,
        difficulty_range: tuple[int, int] | None = None,
        data: str | None = None,
        data_path: str | Path | None = None,
    ):
        if rounds < 1:
            raise ValueError(f"rounds={rounds}: give at least 1")
        turns = 1 + 2 * rounds
        super().__init__(generator, difficulty_range=difficulty_range, data=data, data_path=data_path, max_turns=turns)
        self.rounds = rounds

    def first_observations(self, task: dict) -> list[str | None]:
        return [question_prompt(task), None]

    def step(self, state: MathEpisode, messages: Sequence[str], rng: np.random.Generator) -> Step:
        solution, verdict = messages
        return self._step_verifier(state, verdict) if state.turn % 2 else self._step_solver(state, solution)

    def solve(self, state: MathEpisode) -> list[str | None]:
        """Return the right answer, or the right verdict.

        Demonstrate verdicts with `slips`, which puts wrong answers among the right ones: after right answers alone, every
        verdict would be CORRECT.
        """
        if state.turn % 2:
            return [None, "CORRECT" if state.status == "correct" else "WRONG"]
        return [*super().solve(state), None]

    def _step_solver(self, state: MathEpisode, message: str) -> Step:
        status = check_solution(message, state.task).status
        gain = SCORES[status] - SCORES.get(state.status, 0.0)
        revised = float(gain > 0) - float(gain < 0) if state.status else state.revised
        state = state._replace(turn=state.turn + 1, solution=message, status=status, revised=revised)
        prompt = (
            f"A student was asked:\n{state.task['question']}\n\nThe student wrote:\n{quote(message)}\n\n"
            "Is the student's answer right? Check it step by step, say what is wrong if anything is, and end with the word "
            "CORRECT or the word WRONG."
        )
        return Step(state, [None, prompt], [gain, 0.0], state.turn >= self.max_turns, self._metrics(state))

    def _step_verifier(self, state: MathEpisode, message: str) -> Step:
        words = _VERDICT.findall(message)
        says_correct = words[-1:] == ["CORRECT"]
        right = bool(words) and says_correct == (state.status == "correct")
        state = state._replace(
            turn=state.turn + 1, comment=message, verdict_right=float(right), verdict_read=float(bool(words))
        )
        prompt = (
            f"{question_prompt(state.task)}\n\nYour solution:\n{quote(state.solution)}\n\n"
            f"A verifier says:\n{quote(message)}\n\n"
            "The verifier may be mistaken. Write your solution again, better if it can be."
        )
        paid_rounds = self.rounds - (state.turn // 2 - 1) if says_correct else 1
        reward = (float(right) if words else SCORES["unparsable"]) * paid_rounds / self.rounds
        return Step(state, [prompt, None], [0.0, reward], says_correct, self._metrics(state))

    def _metrics(self, state: MathEpisode) -> dict[str, float]:
        optional = {"verdict_right": state.verdict_right, "verdict_read": state.verdict_read, "revised": state.revised}
        return answer_metrics(state.status) | {name: math.nan if x is None else x for name, x in optional.items()}
