"""Code generation: a team writes one Python function; the last agent writes the function, the others helpers that it may call.

Task: an item with a problem text, the name of the function (`entry_point`) and hidden tests.
Data: HumanEval (arXiv 2107.03374), CoopHumanEval (arXiv 2508.04652) and MBPP (arXiv 2108.07732) by `data.load_items`, or
generated problems (`problems.py`, the default).
Roles: with two agents, agent 0 writes `aux` and agent 1 the function. With more, agents 0, 1, ... write `aux_1`, `aux_2`, ... A
single agent writes the function alone.

Reward of a joint action, the same for all agents, from 0 to 4 (2.1 for one agent), decided on the syntax tree and by running
all hidden tests in a sandbox (`scoring.py`):

    level 1   + 0.4 aux is defined and returns something (several helpers: the share that does)
              + 0.6 the function is defined and returns something; else stop
    level 2   + 0.5 the program of all agents together parses; else stop
    level 3   + (tests passed) / (tests)
    bonus     only if a test passed, for each helper that is defined and called by the function, averaged over the helpers:
              + 0.5, + 1.0 unless the function is a mere wrapper of the helper, - 0.5 if it ignores the helper's result

A program that is stopped at a limit keeps the tests that passed before. The joint action is masked if nobody can say what the
program is worth: the sandbox failed twice, or the tests of the item do not run.
Columns: `reward/level_1` to `level_3`, `reward/bonus`, `measures/solved` (all tests passed), `measures/limited` (stopped at a
limit).

Turns: all agents write again in every turn. From the second turn on they read the problem, everyone's last code, and feedback:

    plain            nothing more
    passed           whether all tests passed
    level_passed     which levels were passed
    level_feedback   what was wrong at each level; with shown_tests=n also the first n tests and their results
    expert_edits     the edits proposed by `expert`, a function from prompt to text

Only `level_feedback` with shown_tests above 0 shows tests. No other prompt contains what the tests expect.
Left out: checking whether the problem text itself gives tests away (MBPP's original prompts do; those of `data.py` do not).
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from jmarl.envs.base import Answer
from jmarl.envs.calls.awaiting import awaited
from jmarl.envs.code import scoring, syntax
from jmarl.envs.code.extraction import extract_code
from jmarl.envs.code.problems import CodeProblemGenerator
from jmarl.envs.code.scoring import CodeScore, FormScore
from jmarl.envs.rewards import Processor, RewardFunction
from jmarl.sandbox import ExecutionResult, Limits, Sandbox, Tests, default_sandbox

FEEDBACK_MODES = ("plain", "passed", "level_passed", "level_feedback", "expert_edits")


class CodeEpisode(NamedTuple):
    """State of an episode: the item, and the code and score of the last turn."""

    item: dict
    codes: tuple[str, ...] = ()  # [N]
    score: CodeScore | None = None
    turn: int = 0


class CodeGeneration:
    """The code-generation environment; see the module docstring.

    Other code environments are subclasses. They override `tests`, `update_codes`, `code_of`, `program`, `score` or
    `first_prompts`.

    Args:
        num_agents: agents that write code.
        feedback: one of `FEEDBACK_MODES`, described in the module docstring.
        shown_tests: tests shown by level_feedback.
        expert: writes the edits of expert_edits.
        processor: transforms the reward. `RewardProcessors.shift(-4)` moves the maximum to 0, so that
            early_termination_threshold=-0.2 means nearly perfect.
        limits: of each program; default: those of the sandbox.
        sandbox: runs the programs. Default: the sandbox of this process, which is started now, so that a machine without one
            fails before training.
        generator: has `tasks(split, count, seed)`. Default: generated problems.
    """

    max_turns = 1  # the least number of turns: `num_turns` of the run decides

    def __init__(
        self,
        num_agents: int = 2,
        *,
        feedback: str = "level_feedback",
        shown_tests: int = 0,
        expert: Callable[[str], str] | None = None,
        processor: Processor | None = None,
        limits: Limits | None = None,
        sandbox: Sandbox | None = None,
        generator: Any = None,
    ):
        if num_agents < 1:
            raise ValueError(f"num_agents={num_agents}: use at least 1")
        if feedback not in FEEDBACK_MODES:
            raise ValueError(f"feedback={feedback!r}: choose {', '.join(FEEDBACK_MODES)}")
        if expert is None and feedback == "expert_edits":
            raise ValueError("feedback='expert_edits' needs an expert: pass a function from prompt to text")
        if expert is not None and feedback != "expert_edits":
            raise ValueError(f"expert has no effect with feedback={feedback!r}: remove it, or use feedback='expert_edits'")
        if shown_tests and feedback != "level_feedback":
            raise ValueError(f"shown_tests={shown_tests} has no effect with feedback={feedback!r}: use 'level_feedback'")
        self.num_agents, self.feedback, self.shown_tests, self.expert = num_agents, feedback, shown_tests, expert
        self.processor, self.limits, self.sandbox = processor, limits, sandbox or default_sandbox()
        self.generator = generator or CodeProblemGenerator()
        best_alone = scoring.FUNCTION + scoring.PARSES + scoring.TESTS
        best_helper = scoring.HELPER + scoring.CALLS_HELPER + scoring.MORE_THAN_WRAPPER
        self.reward_range = (0.0, best_alone + (best_helper if num_agents > 1 else 0.0))

    @property
    def roles(self) -> tuple[str, ...]:
        """Names of the agents [N]."""
        return (*scoring.helper_names(self.num_agents), "main")

    def tasks(self, split: str = "train", count: int = 100, seed: int = 0) -> list[dict]:
        """Return up to `count` items of a split, the same for the same seed."""
        return self.generator.tasks(split, count, seed)

    def describe(self) -> dict[str, str]:
        """Return the confinement level of the sandbox: a resumed run must score its programs at the same level."""
        return {"sandbox": self.sandbox.level}

    # Environment protocol: many episodes in lock-step

    def reset(self, items: Sequence[dict], rng: np.random.Generator) -> tuple[list[CodeEpisode], list[list[str]]]:
        """Return the states [P] and the first prompts [N][P]; raise ValueError for a malformed item."""
        del rng
        for item in items:
            self.tests(item)
        return [CodeEpisode(item) for item in items], _by_agent([self.first_prompts(item) for item in items])

    def step(self, states: Sequence[CodeEpisode], actions: Sequence[Sequence[str]], rng: np.random.Generator) -> Answer:
        """Score the completions [N][B] written in states [B]. No episode is done: the run decides when to stop."""
        completions = zip(*actions, strict=True)
        codes = [self.update_codes(state, texts) for state, texts in zip(states, completions, strict=True)]
        scores = self.scores([state.item for state in states], codes)
        after = [
            state._replace(codes=own, score=score, turn=state.turn + 1)
            for state, own, score in zip(states, codes, scores, strict=True)
        ]

        def code_generation(*texts: Any) -> list[float]:  # RewardFunction checks and counts its values
            return [score.total for score in scores]

        reward = RewardFunction(code_generation, num_agents=self.num_agents, processors=self.processor)
        result = reward(actions, [state.item["prompt"] for state in states], [state.item for state in states], rng)
        parts, measures = scoring.score_parts(scores), scoring.score_measures(scores)
        if self.processor is not None:  # the parts are those of the raw reward
            parts, measures = {}, parts | measures
        return Answer(result._replace(parts=parts, measures=measures), np.zeros(len(states), bool), after)

    def observe(self, after: Sequence[CodeEpisode]) -> tuple[list[CodeEpisode], list[list[str]]]:
        """Return the states [B] and the prompts [N][B] of the next turn."""
        return list(after), _by_agent([self.later_prompts(state) for state in after])

    def solve(self, state: CodeEpisode) -> list[str | None]:
        """Return the reference solution as the message of the last agent, which needs no helpers [N]."""
        solution = state.item.get("solution")
        if not isinstance(solution, str):
            raise NotImplementedError(f"problem {state.item.get('task_id', state.item)!r:.80} has no solution")
        return [*[None] * (self.num_agents - 1), f"```python\n{solution.strip()}\n```"]

    # What subclasses override

    def tests(self, item: dict) -> Tests:
        """Return the hidden tests of an item; raise ValueError for a malformed item."""
        return scoring.item_tests(item)

    def update_codes(self, state: CodeEpisode, texts: Sequence[str]) -> tuple[str, ...]:
        """Return the code of all agents [N] after they wrote these completions [N]."""
        return tuple(map(self.code_of, texts))

    def code_of(self, completion: str) -> str:
        """Return the code of a completion. Lone surrogates are written out: tokenizers and the sandbox take no such text."""
        return extract_code(completion.encode("utf-8", "backslashreplace").decode())

    def program(self, codes: Sequence[str], item: dict) -> str:
        """Return the program of all agents together."""
        return scoring.team_program(codes, item)

    def scores(self, items: Sequence[dict], codes: Sequence[Sequence[str]]) -> list[CodeScore]:
        """Return the scores of codes [B][N]. All programs that parse run side by side."""
        forms = [scoring.score_form(own, item) for own, item in zip(codes, items, strict=True)]
        runnable = [i for i, form in enumerate(forms) if form.level_2]
        programs = [self.program(codes[i], items[i]) for i in runnable]
        results = self.sandbox.run_many(programs, [self.tests(items[i]) for i in runnable], self.limits)
        result_at: dict[int, ExecutionResult] = dict(zip(runnable, results, strict=True))
        return [self.score(codes[i], items[i], form, result_at.get(i)) for i, form in enumerate(forms)]

    def score(self, codes: Sequence[str], item: dict, form: FormScore, result: ExecutionResult | None) -> CodeScore:
        """Return the reward in its parts. result: of the hidden tests; None if they were not run."""
        share = scoring.passed_share(result)
        parts = {
            "level_1": form.level_1,
            "level_2": form.level_2,
            "level_3": scoring.TESTS * share,
            "bonus": scoring.cooperation_bonus(codes, item) if share else 0.0,
        }
        return CodeScore(parts, scoring.add_test_problem(form.problems, result), result)

    def levels(self, state: CodeEpisode) -> dict[str, bool]:
        """Return which levels the last turn's code has passed, for `level_passed`."""
        defined = syntax.returns_value(state.codes[-1], state.item["entry_point"])
        parses = scoring.score_form(state.codes, state.item).level_2 > 0
        return {"form": defined, "syntax": parses, "tests": state.score is not None and state.score.solved}

    # Prompts

    def first_prompts(self, item: dict) -> list[str]:
        """Return the prompts of the first turn [N]."""
        helpers, entry_point = scoring.helper_names(self.num_agents), item["entry_point"]
        problem = item["prompt"].strip()
        prompts = []
        for name in helpers:
            prompts.append(
                f"Help to solve this problem:\n\n{problem}\n\nWrite a Python function named {name} that does a useful part of "
                f"the work. Another programmer writes {entry_point}, which may call {name}. "
                f"Answer with the code of {name} only."
            )
        may_call = f" You may call {' and '.join(helpers)}, which other programmers write for you." if helpers else ""
        prompts.append(
            f"Solve this problem:\n\n{problem}\n\nWrite the Python function {entry_point}.{may_call} Answer with its code only."
        )
        return prompts

    def later_prompts(self, state: CodeEpisode) -> list[str]:
        """Return the prompts of a later turn [N]: the first prompt, everyone's code, and feedback."""
        feedback = self.feedback_on(state)
        codes = "\n\n".join(f"```python\n{code}\n```" for code in state.codes)
        return [
            f"{first}\n\nThe code so far:\n\n{codes}\n\n{feedback}Write your part again, better."
            for first in self.first_prompts(state.item)
        ]

    def feedback_on(self, state: CodeEpisode) -> str:
        """Return the feedback on the last turn, with an empty line behind it, or the empty text."""
        assert state.score is not None  # set by `step`
        if self.feedback == "plain":
            return ""
        if self.feedback == "passed":
            return f"It {'passes all tests' if state.score.solved else 'does not pass all tests'}.\n\n"
        if self.feedback == "level_passed":
            levels = self.levels(state).items()
            return "".join(f"{name}: {'passed' if ok else 'not passed'}\n" for name, ok in levels) + "\n"
        if self.feedback == "expert_edits":
            return self._expert_feedback(state)
        return _level_feedback(state.item, state.score, self.shown_tests)

    def _expert_feedback(self, state: CodeEpisode) -> str:
        assert self.expert is not None  # checked by the constructor
        program = self.program(state.codes, state.item)
        question = f"{state.item['prompt']}\n\n```python\n{program}\n```\n\nPropose edits to this code."
        return f"An expert says:\n{awaited(self.expert(question))}\n\n"


def _level_feedback(item: dict, score: CodeScore, shown_tests: int) -> str:
    lines = [f"- {problem}" for problem in score.problems] or ["- all tests pass"]
    if shown_tests and score.result:
        for text, test in zip(scoring.assert_texts(item)[:shown_tests], score.result.tests, strict=False):
            lines.append(f"- {text}: {'passes' if test.passed else f'does not pass ({test.message})'}")
    return "\n".join(lines) + "\n\n"


def _by_agent(prompts: list[list[str]]) -> list[list[str]]:
    """Transpose prompts [P][N] to [N][P]."""
    return [list(column) for column in zip(*prompts, strict=True)]
