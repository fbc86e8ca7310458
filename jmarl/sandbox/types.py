"""What goes into the sandbox and what comes out of it."""

from __future__ import annotations

import ast
import dataclasses
import json
import keyword
import warnings
from collections.abc import Sequence
from typing import Any, Literal

LEVELS = ("S4", "S3", "S2", "S1")


def utf8(x: Any) -> Any:
    """What a program had a hand in, as JSON gives it back, with each lone surrogate written out (`\\ud800`), so that all of its
    texts can be encoded."""
    if isinstance(x, str):
        return x.encode("utf-8", "backslashreplace").decode()
    if isinstance(x, list):
        return [utf8(y) for y in x]
    return {utf8(name): utf8(y) for name, y in x.items()} if isinstance(x, dict) else x


class SandboxUnavailable(RuntimeError):
    """This machine cannot hold programs at the level that was asked for; says why, and what to do."""


@dataclasses.dataclass(frozen=True)
class Limits:
    """What one program may use, all its tests together."""

    wall_s: float = 5.0
    """Seconds from start to verdict."""
    cpu_s: int = 5
    """Seconds of processor time of the program."""
    memory_mb: int = 512
    """MiB of address space that each of its processes may add to what it begins with."""
    processes: int = 16
    """Processes and threads."""
    file_mb: int = 16
    """MiB of all its files together. Without namespaces this is measured as it runs (`inside.disk`): what it writes in the few
    milliseconds between two measures comes on top, and more ends it."""
    output_kb: int = 64
    """KiB that it may write to stdout, and to stderr; more ends it."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if type(value) not in (int, float) or not 0.01 <= value < 1e6 or (field.name != "wall_s" and value != int(value)):
                raise ValueError(f"{field.name}={value!r}: give a number from 0.01 on, and whole ones but for wall_s")

    def as_bytes(self) -> dict[str, Any]:
        """As the runner reads them."""
        return {
            "wall_s": float(self.wall_s),
            "cpu_s": int(self.cpu_s),
            "memory": int(self.memory_mb) << 20,
            "processes": int(self.processes),
            "file_bytes": int(self.file_mb) << 20,
            "output_bytes": int(self.output_kb) << 10,
        }


@dataclasses.dataclass(frozen=True)
class Tests:
    """The tests of one program; best made by `asserts`, `unittests`, `pairs` and `calls`. They are trusted: what they do is not
    judged, though they too run in a sandbox.

    setup is code that runs before them, on their side: imports, and helpers that the program must not be able to replace.
    Names that neither they nor the setup make come from the program.
    """

    kind: Literal["asserts", "unittest", "io"]
    code: str = ""
    entry_point: str = ""
    setup: str = ""
    pairs: tuple[tuple[str, str], ...] = ()

    __test__ = False  # not for pytest

    def __post_init__(self) -> None:
        if self.kind == "io":
            if not self.pairs:
                raise ValueError("there are no pairs of input and output: give at least one")
            return
        if not self.code.strip():
            raise ValueError("the tests are empty: no program could pass them")
        for name, code in (("tests", self.code), ("setup", self.setup)):
            try:
                with warnings.catch_warnings():  # of escapes in real data sets; the judge says them to nobody
                    warnings.simplefilter("ignore")
                    ast.parse(code)
            except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
                raise ValueError(f"the {name} are no Python: {error}") from None
        if self.entry_point and (not self.entry_point.isidentifier() or keyword.iskeyword(self.entry_point)):
            raise ValueError(f"entry_point={self.entry_point!r} is no name of a function")

    def encoded(self) -> bytes:
        return json.dumps(dataclasses.asdict(self)).encode()


def asserts(code: str | Sequence[str], entry_point: str = "", setup: str = "") -> Tests:
    """A script, or several pieces of one, in which every `assert` is a test (MBPP); or one that defines `check(candidate)`,
    which is called with the program's `entry_point` (HumanEval)."""
    return Tests("asserts", code if isinstance(code, str) else "\n".join(code), entry_point, setup)


def unittests(code: str, setup: str = "") -> Tests:
    """Classes of unittest, of which every test method is a test (ClassEval)."""
    return Tests("unittest", code, "", setup)


def pairs(pairs: Sequence[tuple[str, str]]) -> Tests:
    """What a script reads from stdin, and what it then has to write to stdout."""
    for pair in pairs:
        if isinstance(pair, str) or len(pair) != 2 or not all(isinstance(text, str) for text in pair):
            raise ValueError(f"{pair!r:.80} is no pair of input and output: give two texts")
    return Tests("io", pairs=tuple((given, expected) for given, expected in pairs))


def calls(entry_point: str, cases: Sequence[tuple[Sequence[Any], Any]]) -> Tests:
    """Arguments of a function, and what it then has to return; both must be literals (numbers, texts, lists, …)."""
    lines = []
    for case in cases:
        if not isinstance(case, tuple | list) or len(case) != 2 or not isinstance(case[0], tuple | list):
            raise ValueError(f"{case!r:.80} is no case: give (arguments, expected), the arguments as a tuple or list")
        arguments, expected = case
        for value in (list(arguments), expected):
            try:
                ast.literal_eval(repr(value))
            except (ValueError, SyntaxError):
                raise ValueError(f"{value!r:.80} cannot be written as a literal: use asserts(...)") from None
        lines.append(f"assert {entry_point}(*{list(arguments)!r}) == {expected!r}")
    return asserts(lines, entry_point)


@dataclasses.dataclass(frozen=True)
class TestResult:
    """What came of one test."""

    name: str
    passed: bool
    """It held, and that was decided outside of the program."""
    message: str
    """Why it did not pass; begins with `raised ` if it ended in something else than its own comparison. May hold what the tests
    expect, so that it is not for prompts."""
    weak: bool = False
    """It held, but only by the word of the program, whose own `==`, `<` or `-` was asked: it could have lied. Not passed."""

    __test__ = False  # not for pytest


@dataclasses.dataclass(frozen=True)
class ExecutionResult:
    """What came of one program."""

    outcome: Literal["passed", "failed", "weak", "error"]
    """weak: all tests held, but some of them only by the program's word. It has not passed; nor is it known to be wrong."""
    kind: str
    """Of an error: timeout, limit, sandbox (the program broke the judge's protocol), tests (they do not run, or ask the program
    nothing), infrastructure (nobody's fault: mask the sample). Else empty."""
    message: str
    passed: int
    """Tests that passed; those that are weak did not."""
    total: int
    """Tests that there are, as far as that is known."""
    stdout: str
    stderr: str
    limit_hit: str
    """wall, cpu, memory, processes, file, output or empty; of memory, processes and file as the program says."""
    wall_s: float
    level: str
    """S4 to S1: how the program was confined."""
    integrity: Literal["strong", "weak"]
    """weak: a test is, whatever the outcome."""
    tests: tuple[TestResult, ...] = ()

    @property
    def masked(self) -> bool:
        """Whether this says nothing about the program, so that its sample is left out."""
        return self.kind in ("infrastructure", "tests")
