"""Servers that are full, slow, end, or refuse: the client waits, plays again or raises, and never goes on without end."""

from __future__ import annotations

import contextlib
import random
import threading
import time

import grpc
import numpy as np
import pytest

from jmarl import make, remote_reward
from jmarl.envs.vector import Fault, LockStep
from jmarl.processes.ending import Interrupted
from jmarl.remote import environments_pb2 as pb
from jmarl.remote import grpc_server as server_module
from jmarl.remote.catalog import read_offer
from jmarl.remote.client import servers as servers_module
from jmarl.remote.client.calls import Call, RemoteServer, call_all
from jmarl.remote.client.connection import Credentials
from jmarl.remote.limits import ServerLimits
from tests.remote.faulty import DRIFTING, LONG, OFFER, SLOW, THIS, eventually, forget, soon
from tests.remote.lying import between
from tests.remote.playing import plain, play
from tests.remote.served import HERE, SUM, Client, Sum, running

pytestmark = pytest.mark.usefixtures("short_waits")
AWAY = [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.UNKNOWN]


# --- servers that are full, and messages that are too long


def test_a_server_is_asked_for_no_more_copies_than_it_takes_at_once(monkeypatch):
    with running(OFFER, limits=ServerLimits(batch=2)) as server:
        far = make(SUM, servers=server.address).engine
        ((state, _),) = far.reset([{"start": 1}], [1])
        steps = far.step([state] * 5, [("1", "2")] * 5, [1] * 5)
        assert [step.reward for step in steps] == [[4.0, 0.5]] * 5 and not far.servers.all[server.address].full_reason


def test_servers_without_room_end_the_run_after_the_timeout():
    with running(OFFER, limits=ServerLimits(all_sessions=2)) as full, Client(full.address) as other:
        far = make(SUM, servers={"address": full.address, "timeout": 0.5})
        starts = [other.reset(), other.reset()]
        error = soon(lambda: far.engine.reset([{"start": 1}], [1]))
        assert isinstance(error, RuntimeError) and "have had no room for new sessions for 0.5 s" in str(error)
        assert "this server has at most 2 open sessions of all clients, and 2 are open" in str(error)
        close = pb.CloseRequest(sessions=[start.session for start in starts])
        threading.Timer(0.2, lambda: other.call("Close", close)).start()
        ((_, observations),) = soon(lambda: far.engine.reset([{"start": 1}], [1]))
        assert observations[0].startswith("total 1, ")


def test_answers_that_fit_into_no_message_come_in_several():
    """A message holds the answers of at most 18 episodes, and the requests of many more."""
    with running(OFFER, limits=ServerLimits(message_bytes=20_000)) as server:
        far = make(LONG, servers={"address": server.address, "timeout": 2.0})
        starts = soon(lambda: far.engine.reset([{}] * 30, range(30)))
        assert [observations for _, observations in starts] == [["x" * 1000]] * 30
        assert len(server.server.sessions) == 30  # what was played is asked for again, and not played again
        steps = soon(lambda: far.engine.step([state for state, _ in starts], [("m",)] * 30, range(30)))
        assert [step.observations for step in steps] == [["y" * 1000]] * 30


@pytest.mark.parametrize(("limit", "task"), [(900, {}), (20_000, {"text": "x" * 300_000})])
def test_an_episode_that_fits_into_no_message_ends_the_run_with_the_sentence_of_the_server(limit, task):
    with running(OFFER, limits=ServerLimits(message_bytes=limit)) as server:
        far = make(LONG, servers={"address": server.address, "timeout": 2.0})
        error = soon(lambda: far.engine.reset([task] * 3, range(3)))
        assert isinstance(error, RuntimeError) and str(error).startswith(f"server {server.address}: ")
        assert "the answer has" in str(error) or "larger than max" in str(error)


def test_a_client_waits_for_a_server_with_too_many_calls_at_once(monkeypatch):
    monkeypatch.setattr(server_module, "MAX_CONCURRENT", 1)
    with running(OFFER, limits=ServerLimits(batch=1)) as server:
        far = make(SLOW, servers={"address": server.address, "timeout": 5.0}).engine
        starts = soon(lambda: far.reset([{}] * 4, range(4)))
        steps = soon(lambda: far.step([state for state, _ in starts], [("m",)] * 4, range(4)))
        assert [step.reward for step in steps] == [0.5] * 4


# --- calls without a session


def test_tasks_that_fit_into_no_message_are_an_error_and_lose_no_session():
    with running(OFFER, limits=ServerLimits(message_bytes=20_000)) as server:
        far = make(LONG, servers={"address": server.address, "timeout": 2.0, "patience": 2.0})
        ((state, _),) = far.engine.reset([{}], [0])
        error = soon(lambda: far.tasks("long", 3))
        assert isinstance(error, RuntimeError) and "messages of this server have at most 20000: ask for less" in str(error)
        assert state.session.is_open() and far.engine.servers.all[server.address].ready


