"""Verdicts of the sandbox: kinds of tests, limits, values and proxies, faults, levels; and nothing is left behind."""

from __future__ import annotations

import dataclasses
import os
import resource
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from test_sandbox_attacks import count_descendants, sandbox_directories

from jmarl import sandbox as api
from jmarl.sandbox import (
    Limits,
    Sandbox,
    SandboxUnavailable,
    asserts,
    calls,
    client,
    launch,
    pairs,
    run_program,
    run_programs,
    unittests,
)
from jmarl.sandbox.inside import confine, namespace, wire

ADD = "def add(a, b):\n    return a + b\n"
SUM = asserts("assert add(1, 2) == 3\nassert add(2, 2) == 4")


# Kinds of tests, and what counts as a test

COUNTED = {
    "every assert": (ADD, SUM, "passed", 2, 2),
    "one assert of two": ("def add(a, b): return 3", SUM, "failed", 1, 2),
    "an assert after one that raises": ("def add(a, b):\n if a == 1: raise KeyError\n return 4", SUM, "failed", 1, 2),
    "an assert over several lines": (ADD, asserts("assert add(\n  1,\n  2,\n) == (\n  3\n)"), "passed", 1, 1),
    "an assert in a loop": (
        "def add(a, b): return 3",
        asserts("for b in (2, 3):\n    assert add(1, b) == 1 + b"),
        "failed",
        0,
        1,
    ),
    "an assert that is not reached": (
        ADD,
        asserts("if add(1, 1) == 3:\n    assert add(1, 1) == 3\nassert add(1, 1) == 2"),
        "failed",
        1,
        2,
    ),
    "assert True is no test": (
        ADD,
        asserts("def check(candidate):\n  assert True, 'so'\n  assert candidate(1, 2) == 3", "add"),
        "passed",
        1,
        1,
    ),
    "assert False must not be reached": (
        "def add(a, b):\n  raise ValueError",
        asserts("try:\n    add(1, 2)\n    assert False\nexcept ValueError:\n    pass"),
        "passed",
        1,
        1,
    ),
    "assert False that is reached": (
        ADD,
        asserts("try:\n    add(1, 2)\n    assert False\nexcept AssertionError:\n    pass"),
        "failed",
        0,
        1,
    ),
    "a script without asserts": (ADD, asserts("x = add(1, 2)\nif x != 3: raise ValueError"), "passed", 1, 1),
    "two functions of one name": (f"def add(a, b): return 0\n{ADD}", SUM, "passed", 2, 2),
    "calls": (ADD, calls("add", [((1, 2), 3), (("a", "b"), "ab"), (([1], [2]), [1, 2])]), "passed", 3, 3),
    "pairs": ("print(int(input()) * 2)", pairs([("3\n", "6\n"), ("4", "8"), ("5", "11")]), "failed", 2, 3),
    "trailing white space": ("print('a  \\n b\\n\\n')", pairs([("", "a\n b")]), "passed", 1, 1),
    "a script that exits": ("import sys\nprint(1); sys.exit(0)", pairs([("", "1")]), "passed", 1, 1),
    "a script that fails": ("print(1); raise ValueError", pairs([("", "1")]), "failed", 0, 1),
    "a main guard": ("if __name__ == '__main__': print(1)", pairs([("", "1")]), "passed", 1, 1),
    "the name of a builtin": ("def sum(a, b): return a + b", asserts("assert sum(1, 2) == 3", "sum"), "passed", 1, 1),
}


@pytest.mark.parametrize("name", COUNTED)
def test_asserts_calls_and_pairs_are_counted(box: Sandbox, name: str) -> None:
    program, tests, outcome, passed, total = COUNTED[name]
    result = box.run(program, tests)
    assert (result.outcome, result.passed, result.total, result.integrity) == (outcome, passed, total, "strong"), result
    if name == "pairs":
        assert [(test.name, test.passed) for test in result.tests] == [("pair 1", True), ("pair 2", True), ("pair 3", False)]


FAILED = {
    "no function at all": ("x = 1", "NameError"),
    "not Python": ("def add(:", "SyntaxError"),
    "an error while loading": ("raise ValueError('no')", "ValueError: no"),
    "another function": ("def sub(a, b): return 0", "NameError"),
    "empty": ("", "NameError"),
    "a lone surrogate": ("add = '\udc80'\n" + "x = 1", "surrogates"),
    "a null byte": ("x = 1\0", "null bytes"),
    "markdown around it": ("```python\n" + ADD + "```", "SyntaxError"),
    "ten megabytes": ("x = 1\n" * 1_700_000, "bytes"),
}


