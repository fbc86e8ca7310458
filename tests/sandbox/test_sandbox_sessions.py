"""Sessions keep their state and never share it, files stay in their directory, and no code gets out of its confinement. Each
attack has a benign twin that uses the same features and works."""

from __future__ import annotations

import copy
import signal
import threading
import time
from collections.abc import Iterator
from typing import NamedTuple

import pytest
from test_sandbox_attacks import count_descendants, put

from jmarl.sandbox import Limits, Sandbox, SandboxUnavailable, Session

LIMITS = Limits(wall_s=1.5, cpu_s=3)


@pytest.fixture
def session(sandbox: Sandbox) -> Iterator[Session]:
    with Session(sandbox, LIMITS) as new_session:
        yield new_session


@pytest.fixture
def patient_session(sandbox: Sandbox) -> Iterator[Session]:
    """For programs that make many files, which takes seconds on a slow disk."""
    with Session(sandbox, Limits(wall_s=30, cpu_s=30)) as new_session:
        yield new_session


# What a session does


def test_names_files_and_imports_stay_between_calls(session: Session) -> None:
    assert session.python("import math\nx = 2") == session.python("def f(n): return n * x")
    assert session.python("x += 1; f(math.floor(2.5))").value == "6"
    assert session.python("print('a'); x").text == "a\n3"
    assert session.python("_ * 2").value == "6"
    session.python("open('b.txt', 'w').write('zwei')")
    assert session.read("b.txt").value == "zwei"
    assert session.write("c/d.txt", "dü\n").value == "4 bytes"
    assert session.python("open('c/d.txt').read()").value == "'dü\\n'"
    assert session.list().value == "b.txt  4 bytes\nc/" and session.list("c").value == "d.txt  4 bytes"
    assert session.write("b.txt", "x").value == "1 bytes" and session.read("c/../b.txt").value == "x"


def test_tracebacks_begin_at_the_first_line_of_the_cell(session: Session) -> None:
    session.python("def f(x):\n    return 1 / x")
    reply = session.python("y = 1\nf(0)")
    assert reply.error.splitlines()[:3] == [
        "Traceback (most recent call last):",
        '  File "<cell 2>", line 2, in <module>',
        "    f(0)",
    ]
    assert reply.error.endswith("ZeroDivisionError: division by zero") and "session.py" not in reply.error
    assert session.python("y").value == "1"
    assert "SyntaxError" in session.python("def f(:").error
    assert session.python("import sys; sys.exit(3)").error.endswith("SystemExit: 3")
    assert session.python("y").value == "1"
    assert "RecursionError" in session.python("def g(): return g()\ng()").error


def test_state_never_crosses_sessions(sandbox: Sandbox) -> None:
    leave = (
        "import builtins, os, sys, json, random\nx = 1; builtins.print = None; builtins.secret = 1; sys.path.append('here')\n"
        "json.dumps = None; os.environ['LEFT'] = '1'; random.random = lambda: 4; sys.modules['left'] = os\nopen('left', 'w').close()"
    )
    look = (
        "import builtins, os, sys, json, random\n['x' in globals(), print is None, hasattr(builtins, 'secret'), 'here' in sys.path, "
        "json.dumps is None, 'LEFT' in os.environ, random.random() == 4, 'left' in sys.modules, os.path.exists('left')]"
    )
    with Session(sandbox, LIMITS) as first, Session(sandbox, LIMITS) as second:
        second.python("1")
        assert not first.python(leave).error and first.python(look).value == str([True] * 9)
        assert second.python(look).value == str([False] * 9)
        with Session(sandbox, LIMITS) as third:
            assert third.python(look).value == str([False] * 9) and third.list().value == ""
        assert first.python(look).value == str([True] * 9)


