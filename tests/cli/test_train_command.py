"""`jmarl train`: a run of a YAML file, its repetition, interruption and resuming, the dry run, errors and sweeps."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from jmarl import ExperimentConfig
from jmarl.algorithms import ALGORITHMS
from jmarl.cli import dry_run, sweep
from jmarl.cli.configuration import read_configuration
from jmarl.cli.main import main
from jmarl.cli.sweep import Point, chosen_points, points_of, result_row, write_results
from jmarl.cli.train import add_arguments
from jmarl.config.yaml_file import read_yaml
from jmarl.files.lock import locked
from jmarl.files.run_files import read_best, replace_text
from jmarl.remote.catalog import Catalog, read_offer
from jmarl.runs import prepare
from jmarl.runs.experiment import wandb_config

MODULE = """
import pathlib, signal
from jmarl import Step, TextEnvironment

def letters(texts):
    return [float(text.count("e") + len(text) % 3) for text in texts]

def broken(texts):
    raise LookupError("no such city")

def again(prompt, **history):
    return ["Again: " + prompt]

def interrupting(texts):
    calls = pathlib.Path("calls")
    calls.write_text(calls.read_text() + "." if calls.exists() else ".")
    if len(calls.read_text()) == 2:
        signal.raise_signal(signal.SIGINT)
    return letters(texts)

def first_only(texts, calls=[]):
    calls.append(texts)
    return [2.0 * len(calls)] + [None] * (len(texts) - 1)

def nothing(texts):
    pass

def average(texts):
    return 1.5

def constant(texts):
    return [1.0] * len(texts)

class Words(TextEnvironment):
    def __init__(self, word="apples"):
        self.word = word
    def tasks(self, split="train", count=100, seed=0):
        return [{"text": f"{self.word} {split} {i}"} for i in range(count)]
    def reset(self, task, rng):
        return None, [task["text"]]
    def step(self, state, messages, rng):
        return Step(state, [None], float(len(messages[0])), True)

class TwoTurns(Words):
    max_turns = 2
    def __init__(self, length=1, fails=False):
        self.word, self.length, self.fails = "apples", length, fails
    def reset(self, task, rng):
        return 0, [task["text"]]
    def step(self, state, messages, rng):
        reward = float("nan") if self.fails and state else float(len(messages[0]))
        return Step(state + 1, ["word " * self.length], reward, state == 1)