@pytest.mark.parametrize("name", FAILED)
def test_programs_that_cannot_run_fail(box: Sandbox, name: str) -> None:
    program, message = FAILED[name]
    result = box.run(program, asserts("def check(candidate):\n    assert candidate(1, 2) == 3", "add"))
    assert result.outcome == "failed" and result.passed == 0, result
    assert message in result.message


def test_broken_tests_are_an_error_and_never_pass(box: Sandbox) -> None:
    for tests in (
        asserts("raise KeyError"),
        asserts("def check(candidate):\n    pass", "add"),
        asserts("assert 1 == 1"),
        asserts("assert 1 == add", setup="import nothing_of_this_name"),
        unittests("class T: pass"),
        unittests("import unittest\nclass T(unittest.TestCase):\n    def test(self): pass"),
    ):
        result = box.run(ADD, tests)
        assert result.outcome != "passed", (tests, result)
    assert box.run(ADD, asserts("def check(candidate):\n    pass", "add")).kind == "tests"
    assert box.run(ADD, asserts("assert 1 == add", setup="import nothing_of_this_name")).masked


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: asserts(""), "empty"),
        (lambda: asserts("assert ("), "cannot be parsed as Python"),
        (lambda: asserts("assert f()", "not a name"), "cannot be the name of a function"),
        (lambda: pairs([]), "no pairs"),
        (lambda: pairs([("a",)]), "not a pair"),
        (lambda: pairs(["ab"]), "not a pair"),
        (lambda: calls("f", [((object(),), 1)]), "literal"),
        (lambda: calls("f", [(1, 2)]), "not a case"),
        (lambda: calls("f", [((1,), 2, 3)]), "not a case"),
        (lambda: asserts("assert f()", "class"), "cannot be the name of a function"),
        (lambda: Limits(wall_s=1e-4), "wall_s=0.0001"),
        (lambda: Limits(wall_s=0), "wall_s=0"),
        (lambda: Limits(processes=1.5), "processes=1.5"),
        (lambda: Sandbox("S9"), "S9"),
    ],
)
def test_malformed_tests_limits_and_levels_are_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_wrong_types_and_counts_of_arguments_are_refused(box: Sandbox) -> None:
    with pytest.raises(TypeError, match="bytes"):
        box.run(b"x = 1", SUM)
    with pytest.raises(TypeError, match="made by asserts"):
        run_programs(["x = 1"], "assert 1")
    with pytest.raises(TypeError, match="made by asserts"):
        box.run(ADD, "assert 1")
    with pytest.raises(ValueError, match="workers=-1"):
        box.run_many([ADD], [SUM], workers=-1)
    with pytest.raises(ValueError, match="2 programs and 1 tests"):
        box.run_many([ADD, ADD], [SUM])


# Limits

LIMITED = {
    "wall": ("import time; time.sleep(9)", Limits(wall_s=0.5), "timeout"),
    "cpu": ("while True: pass", Limits(wall_s=8, cpu_s=1), "limit"),
    "memory": ("x = bytearray(1 << 30)", Limits(memory_mb=256), "limit"),
    "file": ("open('f', 'wb').write(bytes(4 << 20))", Limits(file_mb=2), "limit"),
    "output": ("print('x' * 100000)", Limits(output_kb=8), "limit"),
}


@pytest.mark.parametrize("limit", LIMITED)
def test_result_names_the_limit_that_was_hit(box: Sandbox, limit: str) -> None:
    line, limits, kind = LIMITED[limit]
    result = box.run(f"def add(a, b):\n    {line}\n    return a + b", SUM, limits)
    assert (result.outcome, result.kind, result.limit_hit) == ("error", kind, limit), result
    assert not result.masked and result.wall_s < max(limits.wall_s, 4) and len(result.stdout) <= 8192
    generous = box.run("def add(a, b):\n    return a + b", SUM, dataclasses.replace(limits, wall_s=5))
    assert generous.outcome == "passed"


def test_tests_that_passed_before_a_timeout_count(box: Sandbox) -> None:
    result = box.run("def add(a, b):\n    while a == 2: pass\n    return a + b", SUM, Limits(wall_s=1))
    assert (result.kind, result.passed, result.total) == ("timeout", 1, 2)