def test_copies_are_independent(sandbox: Sandbox) -> None:
    with Session(sandbox, LIMITS) as first:
        first.python("import random\nx = [random.random()]")
        first.write("a.txt", "one")
        second, third = copy.deepcopy(first), copy.copy(first)
        assert first.python("x.append(2); len(x)").value == "2"
        second.write("a.txt", "two")
        assert second.python("x.append(3); x[1:]").value == "[3]" and third.python("x").value == second.python("x[:1]").value
        assert [copied.read("a.txt").value for copied in (first, second, third)] == ["one", "two", "one"]


@pytest.mark.parametrize(
    "code, limit",
    [
        ("while True: pass", "wall"),
        ("import time; time.sleep(60)", "wall"),
        ("while True: print('x' * 1000)", "wall"),
        ("class A:\n    def __repr__(self):\n        while True: pass\nA()", "wall"),
        ("import os; os._exit(0)", ""),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", ""),
        ("import ctypes; ctypes.string_at(0)", ""),
    ],
)
def test_a_session_that_was_ended_begins_anew(session: Session, code: str, limit: str) -> None:
    assert session.python("x = 1").error == ""
    reply = session.python(code)
    if "SIGKILL" in code and not reply.lost:  # the first process of a namespace cannot do that to itself
        return
    assert (reply.lost, reply.limit_hit) == (True, limit or reply.limit_hit) and "gone" in reply.error
    assert "NameError" in session.python("x").error and session.python("y = 2; y").value == "2"


def test_processor_time_is_limited_for_the_whole_session(sandbox: Sandbox) -> None:
    spin = "import time\nend = time.process_time() + 0.7\nwhile time.process_time() < end: pass"
    with Session(sandbox, Limits(wall_s=5, cpu_s=1)) as session:
        replies = [session.python(spin) for _ in range(4)]
        assert not replies[0].lost and "cpu" in [reply.limit_hit for reply in replies]


def test_nothing_runs_between_calls(session: Session) -> None:
    session.python(
        "import threading\nn = 0\ndef count():\n    global n\n    while True: n += 1\nthreading.Thread(target=count, daemon=True).start()"
    )
    session.python("import time")
    first = float(session.python("time.process_time()").value)
    time.sleep(0.5)
    assert float(session.python("time.process_time()").value) - first < 0.2


def test_a_killed_helper_loses_no_state(sandbox: Sandbox) -> None:
    with Session(sandbox, LIMITS) as session:
        session.python("x = 1")
        session.write("a.txt", "a")
        sandbox.kill_helper()
        assert session.python("x += 1; x").value == "2" and session.read("a.txt").value == "a"
        killer = threading.Timer(0.3, sandbox.kill_helper)
        killer.start()
        assert session.python("import time; time.sleep(0.6); x += 1; x").value == "3"
        killer.join()


def test_many_sessions_use_few_processes() -> None:
    with Sandbox() as box:
        sessions = [Session(box, LIMITS) for _ in range(80)]
        for i, session in enumerate(sessions):
            session.python(f"x = {i}")
        assert sum(session._process.socket.fileno() >= 0 for session in sessions) <= 32
        assert [session.python("x").value for session in sessions] == [str(i) for i in range(80)]
        for session in sessions:
            session.close()
        end = time.monotonic() + 5
        while count_descendants(box._helper.process.pid) > 2 and time.monotonic() < end:
            time.sleep(0.05)
        assert count_descendants(box._helper.process.pid) <= 2


def test_calls_are_texts_of_limited_size(session: Session) -> None:
    with pytest.raises(TypeError, match="python takes texts, not int"):
        session.python(1)
    assert "at most" in session.write("a", "x" * (1 << 21)).error and session.list().value == ""


# What a session must not do


class Attack(NamedTuple):
    """Code that ends in an expression which is True if the attack, or its twin, has worked. `bad(f)` returns whether f() raises."""

    attack: str
    twin: str


