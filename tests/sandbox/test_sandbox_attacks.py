"""No attack passes, the host is unharmed, and the next program is judged rightly; each attack has a benign twin that passes."""

from __future__ import annotations

import re
import resource
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from attacks import ADD, ATTACKS

from jmarl.sandbox import Limits, Sandbox, asserts, pairs, unittests

TESTS = asserts("assert add(1, 2) == 3\nassert add(20, 22) == 42\nassert add('expected-', '4242') == 'expected-4242'")
FLOAT = asserts("assert add(1, 2) == 3\nassert add(2.5, 1) == 3.5\nassert add((), ()) == ()")
LIMITS = Limits(wall_s=2, cpu_s=2)
SHORT = Limits(wall_s=1, cpu_s=1)  # of attacks that never end


def put(program: str, names: dict[str, str]) -> str:
    """Replace the names that stand for things of the host (see the fixture `host`) by their values."""
    for name, value in names.items():
        program = program.replace(name, value)
    return program


@pytest.mark.parametrize("name", ATTACKS)
def test_attacks_fail_and_their_harmless_twins_pass(sandbox: Sandbox, host: tuple, name: str) -> None:
    attack, (names, reached, directory) = ATTACKS[name], host
    if attack.needs_namespaces and sandbox.level == "S2":
        pytest.skip("level S2: only namespaces hide the host's processes and limit the number of files")
    before = sorted(directory.iterdir())
    tests = FLOAT if "equal to everything" in name else TESTS
    result = sandbox.run(put(attack.attack, names), tests, SHORT if name.startswith("exhausts") else LIMITS)
    assert result.outcome != "passed", result
    assert result.kind not in ("infrastructure", "tests"), result  # no program can have its result masked
    assert result.wall_s < 4
    twin = sandbox.run(put(attack.twin, names), TESTS, LIMITS)
    assert twin.outcome == "passed", twin
    assert not reached and sorted(directory.iterdir()) == before and (directory / "secret.txt").read_text() == "secret"


def test_there_are_at_least_60_attacks_of_four_kinds() -> None:
    assert len(ATTACKS) >= 60 and set(Counter(name.split(":")[0] for name in ATTACKS)) == {
        "forges",
        "reads",
        "reaches",
        "exhausts",
    }


PATCHED = """
import inside.judge, inside.program, inside.wire
server = inside.program.ProgramServer
names = [server.export, server.answer, server._reply_of, server._error_reply, inside.judge.Verdict.report]
names += [inside.program.encode, inside.wire.encode]
"""


def test_names_that_attacks_patch_exist(sandbox: Sandbox) -> None:
    """Otherwise those attacks would try nothing."""
    assert sandbox.run(PATCHED + ADD, TESTS).outcome == "passed"


# Forgeries that need tests of a certain kind