"""
SMALL = dict(
    algorithm="grpo", num_updates=3, num_generations=2, max_new_tokens=4, learning_rate=1e-2, progress=False, tensorboard=False
)  # fmt: skip


@pytest.fixture(scope="module")
def root(tmp_path_factory, tiny_dir):
    """A directory with a module of rewards, data and the files run.yaml and pairs.yaml."""
    root = tmp_path_factory.mktemp("train")
    (root / "own_rewards_of_tests.py").write_text(MODULE)
    (root / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"Item {i} is"}) + "\n" for i in range(6)))
    pair = {"prompt": "What is", "chosen": "the answer", "rejected": "a farmer"}
    (root / "pairs.jsonl").write_text((json.dumps(pair) + "\n") * 4)
    model = str(tiny_dir("llama"))
    own = SMALL | dict(models=[model], data="prompts.jsonl", reward="own_rewards_of_tests:letters", held_out=2, save_every=1)
    (root / "run.yaml").write_text(json.dumps(own, indent=1))
    pairs = dict(
        training=dict(algorithm="dpo", num_epochs=1, batch_size=2), model=model, dataset=dict(type="json", path="pairs.jsonl")
    )
    (root / "pairs.yaml").write_text(json.dumps(pairs, indent=1))
    return root


@pytest.fixture(autouse=True)
def in_root(root, monkeypatch):
    monkeypatch.chdir(root)
    monkeypatch.setattr(sys, "path", [str(root), *sys.path])


@pytest.fixture(scope="module")
def words_yaml(root):
    """The file words.yaml, of an environment with two turns."""
    settings = json.loads((root / "run.yaml").read_text()) | {"environment": "own_rewards_of_tests:TwoTurns", "num_turns": 2}
    del settings["data"], settings["reward"]
    (root / "words.yaml").write_text(json.dumps(settings | {"branching": "chain"}))


@pytest.fixture(scope="module")
def whole(root):
    """The metrics of an uninterrupted run of run.yaml in out/whole."""
    before = os.getcwd(), sys.path
    try:
        os.chdir(root)
        sys.path = [str(root), *sys.path]
        assert main(["train", "--config", "run.yaml", "--output", "out/whole"]) == 0
    finally:
        os.chdir(before[0])
        sys.path = before[1]
    return metrics(root / "out/whole")


def metrics(directory: Path | str) -> list[dict]:
    """The rows of a run, without what depends on time and on compiled programs."""
    rows = [json.loads(line) for line in (Path(directory) / "metrics.jsonl").read_text().splitlines()]
    return [{k: x for k, x in row.items() if "time" not in k and k not in ("tokens_per_s", "compiles")} for row in rows]


def contents(directory: Path) -> dict[Path, bytes]:
    """The files of a run without its lock, which names its newest process."""
    return {path: path.read_bytes() for path in directory.rglob("*") if path.is_file() and path.name != "lock"}


def read(*flags: str) -> ExperimentConfig:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return read_configuration(parser.parse_args(flags)).experiment


@pytest.mark.long
def test_a_run_writes_its_settings_and_they_repeat_it(whole, capsys):
    cfg = ExperimentConfig.of(**read_yaml("out/whole/config.yaml").tree)
    chosen = dict(remat="dots", micro_batches=1, compute_dtype="float32")  # on a CPU, in place of auto
    chosen["chat_date"] = datetime.date.fromisoformat(cfg.train.episodes.chat_date).isoformat()  # of the first start
    assert cfg == read("--config", "run.yaml", "--output", "out/whole").replace(**chosen)
    assert read("--config", "out/whole") == cfg
    assert main(["train", "--config", "out/whole/config.yaml", "--output", "out/again"]) == 0
    assert metrics("out/again") == whole and len(whole) == 5  # three updates and two evaluations
    lines = capsys.readouterr().out.splitlines()
    ends = [f"{row['eval/reward']:.3f}" for row in whole if "eval/reward" in row]
    assert lines[0].startswith("run: loading ") and lines[-1] == (
        f"out/again: 3 updates made, reward of the last one {whole[-2]['reward/mean']:.3f}; held-out reward {ends[0]} before "
        f"training, {ends[1]} after 3 updates"
    )
    assert main(["train", "--config", "out/again", "--seed", "1"]) == 0  # in the same directory: the run before is kept
    line = "jmarl: out/again held an earlier run; its metrics, checkpoints and models are now in out/again/earlier_1"
    assert line in capsys.readouterr().err.splitlines()
    old, new = (read_yaml(f"out/again/{folder}config.yaml").tree["train"]["run"]["seed"] for folder in ("earlier_1/", ""))
    assert (old, new) == (0, 1) and metrics("out/again/earlier_1") == whole


@pytest.mark.long
def test_the_best_weights_are_played_evaluated_and_exported(whole, capsys):
    """Here the last but one is called the best, whose checkpoint is there in any case."""
    settings = ["--set", "keep_best=true", "eval_every=1"]
    assert main(["train", "--config", "run.yaml", "--output", "out/best", *settings]) == 0
    assert read_best(Path("out/best")) is not None
    best = {"column": "eval/reward", "smallest": False, "history": [[2, 9.0]]}
    Path("out/best/checkpoints/best.json").write_text(json.dumps(best))
    for command in (["export", "-o", "out/exported"], ["eval", "-n", "2"], ["play"]):
        assert main([command[0], "--model", "out/best", "--best", *command[1:]]) == 0
        assert "the checkpoint of step 2 in out/best, the best by eval/reward on its held-out tasks" in capsys.readouterr().err
    last, exported = (load_file(f"out/{name}/agent_0/model.safetensors") for name in ("best/models", "exported"))
    assert any((last[name] != exported[name]).any() for name in last)
    for words, problem in (
        (["--model", "out/whole"], "out/whole has no best weights: its run has no keep_best"),
        (["--model", "out/exported"], "--best is for the directory of a run"),
    ):
        assert main(["play", *words, "--best"]) == 2 and problem in capsys.readouterr().err


@pytest.mark.long
def test_an_interrupted_run_ends_with_75_and_resumes_to_the_same_metrics(whole, capsys):
    Path("calls").unlink(missing_ok=True)
    flags = ["--output", "out/cut", "--set", "reward=own_rewards_of_tests:interrupting"]
    assert main(["train", "--config", "run.yaml", *flags]) == 75
    assert 0 < len(metrics("out/cut")) < len(whole)
    *_, closing, line = capsys.readouterr().out.splitlines()
    assert closing.startswith("out/cut: ") and " made, then interrupted, reward of the last one " in closing
    assert line.startswith("to resume: jmarl ")
    assert main(line.removeprefix("to resume: jmarl ").split()) == 0
    resumed = [{k.replace("interrupting", "letters"): x for k, x in row.items()} for row in metrics("out/cut")]
    assert resumed == whole
    assert not ExperimentConfig.of(**read_yaml("out/cut/config.yaml").tree).train.run.resume


@pytest.mark.long
def test_ctrl_c_before_the_first_update_says_how_to_go_on(whole, capsys):
    """Here while the reward is imported, as later while programs compile."""
    Path("interrupts_of_tests.py").write_text("import signal\nsignal.raise_signal(signal.SIGINT)\n")
    own = ["--set", "reward=interrupts_of_tests:f"]
    for output, resume, line in (
        ("out/new", [], "no checkpoint was written: the same command starts again from the beginning"),
        ("out/whole", ["--resume"], "to resume: jmarl train --config out/whole/config.yaml --resume"),
    ):
        assert main(["train", "--config", "run.yaml", "--output", output, *own, *resume]) == 130
        assert capsys.readouterr().err.splitlines()[-1] == f"jmarl: stopped; {line}"


@pytest.mark.long
def test_a_run_with_no_update_left_says_so(whole, capsys):
    assert main(["train", "--config", "out/whole", "--resume"]) == 0
    lines = capsys.readouterr().out.splitlines()
    before, after = (f"{row['eval/reward']:.3f}" for row in whole if "eval/reward" in row)
    ends = f"held-out reward {before} before training, {after} after 3 updates"
    assert lines[-1] == f"out/whole: 3 updates made, none of them now; {ends}", "the first one is that of the log"


@pytest.mark.long
def test_a_run_resumes_from_a_step_or_a_path(whole, capsys):
    shutil.copytree("out/whole", "out/steps")
    assert main(["train", "--config", "run.yaml", "--resume", "out/steps/checkpoints/2"]) == 0
    assert metrics("out/steps") == whole
    cfg = read("--config", "run.yaml", "--resume", "2", "--output", "x")
    assert (cfg.train.run.resume, cfg.train.run.resume_step, cfg.train.run.output_dir) == (True, 2, "x")
    cfg = read("--config", "run.yaml", "--resume", "out/steps")
    assert (cfg.train.run.resume, cfg.train.run.resume_step, cfg.train.run.output_dir) == (True, None, "out/steps")
    file = Path("out/steps/config.yaml")
    shutil.copy("out/whole/config.yaml", file)  # as a run that was copied
    settings = file.read_bytes()
    refused = ["train", "--config", str(file), "--set", "temperature=0.5", "--resume", "--trust"]
    assert main(refused) == 2 and "give --output out/steps to resume the run beside it" in capsys.readouterr().err
    assert main([*refused, "--output", "out/steps"]) == 2 and "temperature: 1.0 -> 0.5" in capsys.readouterr().err
    assert file.read_bytes() == settings, "a refused resume changes no settings"


@pytest.mark.long
def test_resume_auto_begins_and_ends_at_once_where_nothing_is_left_to_do(whole, capsys, tmp_path, monkeypatch):
    """The same command again and again, as of a queue; without auto the finished run would be moved aside."""
    flags = ["train", "--config", "run.yaml", "--output", "out/queue", "--resume", "auto"]
    assert main(flags) == 0 and metrics("out/queue") == whole
    capsys.readouterr()
    start = time.monotonic()
    assert main(flags) == 0 and time.monotonic() - start < 5
    assert capsys.readouterr().out == "out/queue: the run has made all 3 updates, nothing is left to do\n"
    assert metrics("out/queue") == whole and not Path("out/queue/earlier_1").exists()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))  # an account without records, as in a container
    assert main(flags) == 0 and "nothing is left to do" in capsys.readouterr().out
    assert main(["train", "--config", "out/queue"]) == 2 and "give --trust" in capsys.readouterr().err
    assert main([*flags, "--set", "temperature=0.5"]) == 2 and "temperature: 1.0 -> 0.5" in capsys.readouterr().err
    assert read("--config", "run.yaml", "--set", "resume=auto").train.run.resume == "auto"


@pytest.mark.long
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--set", "temperature=0.5"], "temperature: 1.0 -> 0.5"),
        (["--set", "reward=own_rewards_of_tests:interrupting"], "reward: reward functions (changed)"),
        (["--set", "held_out=3"], "data: 4 items -> 3"),
        (["--set", "roles=[Be brief.]"], "reward: formatters and transition (changed)"),
        (["--set", "num_updates=2"], "num_updates=2 is not allowed: the run in out/whole has made 3 already"),
        (["--set", "resume_step=1"], "there is no checkpoint of step 1 in out/whole/checkpoints: choose from 2, 3"),
        (["--resume", "7"], "there is no checkpoint of step 7 in out/whole/checkpoints: choose from 2, 3"),
        (["--output", "out/nothing"], "there is nothing to resume: out/nothing/checkpoints has no complete checkpoint"),
    ],
)
def test_the_dry_run_of_a_resume_refuses_what_the_run_refuses(whole, flags, message, capsys):
    before = sorted(Path("out/whole").rglob("*"))
    assert main(["train", "--config", "out/whole", "--resume", *flags, "--dry-run"]) == 2
    assert message in capsys.readouterr().err and sorted(Path("out/whole").rglob("*")) == before


@pytest.mark.long
def test_the_dry_run_of_a_resume_reads_the_checkpoint_and_changes_nothing(whole, tmp_path, capsys):
    run = Path(shutil.copytree("out/whole", tmp_path / "run"))
    before = contents(run)
    flags = ["train", "--config", str(run), "--output", str(run), "--resume", "--dry-run", "--trust"]
    assert main([*flags, "--set", "num_generations=4"]) == 0
    out = capsys.readouterr().out
    assert "would resume from step 3 of 3" in out and "changed: num_generations: 2 -> 4" in out
    with locked(run):
        assert main(flags) == 2 and "is in use by process" in capsys.readouterr().err
    assert contents(run) == before
    for step in (2, 3):
        (run / "checkpoints" / str(step) / "meta.json").write_bytes(b"{}")
    assert main(flags) == 2 and "are damaged" in capsys.readouterr().err
    assert (run / "checkpoints" / "3").is_dir(), "a dry run sets no damaged checkpoint aside"


@pytest.mark.long
def test_the_dry_run_shows_settings_and_prompts_and_trains_nothing(capsys):
    assert main(["train", "--config", "run.yaml", "--output", "out/dry", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "learning_rate: 0.01\n" in out and "4 tasks to train on, 2 held out" in out and "all checks passed" in out
    assert "--- task 2, agent 0: " in out and "Item 2 is" in out and "--- task 3" not in out
    shown = out.split("4 tasks to train on")[0]
    assert "null" not in shown and len(shown.splitlines()) < 40
    Path("shown.yaml").write_text(shown)
    assert read("--config", "shown.yaml") == read("--config", "run.yaml", "--output", "out/dry")
    assert out.endswith("nothing was trained or written; the run would write to out/dry\n") and not Path("out/dry").exists()


@pytest.mark.long
def test_the_dry_run_plays_whole_episodes_and_shows_one_of_the_first_task(capsys):
    """With what the models write; of two turns it shows what the agent reads next. An error of the reward stands alone."""
    flags = ["train", "--config", "run.yaml", "--output", "out/dry", "--dry-run"]
    assert main(flags) == 0
    out = capsys.readouterr().out
    assert "--- task 0, an episode: completions of up to 4 tokens" in out and "agent 0 writes:\n    " in out
    text, reward = re.search(r"agent 0 writes:\n    (.*)\nreward (.*)\n", out).groups()
    assert "reads next" not in out and float(reward) >= text.count("e")
    turns = ["num_turns=2", "branching=chain", "external_transition=own_rewards_of_tests:again"]
    assert main([*flags, "--set", *turns]) == 0
    out = capsys.readouterr().out
    assert "agent 0 reads next:\n    Again: Item 0 is\nagent 0 writes:\n" in out and out.count("\nreward ") == 2
    assert main([*flags, "--set", "reward=own_rewards_of_tests:broken"]) == 1
    out, err = capsys.readouterr()
    assert out == "" and "no such city" in err.splitlines()[-1] and not Path("out/dry").exists()


OF_DATA, OF_WORDS = "run.yaml", "words.yaml"
NOT_PASSED = {
    "None for a joint action": (
        OF_DATA,
        ["reward=own_rewards_of_tests:first_only"],
        "returned None on joint action 1, not a",
    ),
    "None for all": (
        OF_DATA,
        ["reward=own_rewards_of_tests:nothing"],
        "returned None for joint actions 0 to 3: return a list of 4 numbers",
    ),
    "one value for a batch": (
        OF_DATA,
        ["reward=own_rewards_of_tests:average"],
        "returned 1.5 for joint actions 0 to 3: return a list of 4 numbers",
    ),
    "None in a later turn": (OF_WORDS, ["options={fails: true}"], "returned nan on joint action 0.* turn 1 have no reward"),
    "a long prompt in a later turn": (OF_WORDS, ["options={length: 130}"], "turn 1"),
    "a full conversation": (OF_WORDS, ["history=append", "max_new_tokens=56"], "in turn 1 the conversation may have"),
    "output is a file": (OF_DATA, ["output_dir=run.yaml/runs"], "cannot be made, .*run.yaml is a file"),
}


@pytest.mark.long
@pytest.mark.parametrize("reason", NOT_PASSED)
def test_a_dry_run_that_does_not_pass_ends_with_code_1(reason, words_yaml, monkeypatch, capsys):
    monkeypatch.setattr(dry_run, "FIRST_TOKENS", 4)
    file, settings, message = NOT_PASSED[reason]
    assert main(["train", "--config", file, "--dry-run", "--set", *settings]) == 1
    out, err = capsys.readouterr()
    assert out == "" and re.search(message, err.splitlines()[-1]), err


@pytest.mark.long
def test_a_dry_run_passes_rewards_that_leave_out_joint_actions_and_says_that_all_are_equal(words_yaml, capsys):
    rewards = "reward=[own_rewards_of_tests:first_only, own_rewards_of_tests:constant]"
    assert main(["train", "--config", "run.yaml", "--dry-run", "--set", rewards]) == 0
    assert "all 4 episodes have the return" not in capsys.readouterr().out
    assert main(["train", "--config", "run.yaml", "--dry-run", "--set", "reward=own_rewards_of_tests:constant"]) == 0
    assert "all 4 episodes have the return 1: a team learns from returns that differ" in capsys.readouterr().out
    assert main(["train", "--config", "words.yaml", "--dry-run", "--set", "max_new_tokens=80"]) == 0
    out = capsys.readouterr().out
    assert "completions of up to 64 tokens" in out and out.count("agent 0 writes:") == 2


def test_the_dry_run_shows_prompts_with_the_date_of_the_run(monkeypatch):
    seen, resolve = [], prepare.resolve_auto

    def resolved(cfg, run=None):
        return resolve(cfg, run).replace(chat_date="2026-01-02")

    def encoded(tokenizer, prompts, context, new, chat, **options):
        seen.append(chat.date)
        return [[1]]

    monkeypatch.setattr(prepare, "resolve_auto", resolved)
    monkeypatch.setattr(dry_run, "encode_prompts", encoded)
    dry_run.checked_prompts(read("--config", "run.yaml"))
    assert {*seen} == {datetime.date(2026, 1, 2)}


@pytest.mark.parametrize("setting", ["reward=own_rewards_of_tests:leters", "models=[no/such-model]"])
def test_an_error_of_the_dry_run_stands_alone(setting, capsys):
    """Also one that shows only when the model is loaded."""
    assert main(["train", "--config", "run.yaml", "--dry-run", "--set", setting]) == 2
    out, err = capsys.readouterr()
    assert out == "" and [line for line in err.splitlines() if not line.startswith("jmarl: checking: loading ")] == [
        err.splitlines()[-1]
    ]


@pytest.mark.long
def test_the_dry_run_of_a_sweep_checks_all_and_shows_the_first(capsys):
    sweep = ["--set", "sweep.learning_rate=[1e-3, 1e-2]"]
    assert main(["train", "--config", "run.yaml", "--output", "out/dry", "--dry-run", *sweep]) == 0
    out = capsys.readouterr().out
    assert "    learning_rate: 0.001\n" in out and "    learning_rate: 0.01\n" not in out
    assert out.endswith("write to\nout/dry/learning_rate=0.001/seed_0\nout/dry/learning_rate=0.01/seed_0\n")
    assert main(["train", "--config", "run.yaml", "--dry-run", "--set", "sweep.num_generations=[2, 1]"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and "num_generations=1" in err


def read_points(root: Path, *values: str, config: str = "run.yaml") -> list[Point]:
    """Return the runs of a sweep in root/o. values: of --set."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    args = parser.parse_args(["--config", config, "--output", str(root / "o"), "--set", *values])
    return points_of(args, read_configuration(args))


