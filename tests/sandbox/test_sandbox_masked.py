"""No program can have its result masked: neither by what it answers, nor by how it calls functions of the tests, nor by what it
leaves in their directory. `test_sandbox_objects.py` shows which tests say nothing and mask every result."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from jmarl.sandbox import Limits, Sandbox, Tests, asserts, unittests

RIGHT = "def f(x): return x\ndef g(fn, *xs): return fn(*xs)\ndef size(x): return len(x)\nclass C: x = 1\n"


@pytest.fixture(scope="module")
def box() -> Iterator[Sandbox]:
    with Sandbox(limits=Limits(wall_s=4, cpu_s=3), cache=0) as sandbox:
        yield sandbox


def calling(call: str, honest: str, expected: str) -> Tests:
    """Return tests that give a function to the program."""
    return asserts(f"assert g(lambda *a: {call}, *{honest}) == {expected}")


# What a function of the tests returns for arguments that only a wrong program gives it: name -> (tests, those arguments).
FUNCTIONS = {
    "a union": (calling("a[0] | a[1]", "[1, 2]", "3"), "int, str"),
    "a generic alias": (calling("a[0][a[1]]", "[[5], 0]", "5"), "list, int"),
    "a member": (calling("a[0].name if a else 0", "[]", "0"), "ImportError"),
    "a descriptor": (calling("getattr(a[0], 'real', 2)", "[3]", "3"), "int"),
    "a mapping of a class": (calling("getattr(a[0], '__dict__', 0)", "[3]", "0"), "int"),
    "a view of bytes": (calling("memoryview(a[0]) if a[0] else 0", "[b'']", "0"), "b'x'"),
    "a match": (calling("__import__('re').match('b', a[0])", "['a']", "None"), "'b'"),
    "an object of the tests": (
        asserts("class Node: pass\nassert g(lambda n: Node() if n > 1 else n, 1) == 1"),
        "2",
    ),
    "a file": (calling("__import__('io').StringIO() if a[0] else 0", "[0]", "0"), "1"),
    "a long text": (calling("'x' * a[0]", "[3]", "'xxx'"), "17 << 20"),
    "a deep list": (
        asserts("def deep(n):\n    x = []\n    for _ in range(n): x = [x]\n    return x\nassert g(deep, 1) == [[]]"),
        "120",
    ),
    "an error with an object": (
        asserts("def r(n):\n    if n: raise ValueError(object())\n    return 0\nassert g(r, 0) == 0"),
        "1",
    ),
    "an exit": (asserts("import sys\nassert g(lambda n: n and sys.exit(n), 0) == 0"), "1"),
}  # fmt: skip
WRONG_CALL = RIGHT.replace("return fn(*xs)", "\n    try: fn({0})\n    except BaseException: pass\n    return 'wrong'")


@pytest.mark.parametrize("name", FUNCTIONS)
def test_no_call_of_a_function_of_the_tests_masks_the_result(box: Sandbox, name: str) -> None:
    tests, arguments = FUNCTIONS[name]
    right, wrong = box.run_many([RIGHT, WRONG_CALL.format(arguments)], [tests, tests])
    assert right.outcome == "passed", right
    assert wrong.outcome != "passed" and not wrong.masked, wrong


# Answers that the tests give back, and what the program does with their directory: name -> the program's code.
WRONG = "def g(fn, *xs): return None\ndef size(x): return None\nclass C: x = 0\n"
SENT_BACK = asserts("x = f(3)\nassert g(f, x) == 3\nassert size([x, {1: x}]) == 2")
ANSWERS = {
    "a list that is short to say": "def f(x): return range(3 * 10**6)",
    "a long text": "def f(x): return 'x' * (15 << 20)",
    "a deep list": "def f(x):\n    for _ in range(89): x = [x]\n    return x",
    "an endless iterator": "import itertools\ndef f(x): return itertools.count()",
    "an object": "def f(x): return object()",
    "an ImportError": "def f(x): raise ImportError(object())",
    "an error of the protocol": "import inside.wire\ndef f(x): raise inside.wire.UnsupportedTestValue",
    "its end": "import os\ndef f(x): os._exit(70)",
    "the end of its parent": "import os\ndef f(x): os.kill(os.getppid(), 9)",
    "the end of all": "import os\ndef f(x): os.kill(-1, 9)",
    "no descriptors": "import os\ndef f(x): os.closerange(0, 256)",
    "a fault as reply": "import inside.program as p\np.ProgramServer.answer = lambda s, r: {'value': 0, 'fault': 'x'}",
    "an ImportError as reply": (
        "import inside.program as p\n"
        "p.ProgramServer.answer = lambda s, r: {'raised': [['builtins', 'ImportError', -1, []]], 'args': [], 'object': None}"
    ),
}
IN_FILES = unittests(
    "import unittest\nclass T(unittest.TestCase):\n    def test(self): self.assertEqual(C().x, 1)",
    setup="import os\nos.mkdir('made')\nopen('settings.txt', 'w').write('1')",
)
FILES = {
    "a directory": "import os\nwhile True:\n    os.makedirs('settings.txt', exist_ok=True); os.makedirs('made', exist_ok=True)",
    "a full disk": "f = open('big', 'wb', 0)\nwhile True: f.write(bytes(1 << 16))",
    "a module": "open('unittest.py', 'w').write('raise ImportError')",
}


@pytest.mark.parametrize("name", [*ANSWERS, *FILES])
def test_no_answer_and_no_file_masks_the_result(box: Sandbox, name: str) -> None:
    program, tests = (ANSWERS[name], SENT_BACK) if name in ANSWERS else (FILES[name], IN_FILES)
    result = box.run(f"{program}\n{WRONG}", tests, Limits(wall_s=1, cpu_s=1))
    assert result.outcome != "passed" and not result.masked, result


@pytest.mark.parametrize("early", ["", "f(0)\n"])
def test_the_message_of_a_missing_library_masks_no_result(box: Sandbox, early: str) -> None:
    """The tests import what the program says is missing."""
    lie = 'raise ModuleNotFoundError("No module named \'json\'", name="json")'
    for program in (f"def f(x): {lie}", f"class F:\n    def __call__(self, x): {lie}\nf = F()", f"{lie}\ndef f(x): return 3"):
        result = box.run(program, asserts(f"import json\n{early}assert f(3) == json.loads('3')"))
        assert result.outcome == "failed" or (result.outcome, result.kind) == ("error", "load"), result
        assert not result.masked


def test_a_judge_that_fails_is_no_fault_of_the_machine(box: Sandbox) -> None:
    """Such as one without memory: both processes were set up, so the program may be the reason."""
    result = box.run(RIGHT, asserts("import sys\nassert f(1) == 1\nsys.modules['inside.judge'].Verdict.write = None"))
    assert (result.outcome, result.kind) == ("error", "sandbox"), result