UNIT = unittests(
    "import unittest\nclass T(unittest.TestCase):\n    def test_a(self): self.assertEqual(add(1, 2), 3)\n"
    "class U(unittest.TestCase):\n    def test_b(self): self.assertEqual(add(2, 2), 4)"
)
NEAR = asserts("assert abs(add(1, 2) - 3) < 1e-6")
FORGE_REFERENCES = (
    "import inside.program as p\nclass Std:\n    def __init__(self, *names): self.names = list(names)\n"
    "real = p.ProgramServer.export\n"
    "p.ProgramServer.export = lambda s, x: {'object': 0, 'standard': x.names} if type(x) is Std else real(s, x)\n"
)
OTHER_TESTS = {
    "a class of the judge's": (
        FORGE_REFERENCES + "def make(): return Std('builtins', 'type')\nclass Cart:\n    def add(self, t):\n"
        "        self.e = t('E', (int,), {'__eq__': lambda s, o: True})(5)\n    def total(self): return self.e",
        asserts("c = Cart()\nc.add(make())\nassert c.total() == 3"),
    ),
    "eval of the judge's": (
        FORGE_REFERENCES + "def make(): return Std('builtins', 'eval')\nclass Cart:\n    def add(self, f): self.f = f\n"
        "    def total(self): return self.f('3')",
        asserts("c = Cart()\nf = make()\nc.add(f)\nassert c.total() == 4"),
    ),
    "KeyboardInterrupt in a test method": ("def add(a, b): raise KeyboardInterrupt", UNIT),
    "KeyboardInterrupt after a right answer": ("def add(a, b):\n    if a == 2: raise KeyboardInterrupt\n    return 3", UNIT),
    "an error whose text exits": (
        "class X:\n    def __str__(self): raise SystemExit\n    __repr__ = __str__\ndef add(a, b): raise ValueError(X())",
        UNIT,
    ),
    "an error whose text ends the program": (
        "import os\nclass X:\n    def __str__(self): os._exit(0)\n    __repr__ = __str__\nraise ValueError(X())",
        TESTS,
    ),
    "the same in a script": (
        "import os\nclass X:\n    def __str__(self): os._exit(0)\n    __repr__ = __str__\nraise ValueError(X())",
        pairs([("", "1")]),
    ),
    "an exit whose text exits": (
        "class X:\n    def __str__(self): raise SystemExit(X())\ndef add(a, b): raise SystemExit(X())",
        TESTS,
    ),
    "StopIteration": ("def add(p): raise StopIteration", asserts("assert all(map(add, [1, 2]))")),
    "a constructor that raises": (
        "class C:\n    def __init__(self): raise ValueError",
        unittests(
            "import unittest\nclass T(unittest.TestCase):\n    @classmethod\n    def setUpClass(cls): cls.c = C()\n"
            "    def test(self): self.assertEqual(self.c.x(), 1)"
        ),
    ),
    "a constructor that ends the program": (
        "import os\nclass C:\n    def __init__(self): os._exit(0)",
        unittests("import unittest\nc = C()\nclass T(unittest.TestCase):\n    def test(self): self.assertEqual(c.x(), 1)"),
    ),
    "a base class that is missing": (
        "x = 1",
        unittests("import unittest\nclass S(Base): pass\nclass T(unittest.TestCase):\n    def test(self): S()"),
    ),
    "a class that runs text": (
        "import timeit\nEVIL = \"import sys; sys.modules['inside.judge'].Verdict.report = lambda self, name, number, *a: "
        "self.write(test=name, number=number, message='', weak=False)\"\n"
        "PAY = 'pass\\r' + EVIL + '\\rdef g():\\r    if 1:\\r        pass'\n"
        "class Codec:\n    decode = timeit.Timer\n    def encode(self, s): return PAY\n    def length(self, s): return None",
        asserts("c = Codec()\nassert c.decode(c.encode('hello')) == 'hello'\nassert c.length('abc') == 3"),
    ),
    "anything, by the mock library": (
        "import unittest.mock\nclass Cart: total = unittest.mock._ANY",
        unittests(
            "import unittest\nfrom unittest import mock\nclass T(unittest.TestCase):\n"
            "    def test(self): self.assertEqual(Cart().total(), 11)"
        ),
    ),
    "a module in the directory shared with the tests": (
        "open('colorsys.py', 'w').write('import sys\\nv = sys.modules[\"inside.judge\"].Verdict\\n'\n"
        "    'v.report = lambda self, name, number, *a: self.write(test=name, number=number, message=\"\", weak=False)')\n"
        "def add(a, b): return None",
        unittests(
            "import os, sys, unittest\nsys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))\nimport colorsys\n"
            "class T(unittest.TestCase):\n    def test(self): self.assertEqual(add(1, 2), 3)"
        ),
    ),
    "an error with a huge number": ("raise ValueError(10 ** 5000)", TESTS),
    "a value that cannot go back": (
        "import inside.program as p\nclass Raw: pass\nreal = p.encode\n"
        "p.encode = lambda x, *a: {'array': ['<M8[s]', None, 5]} if type(x) is Raw else real(x, *a)\n"
        "def enc(s): return Raw()\ndef dec(s): return None",
        asserts("assert dec(enc('a')) == 'a'"),
    ),
    "an address for numpy": (
        "class E:\n    @property\n    def __array_interface__(self):\n"
        "        return {'data': (8, False), 'shape': (1000,), 'typestr': '<f8', 'version': 3}\ndef add(a, b): return E()",
        asserts("import numpy as np\nassert np.allclose(add(1, 2), 3)"),
    ),
    "an index that is not there": (
        FORGE_REFERENCES.replace("0, 'standard': x.names", "99") + "def add(a, b): return Std()",
        TESTS,
    ),
}


