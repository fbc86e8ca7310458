"""Tests that use objects of the program: forgeries through objects, right programs of many kinds, and masked results."""

from __future__ import annotations

import pytest

from jmarl.sandbox import Limits, Sandbox, Tests, asserts, pairs, unittests
from jmarl.sandbox.canary import stand_ins

LIMITS = Limits(wall_s=5)


def unit(*lines: str, before: str = "") -> Tests:
    """Return a test class with one method of these lines. before: lines of the module before the class."""
    body = "".join(f"        {line}\n" for line in lines)
    return unittests(f"import unittest\n{before}\nclass T(unittest.TestCase):\n    def test(self):\n{body}")


# Forgeries, each with the tests and a program that is right

LEAVES = """
open('colorsys.py', 'w').write('''
import sys
def report(self, name, number, *a): self.write(test=name, number=number, message='', weak=False)
sys.modules['inside.judge'].Verdict.report = report
''')
import os
os.rename('colorsys.py', 'NAME')
def f(x): return None
"""  # fmt: skip
BY_PATH = (
    "s = u.spec_from_file_location('s', 'solution.py')\ntry:\n    s.loader.exec_module(u.module_from_spec(s))\n"
    "except OSError:\n    pass"
)
DOUBLE = "def f(x): return 2 * x"
REPLACES = (
    "import inside.program as p\nreal = p.ProgramServer.answer\ndone = []\n"
    "def answer(self, request):\n"
    "    if request.get('do') == 'replace' and not done:\n"
    "        done.append(1)\n        return self._error_reply(StopIteration())\n    return real(self, request)\n"
    "p.ProgramServer.answer = answer\nclass S:\n    def __init__(self): self.items = []\n    def double(self, x): return None"
)
FORGED = {
    f"a module in the directory of the tests: {first_line}": (
        LEAVES.replace("NAME", name),
        DOUBLE,
        unit("self.assertEqual(f(1), 2)", before=f"import os, sys\n{first_line}\n{imports}"),
    )
    for first_line, name, imports in (
        ("sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))", "colorsys.py", "import colorsys"),
        ("sys.path.insert(0, os.getcwd())", "colorsys.py", "import colorsys"),
        ("sys.path.insert(0, '')", "colorsys.py", "import colorsys"),
        ("import importlib.util as u", "solution.py", BY_PATH),
        ("import runpy", "solution.py", "try:\n    runpy.run_path('solution.py')\nexcept OSError:\n    pass"),
        ("sys.path.append('.')", "solution.py", "try:\n    from solution import f as g\nexcept ImportError:\n    pass"),
    )
} | {
    "assertSetEqual": (
        "class R:\n    def difference(self, o):\n        self.k = list(o)\n        return set()\n"
        "    def __iter__(self): return iter(self.k)\ndef f(x): return R()",
        "def f(x): return {*x, 77}",
        unit("self.assertSetEqual(f([1, 2]), {1, 2, 77})"),
    ),
    "StopIteration while a container is updated": (
        REPLACES,
        "class S:\n    def __init__(self): self.items = []\n    def double(self, x): return 2 * x",
        asserts(
            "s = S()\ndouble = s.double\ns.items.append(5)\n"
            "assert all(y == 2 * x for x, y in zip([1, 2], map(double, [1, 2])))\nassert s.items == [5]"
        ),
    ),
    "a with block that suppresses failures": (
        "class W:\n    def __enter__(self): return self\n    def __exit__(self, *e): return True\n    x = 0",
        "class W:\n    def __enter__(self): return self\n    def __exit__(self, *e): pass\n    x = 1",
        unit("with W() as t: self.assertEqual(t.x, 1)"),
    ),
    "a value that is an object": ("result = object()", "result = 5", asserts("assert result == 5")),
    "an error that is an object": (
        "MyErr = object()\ndef f(x): pass",
        "class MyErr(Exception): pass\ndef f(x): raise MyErr",
        unit("with self.assertRaises(MyErr): f(1)"),
    ),
    "another object each time": (
        "class S: pass\ndef f(): return S()",
        "s = object()\ndef f(): return s",
        asserts("assert f() is f()"),
    ),
    "the same object": (
        "class L:\n    def copy(self): return self",
        "class L:\n    def copy(self): return L()",
        asserts("a = L()\nb = a.copy()\nassert b is not a"),
    ),
    "a skipped test": (
        "skip = True\ndef f(x): return 0",
        "skip = False\ndef f(x): return 2 * x",
        unittests(
            "import unittest\nclass T(unittest.TestCase):\n    @unittest.skipIf(skip, 'no')\n"
            "    def test_a(self): self.assertEqual(f(1), 2)\n    def test_b(self): self.assertIsNotNone(f(1))"
        ),
    ),
    "a deep value that the tests nest deeper": (
        "def f(x):\n    for _ in range(88): x = [x]\n    return x\ndef g(x): return None",
        "def f(x): return [x]\ndef g(x): return x",
        asserts("assert g([[[f(1)]]]) == [[[[1]]]]"),
    ),
}  # fmt: skip


