"""A leading ~ is the home directory in every path that a user gives."""

from __future__ import annotations

from pathlib import Path

import pytest

from jmarl.cli.main import parser_for
from jmarl.config import ExperimentConfig, Preference, TrainConfig
from jmarl.config.paths import expand_home
from jmarl.config.yaml_file import read_yaml
from jmarl.envs import import_object
from jmarl.envs.rows import read_rows
from jmarl.preferences.pairs import Pair, load_pairs, save_pairs


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """The home directory, beside an empty working directory, in which nothing may appear."""
    (home := tmp_path / "home").mkdir()
    (work := tmp_path / "work").mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(work)
    yield home
    assert not [*work.iterdir()]


def test_only_a_leading_tilde_is_expanded(home):
    assert expand_home("~/runs") == f"{home}/runs" and expand_home(Path("~/runs")) == home / "runs"
    assert expand_home(["~", "a/~", 3, None]) == [str(home), "a/~", 3, None]
    for other in ("./~/a", "$HOME/a", "a~", "~nobody_of_this_name/a", ""):
        assert expand_home(other) == other


def test_settings_that_are_paths_are_expanded(home):
    run = TrainConfig.of(output_dir="~/run", replay_rollout="~/failed.pkl").run
    assert (run.output_dir, run.replay_rollout) == (f"{home}/run", f"{home}/failed.pkl")
    task = dict(data="~/d.jsonl", held_out="~/h.jsonl", reward="m:f")
    cfg = ExperimentConfig.of(models=["~/m", "owner/name"], **task)
    assert cfg.team.models == (f"{home}/m", "owner/name")
    assert (cfg.task.data, cfg.task.held_out) == (f"{home}/d.jsonl", f"{home}/h.jsonl")
    assert ExperimentConfig.of(models="~/m", data="~/d.jsonl").team.models == (f"{home}/m",)
    assert Preference(comparator="model", comparator_model="~/m").comparator_model == f"{home}/m"


def test_files_of_the_home_directory_are_read_and_written(home):
    pairs = [Pair(("a",), ("b",), ("c",))]
    save_pairs("~/pairs.jsonl", pairs)
    assert (home / "pairs.jsonl").is_file() and load_pairs("~/pairs.jsonl") == pairs and len(read_rows("~/pairs.jsonl")) == 1
    (home / "a.yaml").write_text("seed: 3\n")
    assert read_yaml("~/a.yaml").tree == {"seed": 3}
    (home / "home_module_of_a_test.py").write_text("def score():\n    return 7\n")
    assert import_object("~/home_module_of_a_test:score")() == 7


@pytest.mark.parametrize(
    ("words", "values"),
    [
        ("train --config ~/a.yaml --output=~/run --resume ~/run", {"config": "/a.yaml", "output": "/run", "resume": "/run"}),
        ("eval --model ~/m --data=~/d.jsonl -o ~/r.json", {"model": ["/m"], "data": "/d.jsonl", "output": "/r.json"}),
        ("collect --model ~/m -n 2 -o ~/d.jsonl --pairs=~/p.jsonl", {"output": "/d.jsonl", "pairs": "/p.jsonl"}),
        ("export --model ~/m -o ~/out --base-model ~/b", {"output": "/out", "base_model": ["/b"]}),
        ("serve --models ~/m --token-file ~/t", {"models": ["/m"], "token_file": "/t"}),
        ("cross-play ~/a ~/b --json=~/r.json", {"runs": ["/a", "/b"], "json": "/r.json"}),
        ("launch --nproc-per-node 2 --log-dir=~/logs train", {"log_dir": "/logs"}),
        ("init ~/project", {"directory": "/project"}),
        ("plan --config a --device cpu --fit=~/f.yaml", {"fit": "/f.yaml"}),
    ],
)
def test_flags_of_commands_are_expanded(home, words, values):
    """Shells leave the ~ of --output=~/run."""
    found = vars(parser_for(words.split()).parse_args(words.split()))
    for name, value in values.items():
        assert found[name] == ([f"{home}{x}" for x in value] if isinstance(value, list) else f"{home}{value}")


def test_the_paths_of_a_report_are_expanded(home):
    found = parser_for(["report"]).parse_args(["report", "~/run", "-o", "~/r.html"])
    assert (found.runs, found.output) == ([home / "run"], home / "r.html")
