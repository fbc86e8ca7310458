"""Environments, rewards, servers in a thread or process and bare clients, for the tests of services."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import grpc
import numpy as np

from jmarl import Step, TextEnvironment
from jmarl.envs.base import Unanswered
from jmarl.envs.messages import Message, Observation, Reward, SimulatedEnvironment
from jmarl.remote import environments_pb2 as pb
from jmarl.remote import environments_pb2_grpc, values
from jmarl.remote.access import Access
from jmarl.remote.catalog import read_offer
from jmarl.remote.grpc_server import EnvironmentServer
from jmarl.remote.limits import ServerLimits

HERE = "tests.remote.served"
ROOT = Path(__file__).resolve().parents[2]
SECRET = "the answer is hunter2"
calls: list[str] = []  # what Sum.step was called with
built: list[int] = []  # the options that Slow was built with


class Sum(TextEnvironment):
    """Adds up numbers of two agents; one says `raise`, `hang` or `lost` for what can go wrong."""

    roles, reward_range, max_turns = ("left", "right"), (-1000.0, 1000.0), 100

    def __init__(self, start: int = 0, path: str = ""):
        self.start, self.path = start, path

    def tasks(self, split="train", count=100, seed=0):
        return [{"start": int(n), "split": split} for n in np.random.default_rng(seed).integers(100, size=count)]

    def reset(self, task, rng):
        if task.get("secret"):
            raise ValueError(SECRET)
        time.sleep(task.get("sleep", 0))
        total = task["start"] + self.start
        return {"total": total, "history": [total]}, [f"total {total}, draw {rng.integers(1000)}", None]

    def step(self, state, messages, rng):
        calls.append(messages[0])
        match messages[0]:
            case "raise":
                raise KeyError(SECRET)
            case "hang":
                time.sleep(float(messages[1]))
                return Step(state, ["slept", "slept"], 0.0, False)
            case "lost":
                raise Unanswered("the judge is away")
            case "fault":
                raise Unanswered(messages[1].encode().decode("unicode_escape"))
        state["total"] += int(messages[0]) + int(messages[1])
        state["history"].append(state["total"])
        texts = [f"history {state['history']}, draw {rng.integers(1000)}"] * 2
        return Step(state, texts, [float(state["total"]), 0.5], messages[0] == "0", {"draw": float(rng.random())})


class Slow(Sum):
    """Takes a while to be built, if it has an option."""

    def __init__(self, start: int = 0):
        super().__init__(start)
        time.sleep(0.15 * bool(start))
        built.append(start)


class Talk(SimulatedEnvironment):
    """Keeps its state in the object, and declares no number of turns."""

    def reset(self):
        self.said = []
        return Observation([Message("user", f"{self.task['word']} {self.rng.integers(100)}")])

    def step(self, action):
        self.said.append(action.content)
        return Observation([Message("user", " ".join(self.said))]), Reward(len(self.said))


class Drawing:
    """An environment of many episodes that draws random numbers for all of them."""

    num_agents, roles, reward_range, max_turns = 1, ("agent",), (0.0, 1.0), 1

    def reset(self, items, rng):
        return list(items), [[str(rng.integers(10)) for _ in items]]

    def step(self, states, actions, rng):
        raise AssertionError

    def observe(self, after):
        raise AssertionError


def length(left, right, factor, rng=None):
    """A reward that reads a column and draws."""
    draws = rng.random(len(left))
    return np.array([f * (len(a) - len(b)) + d for a, b, f, d in zip(left, right, factor, draws, strict=True)])


async def length_later(left, right):
    await asyncio.sleep(0)
    return [(float(len(a)), float(len(b))) for a, b in zip(left, right, strict=True)]


def failing(left, right):
    raise RuntimeError(SECRET)


OFFER = read_offer(f"{HERE}:Sum,{HERE}:Talk,math", f"{HERE}:length,{HERE}:length_later,{HERE}:failing")
SUM, TALK, SLOW = f"{HERE}:Sum", f"{HERE}:Talk", f"{HERE}:Slow"


class Running:
    """A server in a thread of its own, with its event loop."""

    def __init__(self, offer=OFFER, access=None, limits=None, workers=0, receive_s=None):
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, name="server", daemon=True)
        self.thread.start()
        self.access = access or Access()

        async def start():
            self.server = EnvironmentServer(offer, self.access, limits or ServerLimits(), workers)
            if receive_s is not None:
                self.server._gate.receive_s = receive_s
            self.server.catalog.build_all()
            await self.server.start()

        self.run(start())
        self.address = f"127.0.0.1:{self.server.port}"

    def run(self, coroutine, timeout=60):
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(timeout)

    def call(self, function):
        """Call a function in the thread of the server."""

        async def run():
            return function()

        return self.run(run())

    def close(self):
        self.run(self.server.end())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()


@contextlib.contextmanager
def running(*args, **kwargs):
    server = Running(*args, **kwargs)
    try:
        yield server
    finally:
        server.close()


class Client:
    """A bare client: sends messages as they are, and nothing twice."""

    def __init__(self, address, name="client", token=None, protocol=values.PROTOCOL, credentials=None):
        self.channel = (
            grpc.secure_channel(address, credentials, [("grpc.ssl_target_name_override", "localhost")])
            if credentials
            else grpc.insecure_channel(address, [("grpc.use_local_subchannel_pool", 1)])  # a connection of its own
        )
        self.stub = environments_pb2_grpc.EnvironmentServiceStub(self.channel)
        self.metadata = [("jmarl-client", name)]
        self.metadata += [("jmarl-protocol", protocol)] if protocol else []
        self.metadata += [("authorization", f"Bearer {token}")] if token else []
        own = secrets.token_hex(4)
        self.numbers = (f"{own}-{n}" for n in itertools.count())

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.channel.close()

    def call(self, method, request, timeout=20):
        return getattr(self.stub, method)(request, timeout=timeout, metadata=self.metadata)

    def future(self, method, request, timeout=20):
        return getattr(self.stub, method).future(request, timeout=timeout, metadata=self.metadata)

    def reset_request(self, task=None, environment=SUM, options=None, seed=0, number=None, num_turns=0):
        return pb.ResetRequest(
            environment=environment,
            options=values.to_map(options or {}, "options"),
            task=values.to_map({"start": 0} if task is None else task, "task"),
            seed=seed,
            request_id=number or next(self.numbers),
            num_turns=num_turns,
        )

    def reset(self, *args, **kwargs):
        return self.call("Reset", self.reset_request(*args, **kwargs)).start

    def step_request(self, session, step, messages=("1", "2"), seed=0, number=None):
        return pb.StepRequest(session=session, step=step, messages=messages, seed=seed, request_id=number or next(self.numbers))

    def step(self, *args, timeout=20, **kwargs):
        return self.call("Step", self.step_request(*args, **kwargs), timeout)


@contextlib.contextmanager
def refused(code, *texts, exclude=("Traceback", "hunter2", "/root", ".py", "site-packages")):
    """Expect an error of a call with this code, whose sentence has these texts, and none of the others."""
    try:
        yield
    except grpc.RpcError as error:
        assert error.code() is code, (error.code(), error.details())
        for text in texts:
            assert text in error.details(), error.details()
        for text in exclude:
            assert text not in error.details(), error.details()
        assert "(request " in error.details()
    else:
        raise AssertionError(f"no error; expected {code}")


def certificates(directory):
    """Write an authority, and certificates of localhost and of a client that it signed. Returns the paths by name."""

    def openssl(*arguments):
        subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True, cwd=directory)

    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    openssl("req", "-x509", *key, "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=authority", "-days", 2)
    for name in ("localhost", "trainer"):
        (directory / f"{name}.ext").write_text(f"subjectAltName=DNS:{name}\n")
        openssl("req", *key, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
        signed = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-extfile", f"{name}.ext", "-days", 2)
        openssl("x509", "-req", "-in", f"{name}.csr", "-out", f"{name}.pem", *signed)
    return {path.name: path for path in directory.iterdir()}


# What `jmarl serve` runs, without jax, which a server of environments never needs.
SCRIPT = """
import sys
from jmarl.cli.main import main
code = main(["serve", *sys.argv[1:]])
assert not {"jax", "flax", "optax", "torch", "transformers"} & set(sys.modules), "a server of environments imported jax"
sys.exit(code)
"""


class Process:
    """A server in a process of its own. Its log goes to a file: nobody reads a pipe here while it runs."""

    def __init__(self, *flags, environments="math", log=None):
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115
        command = [sys.executable, "-c", SCRIPT, "--environments", environments, "--port", "0", *flags]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log or self._log, text=True, cwd=ROOT)
        self.first_line = self.process.stdout.readline()
        if (address := re.search(r"127\.0\.0\.1:\d+", self.first_line)) is None:
            raise AssertionError(self.end())
        self.address = address[0]

    @property
    def log(self):
        """What was written to stderr so far."""
        return Path(f"/proc/self/fd/{self._log.fileno()}").read_text()

    def signal(self, number=signal.SIGTERM):
        self.process.send_signal(number)

    def end(self, timeout=20):
        """Wait for the end; return the exit code, and what was written to stdout and stderr."""
        code = self.process.wait(timeout)
        return code, self.process.stdout.read(), self.log

    def close(self):
        self.process.kill()
        self.process.communicate()
        self._log.close()


@contextlib.contextmanager
def process(*flags, **options):
    server = Process(*flags, **options)
    try:
        yield server
    finally:
        server.close()
