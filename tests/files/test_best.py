"""The weights of the best evaluation (keep_best): which they are, that they stay, and that a resumed run chooses the same."""

from __future__ import annotations

import json
import math
from pathlib import Path

import jax
import numpy as np
import pytest

from jmarl.comlrl.checkpoints import copy_run
from jmarl.config import ExperimentConfig, TrainConfig
from jmarl.config.run import Run
from jmarl.files.checkpoint import saved_steps
from jmarl.files.own_files import is_of_run
from jmarl.files.run_files import Best, read_best
from jmarl.files.saving import BestSoFar
from jmarl.preferences.pairs import Pair, Trajectory
from jmarl.runs.checks import check_fit, check_settings
from jmarl.runs.train import fit
from tests.runs.test_faults import ITEMS, Signalling, arrays_of, first_words, run
from tests.runs.training_process import tiny_team

REWARD = Run(keep_best=True)


def history(where):
    return json.loads((Path(where) / "checkpoints" / "best.json").read_text())["history"]


class Scored:
    """`first_words` for training. The n-th evaluation gets the n-th score: the same for all its joint actions, or one each."""

    __name__ = "first_words"

    def __init__(self, *scores):
        self.scores = iter(scores)

    def __call__(self, a, b, batch_items, rng):
        if all("held" in item for item in batch_items):
            score = next(self.scores)
            return score if isinstance(score, list) else [score] * len(a)
        return first_words(a, b, batch_items, rng)


HELD_OUT = [{"prompt": "red one", "held": 1}, {"prompt": "blue two", "held": 2}]
BEST = dict(keep_best=True, eval_every=1, save_every=1, num_updates=4, save_models=False, allow_changed="reward")


def scored(where, *scores, **settings):
    return run(reward=Scored(*scores), held_out=HELD_OUT, output_dir=str(where), **BEST | settings)


# --- which one is the best -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "scores", "chosen"),
    [
        (True, [0.1, 0.9, 0.2], [0, 1]),
        (True, [0.5, 0.5, 0.5], [0]),  # of equal ones the first
        (True, [math.nan, -1.0, math.inf, math.nan], [1]),
        ("eval/reward max", [0.1, 0.2], [0, 1]),
        ("eval/reward min", [0.3, 0.4, 0.1, 0.1], [0, 2]),
    ],
)
def test_the_best_is_the_first_of_the_largest_or_smallest_finite_values(tmp_path, setting, scores, chosen):
    best = BestSoFar(tmp_path, Run(keep_best=setting), 0)
    assert [updates for updates, score in enumerate(scores) if best.add(updates, {"eval/reward": score})] == chosen
    assert [updates for updates, _ in best.history] == chosen


def test_an_evaluation_without_all_episodes_is_never_the_best_and_a_misspelled_column_is_named(tmp_path):
    best = BestSoFar(tmp_path, REWARD, 0)
    assert not best.add(0, {}) and not best.add(1, {"eval/loss": 3.0}) and best.history == []
    with pytest.raises(
        ValueError, match="keep_best='eval/reward' is no column of this run's evaluations: choose one of eval/x$"
    ):
        best.add(0, {"eval/x": 1.0, "eval/x_ci95": 1.0})


def test_a_run_that_begins_before_the_best_evaluation_forgets_it_and_one_of_another_column_begins_anew(tmp_path):
    best = BestSoFar(tmp_path, REWARD, 0)
    for updates, score in ((0, 0.1), (2, 0.5), (4, 0.9)):
        best.add(updates, {"eval/reward": score})
    assert [BestSoFar(tmp_path, REWARD, step).up_to(step) for step in range(6)] == [0, 0, 2, 2, 4, 4]
    again = BestSoFar(tmp_path, REWARD, 4)
    assert again.add(4, {"eval/reward": 0.9}), "the evaluation was not logged before a kill, and is repeated"
    assert again.history == best.history and not again.add(6, {"eval/reward": 0.9})
    assert BestSoFar(tmp_path, Run(keep_best="eval/loss min"), 5).history == []
    assert BestSoFar(tmp_path, Run(), 5).up_to(5) == 4, "without the setting what was kept is kept"


# --- in a run ------------------------------------------------------------------------------------------------------------


def test_the_best_checkpoint_stays_beside_the_newest_ones_and_holds_the_weights_of_its_update(tmp_path, capsys):
    result = scored(tmp_path / "run", 0.1, 0.9, 0.2, 0.1, 0.0, progress=True)
    assert saved_steps(tmp_path / "run" / "checkpoints") == [1, 3, 4] and not result.unsaved
    assert read_best(tmp_path / "run") == Best(1, 0.9, "eval/reward")
    assert "best: eval/reward 0.9 after update 1, kept in" in capsys.readouterr().out
    scored(tmp_path / "one", 0.1, 0.9, num_updates=1)
    jax.tree.map(np.testing.assert_array_equal, arrays_of(tmp_path / "run", 1), arrays_of(tmp_path / "one", 1))
    copy = copy_run(tmp_path / "run", tmp_path / "copy")
    assert saved_steps(copy / "checkpoints") == [1, 4] and read_best(copy) == read_best(tmp_path / "run")


