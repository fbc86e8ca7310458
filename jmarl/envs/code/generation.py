"""Code generation: a team writes one function; the last agent the function itself, those before it helpers that it may call.

Task: an item with a problem text, the name of the function (`entry_point`) and hidden tests. Data: HumanEval (arXiv
2107.03374), CoopHumanEval (arXiv 2508.04652) and MBPP (arXiv 2108.07732) by `load_items`, or problems made by
`jmarl.envs.code.problems`. Roles: with two agents, agent 0 writes `aux`, agent 1 the function; with more, agents 0, 1, … write
`aux_1`, `aux_2`, …; one agent alone writes the function.

Reward of a joint action, the same for all agents, at most 4 (2.1 for one agent), decided on the syntax tree and by running all
tests in a sandbox:

    level 1   + 0.4 aux is defined and returns (with several helpers, their share)
              + 0.6 the function is defined and returns; else stop
    level 2   + 0.5 the program of all agents together parses; else stop
    level 3   + (tests passed) / (tests)
    bonus     only if a test passed and aux is defined: + 0.5 the function calls aux; of those that do
              + 1.0 it does more than hand its arguments on to aux, - 0.5 it makes nothing of what aux returns
              (with several helpers, means over them)

A program that is stopped at a limit keeps the tests that passed before. If nobody can say what a program is worth (the sandbox
failed twice, the item's tests do not run), the joint action is masked. Metrics: `reward/level_1` to `level_3`, `reward/bonus`,
`reward/solved` (all tests passed), `reward/limited` (stopped at a limit).

Turns: in each, all agents write anew; what they read then is the problem, the code of all of the turn before, and feedback:

    plain            no more than that
    passed           whether all tests passed
    level_passed     which levels were passed
    level_feedback   what was wrong at each level, and with shown_tests=n the first n tests and what came of them
    expert_edits     what `expert`, a function from prompt to text, proposes

Only `level_feedback` with shown_tests above 0 shows tests; what the item's tests expect is in no other prompt.
Left out: checking whether the problem text itself gives tests away (MBPP's original prompt does; ours does not).
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from jmarl.envs.base import Answer
from jmarl.envs.code import problems as code_problems
from jmarl.envs.code import text as code_text
from jmarl.envs.rewards import Processor, RewardFunction
from jmarl.sandbox import ExecutionResult, Limits, Sandbox, Tests, asserts, default_sandbox
from jmarl.sandbox.inside.judge import Numbered
from jmarl.sandbox.types import utf8

Formed = tuple[float, float, tuple[str, ...]]
Feedback = Literal["plain", "passed", "level_passed", "level_feedback", "expert_edits"]

AUX, MAIN, PARSES, TESTS, CALLS, MORE_THAN_WRAPPER, IGNORED = 0.4, 0.6, 0.5, 1.0, 0.5, 1.0, -0.5


class Score(NamedTuple):
    """Of one joint action."""

    parts: dict[str, float]  # what the reward is the sum of
    problems: tuple[str, ...]  # what was wrong, for feedback; says nothing of what tests expect
    result: ExecutionResult | None  # None if nothing was run

    @property
    def masked(self) -> bool:
        return self.result is not None and self.result.masked

    @property
    def total(self) -> float:
        return float("nan") if self.masked else sum(self.parts.values())

    @property
    def solved(self) -> bool:
        """All tests passed. Where the program itself had a say in one, the outcome is another: weak."""
        return self.result is not None and self.result.outcome == "passed"


def share_passed(result: ExecutionResult | None) -> float:
    """Of the tests; one that was left to the program does not count as passed."""
    if result is None or not result.total:
        return 0.0
    return result.passed / result.total


class Episode(NamedTuple):
    """What was asked, and in the last turn written and scored."""

    item: dict
    codes: tuple[str, ...] = ()  # [N]
    score: Score | None = None
    turn: int = 0


def helper_names(num_agents: int) -> list[str]:
    """Of all agents but the last."""
    return ["aux"] if num_agents == 2 else [f"aux_{i + 1}" for i in range(num_agents - 1)]


def item_tests(item: dict) -> Tests:
    """The hidden tests of an item; refuses a malformed one with what it lacks."""
    missing = [
        name for name in ("prompt", "entry_point", "test") if not isinstance(item.get(name), str) or not item[name].strip()
    ]
    if missing:
        known = item.get("task_id", item)
        raise ValueError(f"item {known!r:.80} has no text in {', '.join(missing)}: it needs prompt, entry_point and test")
    return asserts(item["test"], item["entry_point"], item.get("setup", ""))


def program_of(codes: Sequence[str], item: dict) -> str:
    """The program of all agents together: nobody replaces what another was asked for."""
    names = helper_names(len(codes))
    parts = []
    for agent, code in enumerate(codes):
        own = names[agent] if agent < len(names) else item["entry_point"]
        parts.append(code_text.without(code, [name for name in [*names, item["entry_point"]] if name != own]))
    return code_text.joined([item.get("setup_program", ""), *parts])


def form(codes: Sequence[str], item: dict) -> Formed:
    """Levels 1 and 2, and what was wrong."""
    names, entry, problems = helper_names(len(codes)), item["entry_point"], []
    there = [code_text.returns(code, name) for code, name in zip(codes, names, strict=False)]
    problems += [f"{name} is not defined or returns nothing" for name, ok in zip(names, there, strict=True) if not ok]
    level_1 = AUX * sum(there) / len(names) if names else 0.0
    if not code_text.returns(codes[-1], entry):
        return level_1, 0.0, (*problems, f"{entry} is not defined or returns nothing")
    if not code_text.compiles(program_of(codes, item)):
        return level_1 + MAIN, 0.0, (*problems, "the program is no valid Python")
    return level_1 + MAIN, PARSES, tuple(problems)


def bonus_of(codes: Sequence[str], item: dict) -> float:
    """For the way in which the function uses its helpers; means over them."""
    main, total, names = code_text.function(codes[-1], item["entry_point"]), 0.0, helper_names(len(codes))
    for code, name in zip(codes, names, strict=False):
        if main is None or not code_text.returns(code, name) or not code_text.calls(main, name):
            continue
        own = code_text.tops(code_text.without(codes[-1], [name]))
        if any(code_text.binds(node, name) for node in own):  # then it may be that one which is called
            continue
        total += CALLS + MORE_THAN_WRAPPER * (not code_text.is_wrapper(main, name)) + IGNORED * code_text.ignores(main, name)
    return total / max(len(names), 1)


def form_problems(problems: tuple[str, ...], result: ExecutionResult | None) -> tuple[str, ...]:
    """With what the tests said, if that was not all well."""
    if result is None or result.outcome == "passed":
        return problems
    stopped = f"; it was stopped at its limit: {result.limit_hit}" if result.limit_hit else ""
    weak = sum(test.weak for test in result.tests)
    own_word = (
        f"; {weak} more held only because the program's own comparison or arithmetic said so, and do not count" if weak else ""
    )
    return (*problems, f"{result.passed} of {result.total} tests pass{own_word}{stopped}")


class CodeGeneration:
    """The environment; see the module.

    num_agents: writers. feedback: what later turns read; shown_tests: of level_feedback; expert: of expert_edits, from prompt
    to text. processor: applied to the reward, such as RewardProcessors.shift(-4), with which an early_termination_threshold of
    -0.2 means nearly perfect. sandbox: where programs run; by default the process's own, which is started now, so that a
    machine without one is known before training. generator: where `tasks` come from, by default made problems.
    """

    max_turns = 1  # at least; further turns are played as long as `num_turns` wants

    def __init__(
        self,
        num_agents: int = 2,
        *,
        feedback: Feedback = "level_feedback",
        shown_tests: int = 0,
        expert: Callable[[str], str] | None = None,
        processor: Processor | None = None,
        limits: Limits | None = None,
        sandbox: Sandbox | None = None,
        generator: Any = None,
    ):
        if num_agents < 1:
            raise ValueError(f"num_agents={num_agents}: at least one writes the function")
        if feedback not in get_args(Feedback):
            raise ValueError(f"feedback={feedback!r}: choose {', '.join(get_args(Feedback))}")
        if (expert is not None) != (feedback == "expert_edits"):
            raise ValueError(f"feedback={feedback!r} and {'an' if expert else 'no'} expert: they go together with expert_edits")
        if shown_tests and feedback != "level_feedback":
            raise ValueError(f"shown_tests={shown_tests} is for feedback='level_feedback', not {feedback!r}")
        self.num_agents, self.feedback, self.shown_tests, self.expert = num_agents, feedback, shown_tests, expert
        self.processor, self.limits, self.sandbox = processor, limits, sandbox or default_sandbox()
        self.generator = generator or code_problems.CodeProblemGenerator()
        best = MAIN + PARSES + TESTS
        self.reward_range = (0.0, best + (AUX + CALLS + MORE_THAN_WRAPPER if num_agents > 1 else 0.0))

    @property
    def roles(self) -> tuple[str, ...]:
        return (*helper_names(self.num_agents), "main")

    def tasks(self, split: str = "train", count: int = 100, seed: int = 0) -> list[dict]:
        return self.generator.tasks(split, count, seed)

    def describe(self) -> dict[str, str]:
        """The level at which programs are confined: verdicts of one run are all of one."""
        return {"sandbox": self.sandbox.level}

    def reset(self, items: Sequence[dict], rng: np.random.Generator) -> tuple[list[Episode], list[list[str]]]:
        del rng
        for item in items:
            self.tests(item)
        return [Episode(item) for item in items], self._prompts([self.ask(item) for item in items])

    def step(self, states: Sequence[Episode], actions: Sequence[Sequence[str]], rng: np.random.Generator) -> Answer:
        each = zip(states, zip(*actions, strict=True), strict=True)
        written = [self.codes(state, texts) for state, texts in each]
        after = [
            state._replace(codes=codes, score=score, turn=state.turn + 1)
            for state, codes, score in zip(states, written, self.scores([s.item for s in states], written), strict=True)
        ]
        scores = [state.score for state in after if state.score]

        def code_generation(*texts: Any) -> list[float]:  # checked and counted as what a reward function returns
            return [score.total for score in scores]

        judge = RewardFunction(code_generation, num_agents=self.num_agents, processors=self.processor)
        result = judge(actions, [state.item["prompt"] for state in states], [state.item for state in states], rng)
        return Answer(result._replace(parts=parts_of(scores)), np.zeros(len(states), bool), after)

    def observe(self, after: Sequence[Episode]) -> tuple[list[Episode], list[list[str]]]:
        return list(after), self._prompts([self.ask_again(state) for state in after])

    # What other environments of code do in their own way

    def tests(self, item: dict) -> Tests:
        return item_tests(item)

    def codes(self, state: Episode, texts: Sequence[str]) -> tuple[str, ...]:
        """Of all agents [N], after they have answered."""
        return tuple(map(self.written, texts))

    def written(self, completion: str) -> str:
        """What is kept of a completion; others read it, so that it can be encoded."""
        return code_text.extract_code(utf8(completion))

    def program(self, codes: Sequence[str], item: dict) -> str:
        return program_of(codes, item)

    def scores(self, items: Sequence[dict], written: Sequence[Sequence[str]]) -> list[Score]:
        """Of codes [B][N]; all programs that get so far run side by side."""
        formed = [form(codes, item) for item, codes in zip(items, written, strict=True)]
        run = [i for i, (_, level_2, _) in enumerate(formed) if level_2]
        programs = [self.program(written[i], items[i]) for i in run]
        results = self.sandbox.run_many(programs, [self.tests(items[i]) for i in run], self.limits)
        found: dict[int, ExecutionResult] = dict(zip(run, results, strict=True))
        each = enumerate(zip(written, items, formed, strict=True))
        return [self.score(codes, item, of, found.get(i)) for i, (codes, item, of) in each]

    def score(self, codes: Sequence[str], item: dict, formed: Formed, result: ExecutionResult | None) -> Score:
        """The reward in its parts. formed: what `form` says; result: of the tests, None where the form stopped before them."""
        level_1, level_2, problems = formed
        share = share_passed(result)
        parts = {
            "level_1": level_1,
            "level_2": level_2,
            "level_3": TESTS * share,
            "bonus": bonus_of(codes, item) if share else 0.0,
        }
        return Score(parts, form_problems(problems, result), result)

    def levels(self, state: Episode) -> dict[str, bool]:
        """Which levels an answer has passed."""
        there = code_text.returns(state.codes[-1], state.item["entry_point"])
        level_2 = form(state.codes, state.item)[1]
        return {"form": there, "syntax": level_2 > 0, "tests": state.score is not None and state.score.solved}

    # What agents read

    def ask(self, item: dict) -> list[str]:
        """The first prompt of each agent."""
        names, entry, problem = helper_names(self.num_agents), item["entry_point"], item["prompt"].strip()
        out = []
        for name in names:
            out.append(
                f"Help to solve this problem:\n\n{problem}\n\nWrite a Python function named {name} that does a useful part of "
                f"the work. Another programmer writes {entry}, which may call {name}. Answer with the code of {name} only."
            )
        may = f" You may call {' and '.join(names)}, which other programmers write for you." if names else ""
        out.append(f"Solve this problem:\n\n{problem}\n\nWrite the Python function {entry}.{may} Answer with its code only.")
        return out

    def ask_again(self, state: Episode) -> list[str]:
        """The prompts of a later turn."""
        said = self.feedback_on(state)
        codes = "\n\n".join(f"```python\n{code}\n```" for code in state.codes)
        return [
            f"{first}\n\nThe code so far:\n\n{codes}\n\n{said}Write your part again, better." for first in self.ask(state.item)
        ]

    def feedback_on(self, state: Episode) -> str:
        score, item = state.score, state.item
        assert score is not None  # only asked for after a step
        solved = score.solved
        if self.feedback == "plain":
            return ""
        if self.feedback == "passed":
            return f"It {'passes all tests' if solved else 'does not pass all tests'}.\n\n"
        if self.feedback == "level_passed":
            reached = self.levels(state).items()
            return "".join(f"{name}: {'passed' if ok else 'not passed'}\n" for name, ok in reached) + "\n"
        if self.feedback == "expert_edits":
            assert self.expert is not None
            question = f"{item['prompt']}\n\n```python\n{self.program(state.codes, item)}\n```\n\nPropose edits to this code."
            return f"An expert says:\n{self.expert(question)}\n\n"
        lines = [f"- {problem}" for problem in score.problems] or ["- all tests pass"]
        for test, of in zip(shown(item)[: self.shown_tests], score.result.tests if score.result else (), strict=False):
            lines.append(f"- {test}: {'passes' if of.passed else f'does not pass ({of.message})'}")
        return "\n".join(lines) + "\n\n"

    def _prompts(self, of_items: list[list[str]]) -> list[list[str]]:
        """Prompts [P][N] as [N][P]."""
        return [list(of_agent) for of_agent in zip(*of_items, strict=True)]


def shown(item: dict) -> list[str]:
    """What the tests of an item assert, in the order of their results."""
    numbered = Numbered()
    numbered.visit(ast.parse(item["test"]))
    return [ast.unparse(node.test) for node in numbered.asserts]


def parts_of(scores: Sequence[Score]) -> dict[str, np.ndarray]:
    """For the log: [J] of each part of the reward, and of what came of the tests; NaN where masked."""
    columns = {name: [score.parts[name] for score in scores] for name in (scores[0].parts if scores else ())}
    columns["solved"] = [float(score.solved) for score in scores]
    columns["limited"] = [float(score.result is not None and bool(score.result.limit_hit)) for score in scores]
    masked = np.array([score.masked for score in scores])
    return {name: np.where(masked, np.nan, values) for name, values in columns.items()}
