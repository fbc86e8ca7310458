"""How the helper is started at each level, and what a level has to show before it is believed.

S4  namespaces (bubblewrap outside, more inside) and a control group that caps memory and processes of all programs together
S3  namespaces, as root and as an ordinary user
S2  Landlock (ABI 4), seccomp and limits: no network, no new processes, one directory; the host's processes stay visible
S1  limits and an empty environment: asked for by name only (`unsafe-process`)
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import platform
import shutil
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
import warnings
from collections.abc import Mapping
from pathlib import Path

from jmarl.sandbox.inside.confine import NOBODY, is_root
from jmarl.sandbox.inside.disk import remove
from jmarl.sandbox.types import Limits, SandboxUnavailable

INSIDE = Path(__file__).resolve().parent / "inside"
MOUNTED, LIBRARIES = "/sandbox/inside", "/sandbox/libraries"
CGROUPS = Path("/sys/fs/cgroup")
MAX_SESSIONS = 32  # that have a process at a time
SESSIONS_AT_ONCE = 4  # that may use all of their memory
# The package `inside` without the directory above it, and what is installed without any .pth file of it.
BOOT = """
import importlib.util as u, sys
sys.path += {libraries!r}
spec = u.spec_from_file_location("inside", {inside!r} + "/__init__.py", submodule_search_locations=[{inside!r}])
sys.modules["inside"] = module = u.module_from_spec(spec)
spec.loader.exec_module(module)
from inside.server import main
main({fd}, {level!r}, {readable!r}, {tmp!r})
"""
ENVIRONMENT = {
    "PYTHONHASHSEED": "0",
    "LANG": "C.UTF-8",
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "PATH": "/usr/bin:/bin",
}
REMEDY = {
    "S4": "control groups are optional: S3 holds without them",
    "S3": "install bubblewrap (Debian, Ubuntu: apt-get install bubblewrap) and allow user namespaces (sysctl "
    "kernel.apparmor_restrict_unprivileged_userns=0 on Ubuntu; in Docker --security-opt seccomp=unconfined)",
    "S2": "needs Linux 6.7 or later on x86-64 with Landlock",
    "S1": "needs Linux",
}


def interpreter() -> tuple[str, str]:
    """The bare interpreter, and the directory that it and its library are in."""
    executable = os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)
    return executable, os.path.realpath(sys.base_prefix)


def libraries() -> list[str]:
    return sorted({os.path.realpath(sysconfig.get_path(name)) for name in ("purelib", "platlib")})


@dataclasses.dataclass
class Launched:
    """A running helper."""

    process: subprocess.Popen
    control: socket.socket
    left: contextlib.ExitStack  # what it leaves on the host
    groups: list[Path]

    def make_room(self, limits: Limits, workers: int) -> None:
        """For so many programs at once, and no less than there was."""
        for name, value in group_limits(limits, workers).items():
            for group in self.groups:
                if (file := group / name).exists() and int(file.read_text()) < value:
                    file.write_text(str(value))

    def close(self) -> None:
        """End it and remove what it leaves."""
        self.control.close()  # the server ends, and with it all that it has started
        try:
            self.process.wait(2)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.left.close()


def launch(level: str, limits: Limits, workers: int) -> Launched:
    """Start the helper at a level; raises `SandboxUnavailable` with what the kernel or bubblewrap said."""
    with contextlib.ExitStack() as left:
        mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        left.enter_context(mine)
        errors = left.enter_context(tempfile.TemporaryFile())
        groups: list[Path] = []
        with its:
            try:
                if level == "S4":
                    groups = control_groups(limits, workers, left)
                process = subprocess.Popen(
                    command_at(level, its.fileno(), groups, left), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                    stderr=errors, pass_fds=[its.fileno()], env=ENVIRONMENT, cwd="/", start_new_session=True,
                )  # fmt: skip
            except OSError as error:
                raise SandboxUnavailable(f"{level}: {error}") from None
        mine.settimeout(10)
        try:
            ready = mine.recv(16) == b"ready"
        except OSError:
            ready = False
        mine.settimeout(None)
        if not ready:
            process.kill()
            process.wait()
            errors.seek(0)
            said = errors.read(4096).decode("utf-8", "replace").strip()
            raise SandboxUnavailable(f"{level}: {said.splitlines()[-1] if said else 'the helper did not start'}")
        return Launched(process, mine, left.pop_all(), groups)


def command_at(level: str, fd: int, groups: list[Path], left: contextlib.ExitStack) -> list[str]:
    """The helper's command. groups: those that it enters; left: takes what has to be removed when it has ended."""
    executable, prefix = interpreter()
    bare = [executable, "-s", "-S", "-P", "-B", "-c"]
    about = dict(fd=fd, level=level)
    if level in ("S2", "S1"):
        tmp = tempfile.mkdtemp(prefix="jmarl-sandbox-")
        left.callback(_remove_directory, tmp)
        readable = [prefix, *libraries(), str(INSIDE), "/usr", "/lib", "/lib64", "/bin"]
        return [*bare, BOOT.format(inside=str(INSIDE), libraries=libraries(), readable=readable, tmp=tmp, **about)]
    if prefix.startswith("/tmp/"):
        raise SandboxUnavailable(
            f"{level}: Python lies in {prefix}, and programs have a /tmp of their own: install it elsewhere"
        )
    seen = {place: f"{LIBRARIES}/{i}" for i, place in enumerate(libraries())}  # they may well lie in /tmp
    boot = BOOT.format(inside=MOUNTED, libraries=list(seen.values()), readable=[], tmp="", **about)
    command = [*bubblewrap({prefix: prefix, **seen}), *bare, boot]
    if level == "S3":
        return command
    enter = 'n=$1; shift; while [ $n -gt 0 ]; do echo $$ > "$1/cgroup.procs" || exit 71; shift; n=$((n-1)); done; exec "$@"'
    return ["/bin/sh", "-c", enter, "sh", str(len(groups)), *map(str, groups), *command]


