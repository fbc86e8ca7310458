"""Every notebook runs from top to bottom, with a tiny random model in place of the real one, and is stored without outputs."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from jmarl.models.gpu import has_cuda
from jmarl.sandbox import Sandbox, SandboxUnavailable
from tests.running import ROOT, changed, tiny_model

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
NAMES = [
    "01_two_agents",
    "02_your_own_algorithm",
    "03_your_own_environment",
    "04_programs_in_the_sandbox",
    "05_preferences_and_imitation",
    "06_looking_at_a_run",
    "07_yaml_and_report",
    "08_how_to_size_a_run",
    "09_environments_and_teams_as_services",
    "10_a_model_family_of_your_own",
]
SMALLER = {  # name of a guide -> what is changed in its cells, beside what the first one reads
    "04_programs_in_the_sandbox": {'"JMARL_NOTEBOOK_UPDATES", 15': '"NONE", 2'},  # nothing is learned within so few updates
    "08_how_to_size_a_run": {"MAX_NEW_TOKENS // 2, MAX_NEW_TOKENS, 2": "MAX_NEW_TOKENS // 2, 2"},
}
# What the first cell of every notebook reads. The tiny model learns each task at this rate within so many updates.
SETTINGS = {"UPDATES": "24", "TOKENS": "8", "LEARNING_RATE": "1e-2"}

# A command of jmarl in a cell runs in the process of the kernel, which has imported and compiled already.
COMMAND = re.compile(r"(?m)^!\{sys\.executable\} -m jmarl (.*)$")
IN_KERNEL = r"run_jmarl(f'\1')"
BETWEEN = "\n# next cell\n"
BEGIN = """%reset -f
import contextlib
import os
import sys

from jmarl.cli.main import main

os.chdir({directory!r})


def run_jmarl(words):
    with contextlib.redirect_stderr(sys.stdout):
        main(words.split())
"""

nbformat = pytest.importorskip("nbformat", reason="pip install 'jmarl[notebooks]'")


def code_cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def risen(rewards: list[float]) -> float:
    """Return the mean of the last quarter minus that of the first."""
    quarter = len(rewards) // 4
    return float(np.mean(rewards[-quarter:]) - np.mean(rewards[:quarter]))


@pytest.fixture(scope="module")
def kernel(tiny_dir, tmp_path_factory) -> Iterator[Any]:
    """The process in which guides run one after the other: it imports and compiles once what they have in common."""
    pytest.importorskip("nbclient", reason="pip install 'jmarl[notebooks]'")
    pytest.importorskip("matplotlib", reason="pip install 'jmarl[notebooks]'")
    pytest.importorskip("ipykernel", reason="pip install 'jmarl[notebooks]'")
    from jupyter_client import KernelManager

    settings = SETTINGS | {"MODEL": tiny_model(tiny_dir)}
    env = os.environ | {f"JMARL_NOTEBOOK_{name}": value for name, value in settings.items()}
    env["JAX_NUM_CPU_DEVICES"] = "1"
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), env.get("PYTHONPATH")]))
    env["IPYTHONDIR"] = str(tmp_path_factory.mktemp("ipython"))
    manager = KernelManager(kernel_name="python3")
    manager.start_kernel(env=env)
    yield manager
    manager.shutdown_kernel(now=True)


@pytest.fixture
def execute(kernel, tmp_path) -> Callable[[str, str], Any]:
    """`execute(name, expression)` runs a notebook in an empty directory and returns the value of an expression at its end."""
    import nbclient

    def run(name: str, expression: str) -> Any:
        notebook = nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", as_version=4)
        cells = code_cells(notebook)
        text = changed(BETWEEN.join(cell.source for cell in cells), SMALLER.get(name, {}))
        for cell, source in zip(cells, COMMAND.sub(IN_KERNEL, text).split(BETWEEN), strict=True):
            assert "\n!" not in f"\n{source}", "a command that is not one of jmarl needs a kernel without threads"
            cell.source = source
        first = nbformat.v4.new_code_cell(BEGIN.format(directory=str(tmp_path)))
        last = nbformat.v4.new_code_cell(f"import json\n\nprint(json.dumps({expression}))")
        notebook.cells = [first, *notebook.cells, last]
        client = nbclient.NotebookClient(notebook, km=kernel, timeout=600)
        try:
            client.execute()
        finally:
            client.kc.stop_channels()
        errors = [output.text for cell in code_cells(notebook) for output in cell.outputs if output.get("name") == "stderr"]
        assert not errors, f"{name} shows red boxes"
        assert any("image/png" in output.get("data", {}) for output in cells[-1].outputs), f"{name} does not end with a curve"
        return json.loads(last.outputs[0].text)

    return run


def test_the_notebooks_are_the_ten_guides():
    assert [path.stem for path in NOTEBOOKS] == NAMES


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_stored_without_outputs_begins_with_its_goal_and_names_what_exists(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert not any(cell.outputs or cell.execution_count for cell in code_cells(notebook))
    assert path.stat().st_size < 20_000
    first = notebook.cells[0]
    assert first.cell_type == "markdown" and first.source.startswith("# ")
    assert all(heading in first.source for heading in ("**You learn**", "**Time**", "**Next**"))
    settings = code_cells(notebook)[0].source
    assert all(f'os.environ.get("JMARL_NOTEBOOK_{name}", ' in settings for name in ("MODEL", *SETTINGS))
    text = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    names = {name.strip("`().,:;") for name in text.replace("](../", "` ").split()}
    files = {f"notebooks/{name}" for name in names if name.endswith(".ipynb")}
    files |= {name for name in names if name.startswith(("jmarl/", "experiments/", "tests/"))}
    files |= {f"{name.replace('.', '/')}.py" for name in names if name.startswith("experiments.")}
    assert [name for name in files if not (ROOT / name).exists()] == []


def guide(test: Callable) -> Callable:
    """Mark a test that runs a kernel. Warnings of the notebook server's own libraries are not errors."""
    return pytest.mark.long(pytest.mark.filterwarnings("default")(test))


