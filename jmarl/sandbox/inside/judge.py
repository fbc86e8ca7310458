"""The side of the tests: run them against a program in another process, and write the verdict.

The verdict is lines of JSON on a descriptor that only this process has: {"planned": count}; {"test": name, "number": position,
"message": problem or "", "weak": bool} for each test that ran; last {"done": true, ...}. If the tests themselves seem to be at
fault, {"fault": text}; if the program does not load, {"load_error": text}.

Kinds of tests:
    asserts    a script. Each of its asserts is a test, also in functions and loops: it passes if it was reached and held every
               time. `assert False` must not be reached; `assert True` is no test. If there is an entry point and the script
               defines `check(candidate)`, that is called. A script without asserts is one test.
    unittest   classes of unittest; each test method is a test
    io         pairs of what a script reads and writes; white space at the ends of lines is ignored
"""

from __future__ import annotations

import ast
import json
import os
import types
import unittest
from typing import Any

from .namespace import build_namespace, compile_for_proxies, forbid_imports_from_program, program_names
from .program_client import ProgramClient
from .proxy import TESTS_MODULE
from .wire import Channel, Disconnected, write_all

RAISED = "raised "  # prefix of the message of a test that ended in another error than a failed assertion


class Verdict:
    """Writes the results of tests to a descriptor."""

    def __init__(self, fd: int, client: ProgramClient):
        self.fd, self.client = fd, client

    def write(self, **fields: Any) -> None:
        """Write one line."""
        write_all(self.fd, json.dumps(fields).encode() + b"\n")

    def report(self, name: str, number: int, problem: str = "", weak: bool = False) -> None:
        """Write the result of a test, which passes if there is no problem. No test passes after the program has ended or broken
        the protocol, or after a value of the tests could not be sent to it."""
        client = self.client
        if client.disconnected or client.violation or client.unsupported_test_value:
            problem = problem or client.unsupported_test_value or "the program has ended"
        self.write(test=name[:200], number=number, message=problem[:500], weak=weak)


def describe_error(error: BaseException) -> str:
    """Return an error as a text, without calling code of the program."""
    if isinstance(error, Disconnected):
        return f"{RAISED}the program has ended"
    simple_types = (str, float, bool, type(None))
    arguments = []
    for x in error.args[:5]:
        is_simple = type(x) in simple_types or type(x) is int and abs(x) < 1 << 63
        arguments.append(str(x)[:300] if is_simple else f"({type(x).__name__})")
    text = f"{type(error).__name__}: {', '.join(arguments)}"
    return f"{RAISED}{text}" if "_jmarl_raised" in error.__dict__ or not isinstance(error, AssertionError) else text


# --- Scripts with asserts


class Numbered(ast.NodeTransformer):
    """Numbers the asserts of a script and puts each into `with __check__(number):`.

    unwanted: numbers of asserts that must not be reached.
    """

    def __init__(self) -> None:
        self.asserts: list[ast.Assert] = []
        self.unwanted: set[int] = set()

    def name(self, number: int) -> str:
        """Return the name of an assert as a test."""
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


def lines_reached_once(tree: ast.Module) -> set[int]:
    """Return the lines of asserts that run at most once: those at the top level of the script and of `check`."""
    bodies = [tree.body, *(node.body for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "check")]
    return {node.lineno for body in bodies for node in body if isinstance(node, ast.Assert)}


class AssertRecorder:
    """Records which asserts of a script were reached and held, and writes their results.

    end: why the script ended early, else empty.
    """

    def __init__(self, numbered: Numbered, once: set[int], verdict: Verdict):
        self.numbered, self.once, self.verdict = numbered, once, verdict
        self.problems: dict[int, str] = {}  # of the asserts that were reached; "" if it held
        self.weak: set[int] = set()
        self.end = ""

    def report(self, number: int) -> None:
        """Write the result of an assert."""
        problem = self.problems.get(number) or self.end
        reached = number in self.problems
        if not problem and reached == (number in self.numbered.unwanted):
            problem = "reached" if reached else "not reached"
        self.verdict.report(self.numbered.name(number), number, problem, number in self.weak)


