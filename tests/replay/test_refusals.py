"""What cannot be made again is refused by one sentence: by the settings, by what has changed, or by what is stored."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import jax
import pytest

from jmarl.config import TrainConfig
from jmarl.config.yaml_file import dump_run
from jmarl.replay import open_step
from jmarl.runs.run import Task
from tests.replay.conftest import HINT

SETTINGS = {  # of a run that is not there: the sentence comes before anything is read
    "async_steps, whose rows begin with the weights of the step before": dict(async_steps=1),
    "a league, whose past weights change with evaluations": dict(snapshots=2, eval_every=1, output_dir="nowhere"),
    "a population, whose members copy each other": dict(members=2, eval_every=20),
}


@pytest.mark.parametrize("sentence", SETTINGS)
def test_runs_of_these_settings_are_refused_before_anything_is_read(sentence):
    cfg = TrainConfig.of(**SETTINGS[sentence])
    with pytest.raises(ValueError, match=f"^steps of a run with {sentence}, cannot be made again yet$"):
        open_step("nowhere", cfg, None, Task(None, ()), 1)


def test_a_run_whose_messages_cannot_be_replaced_is_refused_before_its_step_is_made_again():
    cfg = TrainConfig.of(dynamic_sampling=1)
    with pytest.raises(ValueError, match="^messages cannot be replaced yet in a run with dynamic_sampling, which may replace"):
        open_step("nowhere", cfg, None, Task(None, ()), 1, replaces=True)


def test_several_processes_are_refused(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ValueError, match="^steps of a run with several processes, of which .*, cannot be made again yet$"):
        open_step("nowhere", TrainConfig.of(), None, Task(None, ()), 1)


FILES = {  # what the command says -> settings in config.yaml
    "steps of several seeds in one program cannot be made again yet": dict(seeds=[0, 1], train=dict(algorithm="magrpo")),
    "algorithm='dpo' learns from given data here: its steps have no episodes": dict(
        train=dict(algorithm="dpo"), task=dict(data="pairs.jsonl")
    ),
}  # fmt: skip


@pytest.mark.parametrize("sentence", FILES)
def test_the_command_refuses_runs_by_their_file_before_a_model_is_loaded(sentence, replayed, tmp_path):
    whole = (
        dict(team=dict(models=["nowhere"], num_agents=2), task=dict(environment="tests.replay.hints:Hint")) | FILES[sentence]
    )
    (tmp_path / "config.yaml").write_text(dump_run(whole), encoding="utf-8")
    code, out, err = replayed(tmp_path, "--trust")
    assert (code, out) == (2, "") and sentence in err


# --- what has changed ------------------------------------------------------------------------------------------------------

REWARD = """from pathlib import Path


def score(a, b):
    bonus = float(Path(__file__).with_name("bonus.txt").read_text(encoding="utf-8"))
    return [len(x) + len(y) + bonus for x, y in zip(a, b, strict=True)]
"""


@pytest.fixture(scope="module")
def scored(tmp_path_factory, begin_run):
    """A run on a file of data, with a reward of a file that reads another file."""
    root = tmp_path_factory.mktemp("scored")
    (root / "items.jsonl").write_text('{"prompt": "red one"}\n{"prompt": "blue two"}\n', encoding="utf-8")
    (root / "bonus.txt").write_text("0.5", encoding="utf-8")
    (root / "scoring.py").write_text(REWARD, encoding="utf-8")
    return begin_run(root / "run", num_agents=2, data=str(root / "items.jsonl"), reward=f"{root}/scoring.py:score")


@pytest.fixture
def edit():
    """`edit(file, old, new)`: change a text in a file until the test ends. Modules are read anew, as in another process."""
    before: dict[Path, str] = {}

    def change(file, old, new):
        text = before.setdefault(file, file.read_text(encoding="utf-8"))
        assert old in text
        file.write_text(text.replace(old, new), encoding="utf-8")
        sys.modules.pop("scoring", None)

    yield change
    for file, text in before.items():
        file.write_text(text, encoding="utf-8")
    sys.modules.pop("scoring", None)


CHANGES = {  # what is edited -> what is named
    ("items.jsonl", "red one", "red six"): ": data: ",
    ("scoring.py", "+ bonus", "- bonus"): ": reward: ",
    ("run/config.yaml", "max_new_tokens: 4", "max_new_tokens: 3"): ": max_new_tokens: 4 -> 3; ",
    ("run/config.yaml", "learning_rate: 0.01", "learning_rate: 0.02"): ": learning_rate: 0.01 -> 0.02; ",
}


@pytest.mark.long
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change[2])
def test_what_has_changed_is_named_before_anything_is_played(scored, replayed, edit, change):
    name, old, new = change
    edit(scored.parent / name, old, new)
    code, _, err = replayed(scored, "--trust")
    assert code == 2 and f"step 2 of {scored} cannot be made again, because these have changed:" in err
    assert CHANGES[change] in err


@pytest.mark.long
@pytest.mark.parametrize(
    ("old", "new", "text"),
    [("options: {}", "options: {first: two}", "'one' -> 'two'"), (HINT["environment"], "tests.replay.hints:Other", "answers")],
)
def test_another_environment_and_other_options_are_named(hints, replayed, edit, tmp_path, old, new, text):
    directory = shutil.copytree(hints, tmp_path / "run")
    edit(directory / "config.yaml", old, new)
    code, _, err = replayed(directory, "--trust")
    assert code == 2 and "because these have changed: environment" in err and text in err


@pytest.mark.long
def test_a_change_that_no_fingerprint_sees_is_caught_by_what_is_stored(scored, replayed, edit):
    assert replayed(scored)[0] == 0
    edit(scored.parent / "bonus.txt", "0.5", "0.75")
    code, out, err = replayed(scored)
    assert (code, out) == (2, "") and "step 2 is not as the run has stored it: turn 0, rewards, node 0, joint action 0" in err
    assert "versions and devices are the same; a reward, a tool or an environment may depend on time, on a service" in err
