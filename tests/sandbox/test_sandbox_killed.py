"""Processes of the sandbox that are killed (SIGKILL): back within a second, programs run once more, and nothing is `failed`."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from jmarl.sandbox import Sandbox, asserts
from jmarl.sandbox.client import children

SUM = asserts("assert add(1, 2) == 3")
SLOW = "import time\ntime.sleep(0.4)\ndef add(a, b): return a + b\n"
RUNS_IN = ("helper", "server", "runner", "keeper", "judge", "program")


def process(box: Sandbox, which: str) -> int:
    """Of the program that runs. LookupError or OSError: there is none."""
    assert box._helper is not None
    found = {"helper": box._helper.process.pid}
    found["server"] = found["helper"] if box.level == "S2" else children(found["helper"])[0]  # else the helper is bubblewrap
    found["runner"] = children(found["server"])[0]
    of_runner = children(found["runner"])
    found["keeper"], found["judge"] = next((pid, children(pid)[0]) for pid in of_runner if children(pid))
    found["program"] = next(pid for pid in of_runner if pid != found["keeper"])
    return found[which]


def killed(box: Sandbox, which: str, most: int):
    """Run a program and kill a process of it so many times: the result, how often, and the seconds from the last kill on."""
    results: list = []
    thread = threading.Thread(target=lambda: results.append(box.run(SLOW, SUM)))
    thread.start()
    seen: set[int] = set()
    at = time.monotonic()
    while thread.is_alive() and len(seen) < most:
        time.sleep(0.01)
        try:
            pid, program = process(box, which), process(box, "program")
        except (LookupError, OSError, StopIteration, AttributeError, AssertionError):
            continue
        if program not in seen:
            time.sleep(0.1)  # it is under way
            os.kill(pid, signal.SIGKILL)
            seen.add(program)
            at = time.monotonic()
    thread.join()
    return results[0], len(seen), time.monotonic() - at


@pytest.fixture(scope="module")
def fresh(sandbox):
    """The same level, without what was kept of other tests."""
    with Sandbox(sandbox.level, cache=0) as found:
        found.run("x = 1", SUM)
        yield found


@pytest.mark.parametrize("which", RUNS_IN)
def test_a_program_whose_process_was_killed_runs_once_more(fresh, which):
    if which == "helper" and fresh.level != "S2":
        pytest.skip("bubblewrap's own process: the server goes on without it")
    result, kills, seconds = killed(fresh, which, 1)
    assert (kills, result.outcome, result.passed) == (1, "passed", 1), result
    assert seconds < 1 + 0.4  # what it takes by itself


@pytest.mark.parametrize("which", RUNS_IN)
def test_one_that_is_killed_each_time_is_an_error_after_two_runs(fresh, which):
    if which == "helper" and fresh.level != "S2":
        pytest.skip("bubblewrap's own process: the server goes on without it")
    result, kills, _ = killed(fresh, which, 9)
    assert (kills, result.outcome) == (2, "error"), result
    assert result.masked == (which in ("helper", "server", "runner")), result  # the others may be the program's own doing
    assert fresh.run("def add(a, b): return 3", SUM).outcome == "passed"


def test_an_error_of_the_machine_is_not_kept(fresh):
    with Sandbox(fresh.level) as box:
        assert killed(box, "runner", 9)[0].kind == "infrastructure"
        assert box.run(SLOW, SUM).outcome == "passed"


def test_a_helper_that_was_killed_at_rest_is_back_within_a_second(fresh):
    for _ in range(3):
        fresh.kill_helper()
        began = time.monotonic()
        assert fresh.run("def add(a, b): return a + b", SUM).outcome == "passed" and time.monotonic() - began < 1


def test_all_programs_of_a_batch_run_again(fresh):
    """Right ones pass, wrong ones fail, as without the kill."""
    programs = [SLOW + "#" * i if i % 2 else SLOW.replace("a + b", "7") + "#" * i for i in range(4)]
    results: list = []
    thread = threading.Thread(target=lambda: results.extend(fresh.run_many(programs, [SUM] * 4, workers=4)))
    thread.start()
    time.sleep(0.25)
    fresh.kill_helper()
    thread.join()
    assert [result.outcome for result in results] == ["failed", "passed"] * 2