@guide
def test_two_agents_learn_the_length_ratio_write_and_go_on_after_an_interrupt(execute, tmp_path):
    rewards, before, after, texts, updates, interrupted = execute(
        "01_two_agents",
        "[result.rewards, result.before.mean, result.after.mean, setups + stories, "
        "[int(r.state.step) for r in (result, stopped, resumed)], [r.interrupted for r in (result, stopped, resumed)]]",
    )
    assert len(rewards) == 24
    assert risen(rewards) > 0.1 and after > before
    assert (tmp_path / "my_team/agent_1/model.safetensors").is_file()
    assert len(texts) == 2 and all(texts)
    assert updates == [24, 25, 26] and interrupted == [False, True, False]


@guide
def test_own_algorithm_learns_beside_magrpo(execute):
    rewards = execute("02_your_own_algorithm", "{name: result.rewards for name, result in results.items()}")
    assert rewards["magrpo"][0] == rewards["median"][0], "both play the same texts in the first update"
    assert rewards["magrpo"] != rewards["median"]
    assert risen(rewards["magrpo"]) > 0.2 and risen(rewards["median"]) > 0.2


@guide
def test_own_environment_is_learned_over_two_turns(execute, tmp_path):
    rewards, acts = execute(
        "03_your_own_environment",
        "[result.rewards, [[bool(a.any()) for a in turn.acts] for turn in result.after.rollout.turns]]",
    )
    assert risen(rewards) > 0.1
    assert acts == [[True, False], [False, True]], "the writer acts in the first turn, the editor in the second"
    assert "turn_1/reward/faithful" in (tmp_path / "runs/draft_and_edit/metrics.jsonl").read_text()


