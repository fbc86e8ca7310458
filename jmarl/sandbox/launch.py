"""Start the fork server confined at a level.

S4  namespaces (bubblewrap outside, more inside) and a control group that caps memory and processes of all programs together
S3  namespaces, as root and as an ordinary user
S2  Landlock (ABI 4), seccomp and limits: no network, no new processes, one directory; the host's processes stay visible,
    and installed libraries readable, jmarl among them
S1  limits and an empty environment only; never chosen automatically (`unsafe-process`)
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
from jmarl.sandbox.inside.disk import remove_tree
from jmarl.sandbox.types import Limits, SandboxUnavailable

INSIDE = Path(__file__).resolve().parent / "inside"
MOUNTED_INSIDE, MOUNTED_LIBRARIES = "/sandbox/inside", "/sandbox/libraries"  # paths that programs see
CGROUPS = Path("/sys/fs/cgroup")
MAX_SESSIONS = 32  # that have a process at a time
SESSIONS_WITH_FULL_MEMORY = 4  # that the control group has room for when they use all that they may
# Imports the package `inside` without the directory above it, and adds installed libraries without running their .pth files.
BOOT = """
import importlib.util as u, sys
sys.path += {libraries!r}
spec = u.spec_from_file_location("inside", {inside!r} + "/__init__.py", submodule_search_locations=[{inside!r}])
sys.modules["inside"] = module = u.module_from_spec(spec)
spec.loader.exec_module(module)
from inside.server import main
main({fd}, {level!r}, {readable!r}, {tmp!r})
"""
# Makes a shell enter control groups: their number, their directories, and then the command to run in them.
ENTER_GROUPS = 'n=$1; shift; while [ $n -gt 0 ]; do echo $$ > "$1/cgroup.procs" || exit 71; shift; n=$((n-1)); done; exec "$@"'
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


def unsupported_reason(level: str) -> str:
    """Return why a level cannot hold on this machine if that is known without trying, else an empty text."""
    if platform.system() != "Linux":
        return "the sandbox needs Linux"
    if level in ("S4", "S3", "S2") and platform.machine() != "x86_64":
        return f"the filter of system calls is for x86-64, this is {platform.machine()}"
    return ""


def interpreter() -> tuple[str, str]:
    """Return the interpreter without its virtual environment, and the directory that holds it and the standard library."""
    executable = os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)
    return executable, os.path.realpath(sys.base_prefix)


def libraries() -> list[str]:
    """Return the directories of installed libraries."""
    return sorted({os.path.realpath(sysconfig.get_path(name)) for name in ("purelib", "platlib")})


@dataclasses.dataclass
class Helper:
    """A running helper process: the fork server, or the bubblewrap process that runs it.

    control: the socket on which it takes requests. resources: what has to be removed from the host when it ends. groups: its
    control groups (S4).
    """

    process: subprocess.Popen
    control: socket.socket
    resources: contextlib.ExitStack
    groups: list[Path]

    def raise_group_limits(self, limits: Limits, workers: int) -> None:
        """Make room for so many programs at once with these limits; never lower a limit."""
        for name, value in group_limits(limits, workers).items():
            for group in self.groups:
                if (file := group / name).exists() and int(file.read_text(encoding="utf-8")) < value:
                    file.write_text(str(value), encoding="utf-8")

    def close(self) -> None:
        """End the helper with everything that it has started, and remove its resources."""
        self.control.close()  # the fork server ends when this is closed
        try:
            self.process.wait(2)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.resources.close()


def start_helper(level: str, limits: Limits, workers: int) -> Helper:
    """Start a helper at a level. Raises `SandboxUnavailable` with what the kernel or bubblewrap said."""
    with contextlib.ExitStack() as resources:
        control, helper_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        resources.enter_context(control)
        errors = resources.enter_context(tempfile.TemporaryFile())
        groups: list[Path] = []
        with helper_end:
            try:
                if level == "S4":
                    groups = make_control_groups(limits, workers, resources)
                process = subprocess.Popen(
                    helper_command(level, helper_end.fileno(), groups, resources), stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL, stderr=errors, pass_fds=[helper_end.fileno()], env=ENVIRONMENT, cwd="/",
                    start_new_session=True,
                )  # fmt: skip
            except OSError as error:
                raise SandboxUnavailable(f"{level}: {error}") from None
        control.settimeout(10)
        try:
            ready = control.recv(16) == b"ready"
        except OSError:
            ready = False
        control.settimeout(None)
        if not ready:
            process.kill()
            process.wait()
            errors.seek(0)
            text = errors.read(4096).decode("utf-8", "replace").strip()
            raise SandboxUnavailable(f"{level}: {text.splitlines()[-1] if text else 'the helper did not start'}")
        return Helper(process, control, resources.pop_all(), groups)


def helper_command(level: str, fd: int, groups: list[Path], resources: contextlib.ExitStack) -> list[str]:
    """Return the command that starts a helper. fd: its end of the control socket. groups: control groups that it enters.
    resources: gets what has to be removed when the helper ends."""
    executable, prefix = interpreter()
    python = [executable, "-s", "-S", "-P", "-B", "-c"]
    if level in ("S2", "S1"):
        tmp = tempfile.mkdtemp(prefix="jmarl-sandbox-")
        resources.callback(_remove_directory, tmp)
        readable = [prefix, *libraries(), str(INSIDE), "/usr", "/lib", "/lib64", "/bin"]
        boot = BOOT.format(inside=str(INSIDE), libraries=libraries(), readable=readable, tmp=tmp, fd=fd, level=level)
        return [*python, boot]
    if prefix.startswith("/tmp/"):
        raise SandboxUnavailable(
            f"{level}: Python is installed in {prefix}, but programs get a /tmp of their own: install it elsewhere"
        )
    mounts = {path: f"{MOUNTED_LIBRARIES}/{i}" for i, path in enumerate(libraries())}  # moved, because they may be in /tmp
    boot = BOOT.format(inside=MOUNTED_INSIDE, libraries=list(mounts.values()), readable=[], tmp="", fd=fd, level=level)
    command = [*bubblewrap_command({prefix: prefix, **mounts}), *python, boot]
    return command if level == "S3" else ["/bin/sh", "-c", ENTER_GROUPS, "sh", str(len(groups)), *map(str, groups), *command]


def bubblewrap_command(mounts: Mapping[str, str]) -> list[str]:
    """Return the command that precedes the interpreter. Only what it mounts is visible inside.

    mounts: directories of the host, and the paths that they get. The directory `jmarl` of a library is hidden.
    """
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        raise SandboxUnavailable(f"S3: bwrap is not installed: {REMEDY['S3']}")
    command = [bwrap, "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"]
    command += ["--new-session", "--as-pid-1", "--cap-drop", "ALL"]
    nobody = str(NOBODY)  # not root, because an unprivileged namespace cannot make another one that maps its root
    as_user = ["--unshare-user", "--uid", nobody, "--gid", nobody]
    command += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"] if is_root() else as_user
    command += ["--clearenv", *(word for name, value in ENVIRONMENT.items() for word in ("--setenv", name, value))]
    command += ["--ro-bind", "/usr", "/usr"]
    for name in ("/bin", "/sbin", "/lib", "/lib64"):
        if os.path.islink(name):
            command += ["--symlink", os.readlink(name), name]
        elif os.path.isdir(name):
            command += ["--ro-bind", name, name]
    parents = {"/dev", *(str(parent) for path in [*mounts.values(), MOUNTED_INSIDE] for parent in Path(path).parents)} - {"/"}
    for directory in sorted(directory for directory in parents if not f"{directory}/".startswith("/usr/")):
        command += ["--perms", "0755", "--dir", directory]  # by itself bwrap makes them for their owner only
    for host_path, path in mounts.items():
        if not path.startswith("/usr/"):
            command += ["--ro-bind", host_path, path]
        if os.path.isdir(os.path.join(host_path, "jmarl")):
            command += ["--tmpfs", os.path.join(path, "jmarl")]
    for name in ("null", "zero", "random", "urandom"):
        command += ["--dev-bind", f"/dev/{name}", f"/dev/{name}"]
    command += ["--ro-bind", str(INSIDE), MOUNTED_INSIDE, "--proc", "/proc", "--dir", "/tmp", "--remount-ro", "/"]
    return [*command, "--chdir", "/", "--"]


def group_limits(limits: Limits, workers: int) -> dict[str, int]:
    """Return the limits of the helper's control groups: names of files, of both versions of control groups, and their
    values."""
    memory = (workers + SESSIONS_WITH_FULL_MEMORY) * (limits.memory_mb + 256) + 512 << 20
    processes = (workers + MAX_SESSIONS) * (limits.processes + 16) + 64
    return {"memory.limit_in_bytes": memory, "memory.max": memory, "pids.max": processes}


def make_control_groups(limits: Limits, workers: int, resources: contextlib.ExitStack) -> list[Path]:
    """Make a control group for the helper in each hierarchy: version 1 has one for memory and one for processes, version 2 has
    one for both."""
    if (CGROUPS / "memory/cgroup.procs").exists():
        hierarchies = {CGROUPS / "memory": ["memory.limit_in_bytes"], CGROUPS / "pids": ["pids.max"]}
    else:
        hierarchies = {CGROUPS: ["memory.max", "pids.max"]}
    groups = []
    for parent, files in hierarchies.items():
        for old in parent.glob("jmarl-*-*"):
            if not os.path.exists(f"/proc/{old.name.split('-')[1]}"):  # its client was killed
                _remove_group(old)
        group = parent / f"jmarl-{os.getpid()}-{os.urandom(4).hex()}"
        group.mkdir()
        resources.callback(_remove_group, group)
        groups.append(group)
        for name in files:
            (group / name).write_text(str(group_limits(limits, workers)[name]), encoding="utf-8")
    return groups


def _remove_group(group: Path) -> None:
    """Remove a control group; the kernel needs a moment until it is empty."""
    for _ in range(100):
        try:
            return group.rmdir()
        except OSError:
            time.sleep(0.02)


def _remove_directory(directory: str) -> None:
    """Remove the directory of a helper that was killed before it could do so."""
    try:
        remove_tree(directory)
    except OSError as error:
        warnings.warn(f"the directory {directory} of the sandbox could not be removed: {error}", stacklevel=2)