def bubblewrap(places: Mapping[str, str]) -> list[str]:
    """The command up to the interpreter: what is mounted, and nothing else is there. places: directories, and where they are
    seen."""
    found = shutil.which("bwrap")
    if found is None:
        raise SandboxUnavailable(f"S3: bwrap is not installed: {REMEDY['S3']}")
    command = [found, "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"]
    command += ["--new-session", "--as-pid-1", "--cap-drop", "ALL"]
    nobody = str(NOBODY)  # without rights a namespace cannot make another in which its root is mapped
    as_user = ["--unshare-user", "--uid", nobody, "--gid", nobody]
    command += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"] if is_root() else as_user
    command += ["--clearenv", *(word for name, value in ENVIRONMENT.items() for word in ("--setenv", name, value))]
    command += ["--ro-bind", "/usr", "/usr"]
    for name in ("/bin", "/sbin", "/lib", "/lib64"):
        if os.path.islink(name):
            command += ["--symlink", os.readlink(name), name]
        elif os.path.isdir(name):
            command += ["--ro-bind", name, name]
    above = {"/dev", *(str(parent) for place in [*places.values(), MOUNTED] for parent in Path(place).parents)} - {"/"}
    for directory in sorted(directory for directory in above if not f"{directory}/".startswith("/usr/")):
        command += ["--perms", "0755", "--dir", directory]  # bwrap itself would make them for their owner only
    for place, seen in places.items():
        if not seen.startswith("/usr/"):
            command += ["--ro-bind", place, seen]
        if os.path.isdir(os.path.join(place, "jmarl")):
            command += ["--tmpfs", os.path.join(seen, "jmarl")]
    for name in ("null", "zero", "random", "urandom"):
        command += ["--dev-bind", f"/dev/{name}", f"/dev/{name}"]
    command += ["--ro-bind", str(INSIDE), MOUNTED, "--proc", "/proc", "--dir", "/tmp", "--remount-ro", "/"]
    return [*command, "--chdir", "/", "--"]


def group_limits(limits: Limits, workers: int) -> dict[str, int]:
    """Names of files, in the two versions of control groups, and what they hold."""
    memory = (workers + SESSIONS_AT_ONCE) * (limits.memory_mb + 256) + 512 << 20
    processes = (workers + MAX_SESSIONS) * (limits.processes + 16) + 64
    return {"memory.limit_in_bytes": memory, "memory.max": memory, "pids.max": processes}


def control_groups(limits: Limits, workers: int, left: contextlib.ExitStack) -> list[Path]:
    """A group for the helper in each hierarchy: version 1 has one for memory and one for processes, version 2 one for both."""
    if (CGROUPS / "memory/cgroup.procs").exists():
        wanted = {CGROUPS / "memory": ["memory.limit_in_bytes"], CGROUPS / "pids": ["pids.max"]}
    else:
        wanted = {CGROUPS: ["memory.max", "pids.max"]}
    groups = []
    for parent, files in wanted.items():
        for old in parent.glob("jmarl-*-*"):
            if not os.path.exists(f"/proc/{old.name.split('-')[1]}"):  # of a client that was killed
                _remove_group(old)
        group = parent / f"jmarl-{os.getpid()}-{os.urandom(4).hex()}"
        group.mkdir()
        left.callback(_remove_group, group)
        groups.append(group)
        for name in files:
            (group / name).write_text(str(group_limits(limits, workers)[name]))
    return groups


def _remove_group(group: Path) -> None:
    """The kernel needs a moment until it is empty."""
    for _ in range(100):
        try:
            return group.rmdir()
        except OSError:
            time.sleep(0.02)


def _remove_directory(directory: str) -> None:
    """What a helper that was killed has left."""
    try:
        remove(directory)
    except OSError as error:
        warnings.warn(f"{directory}, where programs ran, could not be removed: {error}", stacklevel=2)


def supported(level: str) -> str:
    """Why a level cannot hold here, if that is known without trying; else empty."""
    if platform.system() != "Linux":
        return "the sandbox needs Linux"
    if level in ("S4", "S3", "S2") and platform.machine() != "x86_64":
        return f"the filter of system calls is for x86-64, this is {platform.machine()}"
    return ""
