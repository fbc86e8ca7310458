"""A run directory from elsewhere runs no code unasked: what counts as code, the record of own runs, and every command."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tty
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from jmarl import ExperimentConfig
from jmarl.cli.configuration import read_experiment
from jmarl.cli.main import find_own_modules, main
from jmarl.config.yaml_file import dump_run, dump_yaml
from jmarl.envs import ENVIRONMENTS, make
from jmarl.files import trusted
from jmarl.files.run_files import leaves, read_config
from jmarl.files.trusted import is_trusted, named_code, record_trust, require_trust
from jmarl.models.hub import agents
from jmarl.models.hub.agents import load_tokenizer
from jmarl.report.page import write_report
from tests.conftest import CHATML

ENVIRONMENT = """
from pathlib import Path
from jmarl import Step, TextEnvironment
Path({mark!r}).touch()
class Env(TextEnvironment):
    def tasks(self, split="train", count=100, seed=0):
        return [{{"text": f"{{split}} {{i}}"}} for i in range(count)]
    def reset(self, task, rng):
        return None, [task["text"]]
    def step(self, state, messages, rng):
        return Step(state, [None], 1.0, True)
"""


@pytest.fixture(autouse=True)
def account(tmp_path, monkeypatch):
    """An account without records."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.fixture
def stranger(tmp_path, tiny_dir):
    """The directory of a run from elsewhere whose environment leaves a mark when it is imported, and the mark."""
    run, mark = tmp_path / "stranger", tmp_path / "mark"
    (run / "models").mkdir(parents=True)
    shutil.copytree(tiny_dir("llama"), run / "models" / "agent_0")
    (run / "evil_module.py").write_text(ENVIRONMENT.format(mark=str(mark)))
    (run / "config.yaml").write_text(
        dump_yaml({"models": [str(run / "models/agent_0")], "environment": f"{run}/evil_module:Env"})
    )
    yield run, mark
    sys.modules.pop("evil_module", None)
    while str(run) in sys.path:
        sys.path.remove(str(run))


RUNS = {  # each command that runs what the config.yaml of a run names; RUN is its directory
    "play": "play --model RUN --max-new-tokens 4",
    "eval": "eval --model RUN -n 1",
    "eval of a file": "eval --config RUN -n 1",
    "collect": "collect --model RUN -n 1 -o RUN/../rows.jsonl",
    "cross-play": "cross-play RUN RUN/../other",
    "cross-play of a file": "cross-play RUN RUN/../other --config RUN",
    "serve": "serve --models RUN --http --mesh nothing",
    "train": "train --config RUN --output RUN/../out",
    "dry run": "train --config RUN --output RUN/../out --dry-run",
    "plan": "plan --config RUN --device cpu",
}


@pytest.mark.parametrize("settings", [
    {"environment": "subprocess:Popen", "options": {"args": ["touch", "x"]}},
    {"environment": "/tmp/run/evil:Env"},
    {"environment": "/tmp/run/evil:8080"},
    {"environment": "jmarl.remote.openenv.client:OpenEnv", "options": {"url": "ws://a", "action": "os:system"}},
    {"environment": "jmarl.files.lock:os.system"},
    {"environment": "jmarl.processes.children:Children"},
    {"environment": "math", "options": {"servers": "elsewhere:50051"}},
    {"train_envs": ["math", {"name": "a:b"}], "eval_envs": [{"name": "math", "options": {"servers": "y:1"}}], "held_out": 1},
    {"data": "x.jsonl", "reward": "subprocess:run"},
    {"data": "x.jsonl", "reward": ["jmarl.envs.rewards:story_length_ratio", "jmarl.cli.main:main"]},
    {"data": "x.jsonl", "reward": "jmarl.envs.rewards:story_length_ratio", "formatters": ["os:system"]},
    {"data": "x.jsonl", "reward": "jmarl.envs.rewards:story_length_ratio", "external_transition": "a.py:b"},
    {"environment": "math", "algorithm": "mine.py:softclip"},
    {"environment": "math", "wandb": {"settings": {"x_executable": "evil"}}},
    {"environment": "math", "replay_rollout": "failed_update_1.pkl"},
])  # fmt: skip
def test_settings_that_name_code_from_elsewhere(settings):
    """Also objects of jmarl that are in no table: what they do depends on their arguments."""
    tree = json.loads(json.dumps(ExperimentConfig.of(models=["m"], **settings).as_dict()))
    expected = {*settings} - {"data", "held_out"}
    expected -= {"environment"} if settings.get("environment") in ENVIRONMENTS else set()
    expected -= {"reward"} if settings.get("reward") == "jmarl.envs.rewards:story_length_ratio" else set()
    assert {*named_code(leaves(tree))} == expected