def test_stdout_and_stderr_are_returned(box: Sandbox) -> None:
    result = box.run(
        "import sys\ndef add(a, b):\n    print('out', a)\n    print('err', file=sys.stderr)\n    return a + b", SUM
    )
    assert (result.stdout, result.stderr) == ("out 1\nout 2\n", "err\nerr\n")


# Values and objects that cross between the processes


@pytest.mark.parametrize(
    "value",
    [
        "None",
        "True",
        "10 ** 50",
        "-0.5",
        "float('inf')",
        "'\\ud800 é'",
        "[1, [2]]",
        "(1, (2,))",
        "{1, 2}",
        "frozenset({1})",
        "b'x'",
    ]
    + ["{(1, 2): [3]}", "range(3)", "1 + 2j", "slice(1, 2)", "...", "C.Counter('aab')", "C.OrderedDict(a=1)", "C.deque([1], 3)"]
    + ["D.date(2024, 1, 2)", "D.datetime(2024, 1, 2, 3, tzinfo=D.timezone.utc)", "D.timedelta(1, 2)", "Decimal('1.10')"]
    + ["Fraction(1, 3)", "np.arange(6.0).reshape(2, 3)", "np.int64(3)", "C.defaultdict(int, a=1)", "bytearray(b'x')"],
)
def test_values_keep_their_type_and_contents_in_both_directions(box: Sandbox, value: str) -> None:
    setup = "import collections as C, datetime as D, numpy as np\nfrom decimal import Decimal\nfrom fractions import Fraction"
    code = f"x = {value}\ny = same(x)\nassert type(y) is type(x)\nassert text(y) == text(x)\nassert text(make()) == text(x)"
    program = f"{setup}\ndef same(x):\n    return x\ndef make():\n    return {value}\n"
    setup += f"\ndef text(x):\n    return {'sorted(x)' if 'default' in value else 'repr(x)'}\n"
    result = box.run(program, asserts(code, setup=setup), Limits(memory_mb=1024))
    assert result.outcome == "passed", result


OBJECTS = textwrap.dedent(
    """
    import collections, dataclasses, enum, contextlib

    class Broke(ValueError):
        def __str__(self): return f'broke: {self.args[0]}'

    class Box:
        made = 0
        def __init__(self, *items): self.items = list(items); Box.made += 1
        def add(self, x): self.items.append(x); return self
        def __len__(self): return len(self.items)
        def __getitem__(self, i): return self.items[i]
        def __setitem__(self, i, x): self.items[i] = x
        def __iter__(self): return iter(self.items)
        def __contains__(self, x): return x in self.items
        def __enter__(self): return self
        def __exit__(self, *error): self.items.clear()
        def __add__(self, other): return Box(*self.items, *other)
        def __radd__(self, other): return Box(*other, *self.items)
        def __str__(self): return 'box'
        @property
        def first(self): return self.items[0]
        @staticmethod
        def zero(): return 0
        def fail(self, x): raise Broke(x)
        def _calculate(self, x): return x + self.first
        _compare = 7

    class Bag(Box): pass
    class Listed(list): pass
    class Words:
        def __contains__(self, word): return True
    Stack = collections.deque
    import json
    def parse(x): return json.loads(x)
    def first(xs): return next(xs)
    def views(): return {'a': 1}.keys(), {'a': 1}.items()
    import pathlib, uuid
    def where(): return pathlib.Path('a') / 'b'
    def which(): return uuid.UUID(int=1)
    def only(xs, kind): return [x for x in xs if isinstance(x, kind)]
    Point = collections.namedtuple('Point', 'x y')
    class Color(enum.Enum): RED = 1
    class Level(enum.IntEnum): LOW = 1
    @dataclasses.dataclass
    class Data: a: int = 1
    @dataclasses.dataclass(frozen=True)
    class Frozen: a: int = 1
    def count(n):
        for i in range(n): yield i
    def apply(f, xs): return [f(x) for x in xs]
    def total(xs): return sum(xs)
    def sort(xs): xs.sort()
    def grow(d): d['new'] = [1]; return d
    """
)

