"""What the kernel enforces on one process: namespaces, limits, Landlock and a filter of system calls, through libc.

    own_files a small /tmp, seen by nobody else
    isolate   own user, mount, process, IPC and host name namespaces; an empty /proc
    limit     memory, CPU time, processes, file size, descriptors; no core dumps
    landlock  only some directories can be read, one written (where namespaces are forbidden)
    seal      no capabilities, no new privileges, no system calls that reach out

Linux on x86-64 only: numbers of system calls differ elsewhere.
"""

from __future__ import annotations

import ctypes
import os
import resource
import struct
from collections.abc import Sequence

_libc = ctypes.CDLL(None, use_errno=True)

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC, CLONE_NEWUSER, CLONE_NEWPID = 0x20000, 0x4000000, 0x8000000, 0x10000000, 0x20000000
CLONE_ANY_NAMESPACE = 0x7E020080  # all of them, the network, control groups and time too
CLONE_THREAD = 0x10000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 1, 2, 4, 8
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 36, 38
SECCOMP_MODE_FILTER = 2
NOBODY = 65534


class Refused(OSError):
    """The kernel does not do it; says what and why."""


def call(what: str, function, *arguments) -> int:
    result = function(*arguments)
    if result < 0:
        number = ctypes.get_errno()
        raise Refused(number, f"{what}: {os.strerror(number)}")
    return result


def prctl(option: int, value: int = 0, more: object = 0) -> None:
    call(f"prctl {option}", _libc.prctl, option, ctypes.c_ulong(value), more, 0, 0)


def die_with_parent() -> None:
    prctl(PR_SET_PDEATHSIG, 9)


def adopt_orphans() -> None:
    """Be the parent of descendants whose own parent has ended, so that none is left behind."""
    prctl(PR_SET_CHILD_SUBREAPER, 1)


def is_root() -> bool:
    """Whether this is a root that can become nobody: in a rootless container it is an ordinary user by another name."""
    if os.getuid() != 0:
        return False
    with open("/proc/self/uid_map") as file:
        ranges = [tuple(map(int, line.split())) for line in file]
    return any(first <= NOBODY < first + count for first, _, count in ranges)


def drop_root() -> None:
    """Become nobody. Limits on the number of processes do not hold for root."""
    if is_root():
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
        prctl(PR_SET_DUMPABLE, 1)  # else the files in /proc/self belong to root, and namespaces are made through them


def mount(kind: str, where: str, flags: int, data: str = "") -> None:
    call(f"mount {kind} on {where}", _libc.mount, kind.encode(), where.encode(), kind.encode(), flags, data.encode())


def own_files(tmp_bytes: int) -> None:
    """A /tmp of its own, for this process and what it forks."""
    _unshare(0)
    mount("tmpfs", "/tmp", MS_NOSUID | MS_NODEV, f"size={tmp_bytes},mode=1777,nr_inodes=4096")


def isolate() -> None:
    """New namespaces; processes forked from now on are in a process namespace of their own, the first as number 1. What is
    mounted does not reach other namespaces."""
    _unshare(CLONE_NEWPID | CLONE_NEWIPC | CLONE_NEWUTS)
    mount("tmpfs", "/proc", MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC, "size=4k,mode=555")


def _unshare(more: int) -> None:
    uid, gid = os.getuid(), os.getgid()
    call("unshare", _libc.unshare, CLONE_NEWUSER | CLONE_NEWNS | more)
    for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def limit(memory: int, cpu_s: int, processes: int, file_bytes: int) -> None:
    for name, soft, hard in (
        ("AS", memory, memory),
        ("CPU", cpu_s, cpu_s + 1),
        ("NPROC", processes, processes),
        ("FSIZE", file_bytes, file_bytes),
        ("NOFILE", 64, 64),
        ("CORE", 0, 0),
    ):
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (soft, hard))


# --- Landlock: system calls 444 to 446; the rights of ABI 4, of which each ABI after it has more.

_NET, _SCOPES = 0b11, 0b11
_READ = 0b1101  # execute, read files, read directories
_DEVICE = 0b110  # write, read
_ON_FILES = 0b100000000000111  # of these, what means something for a file: execute, write, read, truncate


def landlock_abi() -> int:
    """0 where there is none."""
    return max(_libc.syscall(444, None, 0, 1), 0)


def landlock(readable: Sequence[str], writable: Sequence[str], devices: Sequence[str] = ()) -> None:
    """From now on only these paths can be read, or written; no TCP, and (ABI 6) no signals to other processes."""
    abi = landlock_abi()
    everything = (1 << (16 if abi >= 5 else 15)) - 1
    rules = struct.pack("QQQ", everything, _NET, _SCOPES)[: 24 if abi >= 6 else 16]
    ruleset = call("landlock", _libc.syscall, 444, rules, len(rules), 0)
    both = (
        [(path, _READ) for path in readable] + [(path, everything) for path in writable] + [(path, 0b110) for path in devices]
    )
    for path, rights in both:
        if not os.path.exists(path):
            continue
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
        allowed = rights if os.path.isdir(path) else rights & _ON_FILES
        call(f"landlock {path}", _libc.syscall, 445, ruleset, 1, struct.pack("=Qi", allowed, fd), 0)
        os.close(fd)
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    call("landlock", _libc.syscall, 446, ruleset, 0)
    os.close(ruleset)


