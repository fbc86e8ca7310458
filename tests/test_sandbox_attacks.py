"""No attack passes, the host is unharmed, the next program is right; each attack has a benign twin that passes."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
from attacks import ADD, ATTACKS

from jmarl.sandbox import Limits, Sandbox, SandboxUnavailable, asserts

TESTS = asserts("assert add(1, 2) == 3\nassert add(20, 22) == 42\nassert add('expected-', '4242') == 'expected-4242'")
FLOAT = asserts("assert add(1, 2) == 3\nassert add(2.5, 1) == 3.5\nassert add((), ()) == ()")
LIMITS = Limits(wall_s=2, cpu_s=2)


@pytest.fixture(scope="module", params=["S4", "S3", "S2"])
def sandbox(request):
    """A sandbox at each level that this machine has."""
    os.environ["JMARL_TEST_SECRET"] = "1"
    try:
        with Sandbox(request.param, workers=2) as found:
            yield found
    except SandboxUnavailable as error:
        needed = os.environ.get("JMARL_SANDBOX_AT_LEAST", "S9")  # on CI S3: S2 may then be missing, S3 may not
        assert request.param != needed, error
        pytest.skip(f"level {request.param}: {error}")
    finally:
        del os.environ["JMARL_TEST_SECRET"]


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    """What an attack must not reach: texts that stand for it in programs, and a list of who connected."""
    directory, reached = tmp_path_factory.mktemp("host"), []
    secret = directory / "secret.txt"
    secret.write_text("secret")
    listeners = [socket.create_server(("127.0.0.1", 0)), socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)]
    listeners[1].bind(str(directory / "socket"))
    listeners[2].bind("\0jmarl-test")
    for listener in listeners:
        listener.listen()
        threading.Thread(target=_accept, args=(listener, reached), daemon=True).start()
    names = {"PORT": str(listeners[0].getsockname()[1]), "SECRET": str(secret), "SOCKET": str(directory / "socket")}
    yield names | {"HOST": str(Path(__file__).parent)}, reached, directory
    for listener in listeners:
        listener.close()


def _accept(listener, reached):
    while True:
        try:
            reached.append(listener.accept())
        except OSError:
            return


def put(program: str, names: dict[str, str]) -> str:
    for name, value in names.items():
        program = program.replace(name, value)
    return program


@pytest.mark.parametrize("name", ATTACKS)
def test_no_attack_passes_and_its_twin_does(sandbox, host, name):
    attack, (names, reached, directory) = ATTACKS[name], host
    if attack.namespaces and sandbox.level == "S2":
        pytest.skip("level S2: the host's processes, and many small files, are held off by namespaces only")
    before = sorted(directory.iterdir())
    tests = FLOAT if "equal to everything" in name else TESTS
    result = sandbox.run(put(attack.attack, names), tests, LIMITS)
    assert result.outcome != "passed", result
    assert result.kind not in ("infrastructure", "tests"), result  # nothing that a program does gets it out of the reckoning
    assert result.wall_s < 4
    twin = sandbox.run(put(attack.twin, names), TESTS, LIMITS)
    assert twin.outcome == "passed", twin
    assert not reached and sorted(directory.iterdir()) == before and (directory / "secret.txt").read_text() == "secret"


def test_there_are_enough_attacks():
    assert len(ATTACKS) >= 60 and set(Counter(name.split(":")[0] for name in ATTACKS)) == {
        "forges",
        "reads",
        "reaches",
        "exhausts",
    }


# What cannot be told from the attack's own result


def leave(how: str) -> str:
    return f"{how}\ndef add(a, b): return a + b"


PERSISTENT = {
    "a file": (leave("open('left', 'w').write('x')"), "import os; assert not os.path.exists('left')"),
    "a changed module": (leave("import json; json.dumps = None"), "import json; assert json.dumps(1) == '1'"),
    "a new module": (leave("import sys; sys.modules['left'] = sys"), "import sys; assert 'left' not in sys.modules"),
    "a variable": (leave("import os; os.environ['LEFT'] = '1'"), "import os; assert 'LEFT' not in os.environ"),
    "lower limits": (
        leave("import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (5, 5))"),
        "x = [open('/dev/null') for _ in range(9)]",
    ),
    "a seed": (leave("import random; random.seed(5)"), "import random as r; x = r.random(); r.seed(0); assert x == r.random()"),
    "a signal handler": (
        leave("import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)"),
        "import signal; assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PERSISTENT)
def test_nothing_stays_for_the_next_program(sandbox, name):
    first, second = PERSISTENT[name]
    assert sandbox.run(first, TESTS).outcome == "passed"
    after = sandbox.run(f"{second}\n{ADD}", TESTS)
    assert after.outcome == "passed", after


def test_a_process_left_behind_is_gone(sandbox):
    if sandbox.level == "S2":
        pytest.skip("level S2: there are no new processes at all")
    program = (
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        time.sleep(77)\n"
        "    os._exit(0)\n" + ADD
    )
    assert sandbox.run(program, TESTS, LIMITS).outcome == "passed"
    time.sleep(0.2)
    assert processes_below(sandbox._helper.process.pid) <= 2  # bubblewrap and the server


def processes_below(pid: int) -> int:
    """That are descendants of a process."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
            except (OSError, IndexError):
                continue
    found, more = set(), {pid}
    while more:
        found |= more
        more = {child for child, parent in parents.items() if parent in more} - found
    return len(found - {pid})
