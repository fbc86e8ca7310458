"""Choose what is done for the compiler of one platform. This is the only place that does.

What changes only the inside of a program is chosen when the program is lowered (`jax.lax.platform_dependent`). What changes the
arrays that it takes is chosen before, by the argument `platform`: the name that `jax.Device.platform` gives, such as cpu or
gpu. So programs can also be compiled for platforms that are not present. The CPU's part is in `cpu.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jmarl.models import cpu

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Int

# Of all platforms: each compiler reads the options with its own prefix.
COMPILER_OPTIONS: dict[str, Any] = cpu.COMPILER_OPTIONS


def platform_of(tree: Any) -> str:
    """Return the platform that a pytree of arrays (or of `jax.ShapeDtypeStruct` with shardings) lies on; jax's default one if
    it lies on the host."""
    for leaf in jax.tree.leaves(tree):
        if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct) and leaf.sharding is not None:
            return next(iter(leaf.sharding.device_set)).platform
    return jax.default_backend()


def use_panels(platform: str, rows: int, dtype: str, own_core: bool) -> bool:
    """Return whether decoding reads its weights cut into panels.

    Args:
      rows: number of rows per agent.
      dtype: compute dtype.
      own_core: whether each agent has a device of its own. A device alone has all cores and does not gain.
    """
    return platform == "cpu" and own_core and rows <= cpu.MAX_PANEL_ROWS and dtype == "float32"


def gradient_memory(platform: str, params: Any) -> Any:
    """Return what the state of a stack holds for the gradients of the next update; None where nothing is kept."""
    return cpu.keep_gradients(params) if platform == "cpu" else None


def layer_numbers(num_layers: int, lengths: Int[Array, "..."]) -> list[Int[Array, ""]]:
    """Return 0 to num_layers - 1, by which decoding slices the stacked layers. lengths: any array of numbers of at least 1."""
    known = lambda lengths: [jnp.int32(i) for i in range(num_layers)]  # noqa: E731
    return lax.platform_dependent(lengths, cpu=functools.partial(cpu.traced_layer_numbers, num_layers), default=known)


def optimizer_step(update: Callable, grads: Any, opt_state: Any, params: Any, ok: Bool[Array, ""]) -> tuple[Any, Any]:
    """Return parameters and optimizer state of one agent after one step, or unchanged where not ok.

    Args:
      update: the `update` of an `optax.GradientTransformation`.
      ok: whether the step is made.
    """
    in_place = functools.partial(cpu.step_in_place, update)
    return lax.platform_dependent(grads, opt_state, params, ok, cpu=in_place, default=functools.partial(_step, update))


def _step(update: Callable, grads: Any, opt_state: Any, params: Any, ok: Bool[Array, ""]) -> tuple[Any, Any]:
    changes, new_state = update(grads, opt_state, params)
    return cpu.select(ok, optax.apply_updates(params, changes), params), cpu.select(ok, new_state, opt_state)