WEAK_EVEN_IF_RIGHT = ("another object each time", "the same object")  # they compare two objects of the program


@pytest.mark.parametrize("name", FORGED)
def test_no_object_forges_a_verdict_or_masks_the_result(box: Sandbox, name: str) -> None:
    forgery, right, tests = FORGED[name]
    result = box.run(forgery, tests, LIMITS)
    assert result.outcome != "passed" and not result.masked, result
    result = box.run(right, tests, LIMITS)
    assert result.outcome == ("weak" if name in WEAK_EVEN_IF_RIGHT else "passed"), result


# What only the program can decide

LIAR = "class R:\n    def __getattr__(self, n): return lambda *a, **k: True\n    def intersection(self, o): return o\n"
DECIDED_BY_THE_PROGRAM = {
    "a method that gets the expected beginning": ("assert f(1).startswith('Hello')", LIAR + "def f(x): return R()"),
    "a method that gets the expected set": ("assert f(1).issubset({1, 2})", LIAR + "def f(x): return R()"),
    "a method that returns its argument": ("assert f(1).intersection({1, 2}) == {1, 2}", LIAR + "def f(x): return R()"),
    "a builtin class as a method": ("assert f(1).endswith('Hello')", "class R: endswith = bool\ndef f(x): return R()"),
    "members of an enumeration that are the same": ("assert f(C.A) is C.B", "class C: A = B = object()\ndef f(x): return x"),
    "callable": ("assert callable(f(1))", "def f(x): return len"),
    "hasattr of a length": (
        "assert hasattr(f(1), '__len__')",
        "class R:\n    def __len__(self): return 1\ndef f(x): return R()",
    ),
    "isinstance of Iterable": (
        "from collections.abc import Iterable\nassert isinstance(f(1), Iterable)",
        "class R:\n    def __iter__(self): return iter([])\ndef f(x): return R()",
    ),
    "a generator": ("import types\nassert isinstance(f(1), types.GeneratorType)", "def f(x): yield x"),
    "an exception": ("assert isinstance(f(1), (int, ValueError))", "def f(x): return ValueError(x)"),
    "a failed assertion in a function of the tests": (
        "def check(x): raise AssertionError(2)\nassert f(check) is None",
        "def f(check):\n    try:\n        check(1)\n    except AssertionError as e:\n        return e.args or None",
    ),
    "a suppressed error": (
        "with f(1):\n    raise KeyError\nassert f(1).n == 1",
        "class R:\n    n = 1\n    def __enter__(self): pass\n    def __exit__(self, *e): return True\ndef f(x): return R()",
    ),
}


@pytest.mark.parametrize("name", DECIDED_BY_THE_PROGRAM)
def test_a_test_that_an_object_of_the_program_decides_is_weak(box: Sandbox, name: str) -> None:
    code, program = DECIDED_BY_THE_PROGRAM[name]
    result = box.run(program, asserts(code), LIMITS)
    assert result.outcome == "weak" and all(test.weak for test in result.tests), result


@pytest.mark.parametrize(
    "code",
    ["assert callable(c)", "assert c.__doc__", "assert hasattr(c, '__iter__')", "assert hasattr(c, '__len__')"]
    + [
        f"import collections.abc as a\nassert isinstance(c, a.{name})" for name in ("Iterable", "Sized", "Callable", "Iterator")
    ],
)
def test_methods_of_proxies_are_not_taken_for_those_of_the_object(box: Sandbox, code: str) -> None:
    assert box.run("class C: pass\nc = C()", asserts(code), LIMITS).outcome == "failed"


def test_methods_of_classes_that_the_tests_name_are_strong(box: Sandbox) -> None:
    """`count` of such a class is not a comparison that a builtin type would have made."""
    program = "class Bag:\n    def count(self, x): return 2\n    @staticmethod\n    def find(x): return 3"
    result = box.run(program, asserts("assert Bag().count(1) == 2\nassert Bag.find(1) == 3"))
    assert result.outcome == "passed" and result.integrity == "strong", result


# Right programs

