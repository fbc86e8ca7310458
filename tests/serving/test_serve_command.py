"""The command `jmarl serve --models ... --http`, in a process of its own."""

import os
import re
import signal
import subprocess
import sys

import httpx
import openai
import pytest

from jmarl.cli.main import main
from jmarl.cli.serve import agent_names
from jmarl.cli.teams.sources import TeamSource
from jmarl.config import ExperimentConfig


@pytest.mark.parametrize(
    ("experiment", "names"),
    [
        (None, ["agent_0", "agent_1"]),
        (ExperimentConfig.of(models=["-"] * 2, environment="debate"), ["pro", "con"]),
        (ExperimentConfig.of(models=["-"] * 2, data="x.jsonl", reward="m:f"), ["agent_0", "agent_1"]),
    ],
)
def test_agents_are_called_by_their_roles(experiment, names):
    source = TeamSource([None] * 2, "-", experiment=experiment)
    assert agent_names(source) == names and agent_names(source, ["a", "b"]) == ["a", "b"]
    for given in (["a"], ["a", "a"], ["a", "b", "c"]):
        with pytest.raises(ValueError, match="give 2 different names"):
            agent_names(source, given)


@pytest.fixture
def serve(tiny_dir):
    """`serve()`: a process that serves two tiny agents, and its address, which it has just told."""
    processes = []

    def begin():
        command = [sys.executable, "-m", "jmarl", "serve", "--models", *[str(tiny_dir("llama"))] * 2, "--http"]
        command += ["--max-new-tokens", "60"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ)
        processes.append(process)
        return process, re.search(r"(http://127\.0\.0\.1:\d+)/v1 serves agent_0, agent_1", process.stdout.readline())[1]

    yield begin
    for process in processes:
        process.kill()
        process.communicate()


@pytest.mark.slow
def test_a_served_team_answers_and_drains(serve):
    process, address = serve()
    assert httpx.get(f"{address}/health").json() == {"status": "ok"}
    with openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client:
        messages = [{"role": "user", "content": "Hello"}]
        stream = client.chat.completions.create(model="agent_1", messages=messages, seed=1, stream=True)
        next(iter(stream))
        process.send_signal(signal.SIGTERM)
        assert [chunk.choices[0].finish_reason for chunk in stream][-1] in ("stop", "length")
    assert process.wait(30) == 0
    assert "Traceback" not in process.stderr.read()


@pytest.mark.slow
def test_a_signal_right_behind_the_address_ends_the_server_as_later_ones_do(serve):
    process, _ = serve()
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 0


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "give --environments (or --config, --rewards), --models or --openenv"),
        (["--models", "m"], "--models is served over HTTP: add --http"),
        (
            ["--models", "m", "--http", "--host", "0.0.0.0"],
            "--host 0.0.0.0 is not allowed without --tls-cert and --tls-key and",
        ),
        (["--models", "m", "--http", "--slots", "0"], "--slots 0 is not allowed: give 1 or more"),
        (["--models", "m", "--http", "--tls-cert", "x"], "--tls-cert and --tls-key belong together"),
    ],
)
def test_flags_that_do_not_fit_are_refused_before_a_model_is_read(flags, message, capsys):
    assert main(["serve", *flags]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert message in line
