"""A step that is made again is the step that was, bit for bit, and nothing in the directory of the run changes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from jmarl.config import TrainConfig
from jmarl.envs.reward_environment import RewardEnvironment, default_formatter
from jmarl.envs.rewards import make_reward
from jmarl.files.changes import CannotGoOn
from jmarl.files.checkpoint import saved_steps
from jmarl.logs.completions_file import read_completions
from jmarl.logs.rollout_log import turn_records
from jmarl.replay import find_message, make_again, open_step, return_of, say
from jmarl.replay.messages import Change, sampled_tokens, with_messages
from jmarl.runs.run import Task
from tests.runs.test_faults import first_words, run
from tests.runs.training_process import BASE, ITEMS, KINDS, tiny_team, transition

pytestmark = pytest.mark.long
FIELDS = BASE | KINDS["turns"] | dict(num_updates=4, progress=False)


def files_of(directory):
    return {str(path): (path.stat().st_mtime_ns, path.is_file() and path.read_bytes()) for path in Path(directory).rglob("*")}


def opened(directory, number, reward=first_words):
    team, params = tiny_team()
    env = RewardEnvironment(make_reward(reward, num_agents=2), [default_formatter] * 2, transition)
    return open_step(directory, TrainConfig.of(**FIELDS), team, Task(env, ITEMS, ITEMS[:2]), number, params=params)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """A run of two agents and two turns, with checkpoints after updates 2 and 4 of 4."""
    where = tmp_path_factory.mktemp("run")
    run("turns", output_dir=str(where), num_updates=4, save_every=2, tensorboard=False)
    assert saved_steps(where / "checkpoints") == [2, 4]
    return where


@pytest.fixture(scope="module")
def last(directory):
    """Step 4, made again from the checkpoint after update 2."""
    step = opened(directory, 4)
    return step, make_again(step)


def test_a_step_is_made_again_with_the_updates_before_it_and_nothing_in_the_directory_changes(directory):
    before = files_of(directory)
    step = opened(directory, 4)
    lines: list[str] = []
    remade = make_again(step, lines.append)
    stored = [record for record in read_completions(directory / "completions.jsonl.gz") if record["step"] == 4]
    assert (step.first, remade.checked, len(lines)) == (2, 2, 1) and step.seconds > 0
    assert turn_records(remade.rollout)[1]["completions"] == stored[0]["turns"][1]["completions"]
    assert files_of(directory) == before
    assert opened(directory, 2).first == 0, "no checkpoint is before step 2"
