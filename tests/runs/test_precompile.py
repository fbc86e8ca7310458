"""The large programs, lowered for GPUs on a machine without one, and not run; where programs are kept."""

from __future__ import annotations

import os
import re
from functools import partial
from types import SimpleNamespace

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from jmarl.config import TrainConfig
from jmarl.learning import optimizer, program
from jmarl.runs import precompile as programs
from jmarl.runs.checks import environment_of
from jmarl.runs.start import start
from jmarl.sampling import generate, stack_program
from jmarl.team import make_team
from tests.house import HOUSE, ITEMS

ADAPTERS = dict(lora_rank=2, per_agent="vmap", top_k=20, top_p=0.9, repetition_penalty=1.2)
RUNS = {
    "ippo": dict(algorithm="ippo", kl_coef=0.1),
    "adapters, several steps": dict(num_epochs=2, target_kl=0.1, entropy_coef=0.01, micro_batches=2, remat="full", **ADAPTERS),
    "bfloat16": dict(algorithm="maac", compute_dtype="bfloat16"),
    "a greedy baseline": dict(algorithm="remax", kl_coef=0.1, kl_in="reward"),
}


@pytest.fixture(scope="module")
def tiny_agent(tiny_config, tiny_tokenizer, random_agent):
    return random_agent(tiny_config(), tiny_tokenizer, 0)


@pytest.fixture
def own_cache(monkeypatch, tmp_path):
    """The user's cache directory, and JAX as where a process begins."""
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in names}
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name, value in zip(names, (None, 1.0), strict=True):
        jax.config.update(name, value)
    yield tmp_path / "jmarl" / "programs"
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def test_programs_that_were_not_used_for_longest_go_first(own_cache, monkeypatch):
    """Reading counts as use. What a full disk left of a program goes too; files that are no programs stay."""
    own_cache.mkdir(parents=True)
    times = {"old": (2, 2), "read": (9, 1), "new": (8, 8), "older": (0, 0), "empty": (9, 9)}  # of access and of change
    files = {f"{name}-cache": seconds for name, seconds in times.items()} | {"notes.txt": (0, 0)}
    for name, seconds in files.items():
        (own_cache / name).write_bytes(b"" if name == "empty-cache" else bytes(100))
        os.utime(own_cache / name, seconds)
    monkeypatch.setattr(programs, "MOST_KEPT", 200)
    programs.keep_programs(None)
    assert {file.name for file in own_cache.iterdir()} == {"read-cache", "new-cache", "notes.txt"}
    programs.remove_oldest(own_cache, most=200, most_files=1)
    assert {file.name for file in own_cache.iterdir()} == {"read-cache", "notes.txt"}


def test_small_programs_are_kept_too(own_cache):
    lines = []
    programs.keep_programs(lines.append)
    jax.jit(lambda x: x + 41.5)(1.0)
    assert len(list(own_cache.glob("*-cache"))) == 1 and str(own_cache) in lines[0]


def test_a_run_says_that_programs_are_not_kept_where_nothing_can_be_written(own_cache):
    own_cache.parent.write_text("a file in place of a directory")
    lines = []
    programs.keep_programs(lines.append)
    assert jax.config.jax_compilation_cache_dir is None and jax.jit(lambda x: x + 42.5)(1.0) == 43.5
    assert len(lines) == 1 and lines[0].startswith("compiled programs are not kept: ") and str(own_cache) in lines[0]


@pytest.fixture
def for_gpus(monkeypatch):
    """Programs as they are traced and lowered where the devices are GPUs."""
    for module in (stack_program, optimizer):
        monkeypatch.setattr(module, "platform_of", lambda tree: "gpu")
    for module, name in ((generate, "sample_stack"), (program, "_update")):
        jitted = getattr(module, name)

        def lower(*args, jitted=jitted, **static):
            return jitted.trace(*args, **static).lower(lowering_platforms=("cuda",))

        monkeypatch.setattr(module, name, SimpleNamespace(lower=lower))


def texts_of(agent, **changes):
    """Yield the programs of a run's first step, and of an evaluation like it."""
    cfg = TrainConfig.of(**HOUSE | dict(eval_generations=HOUSE["num_generations"], compute_dtype="float32") | changes)
    team, params = make_team([agent, agent], lora=cfg.lora.lora_rank > 0)
    env = environment_of(team, lambda a, b: [0.0] * len(a), cfg)
    setup, state = start(team, params, cfg)
    of_run = programs.programs_of_run(setup, state, ITEMS, ITEMS, ITEMS, partial(programs.first_part, setup, env))
    return (lowered.as_text() for _, _, lowered in of_run)


@pytest.mark.long
@pytest.mark.parametrize("changes", RUNS.values(), ids=RUNS)
def test_programs_are_made_for_gpus(for_gpus, tiny_agent, changes):
    """They contain nothing specific to CPUs. Float32 products have full precision, not TF32; others have the default."""
    texts = [*texts_of(tiny_agent, **changes)]
    assert len(texts) >= 3, "samplers of training and evaluation, an update"
    for text in texts:
        products = re.findall("stablehlo.dot_general .*", text)
        assert products and "stablehlo.custom_call" not in text
        exact = ["precision = [HIGHEST, HIGHEST]" in product for product in products]
        assert not any(exact) if "compute_dtype" in changes else all(exact)


@pytest.mark.long
def test_auto_is_bfloat16_on_gpus_and_the_users_own_precision_has_priority(for_gpus, tiny_agent):
    """In the sampler, which knows its platform; a run resolves the setting before."""
    sampler = next(texts_of(tiny_agent, compute_dtype="auto"))
    assert "HIGHEST" not in sampler and "bf16" in sampler
    with jax.default_matmul_precision("tensorfloat32"):
        assert not any("HIGHEST" in text for text in texts_of(tiny_agent))