PRELUDE = (
    "import os\ndef bad(f, *a):\n    try:\n        f(*a)\n    except BaseException:\n        return True\n    return False\n"
)
CONTAINED = {
    "opens a socket": Attack("import socket\nnot bad(socket.create_connection, ('127.0.0.1', PORT), 1)", "import socket\nbool(socket.socketpair())"),
    "reads a file of the host": Attack("not bad(open, 'SECRET')", "open('mine', 'w').close()\nnot bad(open, 'mine')"),
    "lists the host": Attack("not bad(os.listdir, 'HOST')", "os.listdir('.') == []"),
    "reads the environment": Attack("'JMARL_TEST_SECRET' in str(os.environ) or not bad(open, '/proc/1/environ')", "'PATH' in os.environ"),
    "starts a process": Attack("not bad(os.fork)", "import threading\nt = threading.Thread(target=int); t.start(); t.join(); True"),
    "runs a command": Attack("import subprocess\nnot bad(subprocess.run, ['/bin/true'])", "import sys\nbool(sys.version)"),
    "kills its parent": Attack("import signal\nnot bad(os.kill, os.getppid() or 2, signal.SIGKILL)", "os.getpid() > 0"),
    "makes a named pipe": Attack("not bad(os.mkfifo, 'p')", "bool(os.pipe())"),
    "mounts": Attack("import ctypes\nctypes.CDLL(None).mount(b'x', b'.', b'tmpfs', 0, None) == 0", "import ctypes\nctypes.sizeof(ctypes.c_int) == 4"),
    "raises its limits": Attack(
        "import resource\nnot bad(resource.setrlimit, resource.RLIMIT_AS, (-1, -1))",
        "import resource\nresource.getrlimit(resource.RLIMIT_AS)[0] >= 512 << 20",
    ),
    "fills memory": Attack("not bad(bytearray, 1 << 33)", "not bad(bytearray, 1 << 24)"),
    "a hard link to the host": Attack("not bad(os.link, 'SECRET', 'l')", "open('a', 'w').close(); os.link('a', 'b'); os.path.exists('b')"),
    "makes a device": Attack("not bad(os.mknod, 'd', 0o20666, os.makedev(1, 3))", "not bad(os.mkdir, 'd')"),
    "writes outside": Attack("not bad(open, '/usr/x', 'w') or not bad(open, '/sandbox/inside/x', 'w')", "not bad(open, 'x', 'w')"),
}  # fmt: skip


@pytest.mark.parametrize("name", CONTAINED)
def test_no_session_gets_out_of_its_confinement(session: Session, host: tuple, name: str) -> None:
    names, reached, directory = host
    before = sorted(directory.iterdir())
    session.python(PRELUDE)
    assert session.python(put(CONTAINED[name].attack, names)).value != "True"
    twin = Session(session.sandbox, LIMITS)
    twin.python(PRELUDE)
    assert twin.python(CONTAINED[name].twin).value == "True"
    twin.close()
    assert not reached and sorted(directory.iterdir()) == before


REPRS = {
    "raises": ("raise ValueError('mine')", "ValueError: mine"),
    "exits": ("raise SystemExit", "SystemExit"),
    "is not a text": ("return 1", "TypeError"),
    "is long": ("return 'x' * 10**7", "more characters"),
    "has lone surrogates": ("return '\\udc80' * 3", "\\udc80\\udc80\\udc80"),
    "reads the host": ("return open('SECRET').read()", "Error"),
}


@pytest.mark.parametrize("name", REPRS)
def test_the_repr_is_made_inside_the_session(session: Session, host: tuple, name: str) -> None:
    body, shown = REPRS[name]
    reply = session.python(put(f"class A:\n    def __repr__(self):\n        {body}\nA()", host[0]))
    assert shown in reply.value + reply.error and len(reply.text) < 70_000 and reply.value != "secret"
    assert session.python("class A:\n    def __repr__(self): return 'fine'\nA()").value == "fine"