USES_OF_OBJECTS = [
    "b = Box(1, 2)\nassert len(b) == 2 and b[0] == 1 and b.first == 1 and list(b) == [1, 2] and 2 in b and 5 not in b",
    "b = Box(3)\nassert b._calculate(2) == 5 and b._compare == 7",
    "b = Box(1)\nb.add(2)\nb += Box(3)\nassert b.items == [1, 2, 3]",
    "assert views()[0] == {'a'} and views()[1] == {('a', 1)} and list(views()[0]) == ['a']",
    "import pathlib, uuid\nassert where() == pathlib.Path('a/b') and which() == uuid.UUID(int=1)",
    "d = {}\nassert grow(d=d) == {'new': [1]} and d == {'new': [1]}",
    "b = Box(1)\nb.add(2).add(3)\nassert b.items == [1, 2, 3]\nb[0] = 9\nassert b[0] == 9",
    "b = Box()\nb.items.append(4)\nb.items.append(5)\nassert len(b) == 2\nassert b.items == [4, 5]",
    "b = Box()\nb.items = [7]\nb.extra = 'x'\nassert b.first == 7 and b.extra == 'x'",
    "with Box(1) as b:\n    assert len(b) == 1\nassert len(b) == 0",
    "assert str(Box()) == 'box' and f'{Box()}' == 'box' and Box.zero() == 0",
    "assert (Box(1) + Box(2)).items == [1, 2]",
    "assert isinstance(Bag(), Box) and not isinstance(Box(), Bag) and not isinstance(3, Box)",
    "try:\n    Box().fail('why')\n    assert False\nexcept Broke as e:\n    s = str(e)\nassert s == 'broke: why'",
    "assert issubclass(Broke, ValueError)",
    "try:\n    Box().fail(1)\n    assert False\nexcept ValueError:\n    pass",
    "try:\n    Box()[3]\n    assert False\nexcept IndexError:\n    pass",
    "assert Point(1, 2) == (1, 2) and Point(1, 2).x == 1 and Level.LOW == 1.0 and Level.LOW < 1.5",
    "s = Stack([1])\ns.append(2)\nassert list(s) == [1, 2]\nl = Listed()\nl.append(3)\nassert list(l) == [3] and len(l) == 1",
    "assert only((4, 'a', 7.5), int) == [4] and apply(len, ['ab']) == [2]",
    "try:\n    Box().fail(1)\nexcept Broke as e:\n    code, text = e.args[0], str(e)\nassert code == 1 and text == 'broke: 1'",
    "import json\ntry:\n    parse('{')\n    assert False\nexcept json.JSONDecodeError as e:\n    pass",
    "i = iter([5, 6])\nassert first(i) == 5 and first(i) == 6\nassert first(x for x in 'ab') == 'a'",
    "try:\n    apply(lambda x: [].pop(), [1])\n    assert False\nexcept IndexError:\n    pass",
    "assert apply(Broke, [1])[0].args == (1,)",
    "assert Color.RED.value == 1 and Level.LOW == 1 and Data(a=3).a == 3",
    "assert list(count(3)) == [0, 1, 2] and next(count(1)) == 0 and sum(count(4)) == 6",
    "assert apply(lambda x: x * 2, [1, 2]) == [2, 4] and apply(str, [1]) == ['1']",
    "assert total(x for x in (1, 2)) == 3 and total(iter([4])) == 4",
    "x = [3, 1]\nsort(x)\nassert x == [1, 3]\nd = {}\nassert grow(d) == {'new': [1]} and d == {'new': [1]}",
    "assert apply(Box, [1])[0].first == 1",
]


@pytest.mark.parametrize("code", USES_OF_OBJECTS)
def test_objects_of_the_program_work_through_proxies(box: Sandbox, code: str) -> None:
    result = box.run(OBJECTS, asserts(code))
    assert result.outcome == "passed" and result.integrity == "strong", result


DECIDED_BY_THE_PROGRAM = [
    "assert {Frozen(1): 2}[Frozen(1)] == 2\nassert len({Frozen(1), Frozen(1)}) == 1",
    "assert Data(1) == Data(1)\nassert Data(1) != Data(2)",
    "assert Point(1, 2) == Point(1, 2)",
    "assert 'ab' in Words()\nassert 'c' in Words()",
    "assert (Box(1) + [2]).items == [1, 2]\nassert ([0] + Box(1)).items == [0, 1]",
]


def test_a_weak_assert_does_not_make_other_asserts_weak(box: Sandbox) -> None:
    result = box.run(OBJECTS, asserts("assert total([1]) == 1\nassert Data(1) == Data(1)\nassert total([2]) == 2"))
    assert [t.weak for t in result.tests] == [False, True, False] and (result.outcome, result.passed) == ("weak", 2)
    assert [t.passed for t in result.tests] == [True, False, True] and "1 of 3 tests" in result.message
    result = box.run(OBJECTS, asserts("x = Data(1) == Data(1)\nassert x\nassert total([2]) == 2"))
    assert [t.weak for t in result.tests] == [True, True]


