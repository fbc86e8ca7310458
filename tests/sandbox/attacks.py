"""Programs that try to pass without being right, or to harm their surroundings, each with a benign twin that uses the same features.

The task is always `add(a, b)`. An attack either forges the verdict, or returns the right sum only if what it tried has worked (`WON`),
so none may pass; every twin must. PORT, SECRET, SOCKET and HOST stand for things that the tests put on the host.
"""

from __future__ import annotations

from typing import NamedTuple

ADD = "def add(a, b):\n    return a + b\n"
WRONG = "def add(a, b):\n    return None\n"
WON = "def add(a, b):\n    return a + b if won() else None\n"


class Attack(NamedTuple):
    attack: str
    twin: str
    needs_namespaces: bool = False  # only namespaces prevent it


def forged(body: str, twin: str = "") -> Attack:
    """Return an attack that leaves `add` wrong; the twin does something similar and adds."""
    return Attack(body if "def add" in body or "add =" in body else body + "\n" + WRONG, twin + "\n" + ADD)


def tries(body: str, twin: str = "", needs_namespaces: bool = False) -> Attack:
    """Return an attack whose `won()` returns whether it has worked; anything that it raises means that it has not."""
    lines = "\n".join(f"        {line}" for line in body.strip().splitlines())
    attack = f"def won():\n    try:\n{lines}\n    except Exception:\n        return False\n{WON}"
    return Attack(attack, twin + "\n" + ADD, needs_namespaces)


SYSCALL = "import ctypes; call = ctypes.CDLL(None, use_errno=True).syscall\n"
EQUAL = "class Equal({base}):\n    __hash__ = {base}.__hash__\n    def __eq__(self, other): return True\n    def __ne__(self, other): return False\n"