def test_evaluations_with_invalid_episodes_are_not_chosen_and_the_untrained_team_may_be(tmp_path):
    """Of six episodes the second evaluation has two with a high reward."""
    few = [None] * 4 + [0.9] * 2
    with pytest.warns(UserWarning, match="4 of 6 held-out episodes have no valid reward"):
        scored(tmp_path, 0.3, few, 0.2, num_updates=2, save_every=2)
    assert history(tmp_path) == [[0, 0.3]] and saved_steps(tmp_path / "checkpoints") == [0, 2]


@pytest.mark.parametrize("stop", [1, 2, 3])
def test_a_resumed_run_has_the_best_of_the_whole_run(tmp_path, stop):
    scores = [0.125, 0.5, 0.25, 0.75, 0.75]
    scored(tmp_path / "whole", *scores)
    scored(tmp_path / "parts", *scores[: stop + 1], num_updates=stop)
    scored(tmp_path / "parts", *scores[stop + 1 :], resume=True)
    assert history(tmp_path / "parts") == history(tmp_path / "whole") == [[0, 0.125], [1, 0.5], [3, 0.75]]
    assert {3, 4} <= {*saved_steps(tmp_path / "parts" / "checkpoints")}


def test_a_run_that_resumes_before_the_best_evaluation_finds_it_again(tmp_path):
    scored(tmp_path, 0.125, 0.25, 0.125, 0.125, 0.75)
    assert history(tmp_path) == [[0, 0.125], [1, 0.25], [4, 0.75]] and saved_steps(tmp_path / "checkpoints") == [1, 3, 4]
    scored(tmp_path, 0.125, resume=True, resume_step=3)
    assert history(tmp_path) == [[0, 0.125], [1, 0.25]], "with other scores the one before is the best, and is there"
    assert saved_steps(tmp_path / "checkpoints") == [1, 3, 4]


@pytest.mark.long
def test_an_interrupted_run_keeps_the_best_and_each_seed_its_own(tmp_path):
    settings = dict(keep_best="eval/reward", eval_every=1, save_every=2, num_updates=4)
    run("seeds", output_dir=str(tmp_path / "whole"), **settings)
    assert run("seeds", reward=Signalling(9), output_dir=str(tmp_path / "parts"), **settings).interrupted
    run("seeds", output_dir=str(tmp_path / "parts"), resume=True, allow_changed="reward", **settings)
    for seed in ("seed_0", "seed_1"):
        whole, parts = tmp_path / "whole" / seed, tmp_path / "parts" / seed
        assert history(parts) == history(whole) and read_best(whole).updates in saved_steps(whole / "checkpoints")
        assert is_of_run(whole)


@pytest.mark.long
def test_rounds_of_preferences_keep_the_best_too(tmp_path):
    run("rounds", output_dir=str(tmp_path), keep_best=True, eval_every=2, num_updates=4)
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    rewards = {int(row["eval/updates"]): row["eval/reward"] for row in rows if "eval/reward" in row}
    assert read_best(tmp_path).value == max(rewards.values()) and read_best(tmp_path).updates in rewards


def test_given_data_are_chosen_by_their_loss(tmp_path):
    data = [Trajectory((item["prompt"],), ("red two",)) for item in ITEMS]
    settings = dict(
        algorithm="sft", num_updates=3, batch_size=4, eval_every=1, mesh="agent=1", progress=False, learning_rate=1e-2
    )
    cfg = TrainConfig.of(keep_best="eval/loss min", output_dir=str(tmp_path), **settings)
    team, params = tiny_team(1)
    fit(team, data, cfg, params=params, eval_data=data[:2])
    best = read_best(tmp_path)
    assert best.column == "eval/loss" and best.updates == 3 == history(tmp_path)[-1][0] and len(history(tmp_path)) == 4


# --- settings ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(output_dir=""), "must be off without output_dir"),
        (dict(save_every=0), "must be off where save_every=0"),
        (dict(eval_every=0), "must be off where eval_every=0: set eval_every"),
    ],
)
def test_what_keep_best_needs_is_named(tmp_path, settings, message):
    given = dict(keep_best=True, eval_every=1, output_dir=str(tmp_path)) | settings
    with pytest.raises(ValueError, match=f"keep_best=True is not allowed: keep_best {message}"):
        check_settings(TrainConfig.of(**given))


def test_held_out_tasks_and_a_column_of_given_data_are_asked_for(tmp_path):
    settings = dict(keep_best=True, eval_every=1, output_dir=str(tmp_path))
    with pytest.raises(ValueError, match="keep_best=True needs held-out tasks .*: give eval_items"):
        run(held_out=(), **settings)
    with pytest.raises(ValueError, match="keep_best must be off where held_out is 0: set held_out"):
        ExperimentConfig.of(models=["a"], environment="math", **settings)
    with pytest.raises(ValueError, match="is the held-out reward, and given data have none: set keep_best='eval/loss min'"):
        check_fit(TrainConfig.of(algorithm="sft", **settings), None)
    cfg = TrainConfig.of(algorithm="dpo", mesh="agent=1", progress=False, **settings | dict(keep_best="eval/loss min"))
    with pytest.raises(ValueError, match=r"needs held-out tasks .*eval_data of fit"):
        fit(tiny_team(1)[0], [Pair(("a",), ("b",), ("c",))], cfg)
    for wrong in ("reward", "min", "best"):
        with pytest.raises(ValueError, match="must be true .the held-out reward. or a column of evaluations"):
            TrainConfig.of(keep_best=wrong)
    assert (
        Run(keep_best="eval/a b min").best_column == ("eval/a b", True) and Run(keep_best=True).best_column[0] == "eval/reward"
    )
