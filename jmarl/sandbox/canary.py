"""A program that tries out a level before it is trusted, and what it must and must not be able to do at each level."""

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
