"""Without namespaces (S2) disk use is bounded, and directory and processes are removed before the client gets the verdict."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_sandbox_attacks import count_descendants, sandbox_directories

from jmarl.sandbox import Limits, Sandbox, SandboxUnavailable, Session, Tests, asserts, unittests
from jmarl.sandbox.inside import disk

ADD = "def add(a, b):\n    return a + b\n"
SUM = asserts("assert add(1, 2) == 3")
UNIT = unittests("import unittest\nclass T(unittest.TestCase):\n    def test(self): self.assertEqual(add(1, 2), 3)")
LIMITS = Limits(wall_s=30, cpu_s=30, file_mb=64)  # the wall clock is not what ends them, also on a busy machine
WRITE = """
import os, threading
places = ['.', '..', '/tmp', '/var/tmp', '/dev/shm', os.path.expanduser('~'), '/run']
def write(name, {unlink}):
    try:
        fd = os.open(name, os.O_CREAT | os.O_RDWR)
    except OSError:
        return
    if unlink: os.unlink(name)
    try:
        for _ in range(64): os.write(fd, bytes(1 << 20))
    except OSError: pass
    return fd
def add(a, b):
    fds, i = [], 0
    while i < 40:
        i += 1
        for place in places:
"""
FLOODS = {
    "files of 64 MB in every writable directory": WRITE.format(unlink="unlink=0")
    + "            fd = write(f'{place}/f{i}')\n            if fd: os.close(fd)\n",
    "files without a name": WRITE.format(unlink="unlink=1") + "            fds.append(write(f'{place}/f{i}'))\n",
    "files in a directory that is renamed": WRITE.format(unlink="unlink=0").replace(
        "    fds,",
        "    os.mkdir('a')\n    def spin():\n        while True:\n            for x, y in ('ab', 'ba'):\n"
        "                try: os.rename(x, y)\n                except OSError: pass\n"
        "    threading.Thread(target=spin, daemon=True).start()\n    fds,",
    )
    + "            for d in 'ab':\n                fd = write(f'{d}/f{i}')\n                if fd: os.close(fd)\n",
    "many files": WRITE.format(unlink="unlink=0")
    + "            for j in range(3000): open(f'f{i}-{j}', 'wb').write(bytes(30000))\n",
}
NESTED = {
    "one inside the other": "import os\ndef add(a, b):\n    while True:\n        os.mkdir('d'); os.chdir('d')\n",
    "side by side": "import os\ndef add(a, b):\n    for i in range(1 << 40): os.mkdir(str(i))\n",
    "one around the other": "import os\ndef add(a, b):\n    os.mkdir('d')\n    while True:\n"
    "        os.mkdir('e'); os.rename('d', 'e/d'); os.rename('e', 'd')\n",
    "that cannot be read": "import os\ndef add(a, b):\n    os.mkdir('d', 0o300)\n"
    "    for i in range(1 << 40): os.mkdir(f'd/{i}', 0o300)\n",
}


@pytest.fixture(scope="module")
def s2() -> Iterator[tuple[Sandbox, Path]]:
    """A sandbox at level S2, and the directory that holds those of its programs."""
    try:
        with Sandbox("S2", workers=2, cache=0) as box:
            [directory] = sandbox_directories(helper_pid(box))
            yield box, directory
    except SandboxUnavailable as error:
        pytest.skip(f"level S2: {error}")


def helper_pid(box: Sandbox) -> int:
    assert box._helper is not None
    return box._helper.process.pid


def open_files() -> list[str]:
    """Return the paths in /proc of the open files of all processes."""
    paths = []
    for process in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            paths += [f"/proc/{process}/fd/{fd}" for fd in os.listdir(f"/proc/{process}/fd")]
    return paths


class DiskWatch:
    """Measures in a thread the files below a directory, those that are open without a name included. max_mb: the most so
    far."""

    def __init__(self, directory: Path):
        self.directory, self.max_mb, self._ended = directory, 0, False
        self._thread = threading.Thread(target=self._watch)

    def _watch(self) -> None:
        while not self._ended:
            blocks = {}
            try:
                for fd, name, _ in disk.walk(str(self.directory)):
                    status = os.stat(name, dir_fd=fd, follow_symlinks=False)
                    blocks[status.st_ino] = status.st_blocks
            except OSError:
                pass
            for path in open_files():
                try:
                    if str(self.directory) in os.readlink(path):
                        status = os.stat(path)
                        blocks[status.st_ino] = status.st_blocks
                except OSError:
                    continue
            self.max_mb = max(self.max_mb, sum(blocks.values()) >> 11)

    def __enter__(self) -> DiskWatch:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended = True
        self._thread.join()


@pytest.mark.parametrize("name", FLOODS)
@pytest.mark.parametrize("tests", [SUM, UNIT], ids=["asserts", "unittest"])
def test_disk_use_is_bounded(s2: tuple[Sandbox, Path], name: str, tests: Tests) -> None:
    """The limit is 64 MB; what is written between two measurements comes on top, and on a busy machine they are some time
    apart. The watch may miss a peak, but never shows too much."""
    box, directory = s2
    with DiskWatch(directory) as watch:
        result = box.run(FLOODS[name], tests, LIMITS)
        remaining = list(directory.iterdir())
    assert (result.outcome, result.kind, result.limit_hit) == ("error", "limit", "file"), result
    assert not remaining and watch.max_mb < 256, watch.max_mb


@pytest.mark.parametrize("name", NESTED)
def test_endless_directories_are_removed_before_the_verdict(s2: tuple[Sandbox, Path], name: str) -> None:
    box, directory = s2
    result = box.run(NESTED[name], SUM, LIMITS)
    remaining = list(directory.iterdir())
    assert (result.outcome, result.limit_hit) == ("error", "file"), result
    assert not remaining
    assert has_no_descendants(box)


def has_no_descendants(box: Sandbox, timeout_s: float = 0.2) -> bool:
    """Return whether the helper is the only process soon: a runner ends a moment after it has sent its verdict."""
    deadline = time.monotonic() + timeout_s
    while (count := count_descendants(helper_pid(box))) and time.monotonic() < deadline:
        time.sleep(0.01)
    return count == 0


def test_unusual_use_below_the_limits_passes(s2: tuple[Sandbox, Path]) -> None:
    """Deep and wide directories, files without names or permissions, and more data in total than at any time."""
    program = """