FORGERIES = {
    "another reply": "m.send({'value': 'forged', 'error': ''})",
    "replies without a call": "[m.send({'value': 'forged', 'error': ''}) for _ in range(50)]",
    "a reply that is not JSON": "import os; os.write(m.write_fd, b'\\0\\0\\0\\5xxxxx')",
    "nested JSON": "import os; os.write(m.write_fd, b'\\0\\1\\0\\0' + b'[' * 65536)",
    "a huge length": "import os; os.write(m.write_fd, b'\\xff\\xff\\xff\\xff')",
    "half a frame": "import os; os.write(m.write_fd, b'\\0\\0')",
    "numbers instead of texts": "m.send({'value': 7, 'error': [1], 'lost': 'x', 'output': {}})",
    "a closed channel": "import os; os.close(m.read_fd); os.close(m.write_fd)",
    "a thread that swallows calls": "import threading, os\nthreading.Thread(target=lambda: [os.read(m.read_fd, 1) for _ in iter(int, 1)], daemon=True).start()",
}


@pytest.mark.parametrize("name", FORGERIES)
def test_a_session_that_forges_replies_affects_only_itself(session: Session, name: str) -> None:
    find = "import gc\nm = next(o for o in gc.get_objects() if type(o).__name__ == 'Channel')\n"
    assert not session.python(find + "m.send, m.read_fd, m.write_fd").error  # else the attacks would try nothing
    other = Session(session.sandbox, LIMITS)
    other.python("x = 1")
    start = time.monotonic()
    for code in (find + FORGERIES[name], "1 + 1", "2 + 2"):
        reply = session.python(code)
        assert all(type(text) is str for text in (reply.output, reply.value, reply.error)) and type(reply.lost) is bool
    assert time.monotonic() - start < 3 * LIMITS.wall_s + 2
    assert other.python("x").value == "1"
    other.close()


PATHS = {
    "..": "..", "above": "../../etc/passwd", "in the middle": "a/../../x", "absolute": "/etc/passwd", "the root": "/",
    "a link": "link", "a link in the path": "up/etc/passwd", "a device": "zero", "a loop": "loop",
    "empty": "", "null": "a\0b", "long": "x" * 5000, "a long part": "x" * 300, "deep": "d/" * 3000 + "x",
    "home": "~root/../../etc", "an open file": "/proc/self/fd/0", "missing": "nothing/at/all",
}  # fmt: skip


@pytest.mark.parametrize("name", PATHS)
def test_paths_cannot_leave_the_directory(session: Session, host: tuple, name: str) -> None:
    names, _, directory = host
    session.python(
        "import os\nos.symlink('/etc/passwd', 'link'); os.symlink('/', 'up'); os.symlink('/dev/zero', 'zero'); os.symlink('loop', 'loop')"
    )
    session.python("os.mkdir('a')")
    start = time.monotonic()
    for reply in (session.read(PATHS[name]), session.list(PATHS[name])):
        assert reply.error and not reply.value and not reply.lost, reply
    reply = session.write(PATHS[name], "x")
    assert reply.error or session.read(PATHS[name]).value == "x"
    assert time.monotonic() - start < 1
    assert session.write("own/file", "x").error == "" and session.read("own/file").value == "x"  # the twin
    assert session.read(put("SECRET", names)).error and (directory / "secret.txt").read_text() == "secret"


def test_unusual_names_and_long_files_and_listings_are_shown(patient_session: Session) -> None:
    patient_session.python("open('new\\nline', 'w').close(); open('\\udc80', 'wb').write(b'\\xff'); open('ü', 'w').close()")
    assert patient_session.list().value.splitlines() == ["'new\\nline'  0 bytes", "ü  0 bytes", "'\\udc80'  1 bytes"]
    assert patient_session.read("\udc80").value == "\\xff" and patient_session.read("new\nline").value == ""
    patient_session.python(
        "import os\nopen('big', 'w').write('x' * 10**6); os.mkdir('many')\nfor i in range(700): open(f'many/{i:03}', 'w').close()"
    )
    assert patient_session.read("big").value.endswith(" … (934464 more bytes)")
    listed = patient_session.list("many").value.splitlines()
    assert len(listed) == 501 and listed[0] == "000  0 bytes" and listed[-1] == "… and 200 more"


