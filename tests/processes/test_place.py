"""Where a process stands among the others, from the variables of its launcher; what a file asks of the processes."""

from __future__ import annotations

import re

import pytest

from jmarl.processes.join import check_devices
from jmarl.processes.place import Place, check_processes, find_place

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "node1",
            "MASTER_PORT": "29500"}  # fmt: skip
SLURM = {"SLURM_JOB_ID": "4097", "SLURM_STEP_NODELIST": "node[01-02]", "SLURM_NTASKS": "4", "SLURM_PROCID": "3",
         "SLURM_LOCALID": "1", "SLURM_NODEID": "1", "SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_STEP_ID": "0"}  # fmt: skip


def place_of(text, env, monkeypatch):
    for name in (*TORCHRUN, *SLURM, "CUDA_VISIBLE_DEVICES", "JAX_LOCAL_DEVICE_IDS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    return find_place(text, 1.0)


@pytest.mark.parametrize("text", ["", "auto"])
def test_the_variables_of_torchrun_are_read(text, monkeypatch):
    assert place_of(text, TORCHRUN, monkeypatch) == Place("node1:29500", 3, 8, [1], 2)
    own_store = TORCHRUN | {"TORCHELASTIC_USE_AGENT_STORE": "True"}  # torchrun itself listens at MASTER_PORT
    assert place_of(text, own_store, monkeypatch).address == "node1:19500"
    assert place_of(text, own_store | {"MASTER_PORT": "19500"}, monkeypatch).address == "node1:19501"
    assert place_of(text, TORCHRUN | {"RANK": "0", "WORLD_SIZE": "1"}, monkeypatch) is None


def test_an_address_goes_with_the_numbers_of_the_launcher(monkeypatch):
    assert place_of("other:1234", TORCHRUN, monkeypatch).address == "other:1234"
    assert place_of("other:1234", SLURM, monkeypatch) == Place("other:1234", 3, 4, [1], 2)


@pytest.mark.parametrize(
    ("env", "devices"),
    [
        ({}, [1]),
        ({"CUDA_VISIBLE_DEVICES": "5"}, None),  # Slurm's --gpus-per-task=1: the GPU is number 0 for JAX
        ({"SLURM_STEP_TASKS_PER_NODE": "2,1"}, None),  # alone on its node: all GPUs
        ({"JAX_LOCAL_DEVICE_IDS": "0,1"}, None),  # JAX reads it
    ],
)
def test_a_task_of_slurm_takes_its_own_gpu_or_all(env, devices, monkeypatch):
    place = place_of("auto", SLURM | env, monkeypatch)
    assert (place.process, place.count, place.local_devices) == (3, 4, devices)


def test_two_steps_of_a_job_of_slurm_have_two_ports(monkeypatch):
    first, second = (place_of("auto", SLURM | {"SLURM_STEP_ID": step}, monkeypatch).address for step in "01")
    assert (first, second) == ("node01:61441", "node01:61442")


def test_slurm_alone_starts_nothing(monkeypatch):
    assert place_of("", SLURM, monkeypatch) is None  # a shell of salloc has these variables too


@pytest.mark.parametrize(
    ("text", "env", "message"),
    [
        (
            "auto",
            {},
            r"nothing says how many processes.*Slurm \(srun\).*RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT of torchrun",
        ),
        ("node1:1", {}, "and RANK, WORLD_SIZE of torchrun and jmarl launch are not set"),
        ("node1", {}, r"--distributed node1 is not allowed: give auto, or HOST:PORT"),
        ("auto", TORCHRUN | {"RANK": "8"}, "RANK=8 is not allowed: with WORLD_SIZE=8 it is at most 7"),
        ("", TORCHRUN | {"RANK": "x"}, "RANK='x' is not a number"),
    ],
)
def test_what_is_missing_or_wrong_is_said(text, env, message, monkeypatch):
    with pytest.raises(ValueError, match=message):
        place_of(text, env, monkeypatch)


EIGHT = Place("node1:1", 0, 8, None, 4)


@pytest.mark.parametrize(
    ("asked", "place", "message"),
    [
        ({"num_nodes": 2, "nproc_per_node": 4, "world_size": 8}, EIGHT, ""),
        ({"num_nodes": 3}, Place("node1:1", 0, 8), ""),  # nobody knows
        ({"num_nodes": 3}, EIGHT, "distributed.num_nodes=3, and here it is 2 (8 processes): start them by jmarl launch"),
        ({"world_size": 2}, None, "distributed.world_size=2, and here it is 1"),
        ({"enabled": False}, EIGHT, "distributed.enabled is false, and 8 processes have joined"),
        ({"enabled": False}, None, ""),
    ],
)
def test_a_file_is_compared_with_the_processes(asked, place, message):
    if not message:
        return check_processes(asked, place)
    with pytest.raises(ValueError, match=re.escape(message)):
        check_processes(asked, place)


@pytest.mark.parametrize(
    ("process_of", "per_process", "message"),
    [
        ([0, 1, 1], "", "2 processes have 3 devices, process 1 2 and process 0 1: give all equally many"),
        ([0, 1], "2", "2 processes have 2 devices, 1 each, and 2 each were asked for"),
    ],
)
def test_other_devices_than_asked_for_are_an_error(process_of, per_process, message):
    place = Place("node1:1", 0, 2)
    check_devices([0, 0, 1, 1], place, "2")
    with pytest.raises(ValueError, match=message):
        check_devices(process_of, place, per_process)