RIGHT = {
    "arguments of any name": ("def f(**k): return k", "assert f(self=1, operation=2) == {'self': 1, 'operation': 2}"),
    "errors that derive from errors": (
        "class A(Exception): pass\nclass B(A): pass\nclass C(B, KeyError): pass\ndef f(): raise C('no')",
        "for kind in (A, B, C, KeyError):\n    try:\n        f()\n    except kind as e:\n        got = e\n"
        "    assert got.args == ('no',)\nassert issubclass(C, A) and not issubclass(A, B)",
    ),
    "a function that is passed twice": (
        "class E:\n    def __init__(self): self.h = []\n    def on(self, f): self.h.append(f)\n"
        "    def off(self, f): self.h.remove(f)\n    def fire(self, x): return [f(x) for f in self.h]",
        "class Own:\n    def twice(self, x): return 2 * x\no, e = Own(), E()\ndef h(x): return x\ne.on(h)\ne.on(o.twice)\n"
        "assert e.fire(2) == [2, 4]\ne.off(h)\nassert e.fire(2) == [4]\ne.off(o.twice)\nassert e.fire(2) == []",
    ),
    "a container of functions": (
        "class E:\n    def __init__(self): self.h = {}\n    def on(self, n, f): self.h.setdefault(n, []).append(f)\n"
        "    def fire(self, n, x): return [f(x) for f in self.h.get(n, [])]",
        "e = E()\ne.on('a', lambda x: x)\nheld = e.h\nassert len(e.h['a']) == 1\ne.on('b', lambda x: x + 1)\n"
        "assert e.fire('b', 1) == [2] and set(held) == {'a', 'b'}",
    ),
    "a container that both change": (
        "class C:\n    def __init__(self): self.items = []\n    def add(self, x): self.items.append(x)",
        "c = C()\nv = c.items\nc.add(1)\nassert v == [1]\nv.append(2)\nassert c.items == [1, 2]\nc.items.append(3)\n"
        "assert v == [1, 2, 3]\nassert c.items is v",
    ),
    "a container that is read often": (
        "class S:\n    def __init__(self): self.items = []\n    def push(self, x): self.items.append(x)",
        "s = S()\nfor i in range(1000):\n    s.push(i)\n    assert len(s.items) == i + 1",
    ),
    "an attribute that is computed when it is read": (
        "class S:\n    n = 0\n    @property\n    def items(self):\n        self.n += 1\n        return [self.n]",
        "s = S()\nassert s.items == [1]\nassert s.items == [2]",
    ),
    "a decorator": (
        "import functools, inspect\ndef d(f):\n    @functools.wraps(f)\n    def w(*a):\n"
        "        return f.__name__, f.__doc__, str(inspect.signature(f)), f(*a)\n    return w",
        "@d\ndef foo(x, y=2, *z):\n    'Doc.'\n    return x + y\n"
        "assert foo(1) == ('foo', 'Doc.', '(x, y=2, *z)', 3)\nassert foo.__name__ == 'foo' and foo.__doc__ == 'Doc.'",
    ),
    "errors of the tests that the program passes on": (
        "def retry(f, kind=Exception):\n    for _ in range(2):\n        try:\n            return f()\n"
        "        except kind as e:\n            last = e\n    raise last",
        "class Mine(Exception): pass\ndef boom(e):\n    def f(): raise e\n    return f\n"
        "for e in (ValueError('boom'), Mine('boom', 1)):\n    for kind in (Exception, type(e)):\n        got = None\n"
        "        try:\n            retry(boom(e), kind)\n        except type(e) as caught:\n            got = caught\n"
        "        assert got.args == e.args and str(got) == str(e)",
    ),
    "a with block that ends in an error": (
        "class Tx:\n    def __enter__(self): return self\n"
        "    def __exit__(self, t, v, tb): self.seen = (t is KeyError, v and v.args)",
        "t = Tx()\ntry:\n    with t:\n        raise KeyError('x')\nexcept KeyError:\n    pass\n"
        "assert t.seen == (True, ('x',))\nwith t:\n    pass\nassert t.seen == (False, None)",
    ),
    "threads of the tests": (
        "import threading\nclass C:\n    def __init__(self): self.n, self.l = 0, threading.Lock()\n"
        "    def inc(self):\n        with self.l: self.n += 1",
        "import threading\nc = C()\ndef work():\n    for _ in range(20): c.inc()\n"
        "ts = [threading.Thread(target=work) for _ in range(10)]\nfor t in ts: t.start()\nfor t in ts: t.join()\n"
        "assert c.n == 200",
    ),
    "threads of the program": (
        "from concurrent.futures import ThreadPoolExecutor\ndef pmap(f, xs):\n"
        "    with ThreadPoolExecutor(4) as p: return list(p.map(f, xs))",
        "assert pmap(lambda x: x * 2, range(50)) == [x * 2 for x in range(50)]",
    ),
    "coroutines": (
        "import asyncio\nasync def f(x):\n    await asyncio.sleep(0.001)\n    return x + 1",
        "import asyncio\nasync def g(): return await asyncio.gather(f(1), asyncio.create_task(f(2)))\n"
        "assert asyncio.run(f(1)) == 2\nassert asyncio.run(g()) == [2, 3]",
    ),
    "views": (
        "def m(v): return max(v)\ndef views(d): return d.keys(), d.items(), d.values()",
        "d = {'a': 1, 'b': 5}\nassert m(d.values()) == 5 and m(d.keys()) == 'b' and m(d.items()) == ('b', 5)\n"
        "k, i, v = views(d)\nassert k == d.keys() and i == d.items() and list(v) == [1, 5] and k | {'c'} == {'a', 'b', 'c'}",
    ),
    "copies": (
        "class P:\n    def __init__(self, x): self.x = x",
        "import copy\np = P([1])\nq, r = copy.deepcopy(p), copy.copy(p)\nq.x.append(2)\nr.x.append(3)\n"
        "assert p.x == [1, 3] and q.x == [1, 2]",
    ),
    "names that are local variables elsewhere in the tests": (
        "def f(x): return x[0]\ndef count(x): return 2",
        "assert sorted([(2,), (1,)], key=lambda f: f[0]) == [(1,), (2,)]\nassert f([3]) == 3\n"
        "assert [count for count in [1]] == [1]\nassert count(1) == 2",
    ),
    "a function named as a module": ("def select(x): return x[0]", "assert select([1]) == 1"),
}  # fmt: skip
RIGHT_CLASSES = {
    "a coroutine": (
        "async def f(x): return x + 1",
        unittests(
            "import unittest\nclass T(unittest.IsolatedAsyncioTestCase):\n"
            "    async def test(self): self.assertEqual(await f(1), 2)"
        ),
    ),
    "the base class of an error": (
        "class A(Exception): pass\nclass B(A): pass\ndef f(): raise B",
        unit("with self.assertRaises(A): f()"),
    ),
    "a test that is skipped": (
        DOUBLE,
        unittests(
            "import unittest\nclass T(unittest.TestCase):\n    @unittest.skip('later')\n    def test_a(self): self.fail()\n"
            "    def test_b(self): self.assertEqual(f(1), 2)"
        ),
    ),
    "a class with two names": (
        DOUBLE,
        unittests(
            "import unittest\nclass T(unittest.TestCase):\n    def test(self): self.assertEqual(f(1), 2)\nfor case in [T]: pass"
        ),
    ),
    "sets": ("def f(x): return frozenset(x)", unit("self.assertSetEqual(f([1]), {1})", "self.assertSetEqual({1}, {1})")),
    "output that a hook writes": (
        "import sys, io, atexit\nbuffer = sys.stdout = io.StringIO()\n"
        "atexit.register(lambda: sys.__stdout__.write(buffer.getvalue()))\nprint(7)",
        pairs([("", "7")]),
    ),
    "output in a file that is left open": ("out = open(1, 'w')\nout.write('7')", pairs([("", "7")])),
}


