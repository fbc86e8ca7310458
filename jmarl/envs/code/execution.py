"""Code execution: problems with test cases, under MRLM's simple reward.

Task, roles, prompts, turns and feedback are those of `generation.py`; the problems are best generated (`problems.py`).
Reward of a joint action, the same for all agents, from -0.5 to 2, in parts for syntax and functionality:

    syntax_error   - 0.5 if the answer is no Python or lacks a function that returns something; nothing is run then
    passed         (tests passed) / (tests)
    all_passed     + 1 if all tests passed
    runtime_error  - 0.5 if any test raised an exception, or if the program was stopped at a limit before its last test

Columns: the four terms (`reward/syntax_error`, ...), `measures/solved`, `measures/limited`. Left out: levels for the form of
the code and a bonus for cooperation, which `generation.py` has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jmarl.envs.code.generation import CodeGeneration
from jmarl.envs.code.scoring import CodeScore, FormScore, add_test_problem, passed_share
from jmarl.envs.rewards import Processor
from jmarl.sandbox import ExecutionResult, Limits, Sandbox

ALL_PASSED, RAISED = 1.0, -0.5


def any_test_raised(result: ExecutionResult) -> bool:
    """Return whether any test ended in something else than its own comparison, or did not run at all."""
    if not result.tests or len(result.tests) < result.total:
        return True
    return any(test.raised for test in result.tests)


class CodeExecution(CodeGeneration):
    """The environment; see the module docstring. The arguments are those of `CodeGeneration`, with one agent by default."""

    def __init__(
        self,
        num_agents: int = 1,
        *,
        feedback: str = "level_feedback",
        shown_tests: int = 0,
        expert: Callable[[str], str] | None = None,
        processor: Processor | None = None,
        limits: Limits | None = None,
        sandbox: Sandbox | None = None,
        generator: Any = None,
    ):
        super().__init__(
            num_agents,
            feedback=feedback,
            shown_tests=shown_tests,
            expert=expert,
            processor=processor,
            limits=limits,
            sandbox=sandbox,
            generator=generator,
        )
        self.reward_range = (RAISED, 1 + ALL_PASSED)

    def score(self, codes: Sequence[str], item: dict, form: FormScore, result: ExecutionResult | None) -> CodeScore:
        """Return the reward in its parts. result: of the hidden tests; None if they were not run."""
        score = CodeScore({"passed": passed_share(result)}, add_test_problem(form.problems, result), result)
        raised = result is not None and any_test_raised(result)
        score.parts.update(all_passed=ALL_PASSED * score.solved, runtime_error=RAISED * raised)
        score.parts["syntax_error"] = RAISED * (result is None)
        return score


class CodeExecutionEnvironment(CodeExecution):
    """`CodeExecution` under MRLM's name, with the generator first: `CodeExecutionEnvironment(CodeProblemGenerator())`."""

    def __init__(
        self,
        generator: Any = None,
        num_agents: int = 1,
        *,
        feedback: str = "level_feedback",
        shown_tests: int = 0,
        expert: Callable[[str], str] | None = None,
        processor: Processor | None = None,
        limits: Limits | None = None,
        sandbox: Sandbox | None = None,
    ):
        super().__init__(
            num_agents,
            feedback=feedback,
            shown_tests=shown_tests,
            expert=expert,
            processor=processor,
            limits=limits,
            sandbox=sandbox,
            generator=generator,
        )
