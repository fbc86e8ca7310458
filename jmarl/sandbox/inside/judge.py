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
import json
import os
import types
import unittest
from collections.abc import Callable
from typing import Any

from .handles import TESTS as NAME
from .names import compiled, namespace, trust_only_what_was_there, wanted_names
from .remote import Judge
from .wire import Channel, Gone, write_all

RAISED = "raised "  # begins what is said of a test that ended in something else than its own comparison


class BadTests(Exception):
    """The tests cannot be run, whatever the program."""


class Verdict:
    """Writes what came of each test."""

    def __init__(self, fd: int, judge: Judge):
        self.fd, self.judge = fd, judge

    def write(self, **fields: Any) -> None:
        write_all(self.fd, json.dumps(fields).encode() + b"\n")

    def test(self, name: str, number: int, problem: str = "", weak: bool = False) -> None:
        """The verdict on test `number`: passed if there was no problem. Nothing passes any more once the program has gone or
        broken the protocol, or could not be told what the tests give."""
        if self.judge.gone or self.judge.violation or self.judge.uncrossed:
            problem = problem or self.judge.uncrossed or "the program has ended"
        self.write(test=name[:200], number=number, message=problem[:500], weak=weak)

    def run(self, name: str, number: int, action: Callable[[], Any]) -> None:
        """One test: passed if it does not raise."""
        try:
            action()
        except BaseException as error:  # also SystemExit and KeyboardInterrupt, which the program may raise
            self.test(name, number, described(error))
        else:
            self.test(name, number)


def described(error: BaseException) -> str:
    """An error in words, without asking the program for any of them."""
    if isinstance(error, Gone):
        return f"{RAISED}the program has ended"
    plain = (str, float, bool, type(None))
    small = [type(x) in plain or type(x) is int and abs(x) < 1 << 63 for x in error.args[:5]]
    said = [str(x)[:300] if ok else f"({type(x).__name__})" for x, ok in zip(error.args, small, strict=False)]
    text = f"{type(error).__name__}: {', '.join(said)}"
    return f"{RAISED}{text}" if "_jmarl_raised" in error.__dict__ or not isinstance(error, AssertionError) else text


# --- Asserts


class Numbered(ast.NodeTransformer):
    """Puts each assert into `with __check__(number):`."""

    def __init__(self) -> None:
        self.asserts: list[ast.Assert] = []
        self.unwanted: set[int] = set()  # must not be reached

    def name(self, number: int) -> str:
        return f"assert {number + 1} (line {self.asserts[number].lineno})"

    def visit_Assert(self, node: ast.Assert) -> ast.AST:
        constant = isinstance(node.test, ast.Constant)
        if constant and node.test.value:  # type: ignore[attr-defined]
            return node
        number = len(self.asserts)
        self.asserts.append(node)
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
    tree, numbered, judge = ast.parse(tests["code"]), Numbered(), verdict.judge
    early = once(tree)
    code = compiled(tests["code"], "<tests>", numbered.visit(tree))
    found: dict[int, str] = {}
    weak: set[int] = set()
    ended = ""

    def report(number: int) -> None:
        problem = found.get(number) or ended
        if not problem and (number in found) == (number in numbered.unwanted):
            problem = "not reached" if number not in found else "reached"
        verdict.test(numbered.name(number), number, problem, number in weak)

    class Reporting(Check):
        def __enter__(self) -> None:
            super().__enter__()
            self.before = judge.weak  # what was left to the program outside of asserts, all later ones may hang on

        def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
            goes_on = super().__exit__(kind, error, trace)
            if judge.weak:
                weak.add(self.number)
            judge.weak = self.before
            if not self.unwanted and numbered.asserts[self.number].lineno in early:
                report(self.number)  # so that what has passed is known if a later one takes too long
            return goes_on

    names["__check__"] = lambda number: Reporting(found, number, number in numbered.unwanted)
    verdict.write(planned=max(len(numbered.asserts), 1))
    try:
        exec(code, names)
        if tests["entry_point"] and isinstance(names.get("check"), types.FunctionType):
            names["check"](names[tests["entry_point"]])
    except BaseException as error:  # the program may raise anything in here
        if its_own(error, judge):
            raise
        ended = described(error)
    for number in range(len(numbered.asserts)):
        report(number)
    if not numbered.asserts:
        verdict.test("script", 0, ended, judge.weak)


