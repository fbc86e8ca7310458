"""Confine one process by what the kernel enforces: namespaces, resource limits, Landlock and a filter of system calls.

    mount_tmp      mount a small /tmp that no other process sees
    isolate        enter new user, mount, process, IPC and host name namespaces, with an empty /proc
    set_limits     cap memory, CPU time, processes, file size and descriptors; no core dumps
    restrict_paths leave only some directories readable and one writable (Landlock; used where namespaces are forbidden)
    seal           drop all capabilities, forbid new privileges, and refuse system calls that reach other processes or the host

Everything goes through libc by ctypes. Numbers of system calls are those of Linux on x86-64.
"""

from __future__ import annotations

import ctypes
import os
import resource
import struct
from collections.abc import Callable, Sequence

_libc = ctypes.CDLL(None, use_errno=True)

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC, CLONE_NEWUSER, CLONE_NEWPID = 0x20000, 0x4000000, 0x8000000, 0x10000000, 0x20000000
CLONE_ANY_NAMESPACE = 0x7E020080  # all of them, the network, control groups and time too
CLONE_THREAD = 0x10000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 1, 2, 4, 8
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 36, 38
SECCOMP_MODE_FILTER = 2
NOBODY = 65534


class RefusedByKernel(OSError):
    """The kernel refused a call; the message names the call and the reason."""


def checked_call(description: str, function: Callable[..., int], *arguments: object) -> int:
    """Call a function of libc; raise `RefusedByKernel` if it returns a negative number."""
    result = function(*arguments)
    if result < 0:
        number = ctypes.get_errno()
        raise RefusedByKernel(number, f"{description}: {os.strerror(number)}")
    return result


def prctl(option: int, value: int = 0, pointer: object = 0) -> None:
    """Call prctl(2)."""
    checked_call(f"prctl {option}", _libc.prctl, option, ctypes.c_ulong(value), pointer, 0, 0)


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent ends."""
    prctl(PR_SET_PDEATHSIG, 9)


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent has ended, so that all of them can be found and killed."""
    prctl(PR_SET_CHILD_SUBREAPER, 1)


def is_root() -> bool:
    """Return whether this process is a root that can become nobody; the root of a rootless container cannot."""
    if os.getuid() != 0:
        return False
    with open("/proc/self/uid_map", encoding="utf-8") as file:
        ranges = [tuple(map(int, line.split())) for line in file]
    return any(first <= NOBODY < first + count for first, _, count in ranges)


def drop_root() -> None:
    """Become nobody if this process is root, because root is exempt from the limit on processes."""
    if is_root():
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
        prctl(PR_SET_DUMPABLE, 1)  # else root owns the files in /proc/self, through which namespaces are set up


def mount(kind: str, path: str, flags: int, options: str = "") -> None:
    """Mount a file system of a kind (tmpfs) on a path."""
    checked_call(f"mount {kind} on {path}", _libc.mount, kind.encode(), path.encode(), kind.encode(), flags, options.encode())


def mount_tmp(size_bytes: int) -> None:
    """Mount a /tmp of this size that only this process and its descendants see."""
    _unshare(0)
    mount("tmpfs", "/tmp", MS_NOSUID | MS_NODEV, f"size={size_bytes},mode=1777,nr_inodes=4096")


def isolate() -> None:
    """Enter new namespaces. The next process to be forked is number 1 of a new process namespace, and no mount made from now
    on reaches another namespace."""
    _unshare(CLONE_NEWPID | CLONE_NEWIPC | CLONE_NEWUTS)
    mount("tmpfs", "/proc", MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC, "size=4k,mode=555")


def _unshare(flags: int) -> None:
    """Enter a new user namespace, in which this user keeps its id, a new mount namespace, and those of `flags`."""
    uid, gid = os.getuid(), os.getgid()
    checked_call("unshare", _libc.unshare, CLONE_NEWUSER | CLONE_NEWNS | flags)
    for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        with open(f"/proc/self/{name}", "w", encoding="utf-8") as file:
            file.write(text)


def set_limits(memory_bytes: int, cpu_s: int, processes: int, file_bytes: int) -> None:
    """Set the resource limits of this process and its descendants. SIGXCPU comes after `cpu_s` seconds, SIGKILL one later."""
    for name, soft, hard in (
        ("AS", memory_bytes, memory_bytes),
        ("CPU", cpu_s, cpu_s + 1),
        ("NPROC", processes, processes),
        ("FSIZE", file_bytes, file_bytes),
        ("NOFILE", 64, 64),
        ("CORE", 0, 0),
    ):
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (soft, hard))


