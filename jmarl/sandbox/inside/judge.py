"""The side of the tests: runs them against a program in another process and writes the verdict.

Verdict: lines of JSON on a descriptor that only this process has. {"planned": n}, then {"test": name, "passed": bool,
"message": text} for each test that ran, last {"done": true, ...}. A fault of the tests themselves is {"fault": text}.

Kinds of tests:
    asserts    a script. Each `assert` of it is a test, in functions and loops too: passed if it held whenever it was reached,
               and it was. `assert False` is one that must not be reached, `assert True` none. With an entry point,
               `check(candidate)` is called if the script defines it. A script without asserts is one test.
    unittest   classes with test methods, each a test
    io         pairs of what a script reads and writes; white space at the ends of lines does not count
"""

from __future__ import annotations

import ast
import builtins
import importlib
import json
import os
import random
import sys
import types
import unittest
from collections.abc import Callable
from typing import Any

from .remote import Judge
from .wire import Channel, Gone, write_all

ALIASES = {"np": "numpy", "pd": "pandas"}
NAME = "tests"


class BadTests(Exception):
    """The tests cannot be run, whatever the program."""


class Verdict:
    """Writes what came of each test."""

    def __init__(self, fd: int, judge: Judge):
        self.fd, self.judge = fd, judge

    def write(self, **fields: Any) -> None:
        write_all(self.fd, json.dumps(fields).encode() + b"\n")

    def test(self, name: str, passed: bool, message: str = "") -> None:
        """Nothing passes any more once the program has gone or broken the protocol."""
        passed = passed and not self.judge.gone and not self.judge.violation
        message = "" if passed else message[:500] or "the program has ended"
        self.write(test=name[:200], passed=passed, message=message, weak=self.judge.weak)

    def run(self, name: str, action: Callable[[], Any]) -> None:
        """One test: passed if it does not raise."""
        try:
            action()
        except BaseException as error:  # also SystemExit and KeyboardInterrupt, which the program may raise
            self.test(name, False, described(error))
        else:
            self.test(name, True)


def described(error: BaseException) -> str:
    """An error in words, without asking the program for any of them."""
    if isinstance(error, Gone):
        return "the program has ended"
    plain = (str, int, float, bool, type(None))
    said = [str(x)[:300] if type(x) in plain else f"({type(x).__name__})" for x in error.args[:5]]
    return f"{type(error).__name__}: {', '.join(said)}"


# --- Asserts