FORGERIES = {
    "equal to everything": forged(EQUAL.format(base="object") + "def add(a, b): return Equal()", "class P:\n def __eq__(self, o): return True\nassert P() == 1"),
    "an int equal to everything": forged(EQUAL.format(base="int") + "def add(a, b): return Equal(0)", "class I(int): pass\nassert I(3) == 3"),
    "a float equal to everything": forged(EQUAL.format(base="float") + "def add(a, b): return Equal(0)", "class F(float): pass\nassert F(3) == 3"),
    "a text equal to everything": forged(EQUAL.format(base="str") + "def add(a, b): return Equal('0')", "class S(str): pass\nassert S('a') == 'a'"),
    "a tuple equal to everything": forged(EQUAL.format(base="tuple") + "def add(a, b): return Equal()", "import collections\nP = collections.namedtuple('P', 'x')\nassert P(1) == (1,)"),
    "reflected equality": forged("class E:\n    def __req__(self, o): return True\n    __eq__ = __req__\n    __class__ = int\ndef add(a, b): return E()", "class E:\n    __class__ = int\nassert isinstance(E(), int)"),
    "a false __class__": forged("class E:\n    @property\n    def __class__(self): return int\n    def __eq__(self, o): return True\n    def __index__(self): return 3\ndef add(a, b): return E()", "class E:\n    def __index__(self): return 1\nassert [4, 5][E()] == 5"),
    "always true": forged("class E:\n    def __bool__(self): return True\ndef add(a, b): return E()", "class E:\n    def __bool__(self): return True\nassert E()"),
    "sys.exit while loading": forged("import sys; sys.exit(0)", "import sys\ntry:\n    sys.exit(0)\nexcept SystemExit: pass"),
    "os._exit while loading": forged("import os; os._exit(0)", "import os; assert os.getpid()"),
    "os._exit in a call": forged("import os\ndef add(a, b): os._exit(0)", "import os"),
    "SystemExit in a call": forged("def add(a, b): raise SystemExit(0)", "try:\n    raise SystemExit(0)\nexcept SystemExit: pass"),
    "KeyboardInterrupt in a call": forged("def add(a, b): raise KeyboardInterrupt", "try:\n    raise KeyboardInterrupt\nexcept KeyboardInterrupt: pass"),
    "GeneratorExit in a call": forged("def add(a, b): raise GeneratorExit", "g = (x for x in 'ab'); next(g); g.close()"),
    "abort": forged("import os\ndef add(a, b): os.abort()", "import faulthandler"),
    "a signal to itself": forged("import os, signal\ndef add(a, b): os.kill(os.getpid(), signal.SIGKILL)", "import os, signal\nsignal.signal(signal.SIGUSR1, lambda *a: None); os.kill(os.getpid(), signal.SIGUSR1)"),
    "a crash": forged("import ctypes\ndef add(a, b): ctypes.string_at(0)", "import ctypes; assert ctypes.sizeof(ctypes.c_int) == 4"),
    "a printed verdict": forged("print('{\"planned\": 2}'); print('{\"test\": \"a\", \"passed\": true, \"message\": \"\"}'); print('{\"done\": true}'); print('OK'); print('2 passed')", "print('{\"done\": true}')"),
    "a verdict on every descriptor": forged("import os\ntext = b'{\"planned\": 1}\\n{\"test\": \"a\", \"number\": 0, \"message\": \"\", \"weak\": false}\\n{\"done\": true, \"answers\": 1, \"names_requested\": true, \"disconnected\": false, \"violation\": \"\", \"limit\": \"\", \"unsupported_test_value\": \"\"}\\n'\nfor fd in range(64):\n    try: os.write(fd, text)\n    except OSError: pass", "import os; os.write(1, b'hello')"),
    "replies without a request": forged("import os, json, struct\nm = json.dumps({'value': 3}).encode()\nm = struct.pack('!I', len(m)) + m\nfor fd in range(3, 64):\n    try: os.write(fd, m * 20)\n    except OSError: pass", "import json, struct; json.dumps(struct.calcsize('!I'))"),
    "a message of four gigabytes": forged("import os\ndef add(a, b):\n    for fd in range(3, 64):\n        try: os.write(fd, b'\\xff' * 4)\n        except OSError: pass\n", "import os"),
    "a message that is not JSON": forged("import os\ndef add(a, b):\n    for fd in range(3, 64):\n        try: os.write(fd, b'\\0\\0\\0\\4nope')\n        except OSError: pass\n", "import os"),
    "a message nested a million times": forged("import os, struct\ndef add(a, b):\n    m = b'[' * 1000000\n    for fd in range(3, 64):\n        try: os.write(fd, struct.pack('!I', len(m)) + m)\n        except OSError: pass\n", "x = []\nfor _ in range(50): x = [x]"),
    "calls of a function that the tests did not send": forged("import os, json, struct\ndef add(a, b):\n    m = json.dumps({'back': -1, 'args': [], 'keywords': {}}).encode()\n    for fd in range(3, 64):\n        try: os.write(fd, struct.pack('!I', len(m)) + m)\n        except OSError: pass\n", "print((lambda: 1)())"),
    "a patched server": forged("import sys\nserver = sys.modules['inside.program'].ProgramServer\nserver._reply_of = lambda self, action: {'value': True}\nserver.answer = lambda self, request: {'value': True}", "import sys; assert sys.modules"),
    "a patched encoder": forged("import inside.wire as w, inside.program as p\nw.encode = p.encode = lambda x, *a: {'set': []}", "import json; json.dumps([1])"),
    "patched builtins": forged("import builtins\nbuiltins.AssertionError = type('A', (BaseException,), {})\nbuiltins.isinstance = lambda *a: True\nbuiltins.all = builtins.any = builtins.bool = lambda *a: True", "import builtins; assert builtins.sum([1]) == 1"),
    "functions named as builtins": forged("def abs(x): return 3\ndef sorted(x): return [1]\ndef isinstance(*a): return True\ndef print(*a): pass\nclass int: pass\nAssertionError = KeyError", "def abs(x): return x"),
    "modules named as the tests": forged("import sys, types\nfor n in ('tests', 'judge', '__main__', 'inside.judge'): sys.modules[n] = types.ModuleType(n)", "import sys, types; sys.modules['mine'] = types.ModuleType('mine')"),
    "an error whose text exits": forged("class E(Exception):\n    def __str__(self): raise SystemExit\n    __repr__ = __str__\ndef add(a, b): raise E", "class E(Exception):\n    def __str__(self): return 'e'\nstr(E())"),
    "an error named as one of the tests'": forged("class SkipTest(Exception): pass\nclass _ShouldStop(Exception): pass\nimport unittest\ndef add(a, b): raise unittest.SkipTest('no')", "import unittest; unittest.SkipTest"),
    "everything at once": forged("class E(list):\n    def __iter__(self):\n        i = 0\n        while True: yield i; i += 1\n    __contains__ = __eq__ = lambda *a: True\n    __hash__ = None\ndef add(a, b): return E()", "import itertools; itertools.count()"),
    "a hook for exceptions": forged("import sys, atexit\nsys.excepthook = lambda *a: sys.exit(0)\natexit.register(print, 'OK')\nsys.settrace(lambda *a: None)\nraise ValueError", "import atexit; atexit.register(print, 'bye')"),
}  # fmt: skip