def test_settings_of_a_sweep_change_together_under_a_free_name():
    """As one key of the product; directories have the values, and the names of settings too where these alone are equal."""
    model = read("--config", "run.yaml").team.models[0]

    def points(*values: str) -> list:
        return read_points(Path(), *values)

    rewards = "own_rewards_of_tests:letters", "own_rewards_of_tests:interrupting"
    team = f"{{models: [{model}], reward: {rewards[0]}}}", f"{{models: [{model}, {model}], reward: {rewards[1]}}}"
    made = points(f"sweep.team=[{', '.join(team)}]", "sweep.learning_rate=[1e-3, 1e-2]", "algorithm=magrpo")
    name = Path(model).name
    assert [point.cfg.train.run.output_dir for point in made] == [
        f"o/team={label},learning_rate={rate}/seed_0"
        for label in (f"{name}+letters", f"{name}-{name}+interrupting")
        for rate in (0.001, 0.01)
    ]
    assert [(p.cfg.team.size, p.cfg.task.reward) for p in made] == [(1, rewards[0])] * 2 + [(2, rewards[1])] * 2
    assert made[3].columns == {"models": [model, model], "reward": rewards[1], "learning_rate": 0.01}
    equal = points("sweep.a=[{top_k: 1, num_prompts: 2}, {num_prompts: 1, top_k: 2}]")
    assert [point.directories[0].parts[1] for point in equal] == ["a=top_k=1,num_prompts=2", "a=num_prompts=1,top_k=2"]
    named = points("sweep.a={short: {top_k: 1, num_prompts: 2}, long: {top_k: 2}}", "sweep.learning_rate=[1e-3]")
    assert [point.label for point in named] == ["a=short,learning_rate=0.001", "a=long,learning_rate=0.001"]
    assert named[1].columns == {"a": "long", "learning_rate": 0.001} and named[1].cfg.train.sampling.top_k == 2
    (members,) = points("sweep.learning_rate=[1e-3]", "population.size=3", "population.every=2", "eval_every=2")
    assert members.seeds == members.cfg.seeds == (0, 1, 2) and [path.name for path in members.directories][2] == "seed_2"
    with pytest.raises(ValueError, match="no list of values"):
        points("sweep.optimizer={learning_rate: [1e-3]}")
    trees = points("sweep.chat_template_kwargs=[{a: 1}, {b: 2}]")  # a setting whose values are mappings
    assert trees[1].columns == {"chat_template_kwargs": {"b": 2}}


