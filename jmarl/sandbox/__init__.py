"""The sandbox runs programs that a model wrote, and says whether they pass their tests.

This room may import only the standard library and files at the top of the package; never jax. Open `client.py` first (what a
user calls), then `launch.py` (the levels of confinement) and `inside/server.py` (what runs there).

    from jmarl.sandbox import asserts, run_program

    result = run_program("def add(a, b): return a + b", asserts("assert add(1, 2) == 3"))
    result.outcome, result.passed, result.total   # "passed", 1, 1

The tests run in another process than the program: the judge has the tests, calls the program through messages of exact builtin
types, and compares. Both processes are new for each program and confined. A helper process forks them; it is started by exec,
so that it can run beside JAX, and is started again if it is killed.

An outcome is `passed`, `failed`, `weak` (all tests held, but some by the program's own word only) or `error`, whose `kind` says
whether the program is the reason. All texts of a result can be encoded: a lone surrogate is written out (`\\ud800`). If a
process is killed, its program runs once more; if that happens again, the outcome is `error`, never `failed`.

`Session` is for agents that use tools: Python code and files that stay from call to call, confined the same way.

Tests with an attack for each of these (`attacks.py` and `test_sandbox_sessions.py` below tests/) show that a program cannot
forge a verdict; read tests or secrets; reach the network, other processes or files outside a small directory; leave state for
the next program; or exceed its limits of time, output, memory, disk and processes.

Limitations:
- Bugs of the kernel, of bubblewrap, or of the judge's Python interpreter can let a program out.
- Side channels are open: time, caches, how busy the machine is. Level S2 also shows whether a file exists, its size and owner.
- Only S4 caps the memory of all processes together; elsewhere each process has its own limit. At S2 the number of processes is
  limited for root only by the filter, which forbids new processes but does not count threads.
- At S2 disk use is measured (`inside.disk`), so a program may take some megabytes more before it is stopped; up to 4 times its
  limit with files that are mapped and unlinked; and without bound with such files on a tmpfs.
- Classes of unittest (`unittests`) share a directory with the program: what they read from files there the program may have
  written, and a library that reads such a file for them (sqlite, XML, pickle) reads what a model wrote. They import no module
  from there.
- What an object says about itself is believed, like the return value of a function. If a verdict hangs on a comparison that the
  program itself makes, the test is weak and has not passed: `==` and `is` of two of its objects, calculations, `isinstance`
  with classes that are not its own, `callable`, and methods such as `startswith` or `issubset` unless they belong to a class
  that the tests name.
- The program cannot be given objects of the tests' own classes, classes of theirs that derive from its classes, or values that
  are too large or too deep: such tests fail. Where they also do so with programs that know nothing of the task
  (`canary.stand_ins`), they say nothing about any program, and the result is masked. No other program can have that: what it
  answers, and how it calls functions of the tests, is its own doing.
- Tests fail if they need patched builtins, captured output, `type(x)` or `inspect` of the program's objects, mocks with
  attributes, `async with`, `async for`, or arrays of complex numbers or dates.
- Functions of the tests that the program calls while the tests ask it nothing (from a timer) wait until they do.
- A session's code can change what the session reports about its values and files. It cannot start processes, so libraries that
  need one do not work there.
- Only Linux on x86-64 is supported.
"""

from jmarl.sandbox.client import Sandbox, default_sandbox, levels, run_program, run_programs
from jmarl.sandbox.session import Reply, Session
from jmarl.sandbox.types import ExecutionResult, Limits, SandboxUnavailable, TestResult, Tests, asserts, calls, pairs, unittests

__all__ = [
    "ExecutionResult", "Limits", "Reply", "Sandbox", "SandboxUnavailable", "Session", "TestResult", "Tests", "asserts", "calls",
    "default_sandbox", "levels", "pairs", "run_program", "run_programs", "unittests",
]  # fmt: skip