def test_names_in_jmarls_tables_are_no_code_from_elsewhere():
    for name, place in ENVIRONMENTS.items():
        for environment in (name, place):
            cfg = ExperimentConfig.of(
                models=["m"], environment=environment, options={"data": "rows:all", "names": ["Answer:yes"]}
            )
            assert named_code(leaves(cfg.as_dict())) == {}
    own = "jmarl.envs.rewards:story_length_ratio"
    cfg = ExperimentConfig.of(models=["m"], data="a.jsonl", reward=own, formatters=["jmarl.envs.writing.story:setup_prompt"])
    assert named_code(leaves(cfg.as_dict())) == {}


# --- the record --------------------------------------------------------------------------------------------------------


NAMED = {"environment": "mine:Env", "options": {"a": 1}}


def asks(directory: Path, settings: dict = NAMED) -> bool:
    try:
        require_trust(directory / "config.yaml", settings)
    except PermissionError:
        return True
    return False


def test_a_record_is_of_one_path_and_of_what_its_settings_name(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    assert asks(run) and not is_trusted(run)
    record_trust(run, named_code(NAMED))
    assert not asks(run) and is_trusted(run)
    (tmp_path / "link").symlink_to(run)
    assert not asks(tmp_path / "link"), "another path of the same directory"
    assert not asks(run, NAMED | {"learning_rate": 1.0}), "no name of code"
    for change in ({"environment": "other:Env"}, {"options": {"a": 2}}, {"reward": "other:f"}):
        assert asks(run, NAMED | change)
    assert asks(Path(shutil.copytree(run, tmp_path / "copy")))
    run.rename(tmp_path / "moved")
    assert asks(tmp_path / "moved")
    records = tmp_path / "state/jmarl/trusted"
    (records / "damaged.json").write_text("{")
    record_trust(tmp_path / "moved", {})
    assert len([*records.iterdir()]) == 3, "the disk of a directory that is gone may come back"
    for file in records.iterdir():
        os.utime(file, (0, 0))
    record_trust(tmp_path / "moved", {})
    texts = [file.read_text() for file in records.iterdir()]
    assert len(texts) == 2 and not any(f'"{run}"' in text for text in texts), "of a directory that is long gone"


def test_a_record_that_is_damaged_or_of_another_user_is_none(tmp_path, monkeypatch):
    record_trust(tmp_path, NAMED)
    [file] = (tmp_path / "state/jmarl/trusted").iterdir()
    content = file.read_bytes()
    for damaged in (b"", content[:-9], b"[]", b"\xff", b'{"sha256": 3}', content.replace(b"directory", b"path")):
        file.write_bytes(damaged)
        assert asks(tmp_path)
    file.write_bytes(content)
    assert not asks(tmp_path)
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    assert asks(tmp_path)


def test_a_record_that_several_write_at_once_is_whole(tmp_path):
    with ThreadPoolExecutor(8) as threads:
        assert not any(threads.map(lambda _: record_trust(tmp_path, NAMED) or asks(tmp_path), range(40)))
    [file] = (tmp_path / "state/jmarl/trusted").iterdir()
    assert json.loads(file.read_text())["directory"] == str(tmp_path)


@pytest.mark.parametrize("home", ["/proc/nothing", "relative"])
def test_without_a_home_a_warning_says_that_later_commands_ask(tmp_path, monkeypatch, caplog, home):
    monkeypatch.setattr(trusted, "_records", {})
    monkeypatch.setenv("XDG_STATE_HOME", home)
    record_trust(tmp_path, {})
    assert not caplog.records, "nothing would be asked"
    record_trust(tmp_path, NAMED)
    assert "no record of it can be written" in caplog.text and "later commands ask for --trust" in caplog.text
    assert not asks(tmp_path), "this process knows"


# --- commands ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", RUNS.values(), ids=[*RUNS])
def test_a_command_says_what_it_would_run_and_runs_nothing(stranger, capsys, command):
    run, mark = stranger
    shutil.copytree(run, run.parent / "other")
    assert main(command.replace("RUN", str(run)).split()) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert f"names code to run: environment='{run}/evil_module:Env'" in line and "give --trust" in line
    assert not mark.exists() and not (run.parent / "out").exists() and not is_trusted(run)


@pytest.mark.parametrize("command", RUNS.values(), ids=[*RUNS])
def test_all_code_is_named_at_once_where_it_lies_beside_its_config(stranger, capsys, command):
    run, mark = stranger
    config = run / "config.yaml"
    config.write_text(config.read_text().replace(f"{run}/evil_module:", "evil_module.py:") + "algorithm: evil_module.py:Loss\n")
    shutil.copytree(run, run.parent / "other")
    assert main(command.replace("RUN", str(run)).split()) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    named = f"algorithm='{run}/evil_module.py:Loss', environment='{run}/evil_module.py:Env'"
    assert f"names code to run: {named}; if you trust" in line and not mark.exists()


def test_a_config_that_is_cut_short_is_refused_also_one_of_an_older_version(stranger, capsys):
    run, _ = stranger
    settings = dict(models=["m"], environment="math", wandb={"project": "a", "mode": "offline"})
    tree = json.loads(json.dumps(ExperimentConfig.of(**settings).as_dict()))
    whole, config = dump_run(tree).splitlines(keepends=True), run / "config.yaml"

    def is_cut(lines: list[str]) -> bool:
        config.write_text("".join(lines))
        try:
            return read_config(config).tree != tree
        except ValueError as error:
            return "is cut short" in str(error)

    assert not is_cut(whole) and all(is_cut(whole[:count]) for count in range(len(whole)))
    older = whole[1:-1]
    assert not is_cut(older), "which ends with the settings of W&B"
    algorithm = older.index("  algorithm: magrpo\n") + 1
    assert all(is_cut(older[:count]) for count in range(len(older) - 2) if count != algorithm)
    for own in ("task: {environment: math}\n", "train: {sampling: {temperature: 0.5}}\n", "num_updates: 1\n"):
        config.write_text(own)
        assert read_config(config).tree, "a user wrote it"
    config.write_text("".join(whole[:9]))
    for command in [*RUNS.values(), "export --model RUN -o RUN/../exported"]:
        shutil.copytree(run, run.parent / "other", dirs_exist_ok=True)
        assert main(command.replace("RUN", str(run)).split()) == 2
        assert "config.yaml is cut short, so settings of the run are lost" in capsys.readouterr().err
    (run / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.5}\n')
    with pytest.warns(UserWarning, match="config.yaml is cut short.*; the report shows the settings that the attempts"):
        write_report([run], run.parent / "page.html")


def test_a_command_that_is_trusted_once_does_not_ask_again(stranger, capsys):
    run, mark = stranger
    command = f"serve --models {run} --http --mesh nothing"
    assert main(command.split()) == 2 and "give --trust" in capsys.readouterr().err and not mark.exists()
    for more in (" --trust", ""):
        assert main((command + more).split()) == 2 and "cannot read 'nothing'" in capsys.readouterr().err
    assert mark.exists() and is_trusted(run)
    config = run / "config.yaml"
    config.write_text(config.read_text().replace("evil_module", "other_module"))
    assert main(command.split()) == 2 and "give --trust" in capsys.readouterr().err


def test_an_algorithm_beside_its_config_is_asked_for_once(tmp_path):
    """Its name is that of a file, with the directory in front or not."""
    (tmp_path / "models" / "agent_0").mkdir(parents=True)
    (tmp_path / "mine.py").write_text("def loss(batch, logprobs):\n    return 0.0\n")
    settings = "task: {environment: math}\nteam: {models: [m]}\ntrain: {algorithm: 'mine.py:loss'}\n"
    (tmp_path / "config.yaml").write_text(settings)
    with pytest.raises(PermissionError, match="it names code to run: algorithm="):
        read_experiment(str(tmp_path))
    for trust in (True, False):
        assert read_experiment(str(tmp_path), trust).train.algorithm == f"{tmp_path}/mine.py:loss"


def test_a_run_whose_task_is_not_played_is_not_asked_for(stranger, capsys):
    run, mark = stranger
    for command in (f"play --model {run} --environment nothing_here", f"serve --models {run} --http --names a --mesh nothing"):
        assert main(command.split()) == 2 and "names code" not in capsys.readouterr().err
    assert main(["export", "--model", str(run), "--output", str(run.parent / "exported")]) == 0
    assert not mark.exists()


def test_a_file_that_a_run_has_written_is_of_the_run_and_any_other_file_is_the_users(stranger, capsys):
    """Also where flags or another file change other settings. What these name themselves is the user's."""
    run, mark = stranger
    flags = ["train", "--output", str(run.parent / "out"), "--dry-run", "--config"]
    file, own = run / "config.yaml", run.parent / "own.yaml"
    own.write_text("num_updates: 1\n")
    assert main([*flags, str(file)]) == 2 and "give --trust" in capsys.readouterr().err, "beside models/agent_0"
    (run / "models").rename(run / "moved")
    (run / "attempts/1").mkdir(parents=True)
    (run / "attempts/1/start.json").write_text("{}")
    for given in (file, f"{own},{file}", f"{file},{own}"):
        assert main([*flags, str(given)]) == 2 and "give --trust" in capsys.readouterr().err
    before = file.read_text()
    for after in (
        before + "algorithm: mine.py:softclip\n",
        before + "sweep: {learning_rate: [1.0, 2.0]}\n",
        f"models: [m]\nenvironment: sudoku\nsweep: {{environment: [{run}/evil_module:Env]}}\n",
    ):
        file.write_text(after)
        assert main([*flags, str(file)]) == 2 and "give --trust" in capsys.readouterr().err
    file.write_text(before.replace("environment: ", "train_envs:\n- name: "))
    for part in ("train_envs.0.options.x=1", "task.train_envs.0.options={}"):
        assert main([*flags, str(file), "--set", part]) == 2 and "give --trust" in capsys.readouterr().err, "the file names it"
    assert not mark.exists()
    file.write_text(before)
    own.write_text("environment: nothing_here\n")
    for more in ([str(run), "--set", "environment=nothing_here"], [f"{run},{own}"]):
        assert main([*flags, *more]) == 2 and "unknown environment 'nothing_here'" in capsys.readouterr().err
    assert not mark.exists()
    shutil.copy(file, own)
    assert main([*flags, str(own), "--set", "num_updates=0"]) == 2 and "give --trust" not in capsys.readouterr().err


def test_the_user_is_asked_at_a_terminal(tmp_path, monkeypatch):
    ours, terminal = os.openpty()
    tty.setraw(terminal)  # no echo of the answers
    os.set_blocking(ours, False)
    with open(terminal, "w", closefd=False) as screen, open(terminal) as keys:
        for answer, trusts in ((b"no\n", False), (b"\n", False), (b"y\n", True)):
            os.write(ours, answer)
            with monkeypatch.context() as patched:
                patched.setattr(sys, "stderr", screen)
                patched.setattr(sys, "stdin", keys)
                assert asks(tmp_path) is not trusts
            assert b"environment='mine:Env', options={'a': 1}. Do you trust it? [y/N]" in os.read(ours, 9999)
    os.close(ours)
    assert not asks(tmp_path), "without the terminal, from the record"


def test_the_working_directory_is_searched_for_modules_with_the_first_name_of_the_users_code(stranger, monkeypatch):
    """A run in the working directory that names no code cannot take the place of a package that is imported later."""
    run, mark = stranger
    monkeypatch.chdir(run)
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place not in ("", str(run))])
    monkeypatch.setattr("jmarl.envs.own_places", [])
    find_own_modules()
    make("sudoku")
    assert str(run) not in sys.path
    assert make("evil_module:Env").roles and sys.path[0] == str(run) and mark.exists()