@pytest.mark.parametrize("name", OTHER_TESTS)
def test_no_forgery_passes_or_is_masked(sandbox: Sandbox, name: str) -> None:
    program, tests = OTHER_TESTS[name]
    result = sandbox.run(program, tests, LIMITS)
    assert result.outcome != "passed" and not result.masked, result
    assert sandbox.run(f"# {name}\n{ADD}", TESTS).outcome == "passed"


WEAK = {
    "a difference": ("class E:\n    def __sub__(self, o): return 0.0\ndef add(a, b): return E()", NEAR),
    "a difference from a float": (
        "class E(float):\n    def __rsub__(self, o): return 0.0\n    __sub__ = __rsub__\ndef add(a, b): return E()",
        asserts("import math\nassert abs(3 - add(1, 2)) < 1e-6"),
    ),
    "two objects": (
        "class P:\n    def __init__(self, x): pass\n    def __eq__(self, o): return True",
        asserts("assert P(1) == P(2)"),
    ),
    "one object for all": (
        "class P:\n    one = None\n    def __new__(cls, *a):\n        cls.one = cls.one or object.__new__(cls)\n"
        "        return cls.one\n    def __init__(self, *a): pass\n    def __add__(self, o): return self",
        asserts("assert P(1) + P(2) == P(3)"),
    ),
    "one object in lists": (
        "class P:\n    one = None\n    def __new__(cls, *a):\n        cls.one = cls.one or object.__new__(cls)\n"
        "        return cls.one\n    def __add__(self, o): return self",
        asserts("assert [P(1) + P(2)] == [P(3)]\nassert P(4) in [P(5)]"),
    ),
    "between tests": (
        "class P:\n    def __init__(self, x): pass\n    def __eq__(self, o): return True",
        unittests(
            "import unittest\nclass T(unittest.TestCase):\n    @classmethod\n    def setUpClass(cls): cls.same = P(1) == P(2)\n"
            "    def test(self): self.assertTrue(self.same)"
        ),
    ),
    "two empty tuples": (
        "class P(tuple):\n    def __new__(cls, *a): return tuple.__new__(cls)",
        asserts("assert P(1) == P(2)"),
    ),
    "an order": ("class E:\n    def __lt__(self, o): return True\ndef add(a, b): return E()", asserts("assert add(1, 2) < 4")),
    "an order from the other side": (
        "class E:\n    def __lt__(self, o): return True\n    __gt__ = __lt__\ndef add(a, b): return E()",
        asserts("assert 2 < add(1, 2) < 4"),
    ),
    "a container of everything": (
        "class E:\n    def __contains__(self, x): return True\ndef add(a, b): return E()",
        asserts("assert 3 in add(1, 2)"),
    ),
}


@pytest.mark.parametrize("name", WEAK)
def test_a_test_that_only_the_program_can_decide_is_weak(sandbox: Sandbox, name: str) -> None:
    """A lie cannot be distinguished from the truth, so rewards do not count it (`jmarl.envs`)."""
    result = sandbox.run(*WEAK[name], LIMITS)
    assert result.outcome in ("weak", "failed") and result.passed == 0, result
    assert not any(test.passed for test in result.tests), result
    assert result.outcome == "failed" or (result.integrity == "weak" and all(test.weak for test in result.tests)), result


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen]:
    process = subprocess.Popen(["sleep", "60"])
    yield process
    process.kill()
    process.wait()


