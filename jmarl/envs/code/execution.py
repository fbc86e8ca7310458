"""Code execution: problems with test cases and MRLM's simple reward.

Task, roles, prompts, turns and feedback are those of `code_generation`; problems are best made by `code_problems`. Reward of a
joint action, from -0.5 to 2, the same for all agents:

    (tests passed) / (tests)  + 1 if all passed  - 0.5 if any test raised

An answer without the function, or one that is no Python, raises in every test: -0.5. So does a program that is stopped at a
limit in the tests that it did not come to. Metrics: the three parts (`reward/passed`, `reward/all_passed`, `reward/raised`),
`reward/solved`, `reward/limited`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jmarl.envs.code.generation import CodeGeneration, Formed, Score, form_problems, share_passed
from jmarl.sandbox import ExecutionResult
from jmarl.sandbox.inside.judge import RAISED as RAISED_TEST

ALL_PASSED, RAISED = 1.0, -0.5


def raised(result: ExecutionResult | None) -> bool:
    """Whether any test ended in something else than its comparison."""
    if result is None or not result.tests or len(result.tests) < result.total:
        return True
    return any(test.message.startswith(RAISED_TEST) for test in result.tests)


class CodeExecution(CodeGeneration):
    """The environment; see the module. Options are those of `CodeGeneration`."""

    def __init__(self, num_agents: int = 1, **options):
        super().__init__(num_agents, **options)
        self.reward_range = (RAISED, 1 + ALL_PASSED)

    def score(self, codes: Sequence[str], item: dict, formed: Formed, result: ExecutionResult | None) -> Score:
        score = Score({"passed": share_passed(result)}, form_problems(formed[2], result), result)
        score.parts.update(all_passed=ALL_PASSED * score.solved, raised=RAISED * raised(result))
        return score


class CodeExecutionEnvironment(CodeExecution):
    """The same by MRLM's name, with its problems first: CodeExecutionEnvironment(CodeProblemGenerator())."""

    def __init__(self, generator: Any = None, **options):
        super().__init__(generator=generator, **options)
