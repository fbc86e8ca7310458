"""A server as a process: what it prints, how it ends, what it needs and what it refuses to serve."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import queue
import re
import signal
import subprocess
import time

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from jmarl.cli import serve
from jmarl.cli.main import main
from jmarl.remote import environments_pb2 as pb
from jmarl.remote.access import Access
from jmarl.remote.catalog import Catalog, CatalogEntry, Offer, read_offer
from jmarl.remote.grpc_server import LogQueue
from tests.remote.served import HERE, SUM, Client, process, refused, running

Code = grpc.StatusCode
TASK = {"question": "What is 1 + 1?", "answer": "2"}


def test_a_server_says_what_it_serves_and_ends_with_0_when_it_is_told_to():
    with process(f"--rewards={HERE}:length") as server:
        with Client(server.address) as client:
            start = client.reset(TASK, "math")
            assert client.step(start.session, 0, ("2",)).step.done
        server.signal()
        code, out, err = server.end()
    assert code == 0, err
    assert server.first_line.startswith(f"serving on {server.address} (this machine only; protocol 1, process ")
    assert out.splitlines() == [
        "  environments: math",
        f'  Python: jmarl.RemoteEnvironment("{server.address}", "math")',
        f"  YAML:   task: {{env_type: math, remote: true, server_address: {server.address}}}",
        f"  rewards: {HERE}:length",
    ]
    assert "SIGTERM: no new episodes, 0 are played" in err


def test_a_server_that_ends_lets_episodes_go_on_and_begins_none():
    with process("--grace=60", environments="tools") as server, Client(server.address) as client:
        task = {"question": "What is 1 + 1?", "answer": "2", "tools": ["calculator"]}
        start = client.reset(task, "tools")
        server.signal()
        for _ in range(200):
            with contextlib.suppress(grpc.RpcError):
                client.reset(task, "tools")
                time.sleep(0.01)
                continue
            break
        with refused(Code.UNAVAILABLE, "this server is ending and begins no new episodes: try another one"):
            client.reset(task, "tools")
        health = health_pb2_grpc.HealthStub(client.channel)
        assert health.Check(health_pb2.HealthCheckRequest(), timeout=20).status == health_pb2.HealthCheckResponse.NOT_SERVING
        assert server.process.poll() is None
        assert client.step(start.session, 0, ("<answer>2</answer>",)).step.done
        code, _, err = server.end()
    assert code == 0 and "cut off" not in err, err


@pytest.mark.parametrize("signals", [1, 2])
def test_a_server_ends_after_its_grace_or_at_once_at_the_second_signal(signals):
    with process(f"--grace={0.2 if signals == 1 else 60}", environments="tools") as server, Client(server.address) as client:
        client.reset({"question": "What is 1 + 1?", "answer": "2", "tools": ["calculator"]}, "tools")
        server.signal(signal.SIGINT)
        if signals == 2:
            while "no new episodes" not in server.log:
                time.sleep(0.01)
            server.signal()
        code, _, err = server.end()
    assert code == (0 if signals == 1 else 1), err
    assert "1 episodes are cut off" in err


def test_a_server_with_a_call_that_hangs_ends():
    with process("--grace=0.2", environments=SUM) as server, Client(server.address) as client:
        start = client.reset()
        client.future("Step", client.step_request(start.session, 0, ("hang", "30")))
        time.sleep(0.2)
        server.signal()
        code, _, err = server.end(10)
    assert code == 0, err


def test_a_server_whose_log_nobody_reads_goes_on():
    with process("--grace=0", environments=SUM, log=subprocess.PIPE) as server, Client(server.address) as client:
        start = client.reset()
        for _ in range(60):  # a pipe holds 64 kB
            with refused(Code.INTERNAL):
                client.step(start.session, 0, ("raise", "x" * 3000))
        assert client.step(start.session, 0).step.step == 1
        server.signal()
        assert server.process.wait(20) == 0


def test_an_entry_of_the_log_has_a_limit():
    lines: queue.Queue = queue.Queue()
    LogQueue(lines).handle(logging.makeLogRecord({"msg": "request 1: %s, the end", "args": ("x" * 1_000_000,)}))
    message = lines.get().msg
    assert message.startswith("request 1: xxx") and message.endswith("xxx, the end") and len(message) < 20_100


def test_a_port_is_used_once():
    with (
        running() as server,
        pytest.raises(ValueError, match=r"127\.0\.0\.1:\d+ cannot be listened on"),
        running(access=Access(port=server.server.port)),
    ):
        raise AssertionError


@pytest.mark.parametrize(
    ("environments", "rewards", "config", "error", "message"),
    [
        ("", "", None, ValueError, "there is nothing to serve"),
        ("math,math", "", None, ValueError, "--environments: 'math' is offered twice"),
        ("math", "", "math: {env: math}", ValueError, "c.yaml, line 1: 'math' is offered twice"),
        ("", "", "a: {}\nb: 3", ValueError, "c.yaml, line 1: give {env: math, ...} or {reward: module:function}, got {}"),
        ("", "", "a: {env: math, workers: -1}", ValueError, "line 1: workers=-1 is a number of processes"),
        ("", "", "a: {env: math, client_options: max_turns}", ValueError, "client_options='max_turns' is a list"),
        ("", "", "a: {reward: m:f, weight: 2}", ValueError, "a reward has no other settings, got reward, weight"),
    ],
)  # fmt: skip
def test_an_offer_that_is_wrong_is_refused_by_a_sentence(tmp_path, environments, rewards, config, error, message):
    if config is not None:
        (tmp_path / "c.yaml").write_text(config)
    with pytest.raises(error, match=re.escape(message)):
        read_offer(environments, rewards, None if config is None else tmp_path / "c.yaml")


@pytest.mark.parametrize(
    ("offer", "message"),
    [
        ({"environments": "mathh"}, "unknown environment 'mathh': did you mean 'math'"),
        ({"environments": "no_module:Env"}, "there is no module 'no_module'"),
        ({"environments": f"{HERE}:certificates"}, "give a class, such as a TextEnvironment"),
        ({"environments": f"{HERE}:Client"}, "has no option|missing a required argument|takes|missing"),
        ({"rewards": "no_module:length"}, "there is no module 'no_module'"),
        ({"rewards": f"{HERE}:Sum"}, "is a type: give a function"),
    ],
)  # fmt: skip
def test_a_server_that_cannot_offer_something_does_not_start(offer, message):
    with pytest.raises((ValueError, ImportError), match=message), running(read_offer(**offer)):
        raise AssertionError


def test_names_options_and_rewards_come_from_a_file(tmp_path):
    (tmp_path / "offer.yaml").write_text(
        f"ten: {{env: '{SUM}', start: 10, path: /data, client_options: [start]}}\nlong: {{reward: '{HERE}:length'}}\n"
    )
    with running(read_offer(config=tmp_path / "offer.yaml")) as server, Client(server.address) as client:
        listed = client.call("List", pb.ListRequest())
        assert (list(listed.names), [reward.name for reward in listed.rewards]) == (["ten"], ["long"])
        assert client.reset(environment="ten").observations[0].text.startswith("total 10")
        assert client.reset(environment="ten", options={"start": 10}).observations[0].text.startswith("total 10")
        with refused(Code.INVALID_ARGUMENT, "'start' of a client: this server has set it to another value"):
            client.reset(environment="ten", options={"start": 11})
        with refused(Code.INVALID_ARGUMENT, "'other' of a client: clients may set start"):
            client.reset(environment="ten", options={"other": 1})


def test_servers_with_other_options_or_another_version_are_not_equal(monkeypatch):
    def facts(server_options, options):
        catalog = Catalog(Offer({"guess": CatalogEntry(SUM, server_options)}, {f"{HERE}:length": f"{HERE}:length"}), 0, 5.0)
        built = catalog._build("guess", catalog.offer.environments["guess"], options)
        catalog.close()
        built.player.close()
        return built.facts.fingerprint, catalog.rewards[f"{HERE}:length"].facts.fingerprint

    async def all_facts():
        given = [({"start": 5}, {}), ({"start": 7}, {}), ({}, {"start": 5}), ({"start": 5, "path": "x"}, {})]
        return [facts(*options) for options in given]

    five, seven, set_by_client, path = asyncio.run(all_facts())
    assert five == set_by_client and len({five[0], seven[0], path[0]}) == 3 and five[1] == seven[1]
    monkeypatch.setattr("jmarl.remote.catalog.metadata.version", lambda name: "0.0.0")
    assert all(a != b for a, b in zip(five, asyncio.run(all_facts())[0], strict=True))


def test_every_flag_of_the_command_has_an_effect_on_some_server():
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    access = {"help", "host", "port", "token_file", "tls_cert", "tls_key", "tls_client_ca"}
    assert {action.dest for action in parser._actions} - access == {name for names in serve.FLAGS.values() for name in names}
    args = parser.parse_args(["--openenv", "math"])
    serve.fill(args, "--openenv")
    assert args.sessions == 16
    args = parser.parse_args(["--models", "m", "--http"])
    serve.fill(args, "--models")
    assert (args.grace, args.slots) == (30.0, 8)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("", "give --environments (or --config, --rewards), --models or --openenv"),
        ("--environments math --models m", "a server offers one of them"),
        ("--environments math --http", "--http is for a team"),
        ("--environments mathh", "unknown environment 'mathh': did you mean 'math'?"),
        (
            "--environments math --host 0.0.0.0",
            "--host 0.0.0.0 is not allowed without --tls-cert and --tls-key and --token-file",
        ),
        ("--environments math --tls-client-ca ca.pem", "--tls-client-ca needs --tls-cert and --tls-key"),
        ("--environments math --sessions 0", "--sessions=0 is not allowed: --sessions must be a number above 0"),
        ("--environments math --grace -1", "--grace=-1.0 is not allowed"),
        ("--environments math --workers -1", "--workers=-1 is not allowed"),
        ("--models m --http --tls-client-ca ca.pem", "--tls-client-ca needs --tls-cert and --tls-key"),
        ("--models m --http --client-bytes 5", "--client-bytes has no effect on a server of --models: remove it"),
        ("--models m --http --workers 0", "--workers has no effect on a server of --models: remove it"),
        ("--models m --http --grace -1", "--grace=-1.0 is not allowed"),
        ("--environments math --slots 8", "--slots has no effect on a server of --environments: remove it"),
        ("--environments math --names a", "--names has no effect on a server of --environments: remove it"),
        ("--environments math --option a=1", "--option has no effect on a server of --environments: remove it"),
        ("--environments math --seat 0", "--seat has no effect on a server of --environments: remove it"),
        ("--openenv math --client-bytes 5", "--client-bytes has no effect on a server of --openenv: remove it"),
        ("--openenv math --workers 2", "--workers has no effect on a server of --openenv: remove it"),
        ("--openenv math --message-bytes 9", "--message-bytes has no effect on a server of --openenv: remove it"),
        ("--openenv math --names a", "--names has no effect on a server of --openenv: remove it"),
        ("--openenv math --call-timeout 0", "--call-timeout=0.0 is not allowed"),
    ],
)
def test_the_command_refuses_wrong_flags_with_one_sentence(flags, message, capsys):
    assert main(["serve", *flags.split()]) == 2
    assert message in " ".join(capsys.readouterr().err.split())