class Numbered(ast.NodeTransformer):
    """Puts each assert into `with __check__(number):`."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.lines: list[int] = []
        self.unwanted: set[int] = set()  # must not be reached

    def visit_Assert(self, node: ast.Assert) -> ast.AST:
        constant = isinstance(node.test, ast.Constant)
        if constant and node.test.value:  # type: ignore[attr-defined]
            return node
        number = len(self.names)
        self.lines.append(node.lineno)
        self.names.append(f"assert {number + 1} (line {node.lineno})")
        if constant:
            self.unwanted.add(number)
        check = ast.Call(ast.Name("__check__", ast.Load()), [ast.Constant(number)], [])
        return ast.copy_location(ast.With([ast.withitem(check)], [node]), node)


class Check:
    """Around one assert: notes whether it held, and goes on if it did not."""

    def __init__(self, found: dict[int, str], number: int, unwanted: bool):
        self.found, self.number, self.unwanted = found, number, unwanted

    def __enter__(self) -> None:
        self.found.setdefault(self.number, "")

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        if error is not None:
            self.found[self.number] = self.found[self.number] or described(error)
        return isinstance(error, Exception) and not self.unwanted


def once(tree: ast.Module) -> set[int]:
    """Lines of the asserts that are reached once: of the script itself and of `check`."""
    bodies = [tree.body, *(node.body for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "check")]
    return {node.lineno for body in bodies for node in body if isinstance(node, ast.Assert)}


def run_asserts(tests: dict, names: dict, verdict: Verdict) -> None:
    tree, numbered = ast.parse(tests["code"]), Numbered()
    early = once(tree)
    code = compile(ast.fix_missing_locations(numbered.visit(tree)), "<tests>", "exec")
    found: dict[int, str] = {}
    weak: set[int] = set()
    ended = ""

    def report(number: int) -> None:
        name, unwanted = numbered.names[number], number in numbered.unwanted
        message = (
            found.get(number) or ended or ("" if (number in found) != unwanted else "reached" if unwanted else "not reached")
        )
        verdict.test(name, not message, message)

    class Reporting(Check):
        def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
            goes_on = super().__exit__(kind, error, trace)
            if verdict.judge.weak:
                weak.add(self.number)
            if not self.unwanted and numbered.lines[self.number] in early:
                report(self.number)  # so that what has passed is known if a later one takes too long
            return goes_on

    names["__check__"] = lambda number: Reporting(found, number, number in numbered.unwanted)
    verdict.write(planned=max(len(numbered.names), 1))
    try:
        exec(code, names)
        if tests["entry_point"] and isinstance(names.get("check"), types.FunctionType):
            names["check"](names[tests["entry_point"]])
    except BaseException as error:  # the program may raise anything in here
        ended = described(error)
    for number in range(len(numbered.names)):
        report(number)
    if not numbered.names:
        verdict.test("script", not ended, ended)


# --- unittest


class Results(unittest.TestResult):
    """Writes each test method's verdict when it is over. Only a test that is said to have succeeded has."""

    def __init__(self, verdict: Verdict):
        super().__init__()
        self.verdict, self.message = verdict, ""

    def startTest(self, test: unittest.TestCase) -> None:
        super().startTest(test)
        self.message, self.verdict.judge.weak = "it did not end", False

    def stopTest(self, test: unittest.TestCase) -> None:
        super().stopTest(test)
        self.verdict.test(test.id().removeprefix(f"{NAME}."), not self.message, self.message)
        self.verdict.judge.kept.clear()

    def addSuccess(self, test: unittest.TestCase) -> None:
        self.message = ""

    def addExpectedFailure(self, test: unittest.TestCase, err: Any) -> None:
        self.message = ""

    def addError(self, test: Any, err: Any) -> None:
        self.message = described(err[1])
        if not isinstance(test, unittest.TestCase):  # what is done before or after all tests of a class
            self.verdict.test(test.id(), False, self.message)

    addFailure = addError

    def addSubTest(self, test: Any, subtest: Any, err: Any) -> None:
        if err is not None:
            self.addError(test, err)

    def addSkip(self, test: Any, reason: str) -> None:
        self.message = f"skipped: {reason}"

    def addUnexpectedSuccess(self, test: Any) -> None:
        self.message = "succeeded, which was not expected"


def run_unittest(tests: dict, names: dict, verdict: Verdict) -> None:
    verdict.write(planned=planned(tests))
    exec(compile(tests["code"], "<tests>", "exec"), names)
    classes = [x for x in names.values() if isinstance(x, type) and issubclass(x, unittest.TestCase) and x.__module__ == NAME]
    loader = unittest.TestLoader()
    each = [(of, name) for of in classes for name in loader.getTestCaseNames(of)]
    verdict.write(planned=len(each))
    for of in classes:
        suite = unittest.TestSuite(of(name) for name in loader.getTestCaseNames(of))
        try:
            suite.run(Results(verdict))
        except BaseException:  # the program may raise anything, and what did not run counts as failed
            continue


# --- Pairs


def run_pairs(tests: dict, names: dict, verdict: Verdict) -> None:
    del names
    verdict.write(planned=len(tests["pairs"]))
    for number, (given, expected) in enumerate(tests["pairs"]):

        def compare(given: str = given, expected: str = expected) -> None:
            if tidy(verdict.judge.main(given)) != tidy(expected):
                raise AssertionError("other text than expected")

        verdict.run(f"pair {number + 1}", compare)


