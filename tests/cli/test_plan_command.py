"""`jmarl plan` on models of which only config.json is here: what it prints, and its errors."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
import yaml

from jmarl.cli.main import main
from jmarl.models.gpu import has_cuda
from jmarl.models.hub.agents import config_to_hf


@pytest.fixture(scope="module")
def config_only(tmp_path_factory: pytest.TempPathFactory, tiny_config) -> Path:
    """A directory with a model's config.json, and nothing else."""
    directory = tmp_path_factory.mktemp("config_only")
    (directory / "config.json").write_text(json.dumps(config_to_hf(tiny_config(), None)))
    return directory


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore what the command sets for its own process."""
    for name in ("JAX_PLATFORMS", "JAX_NUM_CPU_DEVICES", "TF_CPP_MIN_LOG_LEVEL"):
        monkeypatch.setenv(name, os.environ.get(name, ""))
        if not os.environ[name]:
            monkeypatch.delenv(name)


def plan(model: Path, *flags: str) -> int:
    """Run `jmarl plan` on the shipped configuration magrpo with this model; return its exit code."""
    settings = [f"models={model}", "num_agents=2", "num_updates=7", "max_new_tokens=8"]
    return main(["plan", "--config", "magrpo", "--set", *settings, *flags])


@pytest.mark.long
def test_a_config_is_enough_to_plan_for_this_cpu(config_only: Path, capsys: pytest.CaptureFixture) -> None:
    assert plan(config_only, "--device", "cpu", "--prompt-tokens", "20") == 0
    out = capsys.readouterr().out
    assert [name for name in ("sampling", "update", "evaluation") if re.search(rf"^{name} +\d", out, re.M)] == [
        "sampling", "update", "evaluation",
    ]  # fmt: skip
    assert "moments of the optimizer" in out and "tokens/s" not in out
    assert out.endswith("how long it takes: --measure makes steps of the run\n")
    assert re.search(r"^fits: \w+ needs [\d.]+ GiB, this machine has", out, re.M)


@pytest.mark.long
def test_programs_are_measured_where_the_device_is_here(config_only: Path, capsys: pytest.CaptureFixture) -> None:
    """Without weights; checkpoints are no program. Caches of completions that begin early stay on the device, and the program
    of two steps is the one that is measured."""
    assert plan(config_only, "--device", "cpu", "--prompt-tokens", "20", "--measure", "--set", "async_steps=1") == 0
    out = capsys.readouterr().out
    rows = {line.split()[0]: line.split()[1:] for line in out.splitlines() if re.match(r"\w+ +\d", line)}
    assert {name: len(row) for name, row in rows.items()} == {"sampling": 5, "update": 5, "evaluation": 5, "checkpoint": 3}
    assert all(float(row[3]) > 0 for name, row in rows.items() if name != "checkpoint")
    assert re.search(r"completions that have begun \d\.\d\d GiB", out)
    assert out.endswith(f"how long it takes is not known: {config_only} has no weights, so no step of the run can be made\n")


def test_a_run_on_pairs_is_not_planned(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """The error says how to learn how long a step takes."""
    assert main(["plan", "--config", "dpo", "--device", "cpu", "--set", f"data={tmp_path}/pairs.jsonl"]) == 2
    assert "algorithm=dpo learns from pairs or texts. To learn how long a step takes" in capsys.readouterr().err


def test_a_league_is_not_planned(config_only: Path, capsys: pytest.CaptureFixture) -> None:
    """Its opponents take memory that the plan of the team alone does not have."""
    assert plan(config_only, "--device", "cpu", "--prompt-tokens", "20", "--set", "snapshots=8") == 2
    assert "a league (snapshots=8, strangers=[]) samples with the weights of opponents too" in capsys.readouterr().err


def test_a_gpu_that_is_not_here_cannot_be_measured(config_only: Path, capsys: pytest.CaptureFixture) -> None:
    """The error names the devices of this machine, or the wheels to install."""
    assert plan(config_only, "--device", "h200", "--prompt-tokens", "20", "--measure") == 2
    error = "--measure needs the NVIDIA H200, and JAX sees (cpu|NVIDIA.*) here" if has_cuda() else "not installed: pip install"
    assert re.search(error, capsys.readouterr().err)


@pytest.mark.parametrize(
    "flags, message",
    [
        (
            ["--num-devices", "8", "--num-nodes", "3"],
            "--num-nodes 3 does not divide 8 devices: give --num-devices, of all hosts",
        ),
        (["--num-devices", "0"], "--num-devices 0 is not allowed: give a number of at least 1"),
        (
            ["--num-devices", "2"],
            "--device cpu plans one device, and this run is for 2: virtual devices of a CPU share",
        ),
        (["--set", "mesh=agent=2,data=4"], "--device cpu plans one device, and this run is for 8"),
    ],
)
def test_several_devices_of_a_cpu_are_not_planned(config_only: Path, flags: list[str], message: str, capsys) -> None:
    assert plan(config_only, "--device", "cpu", "--prompt-tokens", "20", *flags) == 2
    assert message in capsys.readouterr().err


def test_without_a_tokenizer_prompts_have_to_be_given(config_only: Path, capsys: pytest.CaptureFixture) -> None:
    assert plan(config_only, "--device", "cpu") == 2
    assert "give --prompt-tokens" in capsys.readouterr().err


@pytest.mark.parametrize("device, count", [("cpu", "3"), ("h100", "1")])
def test_a_plan_for_this_cpu_has_the_devices_that_the_run_has(config_only: Path, monkeypatch, device: str, count: str) -> None:
    """Those that the user has set; a plan for GPUs sets its own. Both end here for want of a tokenizer."""
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "3")
    assert plan(config_only, "--device", device) == 2
    assert os.environ["JAX_NUM_CPU_DEVICES"] == count


def test_an_unknown_device_is_named_with_the_nearest(config_only: Path, capsys: pytest.CaptureFixture) -> None:
    assert plan(config_only, "--device", "h10") == 2
    assert "did you mean 'h100'" in capsys.readouterr().err


def test_fit_overwrites_no_file(config_only: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("mine")
    assert plan(config_only, "--device", "h100", "--prompt-tokens", "20", "--fit", str(path)) == 2
    assert "this file exists" in capsys.readouterr().err and path.read_text() == "mine"


def test_fit_is_for_one_host(config_only: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    flags = ["--num-devices", "8", "--num-nodes", "2", "--fit", str(tmp_path / "fits.yaml")]
    assert plan(config_only, "--device", "h100", "--prompt-tokens", "20", *flags) == 2
    assert "--fit finds settings for the devices of one host: leave out --num-nodes" in capsys.readouterr().err


@pytest.mark.skipif(has_cuda(), reason="the wheels for CUDA are installed")
def test_without_the_wheels_it_says_what_to_install(config_only: Path, capsys: pytest.CaptureFixture) -> None:
    assert plan(config_only, "--device", "h100", "--prompt-tokens", "20") == 2
    assert "pip install 'jmarl[cuda12]'" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.skipif(not has_cuda(), reason="pip install 'jmarl[cuda12]'")
def test_settings_that_fit_are_written(config_only: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """As a file that can be read; the fastest candidate of so small a model fits."""
    path = tmp_path / "fits.yaml"
    assert plan(config_only, "--device", "rtx4090", "--prompt-tokens", "20", "--fit", str(path)) == 0
    out = capsys.readouterr().out
    assert out.count(", fits") == 1 and f"written to {path}" in out
    assert yaml.safe_load(path.read_text())["train"]["optimizer"]["micro_batches"] == 1
    assert main(["plan", "--config", str(path), "--device", "cpu", "--num-devices", "2"]) == 2
    assert "--device cpu plans one device" in capsys.readouterr().err, "the file is read before"


@pytest.mark.slow
@pytest.mark.skipif(not has_cuda(), reason="pip install 'jmarl[cuda12]'")
def test_a_mesh_that_fits_is_found_and_what_it_exchanges_is_shown(
    config_only: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """Two small agents on four GPUs: whole agents and their rows are divided, weights need not be."""
    flags = ["--device", "h100", "--num-devices", "4", "--prompt-tokens", "20", "--fit", str(tmp_path / "fits.yaml")]
    assert plan(config_only, *flags) == 0
    out = capsys.readouterr().out
    assert "compiling magrpo for 4 x NVIDIA H100" in out and "exchanged GB" in out and "nothing of it was timed" in out
    assert "(each of 4: mesh=agent=2,data=2, strategy=ddp)" in out
    written = yaml.safe_load((tmp_path / "fits.yaml").read_text())
    assert "agent=2,data=2" in json.dumps(written) and "ddp" in json.dumps(written)
