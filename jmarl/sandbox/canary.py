"""The program by which a level is tried before it is believed, and what it must and must not be able to do there."""

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
def number():
    return os.getpid()
"""
_CANARY_ASKS = "assert add(1, 2) == 3\nassert not allocates(1 << 40)\n"
_CANARY_CONFINED = (
    "assert writes('own')\nassert not opens_a_socket()\n"
    "assert not any(reads(p) for p in ('/etc/passwd', '/proc/1/environ', '/etc/hostname'))\n"
    "assert not any(writes(p) for p in ('/jmarl', '/usr/jmarl', '/dev/jmarl', '/sandbox/inside/jmarl', '/var/tmp/jmarl'))\n"
)
CANARY_TESTS = {
    "S4": _CANARY_ASKS + _CANARY_CONFINED + "assert number() == 1\n",
    "S3": _CANARY_ASKS + _CANARY_CONFINED + "assert number() == 1\n",
    "S2": _CANARY_ASKS + _CANARY_CONFINED,
    "S1": _CANARY_ASKS,
}