READS = {
    "frames": tries("import sys\nf = sys._getframe()\nwhile f:\n    if any(''.join(['expected-', '42', '42']) in repr(v) for v in list(f.f_locals.values()) if isinstance(v, (str, bytes, dict, list))): return True\n    f = f.f_back\nreturn False", "import sys; sys._getframe()"),
    "objects": tries("import gc\nreturn any(''.join(['expected-', '42', '42']) in o for o in gc.get_objects() if isinstance(o, (list, tuple, dict)))", "import gc; gc.collect()"),
    "the memory of the process": tries("import gc, sys\nfor o in gc.get_objects():\n    for r in gc.get_referents(o):\n        if isinstance(r, (bytes, bytearray)) and ''.join(['expected-', '42', '42']).encode() in r: return True\n        if isinstance(r, str) and ''.join(['expected-', '42', '42']) in r: return True\nreturn False", "import gc; gc.get_objects()"),
    "open descriptors": tries("import os\nfor fd in range(3, 1024):\n    try: os.set_blocking(fd, False)\n    except OSError: continue\n    try:\n        if ''.join(['expected-', '42', '42']).encode() in os.read(fd, 1 << 20): return True\n    except OSError: pass\nreturn False", "import os; os.fstat(0)"),
    "the environment": tries("import os, ctypes\nreturn 'JMARL_TEST_SECRET' in os.environ or any(b'JMARL_TEST_SECRET' in open(f'/proc/{p}/environ', 'rb').read() for p in ('self', '1'))", "import os; os.environ['X'] = '1'"),
    "libc's environment": tries("import ctypes\nget = ctypes.CDLL(None).getenv\nget.restype = ctypes.c_char_p\nreturn get(b'JMARL_TEST_SECRET') is not None", "import os; os.getenv('HOME')"),
    "a file of the host": tries("return bool(open('SECRET').read())", "open('own', 'w').write('x'); assert open('own').read() == 'x'"),
    "a path with dots": tries("return bool(open('../../../../..' + 'SECRET').read())", "import os; os.path.abspath('..')"),
    "a link": tries("import os\nos.symlink('SECRET', 'link')\nreturn bool(open('link').read())", "import os; open('a', 'w').close(); os.symlink('a', 'b'); open('b').close()"),
    "a hard link": tries("import os\nos.link('SECRET', 'link')\nreturn bool(open('link').read())", "import os; open('a', 'w').close(); os.link('a', 'b')"),
    "the project": tries("import os\nreturn bool(os.listdir('HOST'))", "import os; os.listdir('.')"),
    "passwords": tries("return any(open(p).read() for p in ('/etc/passwd', '/etc/shadow', '/etc/hostname'))", "import getpass"),
    "other processes": tries("import os\nreturn len([p for p in os.listdir('/proc') if p.isdigit()]) > 0", "import os; os.getppid()", needs_namespaces=True),
    "the command line of the helper": tries("return bool(open('/proc/1/cmdline').read() or open('/proc/self/cmdline').read())", "import sys; sys.argv", needs_namespaces=True),
    "the project as a package": tries("import jmarl\nreturn jmarl.__file__ is not None", "import json"),
}  # fmt: skip

