"""Without namespaces (S2) a program's disk is bounded, and its directory and processes are gone before its verdict is there."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from test_sandbox_attacks import processes_below

from jmarl.sandbox import Limits, Sandbox, SandboxUnavailable, Session, asserts, unittests
from jmarl.sandbox.inside import disk

ADD = "def add(a, b):\n    return a + b\n"
SUM = asserts("assert add(1, 2) == 3")
UNIT = unittests("import unittest\nclass T(unittest.TestCase):\n    def test(self): self.assertEqual(add(1, 2), 3)")
LIMITS = Limits(wall_s=5, file_mb=64)
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
    kept, i = [], 0
    while i < 40:
        i += 1
        for place in places:
"""
FLOODS = {
    "files of 64 MB wherever it may": WRITE.format(unlink="unlink=0")
    + "            fd = write(f'{place}/f{i}')\n            if fd: os.close(fd)\n",
    "files without a name": WRITE.format(unlink="unlink=1") + "            kept.append(write(f'{place}/f{i}'))\n",
    "files in a directory that is renamed": WRITE.format(unlink="unlink=0").replace(
        "    kept,",
        "    os.mkdir('a')\n    def spin():\n        while True:\n            for x, y in ('ab', 'ba'):\n"
        "                try: os.rename(x, y)\n                except OSError: pass\n"
        "    threading.Thread(target=spin, daemon=True).start()\n    kept,",
    )
    + "            for d in 'ab':\n                fd = write(f'{d}/f{i}')\n                if fd: os.close(fd)\n",
    "many files": WRITE.format(unlink="unlink=0")
    + "            for j in range(3000): open(f'f{i}-{j}', 'wb').write(bytes(30000))\n",
}
FOLDERS = {
    "in each other": "import os\ndef add(a, b):\n    while True:\n        os.mkdir('d'); os.chdir('d')\n",
    "beside each other": "import os\ndef add(a, b):\n    for i in range(1 << 40): os.mkdir(str(i))\n",
    "around each other": "import os\ndef add(a, b):\n    os.mkdir('d')\n    while True:\n"
    "        os.mkdir('e'); os.rename('d', 'e/d'); os.rename('e', 'd')\n",
    "that cannot be read": "import os\ndef add(a, b):\n    os.mkdir('d', 0o300)\n"
    "    for i in range(1 << 40): os.mkdir(f'd/{i}', 0o300)\n",
}


@pytest.fixture(scope="module")
def alone():
    """A sandbox at level S2, and the directory that all of its programs have theirs in."""
    try:
        with Sandbox("S2", workers=2, cache=0) as found:
            yield found, directory_of(found)
    except SandboxUnavailable as error:
        pytest.skip(f"level S2: {error}")


def helper_of(box: Sandbox) -> int:
    assert box._helper is not None
    return box._helper.process.pid


def directory_of(box: Sandbox) -> Path:
    command = Path(f"/proc/{helper_of(box)}/cmdline").read_text()
    return Path(re.findall(r"/[\w/.]*jmarl-sandbox-\w+", command)[0])


def open_files() -> list[str]:
    """What all processes have open; processes may end meanwhile."""
    found = []
    for process in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            found += [f"/proc/{process}/fd/{fd}" for fd in os.listdir(f"/proc/{process}/fd")]
    return found


class Watched:
    """The most megabytes that files below a directory, and those that processes below `pid` have open, take meanwhile."""

    def __init__(self, directory: Path, pid: int):
        self.directory, self.pid, self.most, self._over = directory, pid, 0, False
        self._thread = threading.Thread(target=self._watch)

    def _watch(self) -> None:
        while not self._over:
            found = {}
            try:
                for fd, name, _ in disk.walk(str(self.directory)):
                    about = os.stat(name, dir_fd=fd, follow_symlinks=False)
                    found[about.st_ino] = about.st_blocks
            except OSError:
                pass
            for path in open_files():
                try:
                    if str(self.directory) in os.readlink(path):
                        about = os.stat(path)
                        found[about.st_ino] = about.st_blocks
                except OSError:
                    continue
            self.most = max(self.most, sum(found.values()) >> 11)

    def __enter__(self) -> Watched:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over = True
        self._thread.join()


@pytest.mark.parametrize("name", FLOODS)
@pytest.mark.parametrize("tests", [SUM, UNIT], ids=["asserts", "unittest"])
def test_disk_is_bounded_by_its_limit(alone, name, tests):
    """64 MB, with what is written between two measures, which on a busy machine are some time apart. What is seen here may be
    less than there was, never more."""
    box, directory = alone
    with Watched(directory, helper_of(box)) as watched:
        result = box.run(FLOODS[name], tests, LIMITS)
        left = list(directory.iterdir())
    assert (result.outcome, result.kind, result.limit_hit) == ("error", "limit", "file"), result
    assert not left and watched.most < 256, watched.most


