"""What tests of replays share: a model, runs of YAML settings, and the command."""

from __future__ import annotations

from pathlib import Path

import pytest

from jmarl.cli.main import main
from jmarl.config import ExperimentConfig
from jmarl.models.hub.agents import save_pretrained
from jmarl.runs.experiment import run_experiment
from tests.house import HOUSE
from tests.runs.training_process import tiny_agents

HINT = dict(environment="tests.replay.hints:Hint", branching="chain", history="none", num_turns=2, num_agents=2)


@pytest.fixture(scope="session")
def tiny_words(tmp_path_factory):
    """The directory of a tiny model that knows a few words."""
    where = tmp_path_factory.mktemp("words")
    [agent] = tiny_agents(1)
    save_pretrained(where, agent.config, agent.params, agent.tokenizer)
    return where


@pytest.fixture(scope="session")
def begin_run(tiny_words):
    """`begin_run(directory, **settings)`: a run of an `ExperimentConfig`, with the tiny model."""

    def make(directory, **settings):
        run = dict(models=[str(tiny_words)], output_dir=str(directory), save_every=1, save_models=False, tensorboard=False)
        run_experiment(ExperimentConfig.of(**run | HOUSE | settings))
        return Path(directory)

    return make


@pytest.fixture(scope="session")
def hints(tmp_path_factory, begin_run):
    """A run of YAML settings in which one agent reads what the other has written."""
    return begin_run(tmp_path_factory.mktemp("hints") / "run", **HINT)


@pytest.fixture
def replayed(capsys):
    """`replayed(directory, *words)`: `jmarl replay`, of step 2; its exit code and what it prints."""

    def run(directory, *words):
        capsys.readouterr()
        code = main(["replay", str(directory), "--step", "2", *words])
        return code, *capsys.readouterr()

    return run