import mmap, os, tempfile
for _ in range(300): os.mkdir('d'); os.chdir('d')
os.chdir(os.environ['HOME'])
for i in range(1500): open(f'f{i}', 'w').close()
os.mkdir('locked', 0o300); open('locked/f', 'w').write('x'); os.mkdir('none', 0)
for _ in range(4): open('big', 'wb').write(bytes(10 << 20)); os.unlink('big')
with tempfile.TemporaryFile() as f:
    f.write(bytes(1 << 20)); f.flush(); m = mmap.mmap(f.fileno(), 0)
"""
    box, directory = s2
    program = program.replace("os.mkdir('locked'", "os.path.exists('locked') or os.mkdir('locked'")
    result = box.run(program + ADD, SUM, Limits(wall_s=30))
    assert (result.outcome, result.limit_hit) in (("passed", ""), ("error", "file")), result
    if runs_as_root(box):  # another user cannot look into a locked directory, so it counts as too much
        assert result.outcome == "passed", result
    assert not list(directory.iterdir())


def runs_as_root(box: Sandbox) -> bool:
    return Path(f"/proc/{helper_pid(box)}").stat().st_uid == 0


def test_calls_that_would_hide_files_are_refused(s2: tuple[Sandbox, Path]) -> None:
    """fallocate reserves blocks, and prctl makes a process invisible for others."""
    hides = "import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\n"
    hides += "open('f', 'wb').close()\nfd = os.open('f', os.O_RDWR)\n"
    hides += "won = [libc.fallocate(fd, 1, ctypes.c_long(0), ctypes.c_long(1 << 20)), libc.prctl(4, 0, 0, 0, 0)]\n"
    assert s2[0].run(f"{hides}def add(a, b): return won", asserts("assert add(1, 2) == [-1, -1]")).outcome == "passed"


def test_mapped_files_without_a_name_are_bounded(s2: tuple[Sandbox, Path]) -> None:
    """The kernel counts the bytes written to a disk, but not those written to a tmpfs."""
    box, directory = s2
    kind = subprocess.run(["stat", "-f", "-c", "%T", directory], capture_output=True, text=True).stdout.strip()
    if kind == "tmpfs":
        pytest.skip("the temporary directory is on a tmpfs")
    program = """