# --- seccomp. Numbers of x86-64.

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
    "everybody's files": [162, 306],  # sync, syncfs
    "others' limits and order": [141, 142, 144, 203, 251, 314],  # priorities, schedulers, affinity
}
FORKS = [57, 58]  # fork, vfork
# Where there are no namespaces: what Landlock leaves open.
DENIED_ALONE = {
    "modes and owners of files": [90, 91, 268, 452, 92, 93, 94, 260],
    "disk that is not written": [285],  # fallocate, which the kernel does not count as written (`disk`)
    "times and attributes of files": [132, 235, 261, 280, 188, 189, 190, 197, 198, 199, 463, 466, 469],
}
_SIGNAL_OWNERS = [(72, 8), (72, 10), (72, 15), (16, 0x8901), (16, 0x8902)]  # of fcntl and ioctl: who gets a file's signals
_KILLS = [62, 129, 200, 234, 297]  # kill, rt_sigqueueinfo, tkill, tgkill, rt_tgsigqueueinfo
_EPERM, _ENOSYS = 1, 38
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_LOAD, _EQUAL, _ABOVE, _ANY, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06


def _program(alone: bool, single: bool, pid: int) -> bytes:
    """alone: refuses new processes, and signals to others, as well. single: only new processes."""

    def step(code: int, k: int, yes: int = 0, no: int = 0) -> bytes:
        return struct.pack("HBBI", code, yes, no, k)

    number, arch, first, second, fifth = 0, 4, 16, 24, 48  # offsets in seccomp_data; of arguments the lower half
    deny, unknown = step(_RETURN, _ERRNO | _EPERM), step(_RETURN, _ERRNO | _ENOSYS)
    out = [step(_LOAD, arch), step(_EQUAL, 0xC000003E, 1), step(_RETURN, _KILL)]
    out += [step(_LOAD, number), step(_ABOVE, 0x40000000, 0, 1), step(_RETURN, _KILL)]  # the x32 calls
    for syscall in sorted(sum(DENIED.values(), [])):
        out += [step(_EQUAL, syscall, 0, 1), deny]
    out += [step(_EQUAL, 435, 0, 1), unknown]  # clone3: its flags cannot be seen; libc then uses clone
    out += [step(_EQUAL, 157, 0, 4), step(_LOAD, first), step(_EQUAL, PR_SET_PDEATHSIG, 0, 1), deny, step(_LOAD, number)]
    out += [step(_EQUAL, 16, 0, 4), step(_LOAD, second), step(_EQUAL, 0x5412, 0, 1), deny, step(_LOAD, number)]  # TIOCSTI
    out += [step(_EQUAL, 56, 0, 4), step(_LOAD, first), step(_ANY, CLONE_ANY_NAMESPACE, 0, 1), deny, step(_LOAD, number)]
    out += [step(_EQUAL, 44, 0, 6), step(_LOAD, fifth), step(_EQUAL, 0, 0, 2)]  # sendto: only without an address
    out += [step(_LOAD, fifth + 4), step(_EQUAL, 0, 1), deny, step(_LOAD, number)]
    if alone or single:
        out += [step(_EQUAL, 56, 0, 4), step(_LOAD, first), step(_ANY, CLONE_THREAD, 1), deny, step(_LOAD, number)]
        for syscall in FORKS:
            out += [step(_EQUAL, syscall, 0, 1), deny]
    if alone:  # of prctl what would hide its files from the runner
        out += [step(_EQUAL, 157, 0, 4), step(_LOAD, first), step(_EQUAL, PR_SET_DUMPABLE, 0, 1), deny, step(_LOAD, number)]
        for syscall in sorted(sum(DENIED_ALONE.values(), [])):
            out += [step(_EQUAL, syscall, 0, 1), deny]
        for syscall, how in _SIGNAL_OWNERS:
            out += [step(_EQUAL, syscall, 0, 4), step(_LOAD, second), step(_EQUAL, how, 0, 1), deny, step(_LOAD, number)]
        own = [step(_EQUAL, 0, 2), step(_EQUAL, pid, 1), deny]
        out += [step(_EQUAL, 302, 0, 5), step(_LOAD, first), *own, step(_LOAD, number)]  # prlimit
        for syscall in _KILLS:
            out += [step(_EQUAL, syscall, 0, 4), step(_LOAD, first), step(_EQUAL, pid, 1), deny, step(_LOAD, number)]
    return b"".join([*out, step(_RETURN, _ALLOW)])


def seal(alone: bool = False, single: bool = False) -> None:
    """No capabilities and no way to get any, and the filter, for this process and all that it starts."""
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    header, nothing = struct.pack("Ii", 0x20080522, 0), bytes(24)
    call("capset", _libc.syscall, 126, header, nothing)
    program = _program(alone, single, os.getpid())
    buffer = ctypes.create_string_buffer(program, len(program))
    filter_ = struct.pack("HxxxxxxQ", len(program) // 8, ctypes.addressof(buffer))
    prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, filter_)