def test_small_numpy_numbers_are_widened(box: Sandbox) -> None:
    """Otherwise numpy would convert a number of the tests to few bits before comparing: 100000 is infinite in 16 bits."""
    setup = "import numpy as np"
    program = "import numpy as np\ndef f(): return np.float16('inf')\ndef g(): return np.array([-1], 'int8')"
    result = box.run(program, asserts("assert f() == 100000\nassert g()[0] == 255\nassert g()[0] == -1", setup=setup))
    assert [t.passed for t in result.tests] == [False, False, True]


def test_results_are_in_the_order_of_the_tests(box: Sandbox) -> None:
    """Asserts that run once are reported earlier than asserts in loops."""
    code = "def check(f):\n    for x in (3, 10):\n        assert f(x) == 9\n    assert f(6) == 36\n"
    code += "    if 1:\n        assert f(3) == 9"
    result = box.run("def f(x): return 9", asserts(code, "f"))
    assert [t.name for t in result.tests] == ["assert 1 (line 3)", "assert 2 (line 4)", "assert 3 (line 6)"]
    assert [t.passed for t in result.tests] == [True, False, True]


@pytest.mark.parametrize("code", DECIDED_BY_THE_PROGRAM)
def test_asserts_that_the_program_decides_are_weak(box: Sandbox, code: str) -> None:
    result = box.run(OBJECTS, asserts(code))
    assert (result.outcome, result.passed, result.integrity) == ("weak", 0, "weak"), result
    assert all(t.weak and not t.passed for t in result.tests), result


SCRIPTS = {
    "input": "print(input()[::-1])",
    "sys.stdin": "import sys\nfor line in sys.stdin: print(line.strip()[::-1])",
    "bytes": "import sys\nsys.stdout.buffer.write(sys.stdin.buffer.read().strip()[::-1])",
    "descriptors": "import os\nos.write(1, os.read(0, 99).strip()[::-1])",
    "the file": "print(open(0).read().strip()[::-1])",
    "exit": "print(input()[::-1])\nexit()",
    "an atexit hook": "import atexit\natexit.register(lambda: print(text[::-1]))\ntext = input()",
    "pickle": "import pickle\nclass A: pass\npickle.loads(pickle.dumps(A()))\nprint(input()[::-1])",
    "a thread": "import threading, time\ndef f(): time.sleep(0.05); print(input()[::-1])\nthreading.Thread(target=f).start()",
    "the name of the file": "assert __file__ and __name__ == '__main__'\nprint(input()[::-1])",
}


@pytest.mark.parametrize("name", SCRIPTS)
@pytest.mark.parametrize("level", ["S3", "S2"])
def test_scripts_may_use_any_way_of_input_and_output(name: str, level: str) -> None:
    try:
        with Sandbox(level) as fresh:
            result = fresh.run(SCRIPTS[name], pairs([("abc\n", "cba"), ("xy", "yx\n")]))
    except SandboxUnavailable as error:
        pytest.skip(f"level {level}: {error}")
    assert result.outcome == "passed", result


def test_a_test_value_that_cannot_be_sent_masks_the_result(box: Sandbox) -> None:
    """An instance of a class that the tests define."""
    code = "class Node:\n    def __init__(self, v): self.v = v\nassert value(Node(3)) == 3"
    result = box.run("def value(n): return n.v", asserts(code))
    assert result.kind == "tests" and "Node" in result.message


def test_every_unittest_method_is_a_test(box: Sandbox) -> None:
    code = """
        import os, unittest
        class First(unittest.TestCase):
            def setUp(self): self.b = Box(1)
            def test_len(self): self.assertEqual(len(self.b), 1)
            def test_raises(self):
                with self.assertRaises(Broke): self.b.fail(1)
            def test_wrong(self): self.assertEqual(self.b.items, [2])
            def test_parts(self):
                for i in range(3):
                    with self.subTest(i=i): self.assertLess(i, 2)
        class Second(unittest.TestCase):
            @classmethod
            def setUpClass(cls): cls.x = Box(5)
            def test_x(self): self.assertIn(5, self.x)
            def test_file(self):
                with open('shared', 'w') as f: f.write('x')
                self.assertEqual(read('shared'), 'x')
    """
    program = OBJECTS + "def read(path):\n    return open(path).read()\n"
    result = box.run(program, unittests(textwrap.dedent(code)))
    assert {t.name.split(".")[-1] for t in result.tests if t.passed} == {"test_len", "test_raises", "test_x", "test_file"}
    assert (result.passed, result.total) == (4, 6)


