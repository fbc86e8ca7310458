"""Programs of the sandbox's own: one that tries out a level before it is trusted, with what it must and must not be able to do
at each level, and those that stand for no program."""

import re

from jmarl.sandbox.inside.namespace import free_names
from jmarl.sandbox.types import Tests

CANARY = """
import os, socket
def add(a, b):
    return a + b
def opens_a_socket():
    try:
        socket.socket().close()
    except OSError:
        return False
    return True
def reads(path):
    try:
        open(path).close()
    except OSError:
        return False
    return True
def writes(path):
    try:
        open(path, "w").close()
    except OSError:
        return False
    return True
def allocates(size):
    try:
        bytearray(size)
    except MemoryError:
        return False
    return True
def process_number():
    return os.getpid()
"""
_RUNS_AND_IS_LIMITED = "assert add(1, 2) == 3\nassert not allocates(1 << 40)\n"
_IS_CONFINED = (
    "assert writes('own')\nassert not opens_a_socket()\n"
    "assert not any(reads(p) for p in ('/etc/passwd', '/proc/1/environ', '/etc/hostname'))\n"
    "assert not any(writes(p) for p in ('/jmarl', '/usr/jmarl', '/dev/jmarl', '/sandbox/inside/jmarl', '/var/tmp/jmarl'))\n"
)
_HAS_PROCESS_NAMESPACE = "assert process_number() == 1\n"
CANARY_TESTS = {
    "S4": _RUNS_AND_IS_LIMITED + _IS_CONFINED + _HAS_PROCESS_NAMESPACE,
    "S3": _RUNS_AND_IS_LIMITED + _IS_CONFINED + _HAS_PROCESS_NAMESPACE,
    "S2": _RUNS_AND_IS_LIMITED + _IS_CONFINED,
    "S1": _RUNS_AND_IS_LIMITED,
}

_STAND_IN = """
class Anything:
    def __call__(self, *arguments, **keywords):
        for x in (*arguments, *keywords.values()):
            try:
                x()
            except Exception:
                continue
        return ANSWER
    def __getattr__(self, name):
        return Anything()
class Class(Anything):
    def __call__(self, *arguments, **keywords):
        return Anything()
"""
_ANSWERS = ("Anything()", "None", "1", "'1'", "[1]", "{1: 1}")


_MISSING = re.compile(r"the tests do not run: raised ModuleNotFoundError: No module named '(\w+)'")


def stand_ins(tests: Tests, fault: str) -> list[str]:
    """Return programs that know nothing of the task, for tests that seem to be at fault: if that is not so with one of these,
    the program that ran has caused it. None for tests that import a library which is not installed: no program removes it.

    They define every name that the tests use: an object with all attributes, which can be called. Objects of a class are such
    objects too; what a function or method returns is a value of another type in each program.
    """
    missing = _MISSING.match(fault)
    if missing and re.search(rf"^\s*(import|from)\s+{missing[1]}\b", f"{tests.setup}\n{tests.code}", re.MULTILINE):
        return []
    names = dict.fromkeys([*free_names(tests.code), tests.entry_point]) if tests.kind != "io" else {}
    defined = "".join(f"{name} = {'Class' if name[0].isupper() else 'Anything'}()\n" for name in names if name)
    return [f"{_STAND_IN}ANSWER = {answer}\n{defined}" for answer in _ANSWERS]