def test_processes_and_files_of_the_host_are_unchanged(sandbox: Sandbox, sleeper: subprocess.Popen, tmp_path: Path) -> None:
    """The program tries what Landlock leaves open: limits and signals by process number, modes and times by path."""
    victim = tmp_path / "victim"
    victim.write_text("x")
    for path in [tmp_path, *tmp_path.parents][:-1]:
        path.chmod(path.stat().st_mode | 0o055)
    victim.chmod(0o666)
    before = victim.stat().st_mtime_ns
    program = f"""
import fcntl, os, resource, socket
def tried(f, *a):
    try: f(*a)
    except Exception: pass
def signal():
    a, b = socket.socketpair()
    fcntl.fcntl(a, fcntl.F_SETOWN, {sleeper.pid}); fcntl.fcntl(a, 10, 9)
    fcntl.fcntl(a, fcntl.F_SETFL, os.O_ASYNC); b.send(b'x')
def add(a, b):
    tried(resource.prlimit, {sleeper.pid}, resource.RLIMIT_NOFILE, (7, 7))
    tried(resource.prlimit, os.getppid(), resource.RLIMIT_NOFILE, (0, 0))
    tried(os.chmod, '{victim}', 0); tried(os.utime, '{victim}', (0, 0)); tried(signal)
    return a + b
"""
    assert sandbox.run(program, TESTS, LIMITS).outcome == "passed"
    assert sleeper.poll() is None and resource.prlimit(sleeper.pid, resource.RLIMIT_NOFILE)[0] != 7
    assert victim.stat().st_mode & 0o777 == 0o666 and victim.stat().st_mtime_ns == before


def test_deeply_nested_directories_are_removed(sandbox: Sandbox) -> None:
    program = "import os\nfor _ in range(900):\n    os.mkdir('d'); os.chdir('d')\n" + ADD
    assert sandbox.run(program, TESTS, LIMITS).outcome == "passed"
    for directory in sandbox_directories(sandbox._helper.process.pid):  # at S2
        for _ in range(100):
            if not list(directory.iterdir()):
                break
            time.sleep(0.1)
        assert not list(directory.iterdir())


def test_memfd_create_is_refused(sandbox: Sandbox) -> None:
    program = "import os\nfor _ in range(20): os.write(os.memfd_create('m'), bytes(15 << 20))\n" + ADD
    assert sandbox.run(program, TESTS, LIMITS).outcome == "failed"


# Attacks whose success only the next program shows


def leave(statements: str) -> str:
    """Return a right program that first runs these statements."""
    return f"{statements}\ndef add(a, b): return a + b"


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
def test_no_state_is_left_for_the_next_program(sandbox: Sandbox, name: str) -> None:
    first, second = PERSISTENT[name]
    assert sandbox.run(first, TESTS).outcome == "passed"
    after = sandbox.run(f"{second}\n{ADD}", TESTS)
    assert after.outcome == "passed", after


def test_a_daemon_does_not_outlive_its_program(sandbox: Sandbox) -> None:
    if sandbox.level == "S2":
        pytest.skip("level S2: there are no new processes at all")
    program = (
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        time.sleep(77)\n"
        "    os._exit(0)\n" + ADD
    )
    assert sandbox.run(program, TESTS, LIMITS).outcome == "passed"
    time.sleep(0.2)
    assert count_descendants(sandbox._helper.process.pid) <= 2  # bubblewrap and the server


def count_descendants(pid: int) -> int:
    """Return the number of descendants of a process."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
            except (OSError, IndexError):
                continue
    family, generation = set(), {pid}
    while generation:
        family |= generation
        generation = {child for child, parent in parents.items() if parent in generation} - family
    return len(family - {pid})


def sandbox_directories(helper_pid: int) -> list[Path]:
    """Return the directory in which a helper at S2 puts those of its programs, from its command line; none at S3 and S4."""
    command = Path(f"/proc/{helper_pid}/cmdline").read_text()
    return [Path(path) for path in re.findall(r"/[\w/.]*jmarl-sandbox-\w+", command)]