def test_a_reward_that_takes_long_is_asked_for_again_and_one_that_never_comes_is_an_error(server):
    far = remote_reward(server.address, f"{THIS}:slow", timeout=0.3)
    rewards = soon(lambda: far(["a"], ["b"], batch_items=[{}], rng=np.random.default_rng(0)))
    assert np.array_equal(rewards, [[1.0, 2.0]])
    with between(server.address, hangs=("Score",)) as (address, handler):
        far = remote_reward(address, f"{HERE}:length", timeout=0.1, patience=0.5)
        error = soon(lambda: far(["a"], ["b"], batch_items=[{"factor": 1.0}], rng=np.random.default_rng(0)))
        assert isinstance(error, RuntimeError) and "does not answer in time" in str(error)
        assert handler.calls.count("Score") == 4


@pytest.mark.parametrize("code", AWAY)
def test_a_reward_whose_servers_refuse_calls_is_waited_for_as_long_as_the_patience(server, code):
    with between(server.address, refuses={"Score": code}) as (address, _):
        far = remote_reward(address, f"{HERE}:length", patience=0.5)
        before = time.monotonic()
        error = soon(lambda: far(["a"], ["b"], batch_items=[{"factor": 1.0}], rng=np.random.default_rng(0)))
        assert isinstance(error, Interrupted) and 0.5 <= time.monotonic() - before < 3


# --- episodes that are played again


@pytest.mark.parametrize(("shown", "step"), [(True, 0), (False, 1)])
def test_an_episode_that_is_another_one_when_it_is_played_again_is_a_fault(shown, step, server):
    """Observations tell, or rewards."""
    far = make(DRIFTING, servers=server.address)
    ((state, _),) = far.engine.reset([{"shown": shown}], [0])
    (before,) = far.engine.step([state], [("a",)], [1])
    forget(server)
    (after,) = far.engine.step([before.state], [("b",)], [2])
    assert isinstance(after, Fault) and f"was played again with another result at step {step}: " in after.reason
    far.engine.servers.refresh()
    eventually(lambda: not server.server.sessions)


# --- servers that end


def test_a_server_that_ends_is_waited_for_as_one_that_is_killed(server, tmp_path):
    """Another one comes while the only one begins no episodes, for longer than its tries take."""
    file, tasks = tmp_path / "servers.txt", [{"start": n} for n in range(4)]
    with running(OFFER) as ending, Client(ending.address) as other:
        file.write_text(ending.address)
        far = make(SUM, servers={"address": str(file), "patience": 20.0})
        other.reset()  # so that the server goes on
        ending.server.sessions.is_draining = True
        threading.Timer(0.7, lambda: file.write_text(server.address)).start()
        ours, theirs = plain(play(LockStep(Sum()), tasks)), soon(lambda: plain(play(far, tasks)))
        assert theirs == ours


@pytest.mark.parametrize("code", AWAY)
def test_a_server_that_says_that_it_is_there_and_begins_nothing_is_waited_for_as_long_as_the_patience(server, code):
    with between(server.address, refuses={"BatchReset": code}) as (address, handler):
        far = make(SUM, servers={"address": address, "patience": 0.5})
        error = soon(lambda: far.engine.reset([{"start": 1}] * 4, range(4)))
        assert isinstance(error, Interrupted) and "refused by the test" in str(error)
        assert f"{address}: " in str(error)
        assert handler.calls.count("BatchReset") > 3


@pytest.mark.parametrize("goes", [False, True])
def test_sessions_are_closed_on_a_server_that_is_not_used_any_more(goes, server, tmp_path):
    """It ends, or is taken out of the list."""
    file = tmp_path / "servers.txt"
    with running(OFFER) as old, between(old.address, refuses=(refused := {})) as (address, handler):
        file.write_text(f"{address}\n{server.address}=0.001\n")
        far = make(SUM, servers=str(file))
        servers = far.engine.servers
        states = far.engine.reset([{"start": n} for n in range(4)], range(4))
        assert len(old.server.sessions) == 4
        handler.slow = "Close"
        refused["Describe"] = grpc.StatusCode.UNAVAILABLE
        servers.put_aside(servers.all[address], "it ends")
        servers.all[address].not_before = 0.0
        if goes:
            file.write_text(f"{server.address}\n")
        states.clear()
        end = time.monotonic() + 5
        while len(old.server.sessions) and time.monotonic() < end:
            servers.refresh()
            time.sleep(0.01)
        assert not len(old.server.sessions)