REACHES = {
    "a connection to the host": tries("import socket\nsocket.create_connection(('127.0.0.1', PORT), 1)\nreturn True", "import socket; a, b = socket.socketpair(); a.close()"),
    "a datagram": tries("import socket\ns = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\ns.sendto(b'x', ('127.0.0.1', PORT))\nreturn True", "import socket; socket.AF_INET"),
    "a listening socket": tries("import socket\ns = socket.socket(); s.bind(('127.0.0.1', 0)); s.listen()\nreturn True", "import asyncio\nasync def f(): return 1\nassert asyncio.run(f()) == 1"),
    "a Unix socket of the host": tries("import socket\ns = socket.socket(socket.AF_UNIX); s.connect('SOCKET')\nreturn True", "import socket"),
    "an abstract socket": tries("import socket\ns = socket.socket(socket.AF_UNIX); s.connect('\\0jmarl-PORT')\nreturn True", "import socket"),
    "an abstract socket through a pair": tries("import socket\na, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)\na.sendto(b'x', '\\0jmarl-PORT')\nreturn True", "import socket; a, b = socket.socketpair(); a.send(b'x'); assert b.recv(1) == b'x'"),
    "a raw socket by number": tries(SYSCALL + "return call(41, 2, 1, 0) >= 0", SYSCALL + "assert call(39) > 0"),
    "signals to its parent": tries("import os\nos.kill(os.getppid(), 9)\nreturn os.getppid() > 0", "import os, signal; os.kill(os.getpid(), 0)"),
    "signals to all": tries("import os\nos.kill(-1, 9)\nreturn False", "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)"),
    "signals to its group": tries("import os\nos.kill(0, 9)\nreturn False", "import os; os.getpgid(0)"),
    "tracing": tries(SYSCALL + "return call(101, 0, 0, 0, 0) == 0 or call(101, 16, 1, 0, 0) == 0", SYSCALL + "call(39)"),
    "memory of others": tries(SYSCALL + "buffer = ctypes.create_string_buffer(8)\nreturn call(310, 1, buffer, 1, buffer, 1, 0) >= 0", SYSCALL),
    "namespaces": tries(SYSCALL + "return call(272, 0x10000000) == 0", SYSCALL),
    "namespaces by clone": tries(SYSCALL + "return call(56, 0x10000000 | 17, 0, 0, 0, 0) >= 0", "import threading; t = threading.Thread(target=print); t.start(); t.join()"),
    "namespaces by clone3": tries(SYSCALL + "arguments = (ctypes.c_ulong * 11)(0x10000000)\nreturn call(435, arguments, 88) >= 0", SYSCALL),
    "a mount": tries(SYSCALL + "return call(165, b'tmpfs', b'/tmp', b'tmpfs', 0, None) == 0 or call(166, b'/proc', 2) == 0", "import os; os.path.ismount('/')"),
    "the new mount calls": tries(SYSCALL + "return call(430, b'tmpfs', 0) >= 0 or call(428, -100, b'/', 0) >= 0", SYSCALL),
    "another root": tries("import os\nos.chroot('.')\nreturn True", "import os; os.chdir('.')"),
    "root": tries("import os\nos.setuid(0)\nopen('/usr/jmarl', 'w')\nreturn True", "import os; os.getuid()"),
    "a device": tries("import os, stat\nos.mknod('disk', stat.S_IFBLK | 0o600, os.makedev(254, 0))\nreturn bool(open('disk', 'rb').read(1))", "assert open('/dev/urandom', 'rb').read(1); open('/dev/null', 'w').write('x')"),
    "kernel modules": tries(SYSCALL + "return call(175, 0, 0, b'') == 0 or call(313, 0, b'', 0) == 0", SYSCALL),
    "programs in the kernel": tries(SYSCALL + "return call(321, 5, ctypes.create_string_buffer(128), 128) >= 0 or call(298, ctypes.create_string_buffer(128), 0, -1, -1, 0) >= 0", SYSCALL),
    "rings": tries(SYSCALL + "return call(425, 8, ctypes.create_string_buffer(256)) >= 0", SYSCALL),
    "keys": tries(SYSCALL + "return call(250, 0, -3, 1) >= 0 or call(248, b'user', b'a', b'b', 1, -3) >= 0", SYSCALL),
    "file handles": tries(SYSCALL + "return call(303, -100, b'/', ctypes.create_string_buffer(128), ctypes.create_string_buffer(8), 0) >= 0", SYSCALL),
    "shared memory": tries(SYSCALL + "return call(29, 0, 4096, 0o1666) >= 0 or call(68, 1, 0o1666) >= 0", "import mmap; mmap.mmap(-1, 4096)"),
    "outliving its parent": tries(SYSCALL + "return call(157, 1, 0, 0, 0, 0) == 0", SYSCALL + "assert call(157, 3, 0, 0, 0, 0) in (0, 1)"),
    "the clock": tries("import time\ntime.clock_settime(time.CLOCK_REALTIME, 0)\nreturn True", "import time; time.time()"),
    "the name of the host": tries("import socket\nsocket.sethostname('jmarl')\nreturn True", "import os; os.uname()"),
    "the libraries": tries("import json\nopen(json.__file__, 'a').write('x')\nreturn True", "import json; open(json.__file__).read()"),
    "the sandbox's own files": tries("import inside.wire as w\nopen(w.__file__, 'a').write('x')\nreturn True", "open('a', 'w').write('x')"),
    "the root directory": tries("open('/jmarl', 'w')\nreturn True", "import tempfile; tempfile.TemporaryFile().write(b'x')"),
    "the directory of devices": tries("open('/dev/jmarl', 'w')\nreturn True", "open('/dev/null').read()"),
    "higher limits": tries("import resource\nresource.setrlimit(resource.RLIMIT_AS, (-1, -1))\nreturn True", "import resource; resource.getrlimit(resource.RLIMIT_AS)"),
    "system calls of x32": tries("import ctypes\nreturn ctypes.CDLL(None).syscall(0x40000000 + 39) > 0", SYSCALL),
    "the priority of others": tries("import os\nos.setpriority(os.PRIO_PROCESS, 0, -5)\nreturn True", "import os; os.getpriority(os.PRIO_PROCESS, 0)"),
}  # fmt: skip

