"""Score the code of a team: its form, its syntax, its hidden tests, and how the function uses the helpers.

The formula is in `generation.py`. Everything here is a function of the code and the result of the tests; `CodeGeneration` runs
the tests in the sandbox. What a program calls and returns is decided on its syntax tree, not by regular expressions, which
almost never match.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jmarl.envs.code import syntax
from jmarl.sandbox import ExecutionResult, Tests, asserts

HELPER, FUNCTION, PARSES, TESTS = 0.4, 0.6, 0.5, 1.0
CALLS_HELPER, MORE_THAN_WRAPPER, IGNORES_RESULT = 0.5, 1.0, -0.5


class FormScore(NamedTuple):
    """Reward for levels 1 and 2, and what was wrong with the code."""

    level_1: float
    level_2: float  # 0: the tests are not run
    problems: tuple[str, ...]


class CodeScore(NamedTuple):
    """Reward of one joint action."""

    parts: dict[str, float]  # the terms of the reward by name; the reward is their sum
    problems: tuple[str, ...]  # what was wrong, for feedback; never what a test expects
    result: ExecutionResult | None  # of the tests; None if they were not run

    @property
    def masked(self) -> bool:
        """Whether nobody can say what the code is worth: the sandbox failed, or the item's tests do not run."""
        return self.result is not None and self.result.masked

    @property
    def total(self) -> float:
        """The reward; NaN if masked."""
        return float("nan") if self.masked else sum(self.parts.values())

    @property
    def solved(self) -> bool:
        """Whether all tests passed. If some held only by the program's own comparison, the outcome is "weak" instead."""
        return self.result is not None and self.result.outcome == "passed"


def passed_share(result: ExecutionResult | None) -> float:
    """Return the share of the tests that passed. Tests that hold only by the program's own comparison do not count."""
    if result is None or not result.total:
        return 0.0
    return result.passed / result.total


def helper_names(num_agents: int) -> list[str]:
    """Return the function names that are asked of all agents but the last."""
    return ["aux"] if num_agents == 2 else [f"aux_{i + 1}" for i in range(num_agents - 1)]


def item_tests(item: dict) -> Tests:
    """Return the hidden tests of an item.

    Raises:
        ValueError: the item lacks a field; the message names it.
    """
    fields = ("prompt", "entry_point", "test")
    missing = [name for name in fields if not isinstance(item.get(name), str) or not item[name].strip()]
    if missing:
        name = item.get("task_id", item)
        raise ValueError(f"item {name!r:.80} has no text in {', '.join(missing)}: an item needs prompt, entry_point and test")
    return asserts(item["test"], item["entry_point"], item.get("setup", ""))


def assert_texts(item: dict) -> list[str]:
    """Return the conditions that the tests of an item assert, in the order of the results of its tests."""
    return asserts(item["test"]).conditions()


def team_program(codes: Sequence[str], item: dict) -> str:
    """Return the program of all agents together. An agent's definitions of names that belong to another agent are removed."""
    names = [*helper_names(len(codes)), item["entry_point"]]
    parts = []
    for own_name, code in zip(names, codes, strict=True):
        parts.append(syntax.remove_names(code, [name for name in names if name != own_name]))
    return syntax.join_programs([item.get("setup_program", ""), *parts])


def score_form(codes: Sequence[str], item: dict) -> FormScore:
    """Return levels 1 and 2 of the reward for the agents' codes [N]."""
    helpers, entry_point = helper_names(len(codes)), item["entry_point"]
    defined = [syntax.returns_value(code, name) for code, name in zip(codes, helpers, strict=False)]
    problems = [f"{name} is not defined or returns nothing" for name, ok in zip(helpers, defined, strict=True) if not ok]
    level_1 = HELPER * sum(defined) / len(helpers) if helpers else 0.0
    if not syntax.returns_value(codes[-1], entry_point):
        return FormScore(level_1, 0.0, (*problems, f"{entry_point} is not defined or returns nothing"))
    if not syntax.compiles(team_program(codes, item)):
        return FormScore(level_1 + FUNCTION, 0.0, (*problems, "the program is no valid Python"))
    return FormScore(level_1 + FUNCTION, PARSES, tuple(problems))


def cooperation_bonus(codes: Sequence[str], item: dict) -> float:
    """Return the bonus for how the function uses its helpers: the mean over the helpers."""
    helpers, function = helper_names(len(codes)), syntax.find_function(codes[-1], item["entry_point"])
    if function is None:
        return 0.0
    total = 0.0
    for code, helper in zip(codes, helpers, strict=False):
        if not syntax.returns_value(code, helper) or not syntax.reachable_calls(function, helper):
            continue
        own_statements = syntax.statements(syntax.remove_names(codes[-1], [helper]))
        if any(syntax.binds(node, helper) for node in own_statements):
            continue  # the call may reach the last agent's own function of this name
        total += CALLS_HELPER
        total += MORE_THAN_WRAPPER * (not syntax.is_wrapper(function, helper))
        total += IGNORES_RESULT * syntax.ignores_result(function, helper)
    return total / max(len(helpers), 1)


def add_test_problem(problems: tuple[str, ...], result: ExecutionResult | None) -> tuple[str, ...]:
    """Return the problems with one more for the tests, unless all passed or none ran."""
    if result is None or result.outcome == "passed":
        return problems
    stopped = f"; it was stopped at its limit: {result.limit_hit}" if result.limit_hit else ""
    num_weak = sum(test.weak for test in result.tests)
    weak = f"; {num_weak} more held only because the program's own comparison or arithmetic said so, and do not count"
    return (*problems, f"{result.passed} of {result.total} tests pass{weak if num_weak else ''}{stopped}")


def score_parts(scores: Sequence[CodeScore]) -> dict[str, np.ndarray]:
    """Return the parts of the reward of a batch of scores: arrays [B] by name, NaN where masked."""
    names = scores[0].parts if scores else ()
    return {name: np.array([math.nan if score.masked else score.parts[name] for score in scores]) for name in names}


def score_measures(scores: Sequence[CodeScore]) -> dict[str, np.ndarray]:
    """Return what else is logged of a batch of scores: arrays [B] by name, NaN where masked."""
    limited = [float(score.result is not None and bool(score.result.limit_hit)) for score in scores]
    columns = {"solved": [float(score.solved) for score in scores], "limited": limited}
    masked = np.array([score.masked for score in scores])
    return {name: np.where(masked, np.nan, values) for name, values in columns.items()}
