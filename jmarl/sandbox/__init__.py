"""Runs programs that a model wrote, and says whether they pass their tests.

The verdict is formed in a process the program never ran in: the judge has the tests, calls the program through messages of
exact builtin types, and compares. Both are confined (`launch` says at which levels, `inside.confine` how), for each program
anew. A helper process forks them; it is started by exec, so that JAX may run beside it, and started again if it is killed.

    from jmarl.sandbox import asserts, run_program

    result = run_program("def add(a, b): return a + b", asserts("assert add(1, 2) == 3"))
    result.outcome, result.passed, result.total   # "passed", 1, 1

An outcome is `passed`, `failed`, `weak` (all tests held, but some by the program's own word only) or `error`, whose `kind` says
whether that is the program's doing. Every text of a result can be encoded: a lone surrogate is written out (`\\ud800`). Where a
process was killed, its program runs once more; where that happens again, the outcome is `error`, never `failed`.

`Session` is for agents that use tools: Python code and files that stay from call to call, confined the same way.

Covered, by tests with an attack each (tests/attacks.py, tests/test_sandbox_sessions.py): forged verdicts, reading tests or
secrets, the network, other processes, files outside a small directory, state for the next program, loops, floods, memory, disk,
processes.

Open `client.py` first. The room imports only the standard library and itself.

Not covered:
- Faults of the kernel, of bubblewrap, or of the interpreter that the judge runs: a program that breaks one of these is outside.
- Side channels: time, caches, how busy the machine is. Level S2 also shows whether a file exists, and its size and owner.
- Memory of all processes together is capped at S4 only (elsewhere each process for itself), processes at S2 for root only by
  the filter (no new processes; threads are not counted).
- Disk at S2 is measured (`inside.disk`): a program may have taken some megabytes more before it is stopped, up to 4 times its
  limit with files that it has mapped and unlinked, and any number of those where the directory is on a tmpfs.
- Tests of objects (`unittests`) share a directory with the program: what they read from files there it may have written, and a
  library of theirs that reads such a file (sqlite, XML, pickle) reads what a model wrote. No module is imported from there.
- What an object says about itself is believed as a function's answer is. Where a verdict would hang on its own comparison, the
  test is weak, and has not passed: `==` and `is` of two of its objects, calculations, `isinstance` of classes
  that are not its own, `callable`, methods as `startswith` or `issubset` of what is no object of a class that the tests name.
- Objects of the tests' own classes that the program is to use, classes of theirs that come from its classes, and values too
  large or too deep: such tests say nothing, and are masked. Patched builtins, captured output, `type(x)` and `inspect` of its
  objects, mocks with attributes, `async with` and `async for`, arrays of complex numbers or dates: such tests fail.
- Functions of the tests that the program calls while they ask it nothing (a timer's) wait until they do.
- A session's own words: its code can change what it says of its values and files. It can start no process, so that no library
  that needs one works there.
- Machines other than Linux on x86-64.
"""

from jmarl.sandbox.client import Sandbox, default_sandbox, levels, run_program, run_programs
from jmarl.sandbox.session import Reply, Session
from jmarl.sandbox.types import ExecutionResult, Limits, SandboxUnavailable, TestResult, Tests, asserts, calls, pairs, unittests

__all__ = [
    "ExecutionResult", "Limits", "Reply", "Sandbox", "SandboxUnavailable", "Session", "TestResult", "Tests", "asserts", "calls",
    "default_sandbox", "levels", "pairs", "run_program", "run_programs", "unittests",
]  # fmt: skip
