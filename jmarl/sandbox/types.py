"""What goes into the sandbox and what comes out of it: limits, tests and results."""

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
    """Return JSON data with every lone surrogate in its texts written out (`\\ud800`), so that all of them can be encoded.

    A program can put lone surrogates into any text that it influences.
    """
    if isinstance(x, str):
        return x.encode("utf-8", "backslashreplace").decode()
    if isinstance(x, list):
        return [utf8(y) for y in x]
    return {utf8(name): utf8(y) for name, y in x.items()} if isinstance(x, dict) else x


class SandboxUnavailable(RuntimeError):
    """This machine cannot confine programs at the requested level; the message says why, and what to do."""


@dataclasses.dataclass(frozen=True)
class Limits:
    """What one program may use, with all its tests together."""

    wall_s: float = 5.0
    """Seconds from start to verdict."""
    cpu_s: int = 5
    """Seconds of processor time of the program."""
    memory_mb: int = 512
    """MiB of address space that each of its processes may add to what it begins with."""
    processes: int = 16
    """Processes and threads."""
    file_mb: int = 16
    """MiB of all its files together. Without namespaces this is measured while the program runs (`inside.disk`): what it writes
    in the few milliseconds between two measurements comes on top, and exceeding the limit ends it."""
    output_kb: int = 64
    """KiB that it may write to stdout, and as many to stderr; writing more ends it."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if type(value) not in (int, float) or not 0.01 <= value < 1e6 or (field.name != "wall_s" and value != int(value)):
                allowed = "a number, at least 0.01" if field.name == "wall_s" else "a whole number, at least 1"
                raise ValueError(f"{field.name}={value!r} is not allowed: give {allowed} and less than 1000000")

    def in_bytes(self) -> dict[str, Any]:
        """Return the limits as the runner reads them: sizes in bytes."""
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
    """The tests of one program; build them with `asserts`, `unittests`, `pairs` or `calls`.

    Tests are trusted code, though they too run in a sandbox. setup: code that runs before the tests, on their side: imports,
    and helpers that the program must not be able to replace. Names that neither the tests nor the setup define come from the
    program.
    """

    kind: Literal["asserts", "unittest", "io"]
    code: str = ""
    entry_point: str = ""
    setup: str = ""
    pairs: tuple[tuple[str, str], ...] = ()

    __test__ = False  # pytest must not collect it

    def __post_init__(self) -> None:
        if self.kind == "io":
            if not self.pairs:
                raise ValueError("there are no pairs of input and output: give at least one")
            return
        if not self.code.strip():
            raise ValueError("the tests are empty: no program could pass them")
        for name, code in (("tests", self.code), ("setup", self.setup)):
            try:
                with warnings.catch_warnings():  # real data sets have invalid escapes; the judge ignores them too
                    warnings.simplefilter("ignore")
                    ast.parse(code)
            except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
                raise ValueError(f"the {name} cannot be parsed as Python: {error}") from None
        if self.entry_point and (not self.entry_point.isidentifier() or keyword.iskeyword(self.entry_point)):
            raise ValueError(f"entry_point={self.entry_point!r} cannot be the name of a function")

    def conditions(self) -> list[str]:
        """Return the conditions that a script asserts, in the order of the results of its tests."""
        from jmarl.sandbox.inside.judge import Numbered

        numbered = Numbered()
        numbered.visit(ast.parse(self.code))
        return [ast.unparse(node.test) for node in numbered.asserts]

    def to_json(self) -> bytes:
        """Return the tests as the judge reads them."""
        return json.dumps(dataclasses.asdict(self)).encode()


def asserts(code: str | Sequence[str], entry_point: str = "", setup: str = "") -> Tests:
    """Return tests that are a script, or several pieces of one, in which every `assert` is a test (MBPP).

    If the script defines `check(candidate)`, that is called with the program's `entry_point` (HumanEval).
    """
    return Tests("asserts", code if isinstance(code, str) else "\n".join(code), entry_point, setup)


def unittests(code: str, setup: str = "") -> Tests:
    """Return tests that are classes of unittest, of which every test method is a test (ClassEval)."""
    return Tests("unittest", code, "", setup)


def pairs(pairs: Sequence[tuple[str, str]]) -> Tests:
    """Return tests of a script: for each pair, what it reads from stdin and what it must then write to stdout."""
    for pair in pairs:
        if isinstance(pair, str) or len(pair) != 2 or not all(isinstance(text, str) for text in pair):
            raise ValueError(f"{pair!r:.80} is not a pair of input and output: give two texts")
    return Tests("io", pairs=tuple((stdin, stdout) for stdin, stdout in pairs))


def calls(entry_point: str, cases: Sequence[tuple[Sequence[Any], Any]]) -> Tests:
    """Return tests of a function: for each case, its positional arguments and what it must then return.

    Both must be literals (numbers, texts, lists, …).
    """
    lines = []
    for case in cases:
        if not isinstance(case, tuple | list) or len(case) != 2 or not isinstance(case[0], tuple | list):
            raise ValueError(f"{case!r:.80} is not a case: give (arguments, expected), the arguments as a tuple or list")
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
    """The result of one test."""

    name: str
    passed: bool
    """Whether it held, as decided outside of the program."""
    message: str
    """Why it did not pass; begins with `raised ` if it ended in another error than a failed assertion. It may show what the
    tests expect, so keep it out of prompts."""
    weak: bool = False
    """It held only by the word of the program, which could have lied: its own `==`, `<` or `-` was asked. It has not passed."""

    __test__ = False  # pytest must not collect it

    @property
    def raised(self) -> bool:
        """Whether it ended in another error than a failed assertion."""
        from jmarl.sandbox.inside.judge import RAISED  # here, as few need it

        return self.message.startswith(RAISED)


@dataclasses.dataclass(frozen=True)
class ExecutionResult:
    """The result of one program."""

    outcome: Literal["passed", "failed", "weak", "error"]
    """weak: all tests held, but some of them only by the program's word. It has not passed, nor is it known to be wrong."""
    kind: str
    """Of an error: timeout, limit, sandbox (the program broke the judge's protocol), tests (they do not run, or ask the program
    nothing), infrastructure (the machine failed: mask the sample). Otherwise empty."""
    message: str
    passed: int
    """Number of tests that passed; weak ones did not."""
    total: int
    """Number of tests, as far as it is known."""
    stdout: str
    stderr: str
    limit_hit: str
    """wall, cpu, memory, processes, file, output or empty. Of memory, processes and file only the program's own error tells."""
    wall_s: float
    level: str
    """How the program was confined: S4 to S1."""
    integrity: Literal["strong", "weak"]
    """weak: at least one test is weak, whatever the outcome is."""
    tests: tuple[TestResult, ...] = ()

    @property
    def masked(self) -> bool:
        """Whether this says nothing about the program, so that its sample should be left out."""
        return self.kind in ("infrastructure", "tests")
