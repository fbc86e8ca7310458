"""What `prepare` returns: one record with resolved settings, for every kind of run, and no file."""

from __future__ import annotations

import dataclasses

import pytest

from jmarl.config import TrainConfig
from jmarl.logs.rollout_log import RolloutLog
from jmarl.preferences.pairs import Pair
from jmarl.runs.checks import environment_of
from jmarl.runs.prepare import prepare
from jmarl.runs.run import Task
from jmarl.team import Team

ITEMS = [{"prompt": "the answer"}, {"prompt": "basket"}]
PAIRS = [Pair(("the",), ("a",), ("b",)), Pair(("is",), ("c",), ("d",))]


def lengths(texts):
    """A reward."""
    return [float(len(text)) for text in texts]


@pytest.mark.parametrize(
    ("algorithm", "learns", "task", "plays"),
    [
        ("magrpo", "magrpo", Task(lengths, ITEMS), True),
        ("madpo_iter", "madpo_iter", Task(lengths, ITEMS), False),
        ("marlhf", "grpo", Task(lengths, ITEMS), True),
        ("dpo", "dpo", Task(None, PAIRS), False),
    ],
)
def test_a_run_is_resolved_and_nothing_is_written(
    algorithm, learns, task, plays, tiny_config, tiny_tokenizer, random_agent, tmp_path
):
    """The settings are those of the run, also where a learned reward lets the team learn by another row."""
    cfg = TrainConfig.of(algorithm=algorithm, output_dir=str(tmp_path / "run"), progress=False, chat_date="auto")
    cfg = cfg if task.env is None else cfg.replace(max_new_tokens=8)
    cfg = cfg.replace(rl_algorithm=learns) if learns != algorithm else cfg
    team = Team.of([random_agent(tiny_config(), tiny_tokenizer, 0)])
    run, state = prepare(cfg, team, task)
    assert (run.cfg.algorithm, run.setup.algorithm.name, run.kind.log is RolloutLog) == (algorithm, learns, plays)
    assert "auto" not in {
        run.cfg.optimizer.remat, run.cfg.optimizer.micro_batches, run.cfg.sampling.compute_dtype, run.cfg.episodes.chat_date
    }  # fmt: skip
    assert int(state.step) == 0 and not (tmp_path / "run").exists()
    assert bool(run.identity["initial"]) == (algorithm in ("madpo_iter", "dpo")), "the reference must not change"
    with pytest.raises(dataclasses.FrozenInstanceError):
        run.setup = None


def test_an_environment_needs_no_algorithm(tiny_config, tiny_tokenizer, random_agent):
    """A run of one's own algorithm is played without it."""
    team = Team.of([random_agent(tiny_config(), tiny_tokenizer, 0)])
    assert environment_of(team, lengths, TrainConfig.of(algorithm="elsewhere.py:loss")).num_agents == 1