import ctypes, os
libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
def add(a, b):
    for i in range(100):
        fd = os.open('f', os.O_CREAT | os.O_RDWR); os.unlink('f')
        for _ in range(15): os.write(fd, bytes(1 << 20))
        libc.mmap(None, 4096, 1, 1, fd, 0); os.close(fd)
    return 3
"""
    result = box.run(program, SUM, Limits(wall_s=30, cpu_s=30, file_mb=16))
    assert (result.outcome, result.limit_hit) == ("error", "file"), result


def test_sessions_have_the_same_limit(s2: tuple[Sandbox, Path]) -> None:
    box, directory = s2
    with Session(box, LIMITS) as session:
        session.python("x = 1")
        with DiskWatch(directory) as watch:
            reply = session.python(f"{FLOODS['files without a name']}\nadd(1, 2)")
        assert reply.lost and not reply.fault and reply.limit_hit == "file" and watch.max_mb < 128, (reply, watch.max_mb)
        assert not list(directory.iterdir()) and has_no_descendants(box)
        assert session.python("1 + 1").value == "2"


CLIENT = """
import sys, threading, time
from jmarl.sandbox import Limits, Sandbox, asserts
box = Sandbox("S2")
print(box._helper.process.pid, flush=True)
program = "import os\\ndef add(a, b):\\n    for i in range(1 << 40): os.mkdir(str(i)); os.rmdir(str(i - 9)) if i > 9 else 0"
box.run_many([program + f"\\n# {i}" for i in range(2)], [asserts("assert add(1, 2)")] * 2, Limits(wall_s=60, cpu_s=60))
"""


def test_programs_and_directories_of_a_killed_client_are_removed(s2: tuple[Sandbox, Path]) -> None:
    """The programs still make directories at that time: they end first, then the directories are removed."""
    del s2
    client = subprocess.Popen([sys.executable, "-c", CLIENT], stdout=subprocess.PIPE, text=True)
    assert client.stdout is not None
    helper = int(client.stdout.readline())
    [directory] = sandbox_directories(helper)
    for _ in range(200):
        if len(list(directory.glob("*/*/*"))) > 1:
            break
        time.sleep(0.02)
    pids = [helper, *descendants(helper)]
    assert len(pids) >= 5
    client.kill()
    client.wait()
    client.stdout.close()
    end = time.monotonic() + 3
    while directory.exists() and time.monotonic() < end:
        time.sleep(0.02)
    assert not directory.exists()
    while any(is_running(pid) for pid in pids) and time.monotonic() < end:
        time.sleep(0.02)
    assert not any(is_running(pid) for pid in pids)


def descendants(pid: int) -> list[int]:
    try:
        own = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []
    return own + [x for child in own for x in descendants(child)]


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


# Single functions


def test_remove_tree_removes_any_tree(tmp_path: Path) -> None:
    """One that is deeper than a path may be long, with a locked directory and a link that leads out of it."""
    outside = tmp_path / "outside"
    outside.mkdir(mode=0o750)
    (outside / "file").write_text("x")
    top = tmp_path / "top"
    top.mkdir()
    os.symlink(outside, top / "link")
    os.mkfifo(top / "pipe")
    fd = os.open(top, os.O_RDONLY)
    for _ in range(500):
        os.mkdir("deep" * 10, dir_fd=fd)
        below = os.open("deep" * 10, os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = below
    os.mkdir("locked", 0, dir_fd=fd)
    os.close(fd)
    assert sum(1 for _ in disk.walk(str(top), unlock=True)) == 503
    disk.remove_tree(str(top))
    assert not top.exists() and (outside / "file").read_text() == "x" and outside.stat().st_mode & 0o777 == 0o750
    disk.remove_tree(str(top))  # a directory that does not exist is no error


def test_remove_tree_raises_what_is_in_the_way(tmp_path: Path) -> None:
    """A file of the same name."""
    (tmp_path / "top").write_text("x")
    with pytest.raises(NotADirectoryError):
        disk.remove_tree(str(tmp_path / "top"), timeout_s=0.05)