@guide
def test_programs_are_judged_in_the_sandbox(execute):
    try:
        Sandbox().close()
    except SandboxUnavailable as error:
        pytest.skip(str(error))
    outcomes, helper_only, rewards = execute(
        "04_programs_in_the_sandbox",
        "[{name: [r.outcome, r.limit_hit] for name, r in results.items()}, [score.solved, score.total], result.rewards]",
    )
    assert outcomes["right"] == ["passed", ""]
    assert outcomes["wrong"] == ["failed", ""]
    assert outcomes["endless"] == ["error", "wall"]
    assert outcomes["greedy"] == ["error", "memory"]
    assert outcomes["curious"][0] == outcomes["online"][0] == "failed"
    assert helper_only == [False, 0.4]  # the last answer that the guide scores by hand
    assert len(rewards) == 2 and np.isfinite(rewards).all()


@guide
def test_imitation_preferences_and_rounds_improve_on_held_out_data(execute, tmp_path):
    imitated, preferred, rewards = execute(
        "05_preferences_and_imitation",
        "[[imitation.before, imitation.after], [preferences.before, preferences.after], [r for _, r in rewards]]",
    )
    assert imitated[1]["nll"] < imitated[0]["nll"] - 0.5
    assert preferred[0]["accuracy"] == 0.5, "before training the team is its own reference: every margin is a tie"
    assert preferred[1]["accuracy"] == 1.0 and preferred[1]["loss"] < np.log(2)
    assert len(rewards) == 6 and rewards[-1] > rewards[0]
    assert len(list((tmp_path / "runs/rounds/pairs").glob("round_*.jsonl"))) == 6


@guide
def test_run_is_resumed_read_and_cross_played(execute, tmp_path):
    updates, rewards, means = execute(
        "06_looking_at_a_run",
        "[[int(half.state.step), int(result.state.step)], [row['reward/mean'] for row in rows], "
        "[again.mean, evaluations[-1]['eval/reward'], float(played.self_play.mean), float(played.zero_shot.mean)]]",
    )
    evaluated, logged, self_play, zero_shot = means
    assert updates == [12, 24] and len(rewards) == 24
    assert risen(rewards) > 0.2
    assert evaluated == logged, "a saved team gets the number that its run logged"
    assert self_play > zero_shot + 0.2, "the two seeds agreed on different words"
    assert (tmp_path / "runs/seed_1/models/agent_0/model.safetensors").is_file()


@guide
def test_two_seeds_are_trained_from_yaml_and_reported(execute, tmp_path):
    rewards, directories = execute(
        "07_yaml_and_report", "[[[row['reward/mean'] for row in lines] for lines in rows], [str(run) for run in runs]]"
    )
    assert len(rewards) == 2 and all(len(run) == 24 for run in rewards)
    assert risen(np.mean(rewards, 0)) > 0.1
    page = (tmp_path / "report.html").read_text()
    assert "<svg" not in page and 'id="data"' in page and len(page) > 50_000
    assert all((tmp_path / directory / "completions.jsonl.gz").is_file() for directory in directories)


@guide
def test_a_run_is_sized_without_a_gpu(execute, tmp_path):
    """Cells for GPUs show the table with the wheels for CUDA, and else what to install; the guide goes on."""
    temporaries, written = execute("08_how_to_size_a_run", "[temporaries, fits.is_file()]")
    assert written == has_cuda()
    assert all(sizes == sorted(sizes) and sizes[0] > 0 for sizes in temporaries.values())
    assert temporaries["full"][-1] < temporaries["none"][-1]


@guide
def test_a_team_learns_on_a_server_that_is_replaced_and_becomes_one(execute):
    equal, codes, answers = execute(
        "09_environments_and_teams_as_services",
        "[local.rewards == remote.rewards, [first.wait(), started[0][0].wait(), team.wait()], list(answers)]",
    )
    assert equal and codes == [-9, 0, 0] and answers == ["agent_0", "agent_1"]


@guide
def test_a_new_family_computes_what_transformers_does_and_learns(execute):
    distance, same, rewards = execute("10_a_model_family_of_your_own", "[distance, same, result.rewards]")
    assert distance < 1e-4 and same and risen(rewards) > 0.1