def test_pipes_and_devices_do_not_block() -> None:
    """At S1, where no filter forbids making them."""
    with Sandbox("unsafe-process") as box, Session(box, LIMITS) as session:
        session.python("import os\nos.mkfifo('p')")
        for _ in range(2):
            assert (
                "not a regular file" in session.read("p").error
                and session.write("p", "x").error
                and session.list().value == "p  pipe"
            )
            session.python("fd = os.open('p', os.O_RDWR)")  # both ends are open now, so that opening it succeeds


def test_files_have_a_limit(session: Session) -> None:
    for i in range(40):
        reply = session.write(f"f{i}", "x" * 900_000)
        if reply.error:
            break
    if session.sandbox.level == "S2":
        assert "size of all files" in reply.error and reply.limit_hit == "file" and reply.lost and i in range(15, 20)
        assert "too large" in session.python("open('f', 'w').write('x' * (17 << 20))").error
    else:
        assert "No space left" in reply.error and i in range(15, 19)
    assert session.python("1").value == "1"


def test_long_texts_are_cut_and_others_are_complete(session: Session) -> None:
    """Even those that do not fit into a socket at once."""
    session.python("x = 1")
    for code, shown, cut_off in (
        ("'日' * 60_000", 60_000, 0),
        ("'😀' * 70_000", 65_535, 4466),
        ("'\\0' * 20_000", 16_383, 3617 * 4),
    ):
        value = session.python(code).value
        assert value.count(eval(code)[0]) in (shown, 0) and ("more characters" in value) == bool(cut_off), (
            value[:20],
            value[-40:],
        )
    reply = session.python("print('y' * 100_000); x")
    assert reply.value == "1" and reply.output.endswith("y … (34465 more bytes)") and not reply.lost
    with Session(session.sandbox, Limits(output_kb=2000)) as long:
        assert len(long.python("print('a' * 1_500_000); 'b' * 1_000_000").text) > 2_400_000


def test_errors_and_paths_that_cannot_be_shown_lose_no_state(patient_session: Session) -> None:
    patient_session.python(
        "x = 1\nclass M(type):\n    __name__ = property(lambda c: 1 / 0)\nclass E(Exception, metaclass=M):\n    def __str__(self): return 1 / 0"
    )
    assert patient_session.python("raise E").error
    patient_session.python("import os\nos.symlink('end', 'l0')\nfor i in range(1500): os.symlink(f'l{i}', f'l{i + 1}')")
    for reply in (
        patient_session.read("\ud83d"),
        patient_session.write("\ud83d", "x"),
        patient_session.list("\ud83d"),
        patient_session.read("l1500"),
    ):
        assert reply.error and not reply.lost
    assert patient_session.write("a", "x").error == "" and "is a file" in patient_session.write("a/b", "x").error
    assert "directory" in patient_session.write("c/", "x").error and patient_session.python("x").value == "1"


def test_an_interrupted_call_does_not_answer_the_next_one(session: Session) -> None:
    """An interrupt such as Ctrl-C in a notebook."""
    session.python("x = 1")
    before = signal.signal(signal.SIGALRM, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    try:
        with pytest.raises(KeyboardInterrupt):
            session.python("import time; time.sleep(1); 'slept'")
    finally:
        signal.signal(signal.SIGALRM, before)
    assert [session.python(f"x + {i}").value for i in range(3)] == ["1", "2", "3"]


def test_threads_can_share_a_session(session: Session) -> None:
    session.python("n = 0")
    threads = [threading.Thread(target=lambda: [session.python("n += 1") for _ in range(10)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert session.python("n").value == "40"


@pytest.mark.long
def test_a_session_may_have_larger_limits_than_programs() -> None:
    try:
        with (
            Sandbox("S4", workers=1, limits=Limits(memory_mb=64)) as box,
            Session(box, Limits(wall_s=30, cpu_s=30, memory_mb=6000)) as session,
        ):
            assert session.python("x = bytearray(b'x') * (4700 << 20); len(x)").value == str(4700 << 20)
    except SandboxUnavailable as error:
        pytest.skip(f"level S4: {error}")
