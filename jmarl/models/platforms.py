"""Choose optimizations for the compiler of one platform. No other module does.

Choices inside a program are made when it is lowered (`jax.lax.platform_dependent`). Choices that change its arguments are made
before, by the argument `platform`: a name as in `jax.Device.platform`, such as cpu or gpu. So programs can also be compiled for
platforms that are not present. The optimizations for CPUs are in `cpu.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jaxtyping import Array, Bool, Int

from jmarl.models import cpu

# Options for all platforms; each compiler reads those with its own prefix.
COMPILER_OPTIONS: dict[str, Any] = cpu.COMPILER_OPTIONS


def platform_of(tree: Any) -> str:
    """Return the platform of a pytree of arrays or `jax.ShapeDtypeStruct` with shardings; for host arrays, jax's default."""
    for leaf in jax.tree.leaves(tree):
        if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct) and leaf.sharding is not None:
            return next(iter(leaf.sharding.device_set)).platform
    return jax.default_backend()


def use_panels(platform: str, rows: int, dtype: str, own_core: bool) -> bool:
    """Return whether decoding reads its weights cut into panels.

    Args:
      rows: number of rows per agent.
      dtype: compute dtype.
      own_core: whether each agent has its own device. A single device uses all cores and gains nothing.
    """
    return platform == "cpu" and own_core and rows <= cpu.MAX_PANEL_ROWS and dtype == "float32"


def gradient_memory(platform: str, params: Any) -> Any:
    """Return arrays whose memory the gradients of the next update take, or None on platforms that do not reuse it."""
    return cpu.keep_gradients(params) if platform == "cpu" else None


def layer_numbers(num_layers: int, lengths: Int[Array, "..."]) -> list[Int[Array, ""]]:
    """Return 0 to num_layers - 1, by which decoding slices the stacked layers. lengths: any numbers of at least 1."""

    def constants(lengths: Int[Array, "..."]) -> list[Int[Array, ""]]:
        return [jnp.int32(i) for i in range(num_layers)]

    return lax.platform_dependent(lengths, cpu=functools.partial(cpu.traced_layer_numbers, num_layers), default=constants)


def optimizer_step(update: Callable, grads: Any, opt_state: Any, params: Any, ok: Bool[Array, ""]) -> tuple[Any, Any]:
    """Return parameters and optimizer state of one agent after one step, or unchanged if not `ok`.

    update: the `update` of an `optax.GradientTransformation`.
    """
    in_place, plain = functools.partial(cpu.step_in_place, update), functools.partial(_step, update)
    return lax.platform_dependent(grads, opt_state, params, ok, cpu=in_place, default=plain)


def _step(update: Callable, grads: Any, opt_state: Any, params: Any, ok: Bool[Array, ""]) -> tuple[Any, Any]:
    changes, new_state = update(grads, opt_state, params)
    return cpu.select(ok, optax.apply_updates(params, changes), params), cpu.select(ok, new_state, opt_state)