@pytest.mark.parametrize("name", [*RIGHT, *RIGHT_CLASSES])
def test_right_programs_pass(box: Sandbox, name: str) -> None:
    program, tests = RIGHT[name] if name in RIGHT else RIGHT_CLASSES[name]
    result = box.run(program, asserts(tests) if name in RIGHT else tests, LIMITS)
    assert result.outcome == "passed" and (result.total == 1 or name in RIGHT), result
    assert result.integrity == "strong" or " is v" in str(tests), result


# Results that say nothing about the program

UNSENDABLE = {
    "an object": "with self.assertRaises(TypeError): f(object())",
    "a pattern": "import re; self.assertEqual(f(re.compile('a')), 2)",
    "a file": "import io; self.assertEqual(f(io.StringIO('1')), 2)",
    "an object in the program's list": "s = S(); s.items.append(object()); self.assertEqual(f(1), 2)",
    "a result of a function of the tests": "self.assertEqual(call(lambda: object()), 2)",
    "a deep dictionary": "d = {}; [d := {1: d} for _ in range(40)]; self.assertIsNotNone(f(d))",
    "a long text": "self.assertIsNotNone(f('x' * (17 << 20)))",
    "a class that derives from the program's": "f(1); self.assertEqual(derived(), 1)",
}


@pytest.mark.parametrize("name", UNSENDABLE)
def test_unsendable_test_values_mask_the_result(box: Sandbox, name: str) -> None:
    program = "class S:\n    def __init__(self): self.items = []\ndef f(x): return 0\ndef call(f): return f()"
    result = box.run(
        program, unit(UNSENDABLE[name], before="def derived():\n    class Own(S): x = 1\n    return Own().x"), LIMITS
    )
    assert result.kind == "tests" and result.masked, result


def test_tests_that_lack_a_library_mask_the_result(box: Sandbox) -> None:
    for tests in (asserts("import missing_library\nassert f(1) == 2"), unit("f(1)", before="import missing_library")):
        result = box.run(DOUBLE, tests)
        assert result.masked and not stand_ins(tests, result.message), "no program takes a library away, so none stands in"
        assert stand_ins(tests, "the tests never asked the program anything")