# --- Landlock. Access rights are bits; ABI 4 has 15 of them on paths, ABI 5 one more.

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # numbers of system calls
_NET, _SCOPES = 0b11, 0b11
_READ = 0b1101  # execute, read files, read directories
_DEVICE = 0b110  # write, read
_ON_FILES = 0b100000000000111  # the rights that apply to a file: execute, write, read, truncate


def landlock_abi() -> int:
    """Return the version of Landlock that the kernel has; 0 if it has none."""
    return max(_libc.syscall(_CREATE_RULESET, None, 0, 1), 0)


def restrict_paths(readable: Sequence[str], writable: Sequence[str], devices: Sequence[str] = ()) -> None:
    """From now on allow access to these paths only. Also forbid TCP and, from ABI 6 on, signals to other processes.

    Paths that do not exist are skipped.
    """
    abi = landlock_abi()
    every_right = (1 << (16 if abi >= 5 else 15)) - 1
    attributes = struct.pack("QQQ", every_right, _NET, _SCOPES)[: 24 if abi >= 6 else 16]
    ruleset = checked_call("landlock", _libc.syscall, _CREATE_RULESET, attributes, len(attributes), 0)
    rights_by_path = [
        *((path, _READ) for path in readable),
        *((path, every_right) for path in writable),
        *((path, _DEVICE) for path in devices),
    ]
    for path, rights in rights_by_path:
        if not os.path.exists(path):
            continue
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
        rule = struct.pack("=Qi", rights if os.path.isdir(path) else rights & _ON_FILES, fd)
        checked_call(f"landlock {path}", _libc.syscall, _ADD_RULE, ruleset, 1, rule, 0)
        os.close(fd)
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    checked_call("landlock", _libc.syscall, _RESTRICT_SELF, ruleset, 0)
    os.close(ruleset)


# --- seccomp. Numbers of system calls are those of x86-64.

DENIED = {
    "connections": [41, 42, 43, 46, 47, 49, 50, 288, 299, 307],  # socket, connect, …; not socketpair, which asyncio needs
    "other processes": [101, 310, 311, 312, 424, 434, 438, 440, 448],  # ptrace, process_vm, kcmp, pidfd, process_madvise
    "mounts and roots": [155, 161, 165, 166, 428, 429, 430, 431, 432, 433, 442, 467],  # pivot_root, chroot, mount, umount, …
    "namespaces": [272, 308],  # unshare, setns
    "keys": [248, 249, 250],
    "kernel": [103, 163, 167, 168, 169, 172, 173, 174, 175, 176, 177, 179, 180, 212, 246, 298, 313, 320, 321, 323, 443],
    "clocks and names": [159, 164, 170, 171, 227, 305],
    "rings and handles": [300, 301, 303, 304, 425, 426, 427, 447],  # fanotify, handles, io_uring, memfd_secret
    "shared memory": [29, 30, 31, 64, 65, 66, 67, 68, 69, 70, 71, 220, 240, 241, 242, 243, 244, 245],  # System V, queues
    "special files": [133, 259],  # mknod
    "personality": [135, 153, 154],  # also vhangup, modify_ldt
    "files without a path": [319],  # memfd_create: memory that no limit counts
    "writes to all disks": [162, 306],  # sync, syncfs
    "limits and scheduling of other processes": [141, 142, 144, 203, 251, 314],  # priorities, schedulers, affinity
}
# Denied too where there are no namespaces: what Landlock leaves open.
DENIED_WITHOUT_NAMESPACES = {
    "modes and owners of files": [90, 91, 268, 452, 92, 93, 94, 260],
    "disk space without a write": [285],  # fallocate: the kernel does not count it as written, and `disk` would miss it
    "times and attributes of files": [132, 235, 261, 280, 188, 189, 190, 197, 198, 199, 463, 466, 469],
}
_FORKS = [57, 58]  # fork, vfork
_IOCTL, _SENDTO, _CLONE, _PRCTL, _PRLIMIT, _CLONE3 = 16, 44, 56, 157, 302, 435
_TIOCSTI = 0x5412  # the ioctl that types into a terminal
_SIGNAL_OWNERS = [(72, 8), (72, 10), (72, 15), (16, 0x8901), (16, 0x8902)]  # of fcntl and ioctl: who gets a file's signals
_KILLS = [62, 129, 200, 234, 297]  # kill, rt_sigqueueinfo, tkill, tgkill, rt_tgsigqueueinfo
_EPERM, _ENOSYS = 1, 38
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000  # what a filter can answer
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06  # BPF instructions
_X86_64, _FIRST_X32_CALL = 0xC000003E, 0x40000000
# Offsets in seccomp_data; of the arguments those of the lower half.
_NUMBER, _ARCHITECTURE, _FIRST, _SECOND, _FIFTH = 0, 4, 16, 24, 48