def tidy(text: str) -> list[str]:
    lines = [line.rstrip() for line in text.splitlines()]
    while lines and not lines[-1]:
        lines.pop()
    return lines


KINDS = {"asserts": run_asserts, "unittest": run_unittest, "io": run_pairs}


# --- All


def free_names(code: str) -> list[str]:
    """Names that a script reads and does not make itself."""
    read: dict[str, None] = {}
    made = set(dir(builtins))
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Name):
            read[node.id] = None
            if not isinstance(node.ctx, ast.Load):
                made.add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            made.add(node.name)
        elif isinstance(node, ast.arg):
            made.add(node.arg)
        elif isinstance(node, ast.alias):
            made.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, ast.ExceptHandler) and node.name:
            made.add(node.name)
    return [name for name in read if name not in made]


def namespace(tests: dict) -> dict[str, Any]:
    """The names of the tests before the program gives any: what trusted code makes, and modules that it takes for granted."""
    unittest.main = lambda *arguments, **named: None  # type: ignore[assignment,misc]  # often the last line
    random.seed(0)
    module = sys.modules[NAME] = types.ModuleType(NAME)
    names = module.__dict__
    exec(compile(tests["setup"], "<setup>", "exec"), names)
    for name in free_names(tests["code"]):
        target = ALIASES.get(name, name)
        if name not in names and (target in sys.stdlib_module_names or name in ALIASES):
            try:
                names[name] = importlib.import_module(target)
            except ImportError:
                continue
    return names


def wanted_names(tests: dict, names: dict) -> list[str]:
    """What the program has to give."""
    entry = [tests["entry_point"]] if tests["entry_point"] else []
    return entry + [name for name in free_names(tests["code"]) if name not in names and name not in entry]


def run(tests: dict, judge: Judge, verdict: Verdict) -> None:
    try:
        names = namespace(tests)
        wanted = wanted_names(tests, names) if tests["kind"] != "io" else []
    except Exception as error:
        raise BadTests(described(error)) from error
    loaded, given = "", {}
    try:
        judge.value(judge.exchange(None))
        if wanted:
            names.update(given := judge.names(wanted))
            judge.asked += len(set(wanted) - set(given))  # that it has no such thing is an answer, too
        if tests["entry_point"] and tests["entry_point"] not in given:
            loaded = f"NameError: name {tests['entry_point']!r} is not defined"
    except BaseException as error:  # the program may raise anything
        loaded = described(error)
    if loaded:
        verdict.write(unloaded=loaded[:500], planned=planned(tests))
        return
    KINDS[tests["kind"]](tests, names, verdict)


def planned(tests: dict) -> int:
    """How many tests there are, without running them."""
    if tests["kind"] == "io":
        return len(tests["pairs"])
    tree = ast.parse(tests["code"])
    if tests["kind"] == "asserts":
        (numbered := Numbered()).visit(tree)
        return max(len(numbered.names), 1)
    methods = [node for of in tree.body if isinstance(of, ast.ClassDef) for node in of.body]
    return sum(isinstance(node, ast.FunctionDef) and node.name.startswith("test") for node in methods)


def main(tests: bytes, channel: Channel, verdict_fd: int) -> None:
    """Run as the judge's process, confined already. From the first answer of the program on, nothing is the tests' fault alone:
    a program that could make it so would not be reckoned with."""
    judge = Judge(channel)
    verdict = Verdict(verdict_fd, judge)
    try:
        run(json.loads(tests), judge, verdict)
    except BaseException as error:
        text = f"the tests do not run: {described(error)}"[:500]
        verdict.write(**{"unloaded" if judge.asked and not isinstance(error, BadTests) else "fault": text})
    about = ("asked", "gone", "violation", "limit", "unsupported")
    verdict.write(done=True, **{name: getattr(judge, name) for name in about})
    os.close(verdict_fd)
