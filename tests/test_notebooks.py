"""Every notebook runs from top to bottom, here with a tiny model and few updates, and is stored without outputs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))

nbformat = pytest.importorskip("nbformat", reason="pip install 'jmarl[notebooks]'")


def code_cells(notebook) -> list:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def test_there_are_notebooks():
    assert [path.name for path in NOTEBOOKS] == ["01_two_agents.ipynb"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_valid_and_stored_without_outputs(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert not any(cell.outputs or cell.execution_count for cell in code_cells(notebook))
    assert notebook.cells[0].cell_type == "markdown" and notebook.cells[0].source.startswith("# ")


@pytest.mark.filterwarnings("default")  # what the notebook server's own libraries warn of is not ours to change
def test_two_agents_runs_top_to_bottom(tiny_dir, tmp_path, monkeypatch):
    nbclient = pytest.importorskip("nbclient", reason="pip install 'jmarl[notebooks]'")
    pytest.importorskip("matplotlib", reason="pip install 'jmarl[notebooks]'")
    pytest.importorskip("ipykernel", reason="pip install 'jmarl[notebooks]'")
    monkeypatch.setenv("JMARL_NOTEBOOK_MODEL", str(tiny_dir("llama", max_position_embeddings=512)))
    monkeypatch.setenv("JMARL_NOTEBOOK_EPOCHS", "1")
    monkeypatch.setenv("JMARL_NOTEBOOK_TOKENS", "8")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    notebook = nbformat.read(ROOT / "notebooks" / "01_two_agents.ipynb", as_version=4)
    where = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3", resources=where).execute()

    outputs = [output for cell in code_cells(notebook) for output in cell.outputs]
    printed = "".join(output.text for output in outputs if output.output_type == "stream" and output.name == "stdout")
    assert "before training, a bridge made of glass: reward" in printed
    assert "after training, a bridge made of glass: reward" in printed
    assert [output for output in outputs if "image/png" in output.get("data", {})], "there is no picture of the reward"
    assert len((tmp_path / "runs/two_agents/metrics.jsonl").read_text().splitlines()) >= 5  # an epoch of 10 by 2 topics
    assert (tmp_path / "runs/two_agents/models/agent_1/model.safetensors").is_file()