def _step(code: int, operand: int, skip_if_true: int = 0, skip_if_false: int = 0) -> bytes:
    """Return one BPF instruction; a comparison skips so many of the next instructions."""
    return struct.pack("HBBI", code, skip_if_true, skip_if_false, operand)


_DENY, _UNKNOWN = _step(_RETURN, _ERRNO | _EPERM), _step(_RETURN, _ERRNO | _ENOSYS)


def _deny(syscall: int) -> list[bytes]:
    """Return the steps that refuse a system call. All lists of steps begin and end with the call's number loaded."""
    return [_step(_EQUAL, syscall, 0, 1), _DENY]


def _deny_argument(syscall: int, offset: int, condition: int, value: int, negate: bool = False) -> list[bytes]:
    """Return the steps that refuse a system call if a condition on one argument holds, or (`negate`) if it does not."""
    check = _step(condition, value, 1, 0) if negate else _step(condition, value, 0, 1)
    return [_step(_EQUAL, syscall, 0, 4), _step(_LOAD, offset), check, _DENY, _step(_LOAD, _NUMBER)]


def _filter(without_namespaces: bool, no_forks: bool, pid: int) -> bytes:
    """Return the BPF program. The arguments are those of `seal`; pid: the process that may signal itself and set its limits."""
    steps = [_step(_LOAD, _ARCHITECTURE), _step(_EQUAL, _X86_64, 1), _step(_RETURN, _KILL)]
    steps += [_step(_LOAD, _NUMBER), _step(_AT_LEAST, _FIRST_X32_CALL, 0, 1), _step(_RETURN, _KILL)]
    for syscall in sorted(sum(DENIED.values(), [])):
        steps += _deny(syscall)
    steps += [_step(_EQUAL, _CLONE3, 0, 1), _UNKNOWN]  # a filter cannot see its flags; without it libc uses clone
    steps += _deny_argument(_PRCTL, _FIRST, _EQUAL, PR_SET_PDEATHSIG)
    steps += _deny_argument(_IOCTL, _SECOND, _EQUAL, _TIOCSTI)
    steps += _deny_argument(_CLONE, _FIRST, _ANY_BIT, CLONE_ANY_NAMESPACE)
    # sendto only without an address: both halves of the pointer must be zero
    steps += [_step(_EQUAL, _SENDTO, 0, 6), _step(_LOAD, _FIFTH), _step(_EQUAL, 0, 0, 2)]
    steps += [_step(_LOAD, _FIFTH + 4), _step(_EQUAL, 0, 1), _DENY, _step(_LOAD, _NUMBER)]
    if without_namespaces or no_forks:
        steps += _deny_argument(_CLONE, _FIRST, _ANY_BIT, CLONE_THREAD, negate=True)
        for syscall in _FORKS:
            steps += _deny(syscall)
    if without_namespaces:
        steps += _steps_without_namespaces(pid)
    return b"".join([*steps, _step(_RETURN, _ALLOW)])


def _steps_without_namespaces(pid: int) -> list[bytes]:
    """Return the steps that refuse what a process namespace would make harmless."""
    steps = _deny_argument(_PRCTL, _FIRST, _EQUAL, PR_SET_DUMPABLE)  # it would hide the program's files from the runner
    for syscall in sorted(sum(DENIED_WITHOUT_NAMESPACES.values(), [])):
        steps += _deny(syscall)
    for syscall, command in _SIGNAL_OWNERS:
        steps += _deny_argument(syscall, _SECOND, _EQUAL, command)
    only_itself = [_step(_EQUAL, 0, 2), _step(_EQUAL, pid, 1), _DENY]
    steps += [_step(_EQUAL, _PRLIMIT, 0, 5), _step(_LOAD, _FIRST), *only_itself, _step(_LOAD, _NUMBER)]
    for syscall in _KILLS:
        steps += _deny_argument(syscall, _FIRST, _EQUAL, pid, negate=True)
    return steps


def seal(without_namespaces: bool = False, no_forks: bool = False) -> None:
    """Drop all capabilities and install the filter, for this process and its descendants. This cannot be undone.

    without_namespaces: also refuse new processes, signals to other processes, and what Landlock leaves open. no_forks: also
    refuse new processes. Threads are always allowed.
    """
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    header, no_capabilities = struct.pack("Ii", 0x20080522, 0), bytes(24)
    checked_call("capset", _libc.syscall, 126, header, no_capabilities)
    program = _filter(without_namespaces, no_forks, os.getpid())
    buffer = ctypes.create_string_buffer(program, len(program))
    description = struct.pack("HxxxxxxQ", len(program) // 8, ctypes.addressof(buffer))
    prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, description)
