"""Programs do not affect each other, whichever limits they reach and whatever ran before them."""

from __future__ import annotations

import os

import pytest

from jmarl.sandbox import Limits, Sandbox, SandboxUnavailable, asserts, unittests

DOUBLE = asserts("assert f(1) == 2")
RIGHT = "def f(x): return 2 * x\n"


@pytest.mark.parametrize("kilobytes", [300, 5000])
def test_floods_do_not_disturb_programs_that_run_beside_them(sandbox: Sandbox, kilobytes: int) -> None:
    """The floods are stopped before their judges have read the long tests."""
    long = asserts(f"text = {'x' * (kilobytes << 10)!r}\nassert f(1) == 2")
    floods = [f"import os\nwhile True: os.write(1, b'{i:05}' * 13000)" for i in range(40)]
    honest = [f"{RIGHT}# {i}" for i in range(40)]
    helper = sandbox._helper.process.pid
    mixed = [program for pair in zip(floods, honest, strict=True) for program in pair]
    results = sandbox.run_many(mixed, [long, DOUBLE] * 40, Limits(wall_s=5), workers=8)
    assert {(r.kind, r.limit_hit) for r in results[::2]} == {("limit", "output")}
    assert {r.outcome for r in results[1::2]} == {"passed"} and sandbox._helper.process.pid == helper


def test_memory_limit_does_not_depend_on_earlier_programs() -> None:
    """The fork server grows with every library that it imports, so the limit is on what a program adds."""
    program = "x = bytearray({0} << 20)\n" + RIGHT
    with Sandbox(cache=0) as box:
        before = [box.run(program.format(size), DOUBLE, Limits(memory_mb=64)).outcome for size in (40, 80)]
        assert box.run("import asyncio, ctypes, numpy, unittest\n" + RIGHT, DOUBLE).outcome == "passed"
        after = [box.run(program.format(size), DOUBLE, Limits(memory_mb=64)).outcome for size in (40, 80)]
    assert before == after == ["passed", "error"]


def test_memory_limit_of_all_programs_grows_with_the_limits_of_a_call() -> None:
    try:
        with Sandbox("S4", workers=1, limits=Limits(memory_mb=64), cache=0) as box:
            program = "def f(x):\n    a = bytearray(b'x') * (2500 << 20)\n    return 2"
            result = box.run(program, DOUBLE, Limits(wall_s=30, cpu_s=30, memory_mb=3000))
            assert (result.outcome, result.limit_hit) == ("passed", ""), result
    except SandboxUnavailable as error:
        pytest.skip(f"level S4: {error}")


def test_a_program_that_exhausts_the_memory_of_all_does_not_fail_others() -> None:
    """It has many processes, each within its own limit. The other program is killed too, and runs again alone."""
    hog = """
import os, time
def f(x):
    for i in range(34):
        if os.fork() == 0:
            a = bytearray(b'x') * (110 << 20)
            time.sleep(2)
            os._exit(0)
    time.sleep(2)
    return 2
"""
    honest = "import time\ndef f(x):\n    time.sleep(0.9); a = bytearray(b'x') * (140 << 20); time.sleep(0.5)\n    return 2"
    try:
        with Sandbox("S4", workers=2, cache=0, limits=Limits(memory_mb=150, processes=40)) as box:
            assert box.run_many([hog, honest], [DOUBLE] * 2, Limits(memory_mb=150, processes=40))[1].outcome == "passed"
    except SandboxUnavailable as error:
        pytest.skip(f"level S4: {error}")


def test_judges_share_no_file(sandbox: Sandbox) -> None:
    """They write more to stderr than the largest file that a judge may make."""
    loud = asserts("import sys\nsys.stderr.write('x' * 300_000)\nassert f(1) == 2")
    results = sandbox.run_many([f"{RIGHT}# {i}" for i in range(8)], [loud] * 8)
    assert {result.outcome for result in results} == {"passed"}


VERDICT = """
import json, os
lines = [dict(planned=1), dict(test='T.test', number=0, message='', weak=False)]
lines += [dict(done=True, answers=1, names_requested=True, disconnected=False, violation='', limit='',
               unsupported_test_value='')]
os.symlink('/proc/self/fd/{fd}', 'report.txt')
def make(): return ''.join(json.dumps(line) + chr(10) for line in lines)
def size(path): return {size}
"""
WRITES = unittests("""
import unittest
class T(unittest.TestCase):
    def test(self):
        with open('report.txt', 'w') as file:
            file.write(make())
        self.assertEqual(size('report.txt'), 3)
""")


def test_no_link_leads_to_the_verdict() -> None:
    """The tests write to a file that the program has made a link to a descriptor of the judge. Through /proc a pipe could be
    opened that way; a pair of sockets cannot."""
    for level in ("S2", "S3", "unsafe-process"):
        try:
            with Sandbox(level, cache=0) as box:
                results = box.run_many([VERDICT.format(fd=fd, size="None") for fd in range(3, 20)], [WRITES] * 17)
                assert "passed" not in {result.outcome for result in results}
                twin = VERDICT.format(fd=0, size="3").replace("os.symlink", "(lambda *_: None)")
                assert box.run(twin, WRITES).outcome == "passed"
        except SandboxUnavailable as error:
            assert level != os.environ.get("JMARL_SANDBOX_AT_LEAST"), error