# --- chat templates ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("template", [
    "{% for a in range(9999) %}{% for b in range(9999) %}{% for c in range(9999) %}{% endfor %}{% endfor %}{% endfor %}",
    "{% generation %}a{% endgeneration %}{{ ('x' * 9999999999) | length }}",
])  # fmt: skip
def test_a_chat_template_that_does_not_end_is_refused_where_a_tokenizer_is_loaded(copy_dir, template, monkeypatch):
    monkeypatch.setitem(agents.RENDER_LIMITS, "RLIMIT_CPU", 1)
    (copy_dir / "chat_template.jinja").write_text(template)
    with pytest.raises(ValueError, match=f"{copy_dir}: the chat template needs more than 1 s or 512 MB"):
        load_tokenizer(copy_dir)


def test_a_process_that_cannot_try_a_chat_template_is_said(copy_dir, monkeypatch):
    """It does not start, or has no memory to begin."""
    (copy_dir / "chat_template.jinja").write_text("{{ 'of this test' }}")
    with monkeypatch.context() as patched:
        patched.setitem(agents.RENDER_LIMITS, "RLIMIT_AS", 1 << 20)
        with pytest.raises(
            OSError, match=r"no process can try the model's chat template \(.*\): let this account have more memory"
        ):
            load_tokenizer(copy_dir)
    monkeypatch.setattr(sys, "executable", "/nothing/python")
    with pytest.raises(OSError, match=r"chat template \(.*No such file or directory: '/nothing/python'\)"):
        load_tokenizer(copy_dir)


@pytest.mark.parametrize("template", [CHATML, "{{ raise_exception('no') }}", "{% for", "{{ strftime_now('%d') | tojson }}"])
def test_a_chat_template_that_ends_is_tried_once(copy_dir, template):
    (copy_dir / "chat_template.jinja").write_text(template)
    before = agents.ends.cache_info().misses
    assert load_tokenizer(copy_dir).chat_template == load_tokenizer(copy_dir).chat_template == template
    assert agents.ends.cache_info().misses <= before + 1
