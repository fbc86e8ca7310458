"""Optimizations for the compiler of one platform are in no other programs, and change no number."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import SingleDeviceSharding

from jmarl.models import cpu, platforms

ADAM = optax.adamw(1e-2)


def stablehlo(f, *args, platform):
    return jax.jit(f).trace(*args).lower(lowering_platforms=(platform,)).as_text()


@pytest.fixture(scope="module")
def step_arguments():
    """Gradients, optimizer state and parameters of one agent after one step."""
    params = {"w": np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4), "b": np.ones(4, np.float32)}
    grads = jax.tree.map(np.sin, params)
    return grads, jax.jit(lambda: ADAM.update(grads, ADAM.init(params), params)[1])(), params


def test_a_step_in_place_equals_the_plain_step(step_arguments):
    steps = (cpu.step_in_place, platforms._step, platforms.optimizer_step)
    programs = [jax.jit(functools.partial(step, ADAM.update)) for step in steps]
    for ok in (True, False):
        in_place, plain, chosen = (program(*step_arguments, ok) for program in programs)
        jax.tree.map(np.testing.assert_array_equal, in_place, plain)
        jax.tree.map(np.testing.assert_array_equal, in_place, chosen)
    jax.tree.map(np.testing.assert_array_equal, chosen, (step_arguments[2], step_arguments[1]))


def test_only_programs_for_cpus_compute_the_moments_after_the_parameters(step_arguments):
    step = functools.partial(platforms.optimizer_step, ADAM.update)
    assert "stablehlo.is_finite" in stablehlo(step, *step_arguments, True, platform="cpu")
    assert "stablehlo.is_finite" not in stablehlo(step, *step_arguments, True, platform="cuda")


def test_only_programs_for_cpus_trace_the_layer_numbers():
    numbers, lengths = functools.partial(platforms.layer_numbers, 3), jnp.array([4, 1])
    assert [int(n) for n in jax.jit(numbers)(lengths)] == [0, 1, 2]
    assert "stablehlo.compare" in stablehlo(numbers, lengths, platform="cpu")
    assert "stablehlo.compare" not in stablehlo(numbers, lengths, platform="cuda")


@pytest.mark.parametrize(
    "arguments, panels",
    [
        (("cpu", 8, "float32", True), True),
        (("cpu", 9, "float32", True), False),
        (("cpu", 8, "bfloat16", True), False),
        (("cpu", 8, "float32", False), False),
        (("gpu", 8, "float32", True), False),
    ],
)
def test_panels_are_for_few_float32_rows_with_one_core_per_agent(arguments, panels):
    assert platforms.use_panels(*arguments) == panels


def test_only_cpus_reuse_the_memory_of_gradients():
    params = {"w": jnp.ones((2, 3))}
    np.testing.assert_array_equal(platforms.gradient_memory("cpu", params)["w"], np.zeros((2, 3)))
    assert platforms.gradient_memory("gpu", params) is None


def test_the_platform_is_that_of_the_arrays(monkeypatch):
    """Also for shapes with a sharding, for which programs are only compiled. Host arrays go to jax's default platform."""
    monkeypatch.setattr(jax, "default_backend", lambda: "default")
    placed = jax.ShapeDtypeStruct((2,), jnp.float32, sharding=SingleDeviceSharding(jax.devices("cpu")[0]))
    for tree in ({"a": np.ones(2), "b": jnp.ones(2)}, [placed]):
        assert platforms.platform_of(tree) == "cpu"
    for tree in ({"a": np.ones(2)}, jax.ShapeDtypeStruct((2,), jnp.float32)):
        assert platforms.platform_of(tree) == "default"