def test_a_server_that_is_taken_out_of_the_list_is_not_used_again(server, tmp_path):
    """It answers that it is there, after it was put aside, and still has sessions."""
    file = tmp_path / "servers.txt"
    with running(OFFER) as old:
        file.write_text(f"{old.address}\n{server.address}\n")
        far = make(SUM, servers=str(file))
        servers = far.engine.servers
        states = far.engine.reset([{"start": n} for n in range(4)], range(4))
        gone = servers.all[old.address]
        servers.put_aside(gone, "by the test")
        servers._ask([gone])
        eventually(gone.asked.done)
        file.write_text(f"{server.address}\n")
        servers.refresh()
        assert gone.sessions and not gone.ready
        assert servers.choose(avoid=[servers.all[server.address]]) is servers.all[server.address]
        assert len(states) == 4


def test_a_request_is_not_repeated_at_a_server_that_is_taken_out_of_the_list(server, tmp_path):
    file = tmp_path / "servers.txt"

    class Leaving(dict):
        def __getitem__(self, method):
            file.write_text(server.address)
            return grpc.StatusCode.RESOURCE_EXHAUSTED

    with between(server.address, refuses=Leaving(BatchReset=None)) as (address, handler):
        file.write_text(address)
        far = make(SUM, servers=str(file)).engine
        starts = soon(lambda: far.reset([{"start": n} for n in range(4)], range(4)))
        assert [state.session.server.target for state, _ in starts] == [server.address] * 4
        assert handler.calls.count("BatchReset") == 1 and list(far.servers.all) == [server.address]


@pytest.mark.parametrize("lacks", [False, True])
def test_a_server_whose_place_another_one_takes_is_not_used(lacks, server, capfd):
    """Connections do not show it: the second one has another version of what the first one had, or does not have it."""
    with running(read_offer(LONG) if lacks else OFFER) as other, between(server.address) as (address, handler):
        far = make(SUM, servers=[address, f"{server.address}=0.001"])
        reward = remote_reward(address, f"{HERE}:length", patience=0.3)
        if not lacks:
            catalog = other.server.catalog
            for facts in (catalog._built[(SUM, "[]")].facts, catalog.rewards[f"{HERE}:length"].facts):
                facts.fingerprint = "other"
        before = handler.channel
        handler.channel = grpc.insecure_channel(other.address)
        before.close()
        tasks = [{"start": n} for n in range(4)]
        assert plain(play(far, tasks)) == plain(play(LockStep(Sum()), tasks))
        assert len(other.server.sessions) == 0 and far.engine.servers.all[address].reason
        error = soon(lambda: reward(["a"], ["b"], batch_items=[{"factor": 1.0}], rng=np.random.default_rng(0)))
        assert isinstance(error, Interrupted) and f"{address}: it" in str(error)
    told = capfd.readouterr().err
    assert f"server {address} is not used: it" in told
    assert ("there is no environment" if lacks else "is another one here (fingerprint other, and the client's has") in told


def test_servers_are_asked_again_for_as_long_as_the_patience_is(server):
    servers = make(SUM, servers=[server.address]).engine.servers
    only = servers.all[server.address]
    for failures in (1, 10_000):
        only.failures, only.failed_at = failures, time.monotonic()
        servers.put_aside(only, "by the test")
    assert 10 < only.not_before - only.failed_at < 80


def test_calls_to_a_server_that_is_gone_are_tried_again_side_by_side():
    gone, start, state = RemoteServer("127.0.0.1:1", 1.0, Credentials()), time.monotonic(), random.getstate()
    answers = call_all([Call(gone, "Fork", pb.ForkRequest())] * 50, 10.0)
    assert {answer.code for answer in answers} == {grpc.StatusCode.UNAVAILABLE} and time.monotonic() - start < 3
    assert random.getstate() == state  # functions of the user may draw from there


def test_a_server_that_is_not_there_at_the_start_is_named_once(server, capfd):
    far = make(SUM, servers=[server.address, "127.0.0.1:1"])
    gone = far.engine.servers.all["127.0.0.1:1"]
    while gone.failures < 3:
        far.engine.servers.refresh()
    (line,) = [line for line in capfd.readouterr().err.splitlines() if "127.0.0.1:1 " in line]
    assert "server 127.0.0.1:1 is not used: it cannot be reached (Connection refused)" in line


# --- environments that fail or take long


@pytest.mark.parametrize("count", [1, 5])
def test_an_error_of_the_environment_is_raised_however_many_servers_there_are(count):
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(running(OFFER)) for _ in range(count)]
        far = make(SUM, servers=[server.address for server in servers])
        ((state, _),) = far.engine.reset([{"start": 1}], [1])
        with pytest.raises(RuntimeError, match=f"{SUM} raised a KeyError in step"):
            far.engine.step([state], [("raise", "1")], [1])
        far.engine.servers.refresh()
        del state
        far.engine.servers.refresh()
        eventually(lambda: not sum(len(server.server.sessions) for server in servers))


