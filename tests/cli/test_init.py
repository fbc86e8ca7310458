"""`jmarl init`: the project that it writes trains and passes its own tests, from any directory; and where files of a YAML file
are looked for."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from jmarl import ExperimentConfig
from jmarl.cli.configuration import read_configuration, read_experiment
from jmarl.cli.init import FILES
from jmarl.cli.main import main
from jmarl.config.layers import located
from jmarl.config.yaml_file import Given, read_yaml
from jmarl.envs import import_object
from jmarl.files.identity.fingerprint import difference, of_reward
from jmarl.runs.experiment import task_of

SMALL = [
    "save_models=false",
    "num_updates=2",
    "max_new_tokens=4",
    "num_generations=2",
    "progress=false",
    "tensorboard=false",
    "save_every=0",
]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """The current directory, which is not that of the project; modules of the test are forgotten."""
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in ("JAX_PLATFORMS", "JAX_NUM_CPU_DEVICES", "TF_CPP_MIN_LOG_LEVEL"):  # `jmarl plan` sets them for its process
        monkeypatch.setenv(name, os.environ.get(name, ""))
        if not os.environ[name]:
            monkeypatch.delenv(name)
    monkeypatch.delitem(sys.modules, "rewards", raising=False)
    yield tmp_path
    sys.modules.pop("rewards", None)


@pytest.mark.long
def test_a_new_project_trains_from_any_directory_and_passes_its_own_tests(elsewhere, tiny_dir, capsys):
    project = elsewhere / "my story"
    assert main(["init", str(project)]) == 0
    lines = capsys.readouterr().out.splitlines()
    commands = [line.split("#")[0].strip() for line in lines[lines.index("next:") + 1 :]]
    assert [text.split("'")[0].strip() for text in commands[-5:]] == [
        "python -m pytest", "jmarl train --config", "jmarl train --config", "jmarl report runs/my_story",
        "jmarl play --model runs/my_story",
    ]  # fmt: skip
    Path("prompts.jsonl").write_text("what is here is not read")
    Path("rewards.py").write_text("raise RuntimeError('nor is this')")
    model = tiny_dir("llama", max_position_embeddings=2048)
    flags = ["--config", str(project / "run.yaml"), "--set", f"models=[{model}]", *SMALL]
    assert main(["train", *flags, "--dry-run"]) == 0
    assert "16 tasks to train on, 4 held out; 2 agents" in capsys.readouterr().out
    assert main(["train", *flags, "held_out=0"]) == 0
    rows = [json.loads(line) for line in Path("runs/my_story/metrics.jsonl").read_text().splitlines()]
    assert [0 <= row["reward/mean"] <= 1 for row in rows if "reward/mean" in row] == [True, True]
    task = read_yaml("runs/my_story/config.yaml").tree["task"]
    assert (task["data"], task["reward"]) == (str(project / "prompts.jsonl"), f"{project}/rewards:score")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(project)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 and "4 passed" in done.stdout, done.stdout + done.stderr


def test_the_commented_lines_let_agent_1_read_what_agent_0_wrote(elsewhere):
    """Without the comment signs: the settings of run.yaml, and the functions of rewards.py that they name."""
    assert main(["init", "mine"]) == 0
    for name, start in (("run.yaml", "# formatters:"), ("rewards.py", "# def first_turn")):
        lines = Path("mine", name).read_text().splitlines()
        first = next(i for i, line in enumerate(lines) if line.startswith(start))
        count = len([*itertools.takewhile(lambda line: line.startswith("#"), lines[first:])])
        example = [re.sub("^# ?", "", line) for line in lines[first : first + count]]
        Path("mine", name).write_text("\n".join([*lines[:first], *example, *lines[first + count :]]))
    cfg = read_experiment("mine/run.yaml")
    task = task_of(cfg.task, cfg.team, num_turns=cfg.train.episodes.num_turns)
    rng = np.random.default_rng(0)
    states, prompts = task.env.reset(task.items[:1], rng)
    title, text = cfg.team.roles
    [item] = task.items[:1]
    assert prompts == [[f"{title}\n\n{item['prompt']}"], [None]]
    answer = task.env.step(states, [["The Last Lamp"], [""]], rng)
    assert answer.result.total.tolist() == [0.5], "of the title alone"
    states, prompts = task.env.observe(answer.after)
    assert prompts == [[None], [f"{text}\n\n{item['prompt']}\nTitle: The Last Lamp"]]
    assert task.env.step(states, [[""], [" ".join(item["words"])]], rng).result.total.tolist() == [0.5]
    assert (cfg.train.episodes.num_turns, cfg.train.episodes.branching) == (2, "chain")
    changed = task_of(dataclasses.replace(cfg.task, in_turns=False), cfg.team, num_turns=2).env
    assert "in_turns" in difference("reward", of_reward(changed), of_reward(task.env)), "a resumed run notices it"


@pytest.mark.long
def test_a_few_steps_say_how_long_the_run_of_a_project_takes(elsewhere, tiny_dir, capsys):
    """The last one is timed, the whole run follows from it; nothing is written."""
    assert main(["init", "mine"]) == 0
    model = tiny_dir("llama", max_position_embeddings=2048)
    more = ["num_updates=500", "held_out=4", "lr_schedule=linear", "warmup_updates=10"]
    assert (
        main(["plan", "--config", "mine/run.yaml", "--device", "cpu", "--measure", "--set", f"models=[{model}]", *SMALL, *more])
        == 0
    )
    out = capsys.readouterr().out
    step = re.search(r"measured: ([\d.]+) s a step \(sampling ([\d.]+), rewards ([\d.]+), update ([\d.]+)\); comp", out)
    run = re.search(
        r"the run: about (\d+):(\d\d):(\d\d) for 500 updates and 2 evaluations of about ([\d.]+) s; checkpoints", out
    )
    compiling = re.search(r"; compiling (\d+) s, once", out)
    assert step and run and compiling
    assert re.search(r"; steps \d+ and \d+ agree within 5 %|no two steps in a row agree within 5 %: from step 2 on they", out)
    assert re.search(r"^measured on (one CPU device|\d+ CPU devices, mesh agent=2)", out, re.M)
    hours, minutes, seconds, evaluation = map(float, run.groups())
    total, sampling, rewards, update = map(float, step.groups())
    assert sampling + rewards + update <= total + 0.02
    expected = float(compiling[1]) + 500 * total + 2 * evaluation
    assert 3600 * hours + 60 * minutes + seconds == pytest.approx(expected, abs=4)  # total is rounded to 0.01 s
    assert not Path("runs").exists()


def test_init_overwrites_nothing(elsewhere, capsys):
    Path("rewards.py").write_text("mine")
    assert main(["init", "."]) == 2
    assert capsys.readouterr().err == "jmarl: rewards.py exists, and nothing is overwritten: give another directory\n"
    assert [path.name for path in Path().iterdir()] == ["rewards.py"] and Path("rewards.py").read_text() == "mine"
    assert main(["init", "new/one"]) == 0 and sorted(path.name for path in Path("new/one").iterdir()) == sorted(FILES)


def task_of_file(folders, **settings):
    given = located({name: Given(value, 1, "") for name, value in settings.items()}, folders)
    return ExperimentConfig.of(**{name: x.value for name, x in given.items()}).task


def test_files_beside_a_yaml_file_come_before_those_of_the_current_directory(elsewhere):
    """What is not beside it belongs to the current directory. Of several YAML files the last one comes first."""
    a, b = elsewhere / "a", elsewhere / "b"
    for file in (a / "rows.jsonl", a / "held.jsonl", a / "pkg" / "mine.py", b / "rows.jsonl", Path("rows.jsonl")):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("")
    names = ["other:f", "../a/pkg/mine:g", "jmarl.envs.writing.story:setup_prompt"]
    settings = dict(data="rows.jsonl", held_out="held.jsonl", reward="pkg.mine:f", formatters=names, environment=None)
    task = task_of_file([b, a], models=["m"], num_agents=3, **settings)
    assert (task.data, task.held_out, task.reward) == (f"{b}/rows.jsonl", f"{a}/held.jsonl", f"{a}/pkg.mine:f")
    assert task.formatters == ("other:f", f"{b}/../a/pkg/mine:g", names[2])
    assert task_of_file([Path.cwd()], models=["m"], num_agents=3, **settings).data == "rows.jsonl"


def test_an_environment_beside_a_yaml_file_is_found(elsewhere):
    (elsewhere / "mine.py").write_text("")
    mixture = [{"name": "mine:A", "options": {}}, "story"]
    task = task_of_file([elsewhere], models=["m"], train_envs=mixture, eval_envs=["mine:B"], held_out=1)
    assert [env.name for env in (*task.train_envs, *task.eval_envs)] == [f"{elsewhere}/mine:A", "story", f"{elsewhere}/mine:B"]


def test_a_module_is_imported_from_its_directory(elsewhere):
    (elsewhere / "pkg").mkdir()
    (elsewhere / "pkg" / "mine.py").write_text("value = 3")
    (elsewhere / "json.py").write_text("value = 4")
    assert import_object(f"{elsewhere}/pkg.mine:value") == 3
    with pytest.raises(ImportError, match=rf"another module 'json', of .*, is loaded already: rename the one in {elsewhere}"):
        import_object(f"{elsewhere}/json:value")
    sys.modules.pop("pkg.mine"), sys.modules.pop("pkg")


def test_a_directory_may_have_the_name_of_a_number(tmp_path):
    assert main(["init", str(tmp_path / "2024")]) == 0
    assert read_experiment(str(tmp_path / "2024" / "run.yaml")).train.run.output_dir == "runs/2024"


def test_a_path_of_a_flag_belongs_to_the_current_directory(tmp_path, monkeypatch):
    """One of a YAML file is looked for beside it first."""
    monkeypatch.chdir(tmp_path)
    assert main(["init", "project"]) == 0
    Path("prompts.jsonl").write_text('{"prompt": "mine"}\n')
    assert read_experiment("project/run.yaml").task.data == str(tmp_path / "project" / "prompts.jsonl")
    others = dict.fromkeys(("seed", "device", "output", "resume", "pool", "trust"))
    args = argparse.Namespace(config="project/run.yaml", set=["data=prompts.jsonl"], **others)
    assert read_configuration(args).experiment.task.data == "prompts.jsonl"