# --- unittest


class Results(unittest.TestResult):
    """Writes each test method's verdict when it is over. Only a test that is said to have succeeded has."""

    def __init__(self, verdict: Verdict):
        super().__init__()
        self.verdict, self.message, self.number, self.weak = verdict, "", 0, False

    def startTest(self, test: unittest.TestCase) -> None:
        super().startTest(test)
        self.message = "it did not end"
        self.weak |= self.verdict.judge.weak  # what was left to the program between tests, all later ones hang on
        self.verdict.judge.weak = False

    def stopTest(self, test: unittest.TestCase) -> None:
        super().stopTest(test)
        weak, self.verdict.judge.weak = self.verdict.judge.weak or self.weak, False
        self._report(test.id().removeprefix(f"{NAME}."), self.message, weak)
        self.verdict.judge.kept.clear()

    def _report(self, name: str, problem: str, weak: bool = False) -> None:
        self.verdict.test(name, self.number, problem, weak)
        self.number += 1

    def addSuccess(self, test: unittest.TestCase) -> None:
        self.message = ""

    def addExpectedFailure(self, test: unittest.TestCase, err: Any) -> None:
        self.message = ""

    def addError(self, test: Any, err: Any) -> None:
        self.message = described(err[1])
        if not isinstance(test, unittest.TestCase):  # what is done before or after all tests of a class
            self._report(test.id(), self.message)

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
    exec(compiled(tests["code"], "<tests>"), names)
    found = [x for x in names.values() if isinstance(x, type) and issubclass(x, unittest.TestCase) and x.__module__ == NAME]
    may_skip = not verdict.judge.asked  # else the program could have had a say in which tests there are
    each = {
        of: [name for name in unittest.TestLoader().getTestCaseNames(of) if not (may_skip and skipped(of, name))]
        for of in found
    }
    verdict.write(planned=sum(map(len, each.values())))
    results = Results(verdict)
    for of, methods in each.items():
        try:
            unittest.TestSuite(map(of, methods)).run(results)
        except BaseException:  # the program may raise anything, and what did not run counts as failed
            continue


def skipped(of: type, name: str) -> bool:
    """By a decorator of the tests."""
    return any(getattr(x, "__unittest_skip__", False) for x in (of, getattr(of, name)))


# --- Pairs


def run_pairs(tests: dict, names: dict, verdict: Verdict) -> None:
    del names
    verdict.write(planned=len(tests["pairs"]))
    for number, (given, expected) in enumerate(tests["pairs"]):

        def compare(given: str = given, expected: str = expected) -> None:
            if tidy(verdict.judge.main(given)) != tidy(expected):
                raise AssertionError("other text than expected")

        verdict.run(f"pair {number + 1}", number, compare)


def tidy(text: str) -> list[str]:
    lines = [line.rstrip() for line in text.splitlines()]
    while lines and not lines[-1]:
        lines.pop()
    return lines


KINDS = {"asserts": run_asserts, "unittest": run_unittest, "io": run_pairs}


# --- All


def run(tests: dict, judge: Judge, verdict: Verdict) -> None:
    if tests["kind"] == "unittest":  # others have a directory of their own
        trust_only_what_was_there()
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


def its_own(error: BaseException, judge: Judge) -> bool:
    """Whether an error that ended the tests is theirs: the program has had no part in it. That they use what it has given them
    counts as a part, but for a library that they miss."""
    return not (judge.asked or judge.gone) and (not judge.wanted or isinstance(error, ImportError))


def planned(tests: dict) -> int:
    """How many tests there are, without running them."""
    if tests["kind"] == "io":
        return len(tests["pairs"])
    tree = ast.parse(tests["code"])
    if tests["kind"] == "asserts":
        (numbered := Numbered()).visit(tree)
        return max(len(numbered.asserts), 1)
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
        fault = isinstance(error, BadTests) or its_own(error, judge)
        verdict.write(**{"fault" if fault else "unloaded": f"the tests do not run: {described(error)}"[:500]})
    about = ("asked", "wanted", "gone", "violation", "limit", "unsupported")
    verdict.write(done=True, **{name: getattr(judge, name) for name in about})
    os.close(verdict_fd)