class AssertCheck:
    """Surrounds one assert: records whether it held, and lets the script go on if it did not."""

    def __init__(self, recorder: AssertRecorder, number: int):
        self.recorder, self.number = recorder, number
        self.unwanted = number in recorder.numbered.unwanted

    def __enter__(self) -> None:
        self.recorder.problems.setdefault(self.number, "")
        self.weak_before = self.recorder.verdict.client.weak  # weakness outside of asserts makes all later asserts weak

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        recorder, client = self.recorder, self.recorder.verdict.client
        if error is not None:
            recorder.problems[self.number] = recorder.problems[self.number] or describe_error(error)
        if client.weak:
            recorder.weak.add(self.number)
        client.weak = self.weak_before
        if not self.unwanted and recorder.numbered.asserts[self.number].lineno in recorder.once:
            recorder.report(self.number)  # now, so that it counts even if a later assert takes too long
        return isinstance(error, Exception) and not self.unwanted


def run_asserts(tests: dict, names: dict, verdict: Verdict) -> None:
    """Run a script with asserts."""
    tree, numbered, client = ast.parse(tests["code"]), Numbered(), verdict.client
    once = lines_reached_once(tree)
    code = compile_for_proxies(tests["code"], "<tests>", numbered.visit(tree))
    recorder = AssertRecorder(numbered, once, verdict)
    names["__check__"] = lambda number: AssertCheck(recorder, number)
    verdict.write(planned=max(len(numbered.asserts), 1))
    try:
        exec(code, names)
        if tests["entry_point"] and isinstance(names.get("check"), types.FunctionType):
            names["check"](names[tests["entry_point"]])
    except BaseException as error:  # the program may raise anything
        if tests_are_at_fault(error, client):
            raise
        recorder.end = describe_error(error)
    for number in range(len(numbered.asserts)):
        recorder.report(number)
    if not numbered.asserts:
        verdict.report("script", 0, recorder.end, client.weak)


# --- Classes of unittest


class Results(unittest.TestResult):
    """Writes the result of each test method when it ends. A test passes only if unittest reports its success.

    problem: of the test that runs. weak: whether something between tests was decided by the program alone, on which all later
    tests may hang.
    """

    def __init__(self, verdict: Verdict):
        super().__init__()
        self.verdict, self.problem, self.number, self.weak = verdict, "", 0, False

    def startTest(self, test: unittest.TestCase) -> None:
        super().startTest(test)
        self.problem = "it did not end"
        self.weak |= self.verdict.client.weak
        self.verdict.client.weak = False

    def stopTest(self, test: unittest.TestCase) -> None:
        super().stopTest(test)
        weak, self.verdict.client.weak = self.verdict.client.weak or self.weak, False
        self._report(test.id().removeprefix(f"{TESTS_MODULE}."), self.problem, weak)
        self.verdict.client.copies.clear()

    def _report(self, name: str, problem: str, weak: bool = False) -> None:
        self.verdict.report(name, self.number, problem, weak)
        self.number += 1

    def addSuccess(self, test: unittest.TestCase) -> None:
        self.problem = ""

    def addExpectedFailure(self, test: unittest.TestCase, err: Any) -> None:
        self.problem = ""

    def addError(self, test: Any, err: Any) -> None:
        self.problem = describe_error(err[1])
        if not isinstance(test, unittest.TestCase):  # an error in setUpClass or tearDownClass
            self._report(test.id(), self.problem)

    addFailure = addError

    def addSubTest(self, test: Any, subtest: Any, err: Any) -> None:
        if err is not None:
            self.addError(test, err)

    def addSkip(self, test: Any, reason: str) -> None:
        self.problem = f"skipped: {reason}"

    def addUnexpectedSuccess(self, test: Any) -> None:
        self.problem = "succeeded, which was not expected"


def run_unittest(tests: dict, names: dict, verdict: Verdict) -> None:
    """Run classes of unittest."""
    verdict.write(planned=count_tests(tests))
    exec(compile_for_proxies(tests["code"], "<tests>"), names)
    cases = [
        x for x in names.values() if isinstance(x, type) and issubclass(x, unittest.TestCase) and x.__module__ == TESTS_MODULE
    ]
    may_skip = not verdict.client.answers  # else the program could have decided which tests there are
    methods = {
        case: [name for name in unittest.TestLoader().getTestCaseNames(case) if not (may_skip and is_skipped(case, name))]
        for case in cases
    }
    verdict.write(planned=sum(map(len, methods.values())))
    results = Results(verdict)
    for case, method_names in methods.items():
        try:
            unittest.TestSuite(map(case, method_names)).run(results)
        except BaseException:  # the program may raise anything; tests that did not run count as failed
            continue


