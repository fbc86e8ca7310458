"""OpenEnv: our client and our server with each other, with frames written by hand, and with the package itself."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from websockets.exceptions import InvalidStatus, WebSocketException
from websockets.sync.client import connect
from websockets.sync.server import serve

from jmarl.cli.main import main
from jmarl.config import TrainConfig
from jmarl.envs.base import Step, TextEnvironment, Unanswered
from jmarl.envs.pool import Pool
from jmarl.envs.vector import LockStep
from jmarl.models.hub.agents import load_agent
from jmarl.remote.access import Access, Tls
from jmarl.remote.openenv.client import OpenEnv
from jmarl.remote.openenv.seat import Seat
from jmarl.remote.openenv.seat_server import SeatServer
from jmarl.sampling import texts
from jmarl.sampling.generate import pad
from jmarl.serving.others import TeamSeats
from jmarl.team import Team
from tests.remote.served import certificates


class Numbers(TextEnvironment):
    """Add up numbers that are drawn; three turns. Some messages make trouble."""

    reward_range, max_turns = (0.0, 1.0), 3

    def tasks(self, split="train", count=100, seed=0):
        return [{"start": i, "answer": "SECRET"} for i in range(min(count, 50))]

    def reset(self, task, rng):
        return {"sum": task["start"], "turn": 0}, [f"start {task['start']} {rng.random()}"]

    def step(self, state, messages, rng):
        if messages[0] == "bug":
            raise KeyError("/home/me: SECRET")
        if messages[0] == "unanswered":
            raise Unanswered("the judge at /home/me is away")
        state["sum"] += len(messages[0])
        state["turn"] += 1
        return Step(state, [f"sum {state['sum']} {rng.random()}"], rng.random(), state["turn"] == 3)


class Relay(TextEnvironment):
    """Agent b, then a, then both; the reward of each is 10 and the number of letters that the other one wrote."""

    roles, max_turns = ("a", "b"), 3

    def tasks(self, split="train", count=100, seed=0):
        return [{"first": "b"}]

    def reset(self, task, rng):
        return 0, [None, "b first"]

    def step(self, state, messages, rng):
        texts = [["a now", None], ["both", "both"], [None, None]][state]
        return Step(state + 1, texts, [10.0 + len(messages[1]), 10.0 + len(messages[0])], state == 2)


@contextlib.contextmanager
def served(env: TextEnvironment, seat: int = 0, others=None, access: Access | None = None, **options) -> Iterator[SeatServer]:
    with SeatServer(Seat(LockStep(env), seat, others), access or Access(), **{"log": lambda text: None, **options}) as server:
        yield server


def url_of(server) -> str:
    return f"ws://127.0.0.1:{server.port}"


@contextlib.contextmanager
def talking(server, **options):
    """Send frames as they are, and return what comes back."""
    with connect(f"{url_of(server)}/ws", proxy=None, **options) as connection:

        def say(message) -> dict:
            connection.send(message if isinstance(message, str | bytes) else json.dumps(message))
            return json.loads(connection.recv(20))

        yield say


def step(message: object) -> dict:
    return {"type": "step", "data": {"message": message}}


# --- our client at our server -----------------------------------------------------------------------------------------


def trajectory(env, tasks, messages=("one", "two", "three")) -> list:
    lock, rng = LockStep(env), np.random.default_rng(0)
    states, prompts = lock.reset(tasks, rng)
    record: list = [prompts]
    for message in messages:
        answer = lock.step(states, [[f"{message}{i}" for i in range(len(tasks))]], rng)
        record.append([answer.result.rewards.tolist(), answer.done.tolist(), answer.result.faults])
        if not answer.done.all():
            states, prompts = lock.observe(answer.after)
            record.append(prompts)
    return record


def expected(task: dict, number: int) -> list:
    """Return the prompts and rewards of an episode that the seat itself plays."""
    episode = Seat(LockStep(Numbers())).episode()
    seen = [episode.reset(task["seed"])] + [episode.step(f"{message}{number}") for message in ("one", "two", "three")]
    return [[x.prompt, x.reward, x.done] for x in seen]


@pytest.mark.parametrize("most", [16, 1])
def test_an_episode_is_that_of_the_environment(most):
    """Also if the server allows one session, so that episodes side by side are played again."""
    tasks = [{"seed": seed} for seed in (3, 4, 3)]
    with served(Numbers(), max_sessions=most) as server:
        env = OpenEnv(url_of(server), max_turns=3)
        record = trajectory(env, tasks)
        assert len(server.sessions) == min(most, 3)
        env.close()
        assert wait_until(lambda: not server.sessions)
    for i, task in enumerate(tasks):
        prompts = [row[0][i] for row in record[0::2]]
        rewards = [(row[0][i], row[1][i]) for row in record[1::2]]
        own = expected(task, i)
        assert prompts == [row[0] for row in own[:-1]] and rewards == [([row[1]], row[2]) for row in own[1:]]


def test_episodes_branch():
    """From one state, two messages; from the second one of them, two more. The first continues in its session."""
    with served(Numbers()) as server:
        env, rng = OpenEnv(url_of(server), max_turns=3), np.random.default_rng(0)
        state, _ = env.reset({"seed": 5}, rng)
        first, second, again = (env.step(state, [text], rng) for text in ("a", "bb", "a"))
        assert first.observations == again.observations != second.observations and first.reward == again.reward
        deep = [env.step(second.state, [text], rng) for text in ("ccc", "ccc", "d")]
        assert deep[0].observations == deep[1].observations != deep[2].observations
        assert deep[0].observations[0].startswith("sum 10 ")  # task 5
        env.close()


@pytest.mark.slow
def test_an_environment_of_a_server_is_played_in_a_pool():
    """States go from process to process; each has sockets of its own."""
    tasks = [{"seed": seed} for seed in range(4)]
    with served(Numbers()) as server:
        env = OpenEnv(url_of(server), max_turns=3)
        with Pool(env, workers=2) as pool:
            assert trajectory(pool, tasks) == trajectory(env, tasks)
        env.close()


def test_an_episode_is_truncated_and_a_lost_session_is_played_again():
    with served(Numbers(), idle_s=0.3) as server:
        env, rng = OpenEnv(url_of(server), max_turns=2), np.random.default_rng(0)
        state, _ = env.reset({"seed": 1}, rng)
        step = env.step(state, ["a"], rng)
        assert wait_until(lambda: not server.sessions)  # idle
        last = env.step(step.state, ["b"], rng)
        assert (step.done, last.done, last.truncated) == (False, True, True)
        env.close()


def test_the_tasks_of_a_server_are_seeds():
    env = OpenEnv("http://localhost:1", max_turns=1)
    train, held_out = ({task["seed"] for task in env.tasks(split, 50)} for split in ("train", "eval"))
    assert len(train) == len(held_out) == 50 and not train & held_out
    assert env.tasks("train", 3, seed=1) != env.tasks("train", 3) == env.tasks("train", 3)
    assert LockStep(env).describe() == LockStep(OpenEnv("ws://localhost:2", max_turns=1)).describe()


# --- our server -------------------------------------------------------------------------------------------------------

FRAMES = {  # -> code, part of the message
    "{": ("INVALID_JSON", "a message is a JSON object"),
    b"\xff\xfe": ("INVALID_JSON", "a message is a JSON object"),
    "[" * 100_000: ("INVALID_JSON", "a message is a JSON object"),
    "[1]": ("VALIDATION_ERROR", "a message is a JSON object"),
    "{}": ("VALIDATION_ERROR", "a message is a JSON object"),
    '{"type": "mcp", "data": {}}': ("UNKNOWN_TYPE", "the types of messages are reset, step, state, close"),
    '{"type": "step"}': ("VALIDATION_ERROR", "message of step must be a text"),
    '{"type": "step", "data": []}': ("VALIDATION_ERROR", "data, an object"),
    '{"type": "step", "data": {"message": null}}': ("VALIDATION_ERROR", "message of step must be a text"),
    '{"type": "step", "data": {"message": 3}}': ("VALIDATION_ERROR", "message of step must be a text"),
    '{"type": "step", "data": {"code": "x"}}': ("VALIDATION_ERROR", "data of step has message, and not 'code'"),
    '{"type": "step", "data": {"message": "x"}, "id": 1}': ("VALIDATION_ERROR", "and nothing else"),
    '{"type": "reset", "data": {"seed": "x"}}': ("VALIDATION_ERROR", "seed of reset must be a whole number"),
    '{"type": "reset", "data": {"seed": -1}}': ("VALIDATION_ERROR", "seed of reset must be at least 0"),
    '{"type": "reset", "data": {"seed": 1e400}}': ("VALIDATION_ERROR", "seed of reset must be a whole number"),
    '{"type": "state", "data": {"seed": 1}}': ("VALIDATION_ERROR", "data of state has no fields"),
    '{"type": "step", "data": {"message": "x"}}': ("EXECUTION_ERROR", "send reset first"),
}


@pytest.fixture(scope="module")
def numbers():
    with served(Numbers()) as server:
        yield server


def test_wrong_frames_get_their_codes(numbers):
    """And the session goes on."""
    with talking(numbers) as say:
        for frame, (code, text) in FRAMES.items():
            reply = say(frame)
            assert reply["type"] == "error" and reply["data"]["code"] == code and text in reply["data"]["message"], frame[:80]
        seen = say({"type": "reset", "data": {"seed": 7, "episode_id": "mine"}})["data"]
        assert seen["observation"]["prompt"].startswith("start 7 ") and (seen["reward"], seen["done"]) == (None, False)
        assert say(step("a"))["data"]["done"] is False
        assert say({"type": "state"}) == {"type": "state", "data": {"episode_id": "mine", "step_count": 1}}


def test_clients_get_no_secret_of_an_error():
    logged: list[str] = []
    with served(Numbers(), log=logged.append) as server, talking(server) as say:
        for message in ("bug", "unanswered"):
            say({"type": "reset"})
            reply = say(step(message))["data"]
            assert reply["code"] == "EXECUTION_ERROR" and "the episode is over" in reply["message"]
            assert "/home" not in str(reply) and "SECRET" not in str(reply)
            assert reply["request_id"] in logged[-1] and "/home/me" in logged[-1]
            assert say(step("a"))["data"]["message"].startswith("there is no episode to act in")


def test_sessions_have_a_limit_and_end_when_they_are_idle():
    with served(Numbers(), max_sessions=1, idle_s=0.5) as server:
        with talking(server) as say:
            assert say({"type": "reset"})["type"] == "observation"
            with connect(f"{url_of(server)}/ws", proxy=None) as other:
                assert json.loads(other.recv(20))["data"] == {
                    "message": "this server has 1 sessions, and no room for more",
                    "code": "CAPACITY_REACHED",
                }
        with connect(f"{url_of(server)}/ws", proxy=None) as idle:
            assert "was idle for 0.5 s" in json.loads(idle.recv(20))["data"]["message"]
        assert wait_until(lambda: not server.sessions)


def test_connections_without_the_token_get_few_threads_and_leave_room_for_sessions():
    with served(Numbers(), access=Access(token="secret"), max_sessions=2) as server:
        threads, server.door.strangers.most = threading.active_count(), 4
        silent = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(50)]
        slow = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(50)]
        for connection in slow:
            connection.sendall(b"G")
        assert wait_until(lambda: server.server.handler_threads)
        with talking(server, additional_headers={"Authorization": "Bearer secret"}) as say:
            assert say({"type": "reset"})["type"] == "observation"
            assert wait_until(lambda: threading.active_count() <= threads + 2 * (4 + 1))  # a connection has two
            assert wait_until(lambda: len(server.server.handler_threads) <= 4 + 1)
            silent += [socket.create_connection(("127.0.0.1", server.port)) for _ in range(50)]
            assert wait_until(lambda: len(server.server.handler_threads) == 1)  # the oldest are closed, but not a session
            assert say({"type": "state"})["type"] == "state"
        for connection in silent + slow:
            connection.close()


class Hanging(Numbers):
    """Waits until it is told to go on, if the message is `hang`."""

    go_on = threading.Event()

    def step(self, state, messages, rng):
        if messages[0] == "hang":
            self.go_on.wait()
        return super().step(state, messages, rng)


def test_a_call_that_hangs_ends_its_episode_and_no_other(monkeypatch):
    monkeypatch.setattr("jmarl.remote.openenv.seat.MAX_HANGING", 2)
    seat = Seat(LockStep(Hanging()), call_s=0.3)
    with SeatServer(seat, Access(), log=lambda text: None) as server, talking(server) as say, talking(server) as other:
        assert other({"type": "reset"})["type"] == "observation"
        for hanging in (1, 2):
            assert say({"type": "reset"})["type"] == "observation"
            reply = say(step("hang"))["data"]
            assert reply == {
                "message": "the environment did not answer in time, and the episode is over",
                "code": "EXECUTION_ERROR",
            }
            assert "send reset first" in say(step("more"))["data"]["message"]
            if hanging == 1:
                assert other(step("word"))["type"] == "observation"
        assert "did not answer in time" in say({"type": "reset"})["data"]["message"]  # too many hang
        Hanging.go_on.set()
        assert wait_until(lambda: say({"type": "reset"})["type"] == "observation")


def test_a_team_that_hangs_ends_the_episode():
    go_on = threading.Event()
    seat = Seat(LockStep(Relay()), others=lambda prompts, seed: go_on.wait(), call_s=0.2)
    with SeatServer(seat, Access(), log=lambda text: None) as server, talking(server) as say:
        assert "did not answer in time" in say({"type": "reset"})["data"]["message"]
        go_on.set()


def test_a_server_ends_though_a_call_hangs_and_a_client_reads_nothing(monkeypatch):
    monkeypatch.setattr("jmarl.remote.openenv.seat_server.CLOSE_S", 0.2)
    monkeypatch.setattr(Hanging, "go_on", threading.Event())
    with (
        SeatServer(Seat(LockStep(Hanging())), Access(), log=lambda text: None) as server,
        connect(f"{url_of(server)}/ws", proxy=None) as hanging,
        connect(f"{url_of(server)}/ws", proxy=None, max_queue=1, close_timeout=0.1) as deaf,
    ):
        hanging.send('{"type": "reset"}')
        hanging.send(json.dumps(step("hang")))
        deaf.send(json.dumps({"type": "reset", "data": {"episode_id": "x" * 1_000_000}}))
        for _ in range(20):
            deaf.send('{"type": "state"}')
        time.sleep(0.3)
        began = time.monotonic()
        server.close()
        assert time.monotonic() - began < 3
        Hanging.go_on.set()
        assert wait_until(lambda: not server.sessions)


def test_only_who_has_the_token_gets_a_session():
    """No page of a browser does; health needs no token and says nothing of the environment."""
    with served(Numbers(), access=Access(token="right")) as server:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "right"}):
            with pytest.raises(InvalidStatus, match="401"), connect(f"{url_of(server)}/ws", additional_headers=headers):
                pass
        headers = {"Authorization": "Bearer right"}
        with talking(server, additional_headers=headers) as say:
            assert say({"type": "reset"})["type"] == "observation"
        with (
            pytest.raises(InvalidStatus, match="403"),
            connect(f"{url_of(server)}/ws", additional_headers=headers, origin="http://a"),
        ):
            pass
        with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/health") as reply:
            assert json.load(reply) == {"status": "healthy"}


def test_a_server_with_tls_asks_for_certificates(tmp_path, monkeypatch):
    """Our client reads who is trusted as OpenSSL does, from SSL_CERT_FILE. Without TLS, and without a certificate of its own
    where the server asks for one, a client gets no session."""
    files = certificates(tmp_path)
    tls = Tls(files["localhost.pem"], files["localhost.key"])
    monkeypatch.setenv("SSL_CERT_FILE", str(files["ca.pem"]))
    with served(Numbers(), access=Access(tls=tls)) as server:
        env = OpenEnv(f"wss://localhost:{server.port}", max_turns=3)
        assert env.reset({"seed": 2}, np.random.default_rng(0))[1][0].startswith("start 2 ")
        env.close()
        with pytest.raises(Unanswered, match="cannot be reached"):
            OpenEnv(url_of(server), max_turns=3).reset({}, np.random.default_rng(0))
    asking = dataclasses.replace(tls, client_ca=files["ca.pem"])
    with served(Numbers(), access=Access(tls=asking)) as server:
        context = ssl.create_default_context()
        url = f"wss://localhost:{server.port}/ws"
        with pytest.raises((ssl.SSLError, OSError, WebSocketException)), connect(url, ssl=context, proxy=None) as connection:
            connection.recv(20)
        context.load_cert_chain(files["trainer.pem"], files["trainer.key"])
        with connect(url, ssl=context, proxy=None) as connection:
            connection.send('{"type": "state"}')
            assert json.loads(connection.recv(20))["type"] == "state"


def test_an_address_that_is_taken_is_refused(numbers):
    with pytest.raises(ValueError, match=rf"--host 127.0.0.1 --port {numbers.port} cannot be used: Address already in use"):
        SeatServer(numbers.seat, Access(port=numbers.port))


def test_other_seats_are_played_while_the_seat_does_not_act():
    """Seat a acts second and third, and gets the rewards of the first step with its reset."""
    asked: list = []

    def others(prompts, seed):
        asked.append(prompts)
        return ["no" if prompt is None else "yes" for prompt in prompts]

    with served(Relay(), 0, others) as server, talking(server) as say:
        seen = say({"type": "reset", "data": {}})["data"]
        assert (seen["observation"]["prompt"], seen["reward"], seen["done"]) == ("a now", 13.0, False)
        seen = say(step("hello"))["data"]
        assert (seen["observation"]["prompt"], seen["reward"]) == ("both", 10.0) and asked == [[None, "b first"]]
        seen = say(step("bye"))["data"]
        assert (seen["observation"]["prompt"], seen["reward"], seen["done"]) == ("", 13.0, True)
        assert asked == [[None, "b first"], [None, "both"]]
    b = Seat(LockStep(Relay()), 1, others).episode()
    assert b.reset(0).prompt == "b first" and b.step("hi") == ("both", 23.0, False)  # of two steps
    with pytest.raises(ValueError, match=r"has the seats a, b: give a team that plays the others \(--models\)"):
        Seat(LockStep(Relay()), 0)
    with pytest.raises(ValueError, match=r"seat=2 is not allowed: the environment has the seats 0 \(a\), 1 \(b\)"):
        Seat(LockStep(Relay()), 2, others)


# --- our client at servers that are wrong -----------------------------------------------------------------------------


@contextlib.contextmanager
def answering(*replies: object) -> Iterator[str]:
    """A server that answers each message of a connection with the next reply: a text or JSON; None: not at all; an exception
    closes the connection."""

    def session(connection):
        for reply in replies:
            connection.recv()
            if isinstance(reply, Exception):
                return
            if reply is not None:
                connection.send(reply if isinstance(reply, str) else json.dumps(reply))
        connection.recv()

    with serve(session, "127.0.0.1", 0, close_timeout=0.1) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"ws://127.0.0.1:{server.socket.getsockname()[1]}"
        finally:
            server.shutdown()
            thread.join()


def seen(reward=0.5, done=False, **fields) -> dict:
    fields = fields or {"prompt": "go"}
    return {"type": "observation", "data": {"observation": fields, "reward": reward, "done": done}}


def error(code: str) -> dict:
    return {"type": "error", "data": {"message": "no", "code": code}}


STATE = {"type": "state", "data": {}}
REPLIES: dict[str, tuple[tuple, type[Exception], str]] = {
    "late": ((STATE, seen(), None), Unanswered, "did not answer within 1 s"),
    "garbage": ((STATE, seen(), "{"), Unanswered, "answered with what is no message"),
    "list": ((STATE, seen(), "[]"), Unanswered, "what is no message: a message without data"),
    "no observation": ((STATE, seen(), {"type": "observation", "data": {}}), Unanswered, "an observation that is none"),
    "text as reward": ((STATE, seen(), seen(reward="1")), Unanswered, "an observation that is none"),
    "huge reward": ((STATE, seen(), json.dumps(seen()).replace("0.5", "1" + "0" * 400)), Unanswered, "what is no message"),
    "another type": ((STATE, seen(), STATE), Unanswered, "of type 'state' in place of observation"),
    "closed": ((STATE, seen(), OSError()), Unanswered, "closed the connection"),
    "no reward at the end": ((STATE, seen(), seen(None, True)), Unanswered, "gave no reward at the end"),
    "the environment failed": ((STATE, seen(), error("EXECUTION_ERROR")), Unanswered, r"with no \(EXECUTION_ERROR\)"),
    "wrong action": ((STATE, seen(), error("VALIDATION_ERROR")), RuntimeError, "set action so that its fields"),
    "no such message": ((STATE, seen(), error("UNKNOWN_TYPE")), RuntimeError, "this is no OpenEnv server"),
    "no room": ((error("CAPACITY_REACHED"),), Unanswered, "CAPACITY_REACHED"),
    "over at once": ((STATE, seen(done=True)), Unanswered, "ended the episode .* at its reset"),
    "no text": ((STATE, seen(board=[1])), ValueError, "none of prompt, text, .*, but board: set observation"),
}


@pytest.mark.parametrize("case", REPLIES)
def test_wrong_answers_are_masked_or_refused(case):
    replies, kind, message = REPLIES[case]
    with answering(*replies) as url:
        env, rng = OpenEnv(url, max_turns=2, timeout=1 if case == "late" else 20), np.random.default_rng(0)
        with pytest.raises(kind, match=message):
            env.step(env.reset({"seed": 1}, rng)[0], ["a"], rng)
        env.close()


def test_a_late_call_is_masked_and_its_socket_is_dropped():
    """Another episode does not get the late reply."""
    with answering(STATE, seen(), None, seen()) as url:
        env = OpenEnv(url, max_turns=1, timeout=1)
        lock, rng = LockStep(env), np.random.default_rng(0)
        states, _ = lock.reset([{"seed": 1}], rng)
        result = lock.step(states, [["a"]], rng).result
        assert result.invalid.tolist() == [True] and np.isnan(result.rewards).all() and "within 1 s" in result.faults[0]
        assert not env._sessions


def test_an_episode_that_cannot_be_played_again_is_refused():
    with answering(STATE, seen(), seen(), seen(prompt="another")) as url:
        env, rng = OpenEnv(url, max_turns=3, sessions=1), np.random.default_rng(0)
        state, _ = env.reset({"seed": 1}, rng)
        env.step(state, ["a"], rng)
        with pytest.raises(RuntimeError, match="answers otherwise when an episode is played again .* set num_generations=1"):
            env.step(state, ["b"], rng)
        env.close()


def double(text: str) -> dict:
    return {"code": text * 2}


def lines(fields: dict) -> list[dict]:
    return [{"role": "user", "content": fields["stdout"]}]


@pytest.mark.parametrize(
    "settings, sent, read",
    [
        ({}, {"message": "a"}, "go"),
        ({"action": "code", "observation": "stdout"}, {"code": "a"}, "out"),
        ({"action": double, "observation": lines}, {"code": "aa"}, "[user] out"),
        ({"action": f"{__name__}:double", "observation": f"{__name__}:lines"}, {"code": "aa"}, "[user] out"),
    ],
)
def test_messages_and_observations_are_mapped(settings, sent, read):
    with answering(STATE, seen(stdout="out", prompt="go"), seen(stdout="out", prompt="go")) as url:
        env, rng = OpenEnv(url, max_turns=3, **settings), np.random.default_rng(0)
        state, texts = env.reset({"seed": 1}, rng)
        assert texts == [read]
        assert env.step(state, ["a"], rng).state.actions == (sent,)
        env.close()


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"url": "ftp://a"}, "url='ftp://a' is not allowed: give ws://HOST:PORT"),
        ({"max_turns": 0}, "needs max_turns >= 1"),
        ({"action": ""}, "action='' is not allowed: give a field's name"),
        ({"action": "nowhere_at_all:f"}, "action='nowhere_at_all:f' cannot be imported"),
    ],
)
def test_wrong_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        OpenEnv(**{"url": "ws://localhost:1", "max_turns": 1} | settings)


def test_a_token_is_not_sent_where_others_can_read_it(tmp_path):
    file = tmp_path / "token"
    file.write_text("abc")
    file.chmod(0o600)
    with pytest.raises(ValueError, match="others can read a token without TLS; use wss://"):
        OpenEnv("ws://example.org", max_turns=1, token_file=str(file))
    with served(Numbers(), access=Access(token="abc")) as server:
        env = OpenEnv(url_of(server), max_turns=1, token_file=str(file))
        env.reset({}, np.random.default_rng(0))
        env.close()
        with pytest.raises(RuntimeError, match="refused the connection: .*401.* Is the token right"):
            OpenEnv(url_of(server), max_turns=1).reset({}, np.random.default_rng(0))
        server.is_draining = True
        with pytest.raises(Unanswered, match="cannot be reached: .*503"):  # no mistake: another server comes
            env.reset({}, np.random.default_rng(0))


# --- the command ------------------------------------------------------------------------------------------------------

COMMAND = "import sys; sys.modules['jax'] = None; from jmarl.cli.main import main; sys.exit(main(sys.argv[1:]))"


def test_the_command_serves_without_jax_and_drains():
    """SIGTERM: the episode under way finishes, a new one and a new session are refused, exit code 0."""
    command = [sys.executable, "-c", COMMAND, "serve", "--openenv", "math", "--split", "eval"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        url = process.stdout.readline().split()[-1]
        with connect(f"{url}/ws", proxy=None) as session, connect(f"{url}/ws", proxy=None):  # the other one has no episode
            session.send('{"type": "reset", "data": {"seed": 0}}')
            assert json.loads(session.recv(20))["type"] == "observation"
            process.send_signal(signal.SIGTERM)
            assert "1 sessions have 300 s to finish" in process.stdout.readline()
            with pytest.raises(InvalidStatus, match="503"), connect(f"{url}/ws", proxy=None):
                pass
            with pytest.raises(urllib.error.HTTPError, match="503"):
                urllib.request.urlopen(f"http{url[2:]}/health")
            session.send('{"type": "reset"}')
            assert "this server is ending and begins no new episodes" in session.recv(20)
            session.send('{"type": "step", "data": {"message": "2"}}')
            assert json.loads(session.recv(20))["data"]["done"] is True
            assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.mark.parametrize(
    "flags, message",
    [
        (["debate"], r"the environment has the seats .*: give a team that plays the others (--models)"),
        (["math", "--seat", "1"], "seat=1 is not allowed: the environment has the seats 0 (solver)"),
        (["math", "--models", "a"], "--models plays the other seats, and environment 'math' has one: remove it"),
        (["sudoku", "--http"], "--openenv and --http exclude each other"),
        (["sudoku", "--sessions", "0"], "--sessions=0 is not allowed: --sessions must be a number above 0"),
        (["sudoku", "--host", "0.0.0.0"], "--host 0.0.0.0 is not allowed without --tls-cert and --tls-key and --token-file"),
    ],
)
def test_what_the_command_cannot_serve_is_refused(flags, message, capsys):
    assert main(["serve", "--openenv", *flags]) == 2
    assert re.search(message.replace("(", r"\(").replace(")", r"\)"), capsys.readouterr().err)


@pytest.mark.long
def test_a_team_plays_the_other_seats(tiny_dir, monkeypatch):
    """Equal seeds give equal episodes, of other agents too."""
    agents = [load_agent(str(tiny_dir("llama", seed=seed))) for seed in (0, 1)]
    cfg = TrainConfig.of(max_new_tokens=4, progress=False)
    others = TeamSeats(Team.of(agents), cfg)
    assert others([None, "b first"], 1)[0] == ""
    read = []
    monkeypatch.setattr(texts, "pad", lambda team, rows: read.append(rows) or pad(team, rows))
    for text in ("xxx", "<|im_end|>"):
        others(["a", f"what a player wrote: {text}"], 1)
    assert not {1, 2} & {*read[1][1][0]} and len(read[1][1][0]) > len(read[0][1][0])  # text, and no control token
    episodes = []
    for seed in (1, 1, 2):
        episode = Seat(LockStep(Relay()), 0, others).episode()
        episodes.append([episode.reset(seed), episode.step("hello"), episode.step("bye")])
    assert episodes[0] == episodes[1] and episodes[0][-1].done
    with pytest.raises(ValueError, match="history='append' is not allowed here"):
        TeamSeats(Team.of(agents), cfg.replace(history="append"))


# --- the package itself -----------------------------------------------------------------------------------------------


@pytest.fixture
def openenv_python() -> str:
    """A Python that has the package: this one, or that of JMARL_OPENENV_PYTHON."""
    own = sys.executable if importlib.util.find_spec("openenv") else ""
    return os.environ.get("JMARL_OPENENV_PYTHON", own) or pytest.skip(
        "needs the package openenv: pip install openenv, in another environment with JMARL_OPENENV_PYTHON=its python"
    )


PACKAGE = str(Path(__file__).parent / "openenv_package.py")


@pytest.mark.slow
@pytest.mark.parametrize("sessions", [8, 1])
def test_a_server_of_the_package_is_played(openenv_python, sessions):
    """Also where it allows one session; equal seeds and messages give equal episodes."""
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as free:
        port = free.getsockname()[1]
    server = subprocess.Popen([openenv_python, PACKAGE, "serve", str(port), str(sessions)])
    try:
        assert wait_until(lambda: answers(f"http://127.0.0.1:{port}/health"), 60)
        env, rng = OpenEnv(f"http://127.0.0.1:{port}", max_turns=3), np.random.default_rng(0)
        record = trajectory(env, [{"seed": seed} for seed in (3, 4, 3)], ("a", "b", "c"))
        assert all(not row[2] for row in record[1::2]) and record[-1][1] == [True] * 3
        assert record[1][0][0] == record[1][0][2] != record[1][0][1]
        state, _ = env.reset({"seed": 1}, rng)
        with pytest.raises(Unanswered, match="EXECUTION_ERROR"):
            env.step(state, ["bug"], rng)
        env.close()
        wrong = OpenEnv(f"http://127.0.0.1:{port}", max_turns=3, action="code")
        with pytest.raises(RuntimeError, match=r"refused step: Invalid message \(VALIDATION_ERROR\); set action"):
            wrong.step(wrong.reset({"seed": 1}, rng)[0], ["a"], rng)
    finally:
        server.terminate()
        server.wait()


@pytest.mark.slow
def test_a_client_of_the_package_plays_at_our_server(openenv_python, numbers):
    done = subprocess.run([openenv_python, PACKAGE, "play", f"http://127.0.0.1:{numbers.port}"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    *steps, state, over, unknown = map(json.loads, done.stdout.splitlines())
    own = Seat(LockStep(Numbers())).episode()
    expected_steps = [own.reset(7), *(own.step("abc") for _ in range(3))]
    assert [[row[0]["prompt"], *row[1:]] for row in steps] == [[x.prompt or "", x.reward, x.done] for x in expected_steps]
    assert state == {"episode_id": "mine", "step_count": 3}
    assert over.endswith("(code: EXECUTION_ERROR)") and unknown.endswith("(code: VALIDATION_ERROR)")


def answers(url: str) -> bool:
    with contextlib.suppress(OSError), urllib.request.urlopen(url) as reply:
        return reply.status == 200
    return False


def wait_until(holds: Callable[[], bool], seconds: float = 20) -> bool:
    """Wait; return whether it holds."""
    end = time.monotonic() + seconds
    while not holds() and time.monotonic() < end:
        time.sleep(0.01)
    return holds()
