"""Generate programming problems with hidden tests, from templates and a seed; nothing is downloaded.

A problem is one of 26 core templates over lists of numbers, numbers and texts (`templates.py`), at difficulty 2 with a step
before it, at difficulty 3 also with a step after it. The hidden tests compare with the reference solution on inputs that the
prompt does not show; the prompt shows one other example. A problem is in `train` or `eval` by a hash of template, difficulty
and constants, so the splits share no problem, whatever the seeds.

`generate` gives problems to solve; `generate_repairs` gives broken programs to repair, each with an input on which it is wrong.
Left out: problems that need more than one function or any library.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

from jmarl.envs.code.templates import AFTER, ARGUMENT, BEFORE, BUGS, TEMPLATES, Kind
from jmarl.envs.data import check_split, split_of

NUM_TESTS = 6
BUG_TRIES = 20  # inputs tried to show that a changed program is wrong


class CodeProblem(NamedTuple):
    """What identifies a problem; everything else follows from it."""

    template: str
    difficulty: int
    constants: tuple[int, int, int, int]  # a, b, c, d

    @property
    def split(self) -> str:
        """The split that the problem is in."""
        return split_of(repr(tuple(self)))

    @property
    def entry_point(self) -> str:
        """Name of the function to write."""
        return f"{self.template}_{zlib.crc32(repr(tuple(self)).encode()) % 1000}"

    def text(self) -> str:
        """Return the problem in words."""
        core, constants = TEMPLATES[self.template], dict(zip("abcd", self.constants, strict=True))
        sentences = [f"Write {self.entry_point}(x), where x is {ARGUMENT[core.input_kind]}. It returns {core.words}."]
        if self.difficulty >= 2:
            sentences.append(BEFORE[core.input_kind].words)
        if self.difficulty >= 3:
            sentences.append(AFTER[core.output_kind].words)
        return " ".join(sentences).format(**constants)

    def solution(self) -> str:
        """Return the program of the reference solution."""
        core, constants = TEMPLATES[self.template], dict(zip("abcd", self.constants, strict=True))
        lines = [f"def {self.entry_point}(x):"]
        if self.difficulty >= 2:
            lines.append(BEFORE[core.input_kind].code)
        lines.append(f"y = {core.code}")
        if self.difficulty >= 3:
            lines.append(AFTER[core.output_kind].code)
        return "\n    ".join([*lines, "return y"]).format(**constants) + "\n"


class CodeProblemGenerator:
    """Generator of tasks: problems to solve.

    Args:
        difficulty_range: lowest and highest difficulty, between 1 and 3.
    """

    def __init__(self, difficulty_range: tuple[int, int] = (1, 3)):
        self.difficulty_range = check_difficulty(difficulty_range)

    def tasks(self, split: str = "train", count: int = 100, seed: int = 0) -> list[dict]:
        """Return `count` items of a split, the same for the same seed."""
        return generate_problems(count, split=split, seed=seed, difficulty=self.difficulty_range)


def check_difficulty(difficulty: tuple[int, int]) -> tuple[int, int]:
    """Return the range; raise ValueError if it is not between 1 and 3."""
    low, high = difficulty
    if not 1 <= low <= high <= 3:
        raise ValueError(f"difficulty={difficulty}: use (lowest, highest), both between 1 and 3")
    return low, high


def generate_problems(count: int, *, split: str = "train", seed: int = 0, difficulty: tuple[int, int] = (1, 3)) -> list[dict]:
    """Generate distinct problems as items of the code environments.

    Args:
        count: number of items.
        split: train or eval.
        seed: the same seed gives the same items.
        difficulty: lowest and highest difficulty, between 1 and 3.

    Raises:
        ValueError: a bad split or difficulty, or more problems than there are.
    """
    return [_item(problem, rng, problem.text()) for problem, rng in _draw_distinct(count, split, seed, difficulty)]


def generate_repairs(count: int, *, split: str = "train", seed: int = 0, difficulty: tuple[int, int] = (1, 3)) -> list[dict]:
    """Generate distinct broken programs as items, with the arguments and errors of `generate`.

    The prompt has the program and an input on which it is wrong, but not the right result.
    """
    items = []
    for problem, rng in _draw_distinct(4 * count, split, seed, difficulty):  # some cannot be broken by one change
        if len(items) == count:
            break
        broken = _break(problem, rng)
        if broken is not None:
            program, symptom = broken
            text = f"{problem.text()}\n\nThis program is wrong:\n\n{program}\n{symptom}\n\nMend it."
            items.append(_item(problem, rng, text) | {"broken": program})
    if len(items) < count:
        raise ValueError(f"only {len(items)} of {count} broken programs were generated: reduce count or widen difficulty")
    return items


def _draw(rng: random.Random, difficulty: int) -> CodeProblem:
    """Return a problem of any split. Constants that the difficulty does not use are 0."""
    name = rng.choice(sorted(TEMPLATES))
    core = TEMPLATES[name]
    a, b, c, d = rng.randint(*core.a_range), rng.randint(*core.b_range), rng.randint(2, 9), rng.randint(2, 9)
    return CodeProblem(name, difficulty, (a, b, c if difficulty >= 2 else 0, d if difficulty >= 3 else 0))


def _draw_distinct(count: int, split: str, seed: int, difficulty: tuple[int, int]) -> list[tuple[CodeProblem, random.Random]]:
    """Return distinct problems of a split, each with its own random numbers for inputs and bugs."""
    check_split(split)
    low, high = check_difficulty(difficulty)
    rng, problems = random.Random(f"{seed} {split} {difficulty}"), dict[CodeProblem, random.Random]()
    for _ in range(100 * count + 1000):
        if len(problems) == count:
            return list(problems.items())
        problem = _draw(rng, rng.randint(low, high))
        if problem.split == split and problem not in problems:
            problems[problem] = random.Random(f"{seed} {problem}")
    raise ValueError(f"only {len(problems)} of {count} distinct problems were drawn: reduce count or widen difficulty")


def _draw_input(kind: Kind, rng: random.Random) -> Any:
    if kind == "numbers":
        return [rng.randint(-20, 120) for _ in range(rng.randint(0, 9))]
    if kind == "number":
        return rng.randint(-50, 200)
    return " ".join("".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(1, 7))) for _ in range(rng.randint(1, 5)))


def _load_function(program: str, name: str) -> Callable[[Any], Any]:
    """Execute a program in this process, without a sandbox: it comes from the templates, not from a model."""
    namespace: dict[str, Any] = {}
    exec(program, namespace)
    return namespace[name]


def _item(problem: CodeProblem, rng: random.Random, text: str) -> dict:
    input_kind, name = TEMPLATES[problem.template].input_kind, problem.entry_point
    reference = _load_function(problem.solution(), name)
    inputs: list[Any] = []
    while len(inputs) < NUM_TESTS + 1:
        x = _draw_input(input_kind, rng)
        if x not in inputs:
            inputs.append(x)
    example, *hidden = inputs
    asserts = "".join(f"    assert candidate({x!r}) == {reference(x)!r}\n" for x in hidden)
    return {
        "task_id": f"{problem.template}/{problem.difficulty}/{'-'.join(map(str, problem.constants))}",
        "prompt": f"{text}\n\nExample: {name}({example!r}) == {reference(example)!r}",
        "entry_point": name,
        "test": f"def check(candidate):\n{asserts}",
        "difficulty": problem.difficulty,
        "solution": problem.solution(),
    }


def _break(problem: CodeProblem, rng: random.Random) -> tuple[str, str] | None:
    """Return the reference solution with one bug, and a call that shows it; None if no bug shows."""
    input_kind, name, solution = TEMPLATES[problem.template].input_kind, problem.entry_point, problem.solution()
    reference = _load_function(solution, name)
    head, _, body = solution.partition("\n")
    for old, new in rng.sample(BUGS, len(BUGS)):
        program = f"{head}\n{body.replace(old, new, 1)}"
        if program == solution:
            continue
        function = _load_function(program, name)
        for _ in range(BUG_TRIES):
            x = _draw_input(input_kind, rng)
            try:
                result = repr(function(x))
            except Exception as error:
                return program, f"{name}({x!r}) raises {type(error).__name__}: {error}"
            if result != repr(reference(x)):
                return program, f"{name}({x!r}) returns {result}, which is wrong"
    return None
