"""Requests that no client makes: a server answers each with the right code, and loses neither sessions nor memory."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import time
from pathlib import Path

import grpc
import numpy as np
import pytest

from jmarl.remote import environments_pb2 as pb
from jmarl.remote import values
from jmarl.remote.gate import SERVICE
from tests.remote.served import HERE, SUM, Client, process

Code = grpc.StatusCode
TOKEN = "a-token-of-this-test"
METHODS = [method.name for method in SERVICE.methods]
REFUSALS = {Code.INVALID_ARGUMENT, Code.NOT_FOUND, Code.FAILED_PRECONDITION, Code.RESOURCE_EXHAUSTED}
ANSWERS = REFUSALS | {Code.OK, Code.INTERNAL}  # INTERNAL: the environment raised, never the server
TEXTS = ["", "x", "\0", "\u00e9" * 40, "x" * 70_000, SUM, "unknown", "../../etc/passwd", "1"]
STATE = np.random.default_rng(0).bit_generator.state
NUMBERS = [0, 1, 2, 3, 7, (1 << 31) - 1]


class Mutations:
    """Valid requests, changed at random."""

    def __init__(self, seed, address):
        self.random = random.Random(seed)
        self.client, self.other = Client(address, "client", TOKEN), Client(address, "other", TOKEN)
        self.sessions, self.foreign, self.sent = [], [], []
        self.address = address

    def valid(self, method):
        """Return a request that may be sent: an empty one, where there is nothing to say."""
        session = self.random.choice(self.sessions or ["none"])
        match method:
            case "Reset":
                return self.client.reset_request({"start": self.random.randrange(9)})
            case "Step":
                return self.client.step_request(session, self.random.randrange(3))
            case "BatchReset":
                return pb.BatchResetRequest(calls=[self.valid("Reset") for _ in range(self.random.randrange(4))])
            case "BatchStep":
                return pb.BatchStepRequest(calls=[self.valid("Step") for _ in range(self.random.randrange(4))])
            case "Fork":
                return pb.ForkRequest(
                    session=session, step=self.random.randrange(2), count=1, request_id=next(self.client.numbers)
                )
            case "Close":
                return pb.CloseRequest(sessions=[session])
            case "Observe":
                return pb.ObserveRequest(session=session)
            case "Tasks":
                return pb.TasksRequest(environment=SUM, split="train", count=3)
            case "Describe":
                return pb.DescribeRequest(environment=SUM)
            case "Score":
                texts = [pb.Texts(texts=["a"]), pb.Texts(texts=["b"])]
                items, random = [values.to_map({"factor": 2}, "item")], values.to_map(STATE, "random")
                reward = f"{HERE}:length"
                number = next(self.client.numbers)
                return pb.ScoreRequest(reward=reward, completions=texts, items=items, random=random, request_id=number)
        return pb.ListRequest()

    def change_field(self, message):
        """Clear a field somewhere in a message, or set it to a value that is not expected."""
        field = self.random.choice([*message.DESCRIPTOR.fields] or [None])
        if field is None:
            return
        value, kinds = getattr(message, field.name), field
        if field.message_type is not None and self.random.random() < 0.6:  # go deeper
            inner = self.random.choice(value) if field.is_repeated and len(value) else None if field.is_repeated else value
            if inner is not None:
                self.change_field(inner)
            return
        if self.random.random() < 0.3 or field.message_type is not None:
            message.ClearField(field.name)
            return
        texts = [*TEXTS, *self.sessions[-2:], *self.foreign[-2:]]
        new = self.random.choice({str: texts, bool: [True, False], float: [float("nan"), 1e300]}.get(type_of(kinds), NUMBERS))
        if field.is_repeated:
            value.append(new)
        else:
            setattr(message, field.name, new)

    def change_bytes(self, data):
        """Flip, cut, insert or repeat bytes; texts become invalid UTF-8."""
        data = bytearray(data or b"\0")
        for _ in range(self.random.randrange(1, 4)):
            at = self.random.randrange(len(data) + 1)
            match self.random.randrange(4):
                case 0:
                    data[at : at + 1] = bytes([self.random.randrange(256)])
                case 1:
                    del data[at:]
                case 2:
                    data[at:at] = b"\xff\xfe\xc0\x80"
                case 3:
                    data[at:at] = data[: self.random.randrange(1, 64)]
        return bytes(data)

    def call(self, method, data, expected, client=None, metadata=None, timeout=20.0):
        """Send bytes; check the code, and that the sentence tells nothing of the server."""
        client = client or self.client
        send = client.channel.unary_unary(f"/{SERVICE.full_name}/{method}")
        try:
            reply = send(data, timeout=timeout, metadata=client.metadata if metadata is None else metadata)
        except grpc.RpcError as error:
            assert error.code() in expected, (method, data[:200], error)
            for text in ("Traceback", "hunter2", ".py", "site-packages", "the server failed"):
                assert text not in error.details(), (method, data[:200], error)
            return
        assert Code.OK in expected, (method, data[:200], metadata)
        self.remember(method, reply, client)

    def remember(self, method, reply, client):
        own = self.sessions if client is self.client else self.foreign
        if method == "Reset":
            own.append(pb.ResetReply.FromString(reply).start.session)
        elif method == "BatchReset":
            own += [answer.reply.start.session for answer in pb.BatchResetReply.FromString(reply).answers]
        own[:] = [session for session in own if session][-20:]

    def one(self):
        """Make one call."""
        method = self.random.choice(METHODS)
        message = self.valid(method)
        data = message.SerializeToString()
        match self.random.randrange(10):
            case 0 | 1 | 2:
                for _ in range(self.random.randrange(1, 4)):
                    self.change_field(message)
                self.call(method, message.SerializeToString(), ANSWERS)
            case 3 | 4:
                self.call(method, self.change_bytes(data), ANSWERS)
            case 5:  # the message of another method
                self.call(method, self.valid(self.random.choice(METHODS)).SerializeToString(), ANSWERS)
            case 6:  # again, changed or not, and by another client
                self.sent = [*self.sent[-9:], (method, data)]
                method, data = self.random.choice(self.sent)
                self.call(method, data, ANSWERS, self.random.choice([self.client, self.other]))
            case 7:
                self.no_right(method, data)
            case 8:
                self.impatient(method, data)
            case 9:
                self.foreign_session()

    def no_right(self, method, data):
        """Call without the right token or version."""
        right = dict(self.client.metadata)
        token = self.random.choice([None, "", "Bearer", f"Bearer {TOKEN}x", f"Basic {TOKEN}", "Bearer " + "x" * 3000])
        wrong = [*({**right, "authorization": token} if token is not None else {"jmarl-client": "client"}).items()]
        self.call(method, data, {Code.UNAUTHENTICATED}, metadata=wrong)
        version = self.random.choice(["0", "x" * 200, ""])
        self.call(method, data, {Code.INVALID_ARGUMENT}, metadata=[*{**right, "jmarl-protocol": version}.items()])

    def impatient(self, method, data):
        """Go away in mid-call, send nothing, or half-close."""
        stream = self.client.channel.stream_unary(f"/{SERVICE.full_name}/{method}")
        match self.random.randrange(4):
            case 0:
                self.call(method, data, ANSWERS | {Code.DEADLINE_EXCEEDED}, timeout=0.001)
            case 1:
                with contextlib.suppress(grpc.RpcError):
                    stream(iter(()), timeout=20, metadata=self.client.metadata)
                    raise AssertionError(f"{method} answered a call without a message")
            case 2:
                call = stream.future(slowly(data), timeout=20, metadata=self.client.metadata)
                time.sleep(0.005)
                call.cancel()
            case 3:
                host, _, port = self.address.rpartition(":")
                with socket.create_connection((host, int(port)), timeout=5) as connection:
                    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
                    connection.sendall(preface[: self.random.randrange(len(preface) + 1)] + self.random.randbytes(30))
                    connection.shutdown(socket.SHUT_WR)

    def foreign_session(self):
        """Use a session of the other client."""
        self.call("Reset", self.other.reset_request().SerializeToString(), {Code.OK}, self.other)
        request = self.client.step_request(self.foreign[-1], 0)
        self.call("Step", request.SerializeToString(), {Code.NOT_FOUND})
        self.call("Observe", pb.ObserveRequest(session=self.foreign[-1]).SerializeToString(), {Code.NOT_FOUND})
        self.call("Close", pb.CloseRequest(sessions=[self.foreign[-1]]).SerializeToString(), {Code.OK}, self.other)

    def close(self):
        self.client.channel.close()
        self.other.channel.close()


def type_of(field):
    return {field.TYPE_STRING: str, field.TYPE_BOOL: bool, field.TYPE_DOUBLE: float}.get(field.type, int)


def slowly(data):
    time.sleep(0.02)
    yield data


def resources(pid):
    """Return the descriptors, threads and resident MiB of a process."""
    status = Path(f"/proc/{pid}/status").read_text().split("\n")
    number = {line.split(":")[0]: line.split()[1] for line in status if line.startswith(("Threads", "VmRSS"))}
    return len(os.listdir(f"/proc/{pid}/fd")), int(number["Threads"]), int(number["VmRSS"]) / 1024


@pytest.mark.parametrize("count", [500, pytest.param(10_000, marks=pytest.mark.slow)])
def test_mutated_requests_get_their_codes_and_leave_nothing_behind(tmp_path, count):
    (tmp_path / "token").write_text(TOKEN)
    (tmp_path / "token").chmod(0o600)
    flags = (f"--token-file={tmp_path / 'token'}", "--idle-timeout=1", f"--rewards={HERE}:length")
    with process(*flags, environments=SUM) as server, Client(server.address, "watcher", TOKEN) as watcher:
        before = None
        for part in range(5):
            mutations = Mutations(part, server.address)
            for _ in range(count // 5):
                mutations.one()
            mutations.close()
            before = before or resources(server.process.pid)  # after the first part: all has been used once
        start = watcher.reset({"start": 1})
        assert values.from_value(watcher.step(start.session, 0).step.reward) == [4.0, 0.5]
        watcher.call("Close", pb.CloseRequest(sessions=[start.session]))
        time.sleep(2.0)  # all other sessions end without a call
        after = resources(server.process.pid)
        server.signal()
        code, _, err = server.end()
    assert code == 0, err
    assert "the server failed" not in err and "0 are played" in err, err[-3000:]
    assert after[0] <= before[0] + 3 and after[1] <= before[1] + 3 and after[2] < before[2] + 40, (before, after)