def is_skipped(case: type, name: str) -> bool:
    """Return whether a decorator of the tests skips a method or its class."""
    return any(getattr(x, "__unittest_skip__", False) for x in (case, getattr(case, name)))


# --- Pairs of input and output


def run_pairs(tests: dict, names: dict, verdict: Verdict) -> None:
    """Run the program as a script on each input."""
    del names
    verdict.write(planned=len(tests["pairs"]))
    for number, (stdin, expected) in enumerate(tests["pairs"]):
        try:
            same = without_trailing_space(verdict.client.run_script(stdin)) == without_trailing_space(expected)
            problem = "" if same else "the output differs from the expected one"
        except BaseException as error:  # the program may raise anything, also SystemExit and KeyboardInterrupt
            problem = describe_error(error)
        verdict.report(f"pair {number + 1}", number, problem)


def without_trailing_space(text: str) -> list[str]:
    """Return the lines of a text without white space at their ends and without empty lines at its end."""
    lines = [line.rstrip() for line in text.splitlines()]
    while lines and not lines[-1]:
        lines.pop()
    return lines


RUN_KIND = {"asserts": run_asserts, "unittest": run_unittest, "io": run_pairs}


# --- All kinds


def run(tests: dict, client: ProgramClient, verdict: Verdict) -> None:
    """Build the namespace of the tests, load the program, and run the tests."""
    if tests["kind"] == "unittest":  # other kinds share no directory with the program
        forbid_imports_from_program()
    names = build_namespace(tests)
    missing = program_names(tests, names) if tests["kind"] != "io" else []
    load_error, defined = "", {}
    try:
        client.value_of(client.exchange(None))
        if missing:
            names.update(defined := client.request_names(missing))
            client.answers += len(set(missing) - set(defined))  # that it defines no such name is an answer too
        if tests["entry_point"] and tests["entry_point"] not in defined:
            load_error = f"NameError: name {tests['entry_point']!r} is not defined"
    except BaseException as error:  # the program may raise anything
        load_error = describe_error(error)
    if load_error:
        verdict.write(load_error=load_error[:500], planned=count_tests(tests))
        return
    RUN_KIND[tests["kind"]](tests, names, verdict)


def tests_are_at_fault(error: BaseException, client: ProgramClient) -> bool:
    """Return whether an error that ended the tests has nothing to do with the program. Once they have used an answer of the
    program it may have; once they have its names, only the lack of a library is their own fault. The client makes sure of it
    with a run of the tests without the program."""
    if client.answers or client.disconnected:
        return False
    return not client.names_requested or isinstance(error, ImportError)


def count_tests(tests: dict) -> int:
    """Return the number of tests without running them."""
    if tests["kind"] == "io":
        return len(tests["pairs"])
    tree = ast.parse(tests["code"])
    if tests["kind"] == "asserts":
        (numbered := Numbered()).visit(tree)
        return max(len(numbered.asserts), 1)
    methods = [node for case in tree.body if isinstance(case, ast.ClassDef) for node in case.body]
    return sum(isinstance(node, ast.FunctionDef) and node.name.startswith("test") for node in methods)


def main(tests: bytes, channel: Channel, verdict_fd: int) -> None:
    """Judge a program. This process is confined already."""
    client = ProgramClient(channel)
    verdict = Verdict(verdict_fd, client)
    try:
        run(json.loads(tests), client, verdict)
    except BaseException as error:
        fault = tests_are_at_fault(error, client)
        verdict.write(**{"fault" if fault else "load_error": f"the tests do not run: {describe_error(error)}"[:500]})
    verdict.write(
        done=True,
        answers=client.answers,
        names_requested=client.names_requested,
        disconnected=client.disconnected,
        violation=client.violation,
        limit=client.limit,
        unsupported_test_value=client.unsupported_test_value,
    )
    os.close(verdict_fd)