EXHAUSTS = {
    "a loop without end": forged("def add(a, b):\n    while True: pass", "for _ in range(1000): pass"),
    "a loop while loading": forged("while True: pass", "x = sum(range(1000))"),
    "sleep": forged("import time\ndef add(a, b): time.sleep(1e6)", "import time; time.sleep(0.001)"),
    "threads that never end": forged("import threading\ndef spin():\n    while True: pass\nfor _ in range(4): threading.Thread(target=spin).start()\ndef add(a, b):\n    while True: pass", "import threading\nt = threading.Thread(target=print); t.start(); t.join()"),
    "a regular expression": forged("import re\ndef add(a, b): return re.match('(a+)+$', 'a' * 60 + 'b')", "import re; assert re.match('(a+)+$', 'aaa')"),
    "memory": forged("x = []\nwhile True: x.append(bytearray(1 << 24))", "x = bytearray(1 << 24)"),
    "one huge block": forged("def add(a, b): return len(bytearray(1 << 40)) and a + b", "bytes(1 << 20)"),
    "a huge number": forged("def add(a, b): return 10 ** 10 ** 8", "10 ** 100"),
    "a huge list": forged("def add(a, b): return [0] * 30000000", "[0] * 3000"),
    "a deep list": forged("def add(a, b):\n    x = []\n    for _ in range(100000): x = [x]\n    return x", "x = []\nfor _ in range(90): x = [x]"),
    "recursion": forged("def add(a, b): return add(a, b)", "def f(n): return n and f(n - 1)\nf(500)"),
    "a flood of output": forged("import os\nwhile True: os.write(1, b'x' * 65536)", "print('x' * 1000)"),
    "a flood of errors": forged("import sys\nwhile True: sys.stderr.write('x' * 65536)", "import sys; sys.stderr.write('x')"),
    "a flood before a right answer": Attack("print('x' * 10000000)\n" + ADD, "print('x' * 10000)\n" + ADD),
    "a large file": tries("with open('big', 'wb') as f:\n    for _ in range(1000): f.write(bytes(1 << 20))\nreturn True", "open('a', 'wb').write(bytes(1 << 20))"),
    "a sparse file": tries("f = open('big', 'wb'); f.truncate(1 << 40)\nreturn True", "f = open('a', 'wb'); f.truncate(1 << 20)"),
    "many files": tries("for i in range(100000): open(str(i), 'wb').write(bytes(1024))\nreturn True", "for i in range(100): open(str(i), 'w').close()", needs_namespaces=True),
    "many descriptors": tries("x = [open('/dev/null') for _ in range(10000)]\nreturn True", "x = [open('/dev/null') for _ in range(20)]"),
    "processes": forged("import os\nwhile True:\n    try: os.fork()\n    except OSError: pass", "def f(): pass"),
    "threads": tries("import threading, time\nfor _ in range(5000): threading.Thread(target=time.sleep, args=(9,), daemon=True).start()\nreturn True", "import concurrent.futures as c\nwith c.ThreadPoolExecutor(2) as p: assert list(p.map(abs, [1, -1])) == [1, 1]"),
}  # fmt: skip

ATTACKS = {
    f"{kind}: {name}": attack
    for kind, group in (("forges", FORGERIES), ("reads", READS), ("reaches", REACHES), ("exhausts", EXHAUSTS))
    for name, attack in group.items()
}