def test_exiting_is_not_an_expected_exception(box: Sandbox) -> None:
    for error in ("ValueError", "Exception", "BaseException"):
        code = (
            f"import unittest\nclass T(unittest.TestCase):\n    def test(self):\n        with self.assertRaises({error}): f(1)"
        )
        assert box.run("import os\ndef f(x): os._exit(0)", unittests(code)).outcome == "failed"
        assert box.run(f"def f(x): raise {error}", unittests(code)).outcome == "passed"
    bare = asserts("try:\n    f(1)\nexcept:\n    pass\nassert f is not None")
    assert box.run("import os\ndef f(x): os._exit(0)", bare).outcome == "failed"


def test_the_program_cannot_replace_helpers_of_the_setup(box: Sandbox) -> None:
    """In HumanEval 38 a function of the prompt makes the inputs; with another one any answer could be right."""
    setup = "def encode(x):\n    return x[::-1]\ndef decode(x):\n    'Undo encode.'\n"
    tests = asserts(
        "def check(candidate):\n    for x in ('ab', 'cd'):\n        assert candidate(encode(x)) == x", "decode", setup
    )
    assert box.run("def encode(x): return x\ndef decode(x): return x", tests).outcome == "failed"
    assert box.run("def decode(x): return x[::-1]", tests).outcome == "passed"


# Many programs at once, faults, and what is left behind


def mixed(count: int) -> list[str]:
    """Return different programs that pass, fail, raise and exit in turn."""
    kinds = [ADD, "def add(a, b): return 3", "def add(a, b): raise ValueError", "import os; os._exit(1)", "def add(", "x = 1"]
    return [f"# {i}\n{kinds[i % len(kinds)]}" for i in range(count)]


@pytest.mark.long
def test_verdicts_do_not_depend_on_workers(box: Sandbox) -> None:
    programs = mixed(500)
    with Sandbox(box.level, cache=0) as fresh:
        one_by_one = [(r.outcome, r.kind, r.passed) for r in fresh.run_many(programs, [SUM] * 500, workers=1)]
        together = [(r.outcome, r.kind, r.passed) for r in fresh.run_many(programs, [SUM] * 500, workers=8)]
    assert one_by_one == together
    assert one_by_one[:6] == [
        ("passed", "", 2),
        ("failed", "", 1),
        ("failed", "", 0),
        ("failed", "", 0),
        ("failed", "", 0),
        ("failed", "", 0),
    ]


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def resident_kb(pid: int) -> int:
    return int(next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if "VmRSS" in line).split()[1])


@pytest.mark.slow
def test_a_thousand_runs_leak_nothing(box: Sandbox) -> None:
    with Sandbox(box.level, cache=0) as fresh:
        fresh.run_many(mixed(50), [SUM] * 50, workers=8)
        time.sleep(0.3)
        pid = fresh._helper.process.pid
        before = (descriptors(), threading.active_count(), count_descendants(pid))
        kb = resident_kb(os.getpid())
        fresh.run_many(mixed(1000), [SUM] * 1000, workers=8)
        time.sleep(0.3)
        assert (descriptors(), threading.active_count(), count_descendants(pid)) == before
        assert resident_kb(os.getpid()) < kb + 8_000
    assert not Path(f"/proc/{pid}").exists()
    assert not list(Path("/sys/fs/cgroup").glob(f"**/jmarl-{os.getpid()}-*")) or box.level == "S4"  # the group of `box`


def test_directories_are_removed_at_s2() -> None:
    try:
        with Sandbox("S2", cache=0) as fresh:
            [directory] = sandbox_directories(fresh._helper.process.pid)
            fresh.run_many(mixed(30), [SUM] * 30, workers=4)
            time.sleep(0.3)
            assert directory.is_dir() and not list(directory.iterdir())
    except SandboxUnavailable as error:
        pytest.skip(f"level S2: {error}")
    assert not directory.exists()


