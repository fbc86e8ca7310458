"""Processes of the sandbox are killed: they restart soon, programs run once more, and no verdict is `failed`."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest

from jmarl.sandbox import ExecutionResult, Sandbox, asserts
from jmarl.sandbox.client import child_pids

SUM = asserts("assert add(1, 2) == 3")
SLOW = "import time\ntime.sleep(0.4)\ndef add(a, b): return a + b\n"
PROCESSES = ("helper", "server", "runner", "supervisor", "judge", "program")


def process_pid(box: Sandbox, which: str) -> int:
    """Return the process number of one of PROCESSES. Raises LookupError, OSError or StopIteration if it does not run."""
    assert box._helper is not None
    pids = {"helper": box._helper.process.pid}
    pids["server"] = pids["helper"] if box.level == "S2" else child_pids(pids["helper"])[0]  # else the helper is bubblewrap
    pids["runner"] = child_pids(pids["server"])[0]
    children = child_pids(pids["runner"])
    pids["supervisor"], pids["judge"] = next((pid, child_pids(pid)[0]) for pid in children if child_pids(pid))
    pids["program"] = next(pid for pid in children if pid != pids["supervisor"])
    return pids[which]


def run_and_kill(box: Sandbox, which: str, max_kills: int) -> tuple[ExecutionResult, int, float]:
    """Run a program and kill one of its processes in every run of it, up to `max_kills` times. Return the result, the number of
    kills, and the seconds since the last one."""
    results: list[ExecutionResult] = []
    thread = threading.Thread(target=lambda: results.append(box.run(SLOW, SUM)))
    thread.start()
    killed_programs: set[int] = set()
    last_kill = time.monotonic()
    while thread.is_alive() and len(killed_programs) < max_kills:
        time.sleep(0.01)
        try:
            pid, program = process_pid(box, which), process_pid(box, "program")
        except (LookupError, OSError, StopIteration, AttributeError, AssertionError):
            continue
        if program not in killed_programs:
            time.sleep(0.1)  # until it is well under way
            with contextlib.suppress(ProcessLookupError):  # it has ended since, on a machine with much to do
                os.kill(pid, signal.SIGKILL)
                killed_programs.add(program)
                last_kill = time.monotonic()
    thread.join()
    return results[0], len(killed_programs), time.monotonic() - last_kill


@pytest.fixture(scope="module")
def fresh(sandbox: Sandbox) -> Iterator[Sandbox]:
    """A sandbox at the same level that caches nothing."""
    with Sandbox(sandbox.level, cache=0) as uncached:
        uncached.run("x = 1", SUM)
        yield uncached


@pytest.mark.parametrize("which", PROCESSES)
def test_a_program_whose_process_is_killed_runs_once_more(fresh: Sandbox, which: str) -> None:
    if which == "helper" and fresh.level != "S2":
        pytest.skip("the helper is bubblewrap, without which the server goes on")
    result, kills, seconds = run_and_kill(fresh, which, 1)
    assert (kills, result.outcome, result.passed) == (1, "passed", 1), result
    assert seconds < 5  # far below the time limit


@pytest.mark.parametrize("which", PROCESSES)
def test_a_program_that_is_killed_every_time_is_an_error_after_two_runs(fresh: Sandbox, which: str) -> None:
    if which == "helper" and fresh.level != "S2":
        pytest.skip("the helper is bubblewrap, without which the server goes on")
    result, kills, _ = run_and_kill(fresh, which, 9)
    assert (kills, result.outcome) == (2, "error"), result
    assert result.masked == (which in ("helper", "server", "runner")), (
        result
    )  # the program itself could end the other processes
    assert fresh.run("def add(a, b): return 3", SUM).outcome == "passed"


def test_an_infrastructure_error_is_not_cached(fresh: Sandbox) -> None:
    with Sandbox(fresh.level) as box:
        assert run_and_kill(box, "runner", 9)[0].kind == "infrastructure"
        assert box.run(SLOW, SUM).outcome == "passed"


def test_an_idle_helper_restarts_soon_after_a_kill(fresh: Sandbox) -> None:
    for _ in range(3):
        fresh.kill_helper()
        start = time.monotonic()
        assert fresh.run("def add(a, b): return a + b", SUM).outcome == "passed" and time.monotonic() - start < 5


def test_all_programs_of_a_batch_run_again_after_a_kill(fresh: Sandbox) -> None:
    """Right ones pass and wrong ones fail, as without the kill."""
    programs = [SLOW + "#" * i if i % 2 else SLOW.replace("a + b", "7") + "#" * i for i in range(4)]
    results: list = []
    thread = threading.Thread(target=lambda: results.extend(fresh.run_many(programs, [SUM] * 4, workers=4)))
    thread.start()
    time.sleep(0.25)
    fresh.kill_helper()
    thread.join()
    assert [result.outcome for result in results] == ["failed", "passed"] * 2
