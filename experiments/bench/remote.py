"""Time an environment on a server of this machine against a bare gRPC call.

Claim: a step on a server costs little more than its call, and many open sessions cost neither time nor much memory.
Command: python -m experiments.bench.remote            (flags: --help)
Prints one JSON object. `echo_*` are calls of a server that returns what it gets, in the same run. The others are steps of a
trivial environment: the median of one session, which is played alone; steps a second of `--sessions` sessions, in batches as
training plays them, and with a call for each step, as many at once; and of `--open-sessions` sessions that are open, the 99th
percentile of single steps and the memory of the server and of this process.
Expected: 1.2 ms against 0.7 ms of the echo; 7,500 steps a second in batches and 1,000 in single calls against 2,500 echoes; a
99th percentile of 4 ms and 7 MiB for 1,000 sessions; on two cores that had other work. Time: about 25 s.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import multiprocessing
import statistics
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import grpc
import tyro

from jmarl import RemoteEnvironment, Step, TextEnvironment
from jmarl.config import Count
from jmarl.envs.vector import Fault
from jmarl.remote import environments_pb2 as pb
from jmarl.remote.access import Access
from jmarl.remote.catalog import read_offer
from jmarl.remote.client.plays import request_id
from jmarl.remote.client.remote_engine import RemoteEngine
from jmarl.remote.grpc_server import EnvironmentServer
from jmarl.remote.sessions import ServerLimits

HERE = "experiments.bench.remote"


class Trivial(TextEnvironment):
    """Answers at once, and never ends."""

    max_turns = 1_000_000

    def reset(self, task: dict, rng: Any) -> tuple[Any, list[str]]:
        return None, ["go"]

    def step(self, state: Any, messages: Any, rng: Any) -> Step:
        return Step(None, ["go on"], 0.0, False)


@dataclasses.dataclass(frozen=True)
class Remote:
    """Time of steps on a server."""

    steps: Count = 1000
    """Steps of the one session."""
    sessions: Count = 32
    """Sessions that are played side by side."""
    rounds: Count = 50
    """Steps of each of them."""
    open_sessions: Count = 1000
    """Sessions that are open at once."""
    open_steps: Count = 10
    """Steps of each of them."""


def bench(options: Remote) -> dict[str, Any]:
    context = multiprocessing.get_context("spawn")
    processes, addresses = [], []
    try:
        for target in (serve, echo):
            here, there = context.Pipe()
            processes.append(context.Process(target=target, args=(there,)))
            processes[-1].start()
            addresses.append(f"127.0.0.1:{here.recv()}")
        return dataclasses.asdict(options) | measure(options, addresses[0], addresses[1], processes[0].pid or 0)
    finally:
        for process in processes:
            process.kill()
            process.join()


def measure(options: Remote, address: str, echo_address: str, server: int) -> dict[str, Any]:
    """Return the figures. server: its process."""
    engine = RemoteEnvironment(address, f"{HERE}:Trivial").engine
    assert isinstance(engine, RemoteEngine)
    channel = grpc.insecure_channel(echo_address)
    call: Any = channel.unary_unary("/echo/Echo")
    payload = pb.BatchStepRequest(calls=[step_request("x" * 24, 0)]).SerializeToString()
    for _ in range(100):  # both are warm
        call(payload)
    states = begin(engine, 1)
    echo_seconds = [seconds(lambda: call(payload)) for _ in range(options.steps)]

    def one_step() -> None:
        states[:] = step_all(engine, states)

    for _ in range(100):
        one_step()
    step_seconds = [seconds(one_step) for _ in range(options.steps)]
    echoes = in_waves(lambda i, n: call.future(payload), options)
    batches, single = batched(engine, options), one_by_one(engine, options)
    before = resident(server), resident()
    states = begin(engine, options.open_sessions)
    latencies = []
    for _ in range(options.open_steps):
        for i in range(len(states)):
            start = time.perf_counter()
            states[i : i + 1] = step_all(engine, states[i : i + 1])
            latencies.append(time.perf_counter() - start)
    after = resident(server), resident()
    figures = {
        "echo_p50_ms": 1000 * statistics.median(echo_seconds),
        "step_p50_ms": 1000 * statistics.median(step_seconds),
        "echo_calls_per_s": echoes,
        "steps_per_s_in_batches": batches,
        "step_calls_per_s": single,
        "open_p50_ms": 1000 * statistics.median(latencies),
        "open_p99_ms": 1000 * statistics.quantiles(latencies, n=100)[98],
        "server_mib": after[0],
        "server_mib_for_sessions": after[0] - before[0],
        "client_mib_for_sessions": after[1] - before[1],
    }
    return {name: round(value, 3) for name, value in figures.items()}


def step_request(session: str, step: int) -> pb.StepRequest:
    return pb.StepRequest(session=session, step=step, messages=["hello"], seed=1, request_id=request_id())


def in_waves(start: Callable[[int, int], grpc.Future], options: Remote) -> float:
    """Return calls a second, of which as many as there are sessions are made at once. start: (session, step) -> call."""
    begun = time.perf_counter()
    for step in range(options.rounds):
        for future in [start(i, step) for i in range(options.sessions)]:
            future.result()
    return options.sessions * options.rounds / (time.perf_counter() - begun)


def one_by_one(engine: RemoteEngine, options: Remote) -> float:
    """Return steps a second with a call for each step."""
    states = begin(engine, options.sessions)
    sessions = [state.session for state in states]
    return in_waves(
        lambda i, step: sessions[i].server.connection.start("Step", step_request(sessions[i].name, step), 10.0), options
    )


def batched(engine: RemoteEngine, options: Remote) -> float:
    """Return steps a second of sessions that are played as training does."""
    states = begin(engine, options.sessions)
    start = time.perf_counter()
    for _ in range(options.rounds):
        states = step_all(engine, states)
    return options.sessions * options.rounds / (time.perf_counter() - start)


def begin(engine: RemoteEngine, count: int) -> list[Any]:
    """Return the states of new sessions."""
    return [start[0] for start in engine.reset([{}] * count, range(count)) if not isinstance(start, Fault)]


def step_all(engine: RemoteEngine, states: list[Any]) -> list[Any]:
    """Return the states after a step of each session."""
    steps = engine.step(states, [("hello",)] * len(states), range(len(states)))
    return [step.state for step in steps if isinstance(step, Step)]


def seconds(function: Callable[[], Any]) -> float:
    """Return the time that a call of a function takes."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def resident(process: int | str = "self") -> float:
    """Return the resident memory of a process in MiB."""
    lines = Path(f"/proc/{process}/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) / 1024


def serve(pipe: Connection) -> None:
    """Serve the environment, and say at which port."""

    async def run() -> None:
        server = EnvironmentServer(read_offer(f"{HERE}:Trivial"), Access(), ServerLimits())
        server.catalog.build_all()
        pipe.send(await server.start())
        await asyncio.Event().wait()

    asyncio.run(run())


def echo(pipe: Connection) -> None:
    """Serve a call that returns what it gets, and say at which port."""

    class Echo(grpc.GenericRpcHandler):
        def service(self, handler_call_details: Any) -> Any:
            return grpc.unary_unary_rpc_method_handler(answer)

    async def answer(request: bytes, context: Any) -> bytes:
        return request

    async def run() -> None:
        server = grpc.aio.server(handlers=[Echo()])
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        pipe.send(port)
        await asyncio.Event().wait()

    asyncio.run(run())


if __name__ == "__main__":
    print(json.dumps(bench(tyro.cli(Remote))))