def test_a_broken_library_does_not_end_the_fork_server(box: Sandbox, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    (tmp_path / "numpy.py").write_text("raise RuntimeError('built for another machine')\n")
    monkeypatch.setattr(launch, "libraries", lambda: [str(tmp_path)])
    with Sandbox(box.level, cache=0) as fresh:
        pid = fresh._helper.process.pid
        result = fresh.run(f"import numpy\n{ADD}", SUM)
        assert result.outcome == "failed" and "built for another machine" in result.message
        assert fresh.run(ADD, SUM).outcome == "passed" and fresh._helper.process.pid == pid


def test_a_program_whose_process_cannot_be_set_up_is_masked(box: Sandbox) -> None:
    """It fails because a limit on processes cannot be raised above that of the machine."""
    hard_limit = resource.getrlimit(resource.RLIMIT_NPROC)[1]
    if not 0 < hard_limit < 900_000:
        pytest.skip(f"processes are not limited on this machine: {hard_limit}")
    result = box.run(ADD, SUM, Limits(processes=hard_limit + 1))
    assert result.kind == "infrastructure" and result.masked


def test_no_preloadable_module_ends_the_fork_server(box: Sandbox) -> None:
    """It imports the modules that a program imports before it forks."""
    with Sandbox(box.level, cache=0) as fresh:
        pid = fresh._helper.process.pid
        names = sorted(client.PRELOADABLE)
        for start in range(0, len(names), 40):
            text = "".join(f"    import {name}\n" for name in names[start : start + 40])
            assert fresh.run(f"if 0:\n{text}{ADD}", SUM).outcome == "passed", names[start : start + 40]
        assert fresh._helper.process.pid == pid


def test_results_are_cached_by_content(box: Sandbox) -> None:
    with Sandbox(box.level, cache=2) as fresh:
        first = fresh.run(ADD, SUM)
        assert fresh.run(ADD, SUM) is first  # the same object, so it did not run twice
        assert fresh.run(ADD, SUM, Limits(wall_s=4)) is not first
        fresh.run("x = 1", SUM)
        assert fresh.run(ADD, SUM) is not first  # two newer results have replaced it


def test_a_killed_helper_restarts_and_its_programs_run_again(box: Sandbox) -> None:
    program = "import time\ntime.sleep(0.6)\n" + ADD
    with Sandbox(box.level) as fresh:
        results: list = []
        thread = threading.Thread(
            target=lambda: results.extend(fresh.run_many([program, program + "#"], [SUM, SUM], workers=2))
        )
        thread.start()
        time.sleep(0.3)
        fresh.kill_helper()
        start = time.monotonic()
        thread.join()
        assert [r.outcome for r in results] == ["passed", "passed"] and time.monotonic() - start < 1 + 0.7
        fresh.kill_helper()
        start = time.monotonic()
        assert fresh.run(ADD, SUM).outcome == "passed" and time.monotonic() - start < 1


def test_the_helper_ends_with_its_client(tmp_path: Path) -> None:
    """Even if the client is killed and cannot close anything."""
    code = "import os\nfrom jmarl.sandbox import Sandbox\ns = Sandbox()\n"
    code += "print(s._helper.process.pid, flush=True)\nos.kill(os.getpid(), 9)"
    completed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).resolve().parents[2]
    )
    helper = int(completed.stdout)
    for _ in range(50):
        if not Path(f"/proc/{helper}").exists():
            return
        time.sleep(0.05)
    raise AssertionError("the helper is still running")


def test_threads_can_share_a_sandbox(box: Sandbox) -> None:
    outcomes: list = []
    threads = [threading.Thread(target=lambda i=i: outcomes.append(box.run(f"# {i}\n{ADD}", SUM).outcome)) for i in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes == ["passed"] * 12


def test_there_is_one_default_sandbox() -> None:
    assert run_program(ADD, SUM).outcome == "passed"
    assert [r.outcome for r in run_programs([ADD, "x"], [SUM, SUM])] == ["passed", "failed"]
    assert api.default_sandbox() is api.default_sandbox()


# Levels


@pytest.mark.parametrize("level", ["S4", "S3", "S2"])
def test_libraries_can_be_imported_wherever_they_are_installed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, level: str
) -> None:
    """Virtual environments are often in /tmp, where programs see a directory of their own. Namespaces hide jmarl."""
    tmp_path.chmod(0o755)
    (tmp_path / "installed_there.py").write_text("def three():\n    return 3\n")
    (tmp_path / "jmarl").mkdir()
    (tmp_path / "jmarl" / "__init__.py").write_text("SECRET = 1\n")
    monkeypatch.setattr(launch, "libraries", lambda: [str(tmp_path)])
    try:
        with Sandbox(level) as fresh:
            assert str(tmp_path).startswith("/tmp/")
            result = fresh.run("import installed_there\ndef f(): return installed_there.three()", asserts("assert f() == 3"))
            reads = fresh.run("import jmarl\ndef f(): return jmarl.SECRET", asserts("assert f() == 1"))
    except SandboxUnavailable as error:
        pytest.skip(f"level {level}: {error}")
    assert result.outcome == "passed", result
    assert level == "S2" or reads.outcome == "failed", reads