@pytest.mark.long
def test_a_run_without_held_out_rows_says_nothing_about_them(capsys):
    assert main(["train", "--config", "pairs.yaml", "--output", "out/pairs", "--set", "progress=true", "num_updates=1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"out/pairs: 1 update made, loss of the last one \d\.\d{3}", lines[-1])
    assert lines[-2] == "next: jmarl report out/pairs"
    assert lines[1].startswith("dpo: 1 agent (1 x ") and ", 1 update, written to out/pairs" in lines[1]


def test_the_dry_run_of_data_marks_the_trained_tokens(capsys):
    assert main(["train", "--config", "pairs.yaml", "--dry-run", "--set", "held_out=1"]) == 0
    out = capsys.readouterr().out
    assert "chosen: ⟦" in out and "answer|<|im_end|>⟧" in out and "--- pair 2, agent 0" in out
    assert "1 of 1 held-out pairs are also trained on" in out


@pytest.mark.long
def test_held_out_tasks_that_are_trained_on_are_counted(capsys):
    """Those of a file of their own too, with other columns; in a dry run and in a run."""
    rows = [{"id": i, "prompt": f"Item {i} is"} for i in (3, 8)]
    Path("other.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    line = "1 of 2 held-out tasks are also trained on"
    settings = ["--set", "held_out=other.jsonl", "num_updates=1", "progress=true"]
    assert main(["train", "--config", "run.yaml", "--dry-run", *settings]) == 0
    assert line in capsys.readouterr().out
    assert main(["train", "--config", "run.yaml", "--output", "out/shared", *settings]) == 0
    assert line in capsys.readouterr().out


OWN = """
import jax
import jax.numpy as jnp
from jmarl import Step, TextEnvironment
from jmarl.algorithms import AlgorithmRow
from jmarl.rl.advantages import group_mean

def score(texts):
    return [float(len(text)) for text in texts]

def ask(item):
    return "Say " + item["prompt"]

class Words(TextEnvironment):
    def tasks(self, split="train", count=100, seed=0):
        return [{"text": f"{split} {i}"} for i in range(min(count, 3))]
    def reset(self, task, rng):
        return None, [task["text"]]
    def step(self, state, messages, rng):
        return Step(state, [None], float(len(messages[0])), True)

# the algorithm and metrics
@jax.jit
def soft(logprobs, old_logprobs, advantages, weights, *, eps_low):
    ratio = jnp.tanh((jnp.exp(logprobs - old_logprobs) - 1) / eps_low)
    return -jnp.sum(weights * advantages * ratio), {"soft": ratio}

softclip = AlgorithmRow(soft, group_mean, min_group=2, options={"eps_low": "clip_eps_low"})

def longest(items, rollout):
    return {"longest": max(len(text) for rows in rollout.turns[0].texts for row in rows for text in row)}
"""


@pytest.mark.long
def test_all_that_users_write_has_one_rule_in_files_and_is_found_beside_them(root, capsys):
    """Also a loss alone. A run made with an own algorithm is played without it."""
    project = root / "own project"
    project.mkdir()
    (project / "mine_of_a_test.py").write_text(OWN)
    (project / "prompts.jsonl").write_text((root / "prompts.jsonl").read_text())
    model = read("--config", "run.yaml").team.models
    mine = "mine_of_a_test.py:"
    own = SMALL | dict(models=[*model], num_updates=1, held_out=1, save_every=0, algorithm=f"{mine}softclip", clip_eps_low=0.3)
    data = own | dict(data="prompts.jsonl", reward=f"{mine}score", formatters=[f"{mine}ask"], eval_metrics=f"{mine}longest")
    (project / "data.yaml").write_text(json.dumps(data))
    (project / "words.yaml").write_text(json.dumps(own | dict(environment=f"{mine}Words", algorithm=f"{mine}soft")))
    for name in ("data", "words"):
        assert main(["train", "--config", f"own project/{name}.yaml", "--output", f"out/own {name}"]) == 0
        rows = [json.loads(line) for line in Path(f"out/own {name}/metrics.jsonl").read_text().splitlines()]
        assert any("agent_0/soft" in row for row in rows)
        assert ("eval/longest" in rows[0]) == (name == "data")
        config = read_yaml(f"out/own {name}/config.yaml").tree
        assert config["train"]["algorithm"].startswith(f"{project}/{mine}soft")
        assert main(["eval", "--config", f"own project/{name}.yaml", "-n", "1"]) == 0
    (project / "mine_of_a_test.py").write_text(OWN.split("# the algorithm and metrics")[0])
    del sys.modules["mine_of_a_test"]  # as in another process
    for name in [name for name in ALGORITHMS if ":" in name]:
        del ALGORITHMS[name]
    for name in ("data", "words"):
        for command, *flags in (["play"], ["eval", "-n", "1"], ["collect", "-n", "1", "-o", f"out/own_{name}.jsonl"]):
            assert main([command, "--model", f"out/own {name}", *flags]) == 0, capsys.readouterr().err
    environment = ["--environment", "own project/mine_of_a_test.py:Words"]
    assert main(["play", "--model", model[0], *environment, "--max-new-tokens", "4"]) == 0
    offer = read_offer("own project/mine_of_a_test.py:Words", "own project/mine_of_a_test.py:score")
    assert [*offer.environments] == ["mine_of_a_test.py:Words"]
    with contextlib.closing(Catalog(offer, 0, 10.0)) as catalog:
        catalog.build_all()
        assert catalog.rewards["mine_of_a_test.py:score"].function(["abc"]) == [3.0]


def test_later_files_override_and_the_default_directory_is_said(capsys):
    Path("more.yaml").write_text("training: {learning_rate: 5e-3}\nexperiment_name: my experiment\n")
    cfg = read("--config", "run.yaml,more.yaml", "--seed", "3")
    assert (cfg.train.optimizer.learning_rate, cfg.train.run.seed, cfg.train.run.output_dir) == (5e-3, 3, "runs/my_experiment")
    assert read("--config", "more.yaml,run.yaml").train.optimizer.learning_rate == 1e-2
    assert read("--config", "run.yaml").train.run.output_dir == "runs/run"


def test_environments_of_the_user_are_made_before_any_model_is_loaded(capsys):
    text = "model: no/such-model\neval_envs: [{custom_class: own_rewards_of_tests.Words, custom_kwargs: {%s: pears}}]\n"
    Path("env.yaml").write_text(text % "word")
    [env] = read("--config", "env.yaml").task.eval_envs
    assert (env.name, env.options) == ("own_rewards_of_tests:Words", {"word": "pears"})
    Path("env.yaml").write_text(text % "wrd")
    assert main(["train", "--config", "env.yaml"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("jmarl: env.yaml, line 2: eval_envs: environment 'own_rewards_of_tests:Words': ")
    assert "its options are word" in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--set", "reward=own_rewards_of_tests:leters", "models=[no/such-model]"],
            "cannot be imported: module 'own_rewards_of_tests' has no 'leters'; did you mean 'letters'?",
        ),
        (["--set", "reward=own_reward_of_tests:letters"], "nor is it installed; did you mean 'own_rewards_of_tests'?"),
        (
            ["--set", "environment=story", "data=null", "reward=null"],
            "2 roles (setup, story), and the team has 1: give one model",
        ),
        (["--set", "algorithm=ppoo"], "--set algorithm: algorithm='ppoo' is unknown; did you mean 'ppo'"),
        (["--set", "algorithm=no"], "--set algorithm: algorithm=False is unknown"),
        (["--set", "tpo_p=2"], "unknown key; did you mean 'top_p'"),
        (["--set", "top_p"], "write --set name=value"),
        (["--resume", "nowhere"], "give latest, auto, the number of a checkpoint, or the directory of a run"),
        (["--set", "sweep.learning_rate=3"], "sweep: learning_rate: 3 is no list of values"),
        (["--set", "sweep.optimizer={learning_rate: [3]}"], "write optimizer.learning_rate: [first, second]"),
        (["--set", "sweep.lerning_rate=[1e-3]"], "sweep: lerning_rate: unknown key; did you mean 'learning_rate'?"),
        (
            ["--set", "sweep.learning_rate=[1e-3]", "sweep.a=[{learning_rate: 1e-4}]"],
            "sweep: learning_rate is set by learning_rate and by a: give it in one of them",
        ),
        (["--only", "a"], "--only a chooses runs of a sweep, and no file has a section sweep"),
        (
            ["--set", "sweep.learning_rate=[1e-3]", "--only", "learning_rate=0.001", "x"],
            "--only x is no run of the sweep: choose learning_rate=0.001 or learning_rate=0.001/seed_0",
        ),
        (["--set", "sweep.together=1"], "sweep: together: 1 is not allowed: give true or false"),
        (
            ["--set", "sweep.compare=eval/reward"],
            "sweep: compare: 'eval/reward' is not allowed: give columns and perhaps against",
        ),
        (
            ["--set", "sweep.compare={columns: [x], agains: y}"],
            "sweep: compare: agains: unknown key; allowed: columns and against",
        ),
        (["--set", "sweep.compare={against: y}"], "sweep: compare: columns: None is no list of names of columns"),
        (
            ["--set", "sweep.top_k=[1, 2]", "sweep.compare={columns: [x], against: top_k=3}"],
            "sweep: compare: against: there is no combination 'top_k=3': choose 'top_k=1' or 'top_k=2'",
        ),
        (["--output", "o", "--set", "sweep.seed=[1, 1]"], "two runs would write to o/seed=1/seed_1: give each value once"),
        (["--set", "models=null"], "no model is given"),
        (["--set", "distributed.enabled=true", "distributed.num_gpus=64"], "needs 64 devices"),
    ],
)
def test_what_the_user_wrote_wrong_is_one_line_and_code_2(flags, message, capsys):
    assert main(["train", "--config", "run.yaml", *flags]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_a_sweep_without_settings_is_an_error_with_its_line(capsys):
    for text in ("", "[1e-3]"):
        Path("sweep.yaml").write_text(f"model: m\nsweep: {text}\n")
        assert main(["train", "--config", "sweep.yaml"]) == 2
        error = capsys.readouterr().err
        assert "sweep.yaml, line 2: sweep: " in error and "such as sweep: {learning_rate: [1e-5, 1e-4], " in error


def test_a_directory_in_use_is_one_line_and_code_2(capsys):
    with locked("out/busy"):
        assert main(["train", "--config", "run.yaml", "--output", "out/busy"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"jmarl: the output directory out/busy is in use by process {os.getpid()} on ")
    assert error.count("\n") == 1
    with locked("out/busy_sweep/top_k=1/seed_0"):
        flags = ["--output", "out/busy_sweep", "--set", "sweep.top_k=[1, 2]"]
        assert main(["train", "--config", "run.yaml", *flags]) == 2 and "is in use by process" in capsys.readouterr().err
    assert not list(Path("out/busy_sweep").glob("results*")), "no run has begun: the next start would take it for the user's"


def test_a_missing_file_names_the_nearest_shipped_configuration(capsys):
    assert main(["train", "--config", "magrp"]) == 2
    assert "did you mean 'magrpo'" in capsys.readouterr().err


def test_what_nobody_said_follows_from_the_environment(capsys):
    Path("debate.yaml").write_text("model: m\ntraining: {algorithm: ppo}\neval_envs: [{env_type: debate, max_turns: 4}]\n")
    cfg = read("--config", "debate.yaml")
    assert (cfg.team.size, cfg.team.shared_weights, cfg.train.algorithm) == (2, True, "ippo")
    assert cfg.task.eval_envs[0].options == {"swap": True, "speeches": 4}  # of each side, as in MRLM
    assert (cfg.train.episodes.num_turns, cfg.train.episodes.branching) == (8, "chain")
    assert read("--config", "debate.yaml", "--set", "num_turns=5").train.episodes.branching == "tree"


@pytest.mark.long
def test_a_sweep_makes_a_table_and_skips_finished_runs(capsys):
    command = ["train", "--config", "pairs.yaml", "--output", "out/sweep", "--set", "sweep.dpo.beta=[0.1, 0.5]"]
    command += ["sweep.seeds=[0, 1]", "held_out=1", "progress=false", "save_every=0"]
    assert main([*command, "--only", "beta=0.5", "beta=0.1/seed_1"]) == 0
    assert [(row["dpo.beta"], row["seed"]) for row in json.loads(Path("out/sweep/results.json").read_text())] == [
        (0.1, 1), (0.5, 0), (0.5, 1), (0.5, "mean"),
    ]  # fmt: skip
    assert main(command) == 0
    rows = json.loads(Path("out/sweep/results.json").read_text())
    assert [(row["dpo.beta"], row["seed"]) for row in rows] == [
        (0.1, 0), (0.1, 1), (0.5, 0), (0.5, 1), (0.1, "mean"), (0.5, "mean"),
    ]  # fmt: skip
    assert rows[0].keys() >= {"accuracy after", "margin after", f"loss of the last {rows[0]['updates']}"}
    assert rows[4]["held out after"] == pytest.approx((rows[0]["held out after"] + rows[1]["held out after"]) / 2)
    table = Path("out/sweep/results.md").read_text()
    assert table.count("\n") == 8
    assert capsys.readouterr().out.endswith(
        f"{table}the table is in out/sweep/results.md; `jmarl report out/sweep` compares the curves\n"
    )
    old = {path: path.stat().st_mtime_ns for path in Path("out/sweep").glob("*/*/metrics.jsonl")}
    file = Path("out/sweep/beta=0.1/seed_0/config.yaml")  # as an older version wrote it, which did not have a setting
    file.write_text(file.read_text().replace("random_weights: false\n", "# "))
    assert main(command) == 0 and len(old) == 4
    assert {path: path.stat().st_mtime_ns for path in old} == old and "is finished" in capsys.readouterr().out
    assert main([*command, "learning_rate=1e-3"]) == 2
    assert "written with other settings (learning_rate)" in capsys.readouterr().err
    compare = 'sweep.compare={columns: [eval/loss, loss], against: "beta=0.1"}'
    Path("out/sweep/report.md").write_text("of the user")
    assert main([*command, compare]) == 2 and "report.md is no file of a report" in capsys.readouterr().err
    Path("out/sweep/report.md").unlink()
    assert main([*command, compare]) == 0 and "out/sweep/report.html: 4 runs, " in capsys.readouterr().out
    lines = Path("out/sweep/report.csv").read_text().splitlines()
    assert [line.split(",")[:4] for line in lines[1:]] == [
        [column, f"beta={beta}", "2", "0"] for column in ("eval/loss", "loss") for beta in (0.1, 0.5)
    ]
    assert float(lines[1].split(",")[4]) == pytest.approx(rows[4]["held out after"])
    assert {path.name for path in Path("out/sweep").iterdir() if path.is_file()} == {
        "results.json", "results.md", "report.html", "report.md", "report.tex", "report.csv",
    }  # fmt: skip


def test_a_table_has_the_runs_that_another_process_ended_while_it_was_written(tmp_path, monkeypatch):
    """Two processes with --only: the other one ends its run, and writes its tables, after this one has read the runs."""
    points = read_points(tmp_path, "sweep.learning_rate=[1e-3, 1e-2]", "num_updates=1", "algorithm=dpo", config="pairs.yaml")

    def end(point: Point) -> None:
        (directory,) = point.directories
        directory.mkdir(parents=True)
        (directory / "metrics.jsonl").write_text('{"step": 1, "loss": "NaN"}\n')

    def replace_later(*arguments, **settings) -> None:
        if not points[1].directories[0].exists():
            end(points[1])
        replace_text(*arguments, **settings)

    monkeypatch.setattr(sweep, "replace_text", replace_later)
    end(points[0])
    assert write_results(tmp_path, points, {})
    assert [row["learning_rate"] for row in json.loads((tmp_path / "results.json").read_text())] == [1e-3, 1e-2]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["o", "results.json", "results.md"]


def test_seeds_that_are_not_together_have_directories_and_names_of_their_own(tmp_path):
    values = ["sweep.learning_rate=[1e-3, 1e-2]", "sweep.seeds=[0, 1]"]
    joined = read_points(tmp_path, *values)
    apart = read_points(tmp_path, *values, "sweep.together=false")
    assert [point.cfg.seeds for point in joined] == [(0, 1)] * 2 and [point.cfg.seeds for point in apart] == [()] * 4
    assert [point.cfg.train.run.seed for point in apart] == [0, 1, 0, 1]
    assert [path for point in apart for path in point.directories] == [path for point in joined for path in point.directories]
    names = ["learning_rate=0.01/seed_1", "learning_rate=0.001/"]
    assert chosen_points(apart, tmp_path / "o", names) == [apart[0], apart[1], apart[3]]
    assert chosen_points(joined, tmp_path / "o", ["learning_rate=0.01"]) == joined[1:]
    with pytest.raises(ValueError, match=r"seed_1 is no run of the sweep; its seeds are one run, and with together: false"):
        chosen_points(joined, tmp_path / "o", ["learning_rate=0.01/seed_1"])
    assert {point.label for point in apart} == {"learning_rate=0.001", "learning_rate=0.01"}
    (alone,) = read_points(tmp_path, "sweep.seeds=[0, 1]")
    assert alone.label == "o" and chosen_points([alone], tmp_path / "o", []) == [alone]


@pytest.mark.long
def test_an_interrupted_sweep_prints_the_command_that_resumes_it(capsys):
    Path("calls").unlink(missing_ok=True)
    command = ["train", "--config", "run.yaml", "--output", "out/cut sweep", "--set", "sweep.learning_rate=[1e-2, 1e-3]"]
    assert main([*command, "reward=own_rewards_of_tests:interrupting", "num_updates=2"]) == 75
    out = capsys.readouterr().out
    *_, line = out.splitlines()
    assert line.startswith("to resume the sweep: jmarl train ") and "to resume:" not in out
    assert main(shlex.split(line)[5:]) == 0
    assert [row["updates"] for row in json.loads(Path("out/cut sweep/results.json").read_text())] == [2, 2]


def test_failed_and_unfinished_runs_of_a_sweep_are_in_no_mean(tmp_path):
    """Of four seeds one failed, one stopped after one update, and one failed before it wrote a row."""
    values = ["sweep.learning_rate=[1e-3]", "sweep.seeds=[0, 1, 2, 3, 4]", "num_updates=2", "algorithm=dpo"]
    points = read_points(tmp_path, *values, config="pairs.yaml")
    for point, losses in zip(points, ([1.0, 3.0], [2.0, 6.0], [50.0, 50.0], [70.0]), strict=False):
        (directory,) = point.directories
        directory.mkdir(parents=True)
        rows = [{"step": step, "loss": loss} for step, loss in enumerate(losses, 1)]
        (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    failed = {points[number].cfg.train.run.output_dir: "not finite" for number in (2, 4)}
    assert write_results(tmp_path, points, failed)
    *rows, mean = json.loads((tmp_path / "results.json").read_text())
    assert [row.get("failed") for row in rows] == [None, None, "not finite", None, "not finite"]
    assert [row.get("not finished") for row in rows] == [None, None, None, "1 of 2 updates", None]
    assert mean == {"learning_rate": 1e-3, "seed": "mean of 2 of 5", "updates": 2, "loss of the last 2": 3}
    assert (tmp_path / "results.md").read_text().count("not finite") == 2


def test_invalid_rewards_of_a_sweep_are_in_its_table(tmp_path):
    row = {"step": 0, "reward/mean": 1.0, "turn_0/reward/invalid": 2.0, "turn_1/reward/invalid": 1.0}
    held_out = {"step": 0, "eval/updates": 1, "eval/reward": 1.0, "eval/reward/invalid": 7.0}
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in (row, held_out)))
    cfg = read("--config", "run.yaml", "--set", "num_updates=1").replace(output_dir=str(tmp_path))
    result = result_row(Point({}, cfg, (0,), False), 0, tmp_path, {})
    assert (result["invalid of the last 1"], result["held out invalid"], result["reward of the last 1"]) == (3, 7, 1)


def test_the_name_the_description_and_the_tags_go_to_wandb():
    cfg = read("--config", "run.yaml", "--set", "wandb.project=p", "tags=[a, b]", "description=d", "experiment_name=n")
    assert wandb_config(vars(cfg)) == {"project": "p", "name": "n", "notes": "d", "tags": ["a", "b"]}
    assert wandb_config(vars(read("--config", "run.yaml"))) is None
    assert wandb_config(vars(read("--config", "run.yaml", "--set", "training.wandb_run_name=r")))["name"] == "r"


@pytest.mark.long
def test_a_distributed_run_on_one_device_says_so(capsys):
    flags = ["--output", "out/dry", "--dry-run", "--set", "distributed.enabled=true", "distributed.strategy=fsdp"]
    assert main(["train", "--config", "run.yaml", *flags]) == 0
    assert "distributed: " in capsys.readouterr().out.splitlines()[0]


def test_a_device_that_is_not_there_is_an_error(root):
    command = [sys.executable, "-m", "jmarl", "train", "--config", "run.yaml", "--device", "tpu"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=root)
    assert done.returncode == 2 and done.stderr.startswith("jmarl: device='tpu' is not on this machine")