@pytest.mark.parametrize("name", FOLDERS)
def test_folders_without_end_are_gone_before_the_verdict(alone, name):
    box, directory = alone
    began = time.monotonic()
    result = box.run(FOLDERS[name], SUM, LIMITS)
    left = list(directory.iterdir())
    assert (result.outcome, result.limit_hit) == ("error", "file"), result
    assert not left and time.monotonic() - began < LIMITS.wall_s + 5
    assert ended(box)


def ended(box: Sandbox, within: float = 0.2) -> bool:
    """Whether all processes but the helper have: the one that sends a verdict does so a moment after it."""
    end = time.monotonic() + within
    while (found := processes_below(helper_of(box))) and time.monotonic() < end:
        time.sleep(0.01)
    return found == 0


def test_what_a_program_may_do_below_the_limits_passes(alone):
    """Deep, wide, without names, without rights, and more in all than at a time."""
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
    box, directory = alone
    result = box.run(program.replace("os.mkdir('locked'", "os.path.exists('locked') or os.mkdir('locked'") + ADD, SUM)
    assert (result.outcome, result.limit_hit) in (("passed", ""), ("error", "file")), result
    if "root" in whose(box):  # who else cannot look into a directory that is locked
        assert result.outcome == "passed", result
    assert not list(directory.iterdir())


def whose(box: Sandbox) -> str:
    return "root" if Path(f"/proc/{helper_of(box)}").stat().st_uid == 0 else "nobody"


def test_what_would_hide_files_is_refused(alone):
    """Blocks that are set aside, and a process that cannot be looked into."""
    hides = "import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\n"
    hides += "open('f', 'wb').close()\nfd = os.open('f', os.O_RDWR)\n"
    hides += "won = [libc.fallocate(fd, 1, ctypes.c_long(0), ctypes.c_long(1 << 20)), libc.prctl(4, 0, 0, 0, 0)]\n"
    assert alone[0].run(f"{hides}def add(a, b): return won", asserts("assert add(1, 2) == [-1, -1]")).outcome == "passed"


def test_files_that_are_mapped_and_have_no_name_are_bounded_too(alone):
    """By what the kernel says has been written; a tmpfs is no disk."""
    box, directory = alone
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
    result = box.run(program, SUM, Limits(wall_s=8, file_mb=16))
    assert (result.outcome, result.limit_hit) == ("error", "file"), result


def test_a_session_has_the_same_limit(alone):
    box, directory = alone
    with Session(box, LIMITS) as session:
        session.python("x = 1")
        with Watched(directory, helper_of(box)) as watched:
            reply = session.python(f"{FLOODS['files without a name']}\nadd(1, 2)")
        assert reply.lost and not reply.fault and reply.limit_hit == "file" and watched.most < 128, (reply, watched.most)
        assert not list(directory.iterdir()) and ended(box)
        assert session.python("1 + 1").value == "2"


CLIENT = """
import sys, threading, time
from jmarl.sandbox import Limits, Sandbox, asserts
box = Sandbox("S2")
print(box._helper.process.pid, flush=True)
program = "import os\\ndef add(a, b):\\n    for i in range(1 << 40): os.mkdir(str(i)); os.rmdir(str(i - 9)) if i > 9 else 0"
box.run_many([program + f"\\n# {i}" for i in range(2)], [asserts("assert add(1, 2)")] * 2, Limits(wall_s=60, cpu_s=60))
"""


def test_nothing_is_left_of_programs_whose_client_was_killed(alone):
    """They are still making folders: they end first, then the folders go."""
    del alone
    client = subprocess.Popen([sys.executable, "-c", CLIENT], stdout=subprocess.PIPE, text=True)
    assert client.stdout is not None
    helper = int(client.stdout.readline())
    command = Path(f"/proc/{helper}/cmdline").read_text()
    directory = Path(re.findall(r"/[\w/.]*jmarl-sandbox-\w+", command)[0])
    for _ in range(200):
        if len(list(directory.glob("*/*/*"))) > 1:
            break
        time.sleep(0.02)
    below = [helper, *descendants(helper)]
    assert len(below) >= 5
    client.kill()
    client.wait()
    client.stdout.close()
    end = time.monotonic() + 3
    while directory.exists() and time.monotonic() < end:
        time.sleep(0.02)
    assert not directory.exists()
    while any(running(pid) for pid in below) and time.monotonic() < end:
        time.sleep(0.02)
    assert not any(running(pid) for pid in below)


def descendants(pid: int) -> list[int]:
    try:
        own = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []
    return own + [x for child in own for x in descendants(child)]


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


# Parts


def test_remove_takes_any_tree(tmp_path):
    """Deeper than a path may be long, locked, and with links that lead out of it."""
    outside = tmp_path / "outside"
    outside.mkdir(mode=0o750)
    (outside / "kept").write_text("x")
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
    disk.remove(str(top))
    assert not top.exists() and (outside / "kept").read_text() == "x" and outside.stat().st_mode & 0o777 == 0o750
    disk.remove(str(top))  # there is none


def test_remove_says_what_is_in_the_way(tmp_path):
    """Here a file of the same name."""
    (tmp_path / "top").write_text("x")
    with pytest.raises(NotADirectoryError):
        disk.remove(str(tmp_path / "top"), seconds=0.05)