def test_levels_reports_every_level(box: Sandbox) -> None:
    reasons = api.levels()
    assert list(reasons) == ["S4", "S3", "S2", "S1"]
    assert reasons[box.level] == "" and reasons["S1"] == ""


def test_without_bubblewrap_auto_chooses_s2(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SandboxUnavailable, match="apt-get install bubblewrap"):
        Sandbox("S3")
    if not api.levels()["S2"]:
        with Sandbox() as fresh:
            assert fresh.level == "S2" and "bwrap is not installed" in fresh.reasons["S3"]


def test_an_error_of_bubblewrap_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As on a machine that forbids user namespaces."""
    (tmp_path / "bwrap").write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    (tmp_path / "bwrap").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(SandboxUnavailable, match="No permissions to create new namespace"):
        Sandbox("S3")


def test_a_bubblewrap_that_does_not_confine_is_rejected(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """This one only runs the command, so the canary sees the host."""
    (tmp_path / "bwrap").write_text('#!/bin/sh\nwhile [ "$1" != -- ]; do shift; done; shift; exec "$@"\n')
    (tmp_path / "bwrap").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(SandboxUnavailable, match="S3"):
        Sandbox("S3")


def test_the_error_without_any_level_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch.platform, "machine", lambda: "riscv64")
    with pytest.raises(SandboxUnavailable, match="riscv64.*apt-get install bubblewrap"):
        Sandbox()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_s3_works_for_an_ordinary_user(tmp_path: Path) -> None:
    """With the system's interpreter and a copy of the package, because this user cannot read others."""
    python = "/usr/bin/python3"
    if not os.path.exists(python):
        pytest.skip("plain user: no /usr/bin/python3")
    (tmp_path / "jmarl").mkdir()
    subprocess.run(["cp", "-r", str(Path(api.__file__).parent), str(tmp_path / "jmarl/sandbox")], check=True)
    (tmp_path / "jmarl/__init__.py").write_text("")
    for path in [tmp_path, *tmp_path.parents][:-2]:
        path.chmod(path.stat().st_mode | 0o755)
    code = (
        "import os\nfrom jmarl.sandbox import *\ns = Sandbox('S3')\n"
        "r = s.run('def f(x): return x', asserts('assert f(2) == 2'))\nprint(os.getuid(), s.level, r.outcome)"
    )
    completed = subprocess.run(
        ["setpriv", "--reuid", "12345", "--regid", "12345", "--clear-groups", python, "-c", code],
        capture_output=True, text=True, cwd=tmp_path, env={"PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    if "S3" in completed.stderr and "namespace" in completed.stderr:
        pytest.skip(f"plain user: {completed.stderr.splitlines()[-1]}")
    assert completed.stdout.split() == ["12345", "S3", "passed"], completed.stderr


# Single functions


def test_free_names_are_read_but_not_defined() -> None:
    code = "import math\nfrom os import path as p\nx = 1\ndef g(a):\n    b = f(a)\n    return b\n"
    code += "for i in range(x): g(i)\nassert C(x).y"
    assert sorted(namespace.free_names(code)) == ["C", "f"]


def test_messages_have_a_maximum_length() -> None:
    reads, writes = os.pipe()
    channel = wire.Channel(reads, writes)
    with pytest.raises(wire.Unsupported, match="at most"):
        channel.send({"x": "y" * wire.MAX_MESSAGE})
    os.write(writes, (wire.MAX_MESSAGE + 1).to_bytes(4, "big"))
    with pytest.raises(wire.Violation):
        channel.receive()
    os.close(writes)
    with pytest.raises(wire.Disconnected):
        channel.receive()
    os.close(reads)


def test_the_landlock_version_is_known() -> None:
    assert confine.landlock_abi() >= 0