def test_a_session_whose_step_took_too_long_is_closed():
    with running(OFFER, limits=ServerLimits(call_seconds=0.1)) as server:
        far = make(SUM, servers=server.address)
        ((state, _),) = far.engine.reset([{"start": 1}], [1])
        (step,) = far.engine.step([state], [("hang", "0.3")], [1])
        assert isinstance(step, Fault)
        far.engine.servers.refresh()
        eventually(lambda: not len(server.server.sessions))


def test_sessions_of_a_server_that_was_away_are_closed_when_it_is_back(server):
    lies = []
    with (
        running(OFFER) as backend,
        between(backend.address, lambda method, reply: b"\xff" if lies and method == "BatchStep" else None) as (address, _),
    ):
        far = make(SUM, servers=[address, f"{server.address}=0.001"])
        states = far.engine.reset([{"start": n} for n in range(4)], range(4))
        lies.append(True)
        steps = far.engine.step([state for state, _ in states], [("1", "2")] * 4, range(4))
        assert all(step.state.session.server.target == server.address for step in steps)
        assert len(backend.server.sessions) == 4

        def is_closed():
            far.engine.servers.refresh()
            return not len(backend.server.sessions)

        eventually(is_closed)


@pytest.mark.parametrize("then", ["it is back", "it goes", "the client leaves"])
def test_sessions_of_a_server_that_is_lost_twice_are_closed(then, server, tmp_path):
    file = tmp_path / "servers.txt"
    with running(OFFER) as backend:
        file.write_text(backend.address)
        far = make(SUM, servers=str(file)).engine
        starts, lost = far.reset([{"start": n} for n in range(4)], range(4)), far.servers.all[backend.address]
        far.servers.lose(lost, "by the test")
        eventually(lambda: far.servers.refresh() or lost.ready)
        assert len(starts) == len(lost.released) == len(backend.server.sessions) == 4
        far.servers.lose(lost, "by the test")  # before they are closed
        if then == "it goes":
            file.write_text(server.address)

        def is_closed():
            far.servers.refresh()
            return not len(backend.server.sessions) and list(far.servers.all) == [file.read_text()]

        if then == "the client leaves":
            far.close()
            assert not len(backend.server.sessions)
        else:
            eventually(is_closed)


def test_a_session_that_has_ended_costs_no_other_one(server):
    """Two joint actions continue from it, so it is to be copied."""
    far, here = make(SUM, servers=server.address).engine, LockStep(Sum()).engine
    (a, _), (b, _) = far.reset([{"start": 1}, {"start": 2}], [1, 2])
    ((own, _),) = here.reset([{"start": 1}], [1])
    server.call(lambda: server.server.sessions._end(server.server.sessions._sessions[a.session.name]))
    calls = ([("1", "1"), ("1", "2")], [3, 4])
    steps, ours = far.step([a, a], *calls), here.step([own, own], *calls)
    assert [(step.observations, step.reward) for step in steps] == [(step.observations, step.reward) for step in ours]
    assert b.session.is_open() and far.servers.all[server.address].generation == 0


def test_steps_that_take_longer_than_the_timeout_are_waited_for(server):
    far = make(SLOW, servers={"address": server.address, "timeout": 0.3}).engine
    states = [state for state, _ in far.reset([{}] * 10, range(10))]
    steps = far.step(states, [("m",)] * 10, range(10))  # half a second
    assert [step.reward for step in steps] == [0.5] * 10
    assert far.servers.all[server.address].generation == 0


def test_a_server_that_answers_nothing_is_not_waited_for_as_one_that_computes(server, monkeypatch):
    asked = []
    monkeypatch.setattr(servers_module, "DESCRIBE_SECONDS", 0.2)
    monkeypatch.setattr(servers_module, "call_all", lambda *calls: asked.append(calls) or call_all(*calls))
    with between(server.address) as (address, handler):
        far = make(SUM, servers={"address": [address, f"{server.address}=0.001"], "timeout": 0.2}).engine
        states = [state for state, _ in far.reset([{"start": 1}] * 3, [1, 1, 1])]
        handler.hangs = ("Describe", "BatchStep")
        far.servers.all[address].limits.batch = 1
        steps = far.step(states, [("1", "2")] * 3, [1, 1, 1])
        assert [step.reward for step in steps] == [[4.0, 0.5]] * 3 and handler.calls.count("BatchStep") == 3
        assert len(asked) == 1  # whether it is there, for all three
