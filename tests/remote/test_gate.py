"""Who may call a server, and what it answers to calls that no client of jmarl makes."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
import threading
import time
import tracemalloc

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from jmarl.config.validation import did_you_mean
from jmarl.remote import environments_pb2 as pb
from jmarl.remote.access import Access, Tls
from jmarl.remote.gate import host_of
from jmarl.remote.grpc_server import GrpcStrangers, connections
from jmarl.remote.limits import ServerLimits
from tests.remote.faulty import eventually
from tests.remote.served import SUM, Client, certificates, process, refused, running

Code = grpc.StatusCode
TOKEN = "a-token-of-this-test"
METHOD = "/jmarl.environments.v1.EnvironmentService/"


@pytest.fixture(scope="module")
def server():
    with running(access=Access(token=TOKEN), receive_s=0.3) as server:
        yield server


def raw(client, method, streaming=False):
    """Return a method that sends bytes."""
    make = client.channel.stream_unary if streaming else client.channel.unary_unary
    return make(METHOD + method)


METHODS = ["List", "Describe", "Tasks", "Reset", "Observe", "Step", "BatchReset", "BatchStep", "Fork", "Close", "Score"]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("token", [None, "wrong", TOKEN[:-1], TOKEN + "x", TOKEN.upper()])
def test_every_call_needs_the_token(server, method, token):
    with (
        Client(server.address, token=token) as client,
        refused(Code.UNAUTHENTICATED, "wrong token" if token else "no token", "--token-file"),
    ):
        raw(client, method)(b"", timeout=20, metadata=client.metadata)


@pytest.mark.parametrize("header", [TOKEN, f"Basic {TOKEN}", f"Bearer{TOKEN}", "Bearer"])
def test_a_token_in_another_form_is_wrong(server, header):
    with Client(server.address) as client, refused(Code.UNAUTHENTICATED):
        client.metadata.append(("authorization", header))
        client.call("List", pb.ListRequest())


def test_the_right_token_is_accepted(server):
    with Client(server.address, token=TOKEN) as client:
        assert SUM in client.call("List", pb.ListRequest()).names


def test_health_needs_no_token_and_tells_nothing_of_what_is_served(server):
    with Client(server.address) as client:
        health = health_pb2_grpc.HealthStub(client.channel)
        assert health.Check(health_pb2.HealthCheckRequest(), timeout=20).status == health_pb2.HealthCheckResponse.SERVING
        for name in ("jmarl.environments.v1.EnvironmentService", SUM):
            with pytest.raises(grpc.RpcError) as error:
                health.Check(health_pb2.HealthCheckRequest(service=name), timeout=20)
            assert error.value.code() is Code.NOT_FOUND and error.value.details() == "only the whole server has a health"
        with pytest.raises(grpc.RpcError) as error:
            list(health.Watch(health_pb2.HealthCheckRequest(), timeout=20))
        assert error.value.code() is Code.UNIMPLEMENTED


@pytest.mark.parametrize("protocol", ["0", "2", None, "1.0"])
def test_client_and_server_name_their_versions_where_they_differ(server, protocol):
    theirs = f"protocol {protocol}," if protocol else "no protocol"
    with (
        Client(server.address, token=TOKEN, protocol=protocol) as client,
        refused(Code.INVALID_ARGUMENT, theirs, "this server protocol 1, of jmarl 0.1.0: install the same"),
    ):
        client.call("List", pb.ListRequest())


def test_a_client_without_tls_does_not_reach_a_server_with_it(tmp_path):
    files = certificates(tmp_path)
    tls = Tls(files["localhost.pem"], files["localhost.key"])
    authority = files["ca.pem"].read_bytes()
    with running(access=Access(token=TOKEN, tls=tls)) as server:
        with Client(server.address, token=TOKEN, credentials=grpc.ssl_channel_credentials(authority)) as client:
            assert client.reset().observations
        with Client(server.address, token=TOKEN) as client, pytest.raises(grpc.RpcError) as error:
            client.call("List", pb.ListRequest(), timeout=5)
        assert error.value.code() is Code.UNAVAILABLE


def test_a_client_shows_a_certificate_where_the_server_asks_for_one_and_sessions_belong_to_it(tmp_path):
    files = certificates(tmp_path)
    read = {name: path.read_bytes() for name, path in files.items()}
    tls = Tls(files["localhost.pem"], files["localhost.key"], files["ca.pem"])
    known = grpc.ssl_channel_credentials(read["ca.pem"], read["trainer.key"], read["trainer.pem"])
    other = grpc.ssl_channel_credentials(read["ca.pem"], read["localhost.key"], read["localhost.pem"])
    with running(access=Access(tls=tls), limits=ServerLimits(sessions=1)) as server:
        with Client(server.address, credentials=known) as client:
            start = client.reset()
        with Client(server.address, "new name", credentials=known) as client, refused(Code.RESOURCE_EXHAUSTED):
            client.reset()
        with Client(server.address, credentials=other) as client:
            with refused(Code.NOT_FOUND):
                client.step(start.session, 0)
            client.reset()  # limits too are those of a certificate
        with (
            Client(server.address, credentials=grpc.ssl_channel_credentials(read["ca.pem"])) as client,
            pytest.raises(grpc.RpcError) as error,
        ):
            client.call("List", pb.ListRequest(), timeout=5)
        assert error.value.code() is Code.UNAVAILABLE


# --- calls that no client of jmarl makes ---


@pytest.mark.parametrize("data", [b"\xff", b"\x0a\x05ab", b"\x0a\x02\xff\xfe", b"\x1a" * 50], ids=repr)
def test_bytes_that_are_no_message_are_refused(server, data):
    with Client(server.address, token=TOKEN) as client, refused(Code.INVALID_ARGUMENT, "the message is no ResetRequest"):
        raw(client, "Reset")(data, timeout=20, metadata=client.metadata)


def test_a_sender_that_is_too_slow_is_told(server):
    def slowly():
        time.sleep(1)
        yield b""

    with Client(server.address, token=TOKEN) as client, refused(Code.DEADLINE_EXCEEDED, "no message within 0.3 s"):
        raw(client, "List", streaming=True)(slowly(), timeout=20, metadata=client.metadata)


def test_a_stream_that_is_closed_without_a_message_is_refused(server):
    with Client(server.address, token=TOKEN) as client, refused(Code.INVALID_ARGUMENT, "a call without a message"):
        raw(client, "List", streaming=True)(iter(()), timeout=20, metadata=client.metadata)


def test_a_stream_of_many_messages_is_answered_for_its_first(server):
    with Client(server.address, token=TOKEN) as client:
        reply = raw(client, "List", streaming=True)(iter([b""] * 50), timeout=20, metadata=client.metadata)
        assert SUM in pb.ListReply.FromString(reply).names


def test_slow_senders_do_not_block_others(server):
    end = threading.Event()

    def never():
        end.wait()
        yield b""

    with Client(server.address, "slow", TOKEN) as slow, Client(server.address, "other", TOKEN) as client:
        call = raw(slow, "List", streaming=True)
        waiting = [call.future(never(), timeout=20, metadata=slow.metadata) for _ in range(100)]
        began = time.monotonic()
        client.reset()
        assert time.monotonic() - began < 2
        assert {future.code() for future in waiting} == {Code.DEADLINE_EXCEEDED}
        end.set()


@pytest.mark.parametrize("method", ["/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch", METHOD + "List"])
def test_calls_without_a_token_whose_message_does_not_come_leave_room_for_others(monkeypatch, method):
    monkeypatch.setattr("jmarl.remote.grpc_server.MAX_CONCURRENT", 8)
    monkeypatch.setattr("jmarl.remote.gate.MAX_HEALTH", 4)
    end = threading.Event()

    def never():
        end.wait()
        yield b""

    with running(access=Access(token=TOKEN)) as server:
        server.server._gate.health_s = 0.5
        with Client(server.address) as silent, Client(server.address, token=TOKEN) as client:
            waiting = [silent.channel.stream_unary(method).future(never(), timeout=20) for _ in range(8)]
            deadline = time.monotonic() + 3
            while sum(future.done() for future in waiting) < 4 and time.monotonic() < deadline:
                time.sleep(0.02)
            assert client.call("List", pb.ListRequest()).names
            codes = {future.code() for future in waiting}
            assert codes <= {Code.DEADLINE_EXCEEDED, Code.RESOURCE_EXHAUSTED, Code.UNAUTHENTICATED, Code.UNIMPLEMENTED}
            assert time.monotonic() < deadline
            end.set()


def test_a_connection_that_says_nothing_is_closed(monkeypatch):
    monkeypatch.setattr("jmarl.remote.grpc_server.HANDSHAKE_MS", 300)
    with running() as server, socket.create_connection(("127.0.0.1", server.server.port)) as silent:
        silent.settimeout(10)
        while silent.recv(1000):  # what the server says first
            pass


def test_the_oldest_connections_without_the_token_are_closed_and_no_other():
    with running(access=Access(token=TOKEN)) as server, Client(server.address, token=TOKEN) as client:
        strangers = server.server._strangers
        strangers.most = 2
        client.call("List", pb.ListRequest())
        idle = []
        for _ in range(5):
            idle.append(socket.create_connection(("127.0.0.1", server.server.port), timeout=10))
            idle[-1].sendall(HTTP2)
            port = idle[-1].getsockname()[1]
            eventually(lambda port=port: ("127.0.0.1", port) in strangers.waiting)
        for connection in idle[:3]:
            while connection.recv(1000):  # until it is closed
                pass
        eventually(lambda: len(strangers.waiting) == 2)
        assert client.call("List", pb.ListRequest()).names
        for connection in idle:
            connection.close()
        eventually(lambda: not strangers.waiting)


@pytest.mark.parametrize("token", [None, TOKEN])
def test_only_many_open_files_of_a_server_with_a_token_are_looked_at(monkeypatch, token):
    looks = []

    def look(fd):
        looks.append(fd)
        raise OSError

    monkeypatch.setattr("jmarl.remote.grpc_server.LOOK_S", 0.01)
    monkeypatch.setattr("jmarl.remote.grpc_server.connection_of", look)
    with running(access=Access(token=token)) as server, Client(server.address, token=token) as client:
        strangers = server.server._strangers
        strangers.most = 10**6
        for _ in range(3):
            assert client.call("List", pb.ListRequest()).names
        time.sleep(0.1)
        assert not looks and len(strangers._known) == (token is not None)
        strangers.most = 1
        if token:
            eventually(lambda: looks)
        time.sleep(0.1)
        assert bool(looks) == bool(token)


def test_who_shows_the_token_during_a_look_is_no_stranger(monkeypatch):
    strangers, peer, looks = GrpcStrangers(), ("127.0.0.1", 4711), []

    def look(port, least=0):
        if port:  # of a server that another test uses
            return connections(port, least)
        looks.append(port)
        if looks[1:]:
            return {peer: -1}
        strangers.remove(peer)
        return {}

    monkeypatch.setattr("jmarl.remote.grpc_server.connections", look)
    for _ in range(2):
        asyncio.run(strangers.look(0))
    assert not strangers.waiting


@pytest.mark.parametrize("settings", [b"", b"acknowledged"])
def test_streams_that_are_reset_at_once_without_the_token_cost_no_call_of_others(tmp_path, settings):
    """HTTP/2 rapid reset. Many calls at once of who has the token are not taken for it."""
    end = threading.Event()
    (tmp_path / "token").write_text(TOKEN)
    (tmp_path / "token").chmod(0o600)

    def attack(port):
        while not end.is_set():
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)) as connection:
                connection.sendall(HTTP2 + (frame(4, b"", 0, 1) if settings else b""))
                for first in range(1, 40_000, 100):
                    if end.is_set():
                        return
                    streams = range(first, first + 100, 2)
                    connection.sendall(b"".join(frame(1, HEADERS, n, 4) + frame(3, b"\0\0\0\x08", n) for n in streams))

    with process(f"--token-file={tmp_path / 'token'}") as server, Client(server.address, token=TOKEN) as client:
        thread = threading.Thread(target=attack, args=(int(server.address.rpartition(":")[2]),))
        thread.start()
        try:
            for _ in range(100):
                assert client.call("List", pb.ListRequest()).names
        finally:
            end.set()
            thread.join()
        for future in [client.future("List", pb.ListRequest()) for _ in range(50)]:
            assert future.result().names


def frame(kind, data, stream=0, flags=0):
    """Return a frame of HTTP/2."""
    return len(data).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + data


def literal(name, value):
    """Return a header of HTTP/2."""
    return b"\0" + bytes([len(name)]) + name + bytes([len(value)]) + value


HTTP2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, b"")
HEADERS = b"\x83\x86" + literal(b":path", f"{METHOD}List".encode()) + literal(b":authority", b"x")
HEADERS += literal(b"content-type", b"application/grpc") + literal(b"te", b"trailers")


def test_an_unknown_method_is_refused(server):
    with Client(server.address, token=TOKEN) as client:
        for method in (METHOD + "Delete", "/other.Service/List"):
            with pytest.raises(grpc.RpcError) as error:
                client.channel.unary_unary(method)(b"", timeout=20, metadata=client.metadata)
            assert error.value.code() is Code.UNIMPLEMENTED


def test_a_long_name_of_a_client_is_refused(server):
    with (
        Client(server.address, "x" * 129, TOKEN) as client,
        refused(Code.INVALID_ARGUMENT, "129 characters, 1 to 128 are allowed"),
    ):
        client.call("List", pb.ListRequest())


def test_clients_need_a_name_of_their_own(server):
    """Without one they would share sessions and numbers of requests."""
    with Client(server.address, "", TOKEN) as client:
        for metadata in (client.metadata, [entry for entry in client.metadata if entry[0] != "jmarl-client"]):
            client.metadata = metadata
            with refused(Code.INVALID_ARGUMENT, "jmarl-client has 0 characters, 1 to 128 are allowed"):
                client.call("List", pb.ListRequest())


def test_one_client_leaves_room_for_the_calls_of_others(server, monkeypatch):
    monkeypatch.setattr("jmarl.remote.gate.MAX_CALLS", 2)
    end = threading.Event()

    def never():
        end.wait()
        yield b""

    with Client(server.address, "a", TOKEN) as client:
        call = raw(client, "List", streaming=True)
        waiting = [call.future(never(), timeout=20, metadata=client.metadata) for _ in range(2)]
        time.sleep(0.1)
        with refused(Code.RESOURCE_EXHAUSTED, "more than 2 calls at once of one client") as _:
            client.call("List", pb.ListRequest())
        assert {future.code() for future in waiting} == {Code.DEADLINE_EXCEEDED}
        end.set()
        assert client.call("List", pb.ListRequest()).names and not server.server._gate._calls


@pytest.mark.parametrize("character", ["x", "\u6570", "\U0001f600"])
def test_a_long_sentence_keeps_its_code(server, character):
    """Headers have a limit, and a character of theirs may need twelve."""
    with Client(server.address, "a", TOKEN) as client, refused(Code.INVALID_ARGUMENT, "unexpected keyword argument"):
        client.reset(environment="math", options={character * 5000: 1})


def test_a_long_name_is_not_compared_with_others():
    """That takes seconds, in which a server answers nobody."""
    assert did_you_mean("x" * 200, ["x" * 199]) and not did_you_mean("x" * 201, ["x" * 200])


def test_requests_that_are_refused_are_not_kept(server):
    """Nor those that are answered: they may have megabytes, and Python looks for cycles by their number."""
    request = pb.DescribeRequest(environment="x" * 1_000_000)
    with Client(server.address, "a", TOKEN) as client:
        gc.collect()
        gc.disable()
        tracemalloc.start()
        try:
            for _ in range(5):
                with refused(Code.INVALID_ARGUMENT, "there is no environment"):
                    client.call("Describe", request)
                client.call("Close", pb.CloseRequest(sessions=["x" * 1_000_000]))
            assert tracemalloc.get_traced_memory()[0] < 3_000_000
        finally:
            tracemalloc.stop()
            gc.enable()


@pytest.mark.parametrize(
    ("peer", "host"),
    [("ipv4:10.0.0.1:4711", "10.0.0.1"), ("ipv6:%5B::1%5D:4711", "::/64"), ("ipv6:%5Bfe80::1%25eth0%5D:4711", "fe80::/64"),
     ("ipv6:[2001:db8:0:1:2:3:4:5]:1", "2001:db8:0:1::/64"), ("ipv6:%5B::ffff:10.0.0.1%5D:2", "10.0.0.1"), ("unix:", "unix:")],
)  # fmt: skip
def test_a_host_is_known_without_its_port(peer, host):
    assert host_of(peer) == host
