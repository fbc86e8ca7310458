"""Settings that are auto: chosen once when a run starts, shown, written down, and kept when it resumes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from jmarl import ExperimentConfig, TrainConfig, fit, run_experiment, train
from jmarl.algorithms import ALGORITHMS
from jmarl.config.yaml_file import read_yaml
from jmarl.files.run_directory import resolve_auto
from jmarl.learning.choose import bytes_on_device, choose, is_open, update_settings, with_settings
from jmarl.learning.team_update import lower_team
from jmarl.memory import shapes_of
from jmarl.preferences.pairs import Pair, Trajectory
from jmarl.runs.checks import environment_of
from jmarl.runs.kinds.rollouts import ROLLOUTS
from jmarl.runs.kinds.seeds import several
from jmarl.runs.precompile import choose_updates
from jmarl.runs.prepare import prepare
from jmarl.runs.run import Task
from jmarl.runs.start import start
from jmarl.team import Team, make_team
from tests.house import HOUSE, ITEMS

SETTINGS = HOUSE | dict(num_generations=4, max_new_tokens=8)  # whose rows may be divided by 8
AUTO = {"remat": "auto", "micro_batches": "auto"}


def letters(*completions):
    """A reward."""
    return [float(sum(map(len, texts))) for texts in zip(*completions, strict=True)]


@pytest.fixture(scope="module")
def agents(tiny_config, tiny_tokenizer, random_agent):
    return [random_agent(tiny_config(), tiny_tokenizer, seed) for seed in range(2)]


@pytest.fixture(scope="module")
def model(tiny_dir) -> str:
    return str(tiny_dir("llama"))


@pytest.fixture
def on_gpu(monkeypatch):
    """Return a function that makes JAX say that this machine has a GPU with so many bytes; None: it does not say how many.
    Programs still run on the CPU."""
    devices = jax.local_devices()

    def with_memory(limit: int | None) -> None:
        stats = {"bytes_limit": limit, "bytes_in_use": 0}
        fake = [SimpleNamespace(memory_stats=lambda: stats)]
        monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
        monkeypatch.setattr(jax, "local_devices", lambda: devices if limit is None else fake)

    return with_memory


def experiment(model: str, tmp_path: Path, **settings) -> ExperimentConfig:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "the answer"}\n{"prompt": "basket"}\n')
    task = dict(data=str(tmp_path / "rows.jsonl"), reward=f"{__name__}:letters")
    return ExperimentConfig.of(models=[model], num_agents=2, **task, output_dir=str(tmp_path / "run"), **SETTINGS | settings)


def written(directory: Path) -> dict:
    """The settings in the config.yaml of a run."""
    train = read_yaml(directory / "config.yaml").tree["train"]
    return {name: train["optimizer"][name] for name in AUTO} | {"compute_dtype": train["sampling"]["compute_dtype"]}


def largest(setup, state):
    """The batches of the largest update of a run on rollouts."""
    task = Task(environment_of(setup.team, letters, setup.cfg), ITEMS)
    return ROLLOUTS.make_batches(setup, shapes_of(state), ROLLOUTS.longest(setup, task))


def assert_equal(first, second) -> None:
    for x, y in zip(*(jax.tree.leaves([stack.params for stack in r.state.stacks]) for r in (first, second)), strict=True):
        np.testing.assert_array_equal(x, y)


# --- on a CPU ---------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_on_a_cpu_auto_is_what_is_fast(model, tmp_path) -> None:
    cfg = resolve_auto(TrainConfig.of(**HOUSE))
    assert update_settings(cfg) == {"remat": "dots", "micro_batches": 1} and cfg.sampling.compute_dtype == "float32"
    run_experiment(experiment(model, tmp_path, save_models=False, **HOUSE))
    assert written(tmp_path / "run") == {"remat": "dots", "micro_batches": 1, "compute_dtype": "float32"}


# --- on a GPU ---------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_on_a_gpu_the_choice_is_shown_written_and_kept(model, tmp_path, on_gpu, capfd) -> None:
    """A run that resumes equals one that was not interrupted. What is given is no part of the choice."""
    on_gpu(1 << 40)
    auto = experiment(model, tmp_path, num_updates=1, save_every=1, save_models=False, progress=True)
    run_experiment(auto)
    out = capfd.readouterr()
    out = out.out + out.err
    assert "computes in bfloat16, weights in float32" in out and ": the update needs 0.0 of 1024.0 GiB" in out
    first = written(tmp_path / "run")
    assert first["compute_dtype"] == "bfloat16" and first["micro_batches"] == 1 and "auto" not in first.values()
    on_gpu(None)  # a new run would choose remat=dots
    resumed = run_experiment(auto.replace(resume=True, num_updates=2))
    assert written(tmp_path / "run") == first and first["remat"] != "dots"
    whole = experiment(model, tmp_path, num_updates=2, save_models=False, **first)
    assert_equal(resumed, run_experiment(whole.replace(output_dir=str(tmp_path / "whole"))))
    on_gpu(1)  # nothing fits
    again = experiment(model, tmp_path, num_updates=1, save_models=False, progress=True, remat="none")
    run_experiment(again.replace(output_dir=str(tmp_path / "small")))
    out = capfd.readouterr()
    assert "remat=none, micro_batches=8" in out.out + out.err and "and may not fit: set" in out.out + out.err
    assert written(tmp_path / "small") == {"remat": "none", "micro_batches": 8, "compute_dtype": "bfloat16"}


@pytest.mark.long
def test_every_kind_of_run_chooses(agents, on_gpu) -> None:
    """Texts, a learned reward and its pairs, pairs of own completions, several seeds: no program sees auto, which it would
    refuse."""
    on_gpu(1 << 40)
    short, team = HOUSE | dict(num_updates=1, compute_dtype="float32"), Team.of(agents)
    alone = TrainConfig.of(algorithm="sft", batch_size=2, num_updates=1, progress=False)
    results = [fit(Team.of(agents[:1]), TEXTS, alone)]
    learned = TrainConfig.of(algorithm="marlhf", batch_size=2, reward_updates=1, **short)
    results.append(train(team, letters, ITEMS, learned))
    assert [int(result.state.step) for result in results] == [1, 1]
    pairs, _ = prepare(TrainConfig.of(algorithm="madpo", batch_size=2, **short), team, Task(letters, ITEMS))
    adapters = TrainConfig.of(lora_rank=2, **short)
    seeds, _ = prepare(adapters, Team.of(agents[:1] * 2), Task(letters, ITEMS), kind=several([0, 1]))
    assert not is_open(pairs.cfg) and not is_open(seeds.cfg)


def test_a_program_refuses_auto_that_was_not_chosen(agents, on_gpu) -> None:
    on_gpu(1 << 40)
    team, params = make_team(agents)
    setup, state = start(team, params, TrainConfig.of(**SETTINGS))
    with pytest.raises(ValueError, match="=auto is chosen on a GPU when a run starts"):
        list(lower_team(setup, state, largest(setup, state)))


# --- what is chosen ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def opened(agents):
    """A run whose settings are still to be chosen, and the batches of its largest update."""
    team, params = make_team(agents)
    setup, state = start(team, params, TrainConfig.of(**SETTINGS | dict(max_new_tokens=64)))
    setup = with_settings(setup, AUTO)
    return setup, state, largest(setup, state)


@pytest.mark.long
def test_the_fastest_that_fits_is_chosen_by_compiling(opened) -> None:
    setup, state, batches = opened
    size = bytes_on_device(state)
    fastest, line = choose(setup, state, batches, size, [1 << 40])
    assert fastest.algorithm.micro_batches == 1 and line.startswith(
        f"remat={fastest.algorithm.remat}, micro_batches=1: the update"
    )
    assert not is_open(fastest.cfg) and update_settings(fastest.cfg) == update_settings(setup.cfg) | {
        "remat": fastest.algorithm.remat, "micro_batches": 1,
    }  # fmt: skip
    assert fastest.cfg.optimizer == fastest.algorithm.optimizer
    assert [x.algorithm.micro_batches for x in fastest.programs] == [1]
    tight, line = choose(setup, state, batches, size, [size + 1, size + 2])
    assert tight.algorithm.micro_batches == 8 and "and may not fit" in line


def test_where_the_memory_is_unknown_auto_is_what_is_fast(opened) -> None:
    setup, state, _ = opened
    chosen = choose_updates(ROLLOUTS, setup, state, Task(letters, ITEMS))
    assert update_settings(chosen.cfg) == {"remat": "dots", "micro_batches": 1}


# --- micro-batches ----------------------------------------------------------------------------------------------------


PAIRS = [Pair(("the", "is"), (f"a{i}", "b"), ("c", f"d{i}")) for i in range(4)]
TEXTS = [Trajectory(("the answer",), (f"is {i}",)) for i in range(4)]


def update(agents, name: str, micro_batches: int) -> list:
    """The parameters of agents and critics after one update."""
    row, settings = ALGORITHMS[name], dict(algorithm=name, num_updates=1, micro_batches=micro_batches, adam_eps=1e-4)
    team = Team.of(agents[:1] if name in ("ppo", "sft") else agents)
    settings |= dict(batch_size=4) if row.data != "rollouts" else {}
    settings |= dict(reward_updates=1) if row.learned else {}
    settings |= dict(mask_overlong=False) if name == "dapo" else {}  # all of these completions are cut off
    if row.data == "rollouts" or row.learned or row.rounds:
        result = train(team, letters, ITEMS, TrainConfig.of(**HOUSE | settings))
    else:
        data = TEXTS if row.data == "texts" else PAIRS
        result = fit(team, data, TrainConfig.of(**settings, learning_rate=1e-2, progress=False))
    return jax.device_get([stack.params for stack in (*result.state.stacks, *result.state.critics)])


# Each kind of loss, aggregation, critic and data, with a part for each prompt or also parts of a group or a batch.
IN_CI = dict(dapo=2, gspo=6, dr_grpo=2, ippo=6, maac=2, dpo=2, madpo=4, marlhf=2, sft=4)
PARTS = [
    (name, parts)
    for name in sorted(ALGORITHMS.keys() - {"reward_model"})  # marlhf trains one
    for parts in ((2, 6) if ALGORITHMS[name].data == "rollouts" or ALGORITHMS[name].learned else (2, 4))
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "parts"),
    [pytest.param(*case, marks=[] if IN_CI.get(case[0]) == case[1] else pytest.mark.nightly) for case in PARTS],
)
def test_micro_batches_change_an_update_only_in_rounding(agents, name: str, parts: int) -> None:
    whole, other = (jax.tree.leaves(update(agents, name, n)) for n in (1, parts))
    before = jax.tree.leaves(agents[0].params)
    moved = max(float(np.linalg.norm(x[0] - y)) for x, y in zip(whole, before, strict=False))
    assert moved > 1e-3
    assert all(np.linalg.norm(x - y) <= 2e-3 * moved for x, y in zip(whole, other, strict=True))
