"""Optimize for XLA's CPU compiler; `platforms.py` decides where this applies.

Nothing here changes a number by more than rounding. Each line says what is gained and how it was seen. Timed: on two CPU cores
with two SmolLM2-135M in float32 and one prompt x 8 completions x 128 tokens (`experiments.bench.step`, experiments/README.md).
Counted: by XLA, in programs of these sizes compiled with and without it.

=========================  ==========================================================================================
`COMPILER_OPTIONS`         order operations for memory: 0.25 GiB per agent less in an update, and no two copies of the
                           weights before decoding (XLA's default order computes the zero gradients of all layers early).
                           Counted
`cut_panels`               weights read at 22 to 26 GB/s by 8 rows instead of 12 to 18; a decode step takes 15.4 ms per
                           agent instead of 19.5. Timed
`split_panels`             the output weight in parts of 32 panels: 20.8 and 20.6 ms per step and agent instead of 23.8
                           and 23.6. Parts of 12 panels in the layers gained nothing more. Timed
`traced_layer_numbers`     one kernel that slices a layer's weights instead of one per layer: compiling the sampler of an
                           agent takes 5.3 CPU seconds instead of 10.2. Timed
`keep_gradients`           gradients keep their memory between updates: 10.6 s per step instead of 11.9. Timed
`step_in_place`            parameters and moments are updated in place: 1.02 GiB of temporaries in a step of two agents
                           instead of 1.41, and 18 copies instead of 46. Counted
=========================  ==========================================================================================
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jaxtyping import Array, Bool, Float, Int

COMPILER_OPTIONS: dict[str, Any] = {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}

MAX_PANEL_ROWS = 8  # with more rows per agent the plain product is as fast
PANEL_COLUMNS = 64
PANELS_PER_PRODUCT = 32  # of the output weight


class Panels(NamedTuple):
    """A weight [D, F] cut into panels of 64 columns, for products with a few rows on one core.

    XLA's product (YNNPACK's) copies a matrix into tiles, at every token, but reads a panel in place.
    """

    parts: tuple[Array, ...]  # each [n, D, 64]; all n sum to F / 64


def cut_panels(w: Float[Array, "d f"]) -> Panels | Float[Array, "d f"]:
    """Return the weight as one part of panels, or unchanged if 64 does not divide F."""
    d, f = w.shape
    if f % PANEL_COLUMNS:
        return w
    return Panels((jnp.swapaxes(w.reshape(d, f // PANEL_COLUMNS, PANEL_COLUMNS), 0, 1),))


def split_panels(panels: Panels) -> Panels:
    """Split the panels of a wide weight into parts of `PANELS_PER_PRODUCT`; the last part may be smaller."""
    (part,) = panels.parts
    return Panels(tuple(jnp.split(part, list(range(PANELS_PER_PRODUCT, len(part), PANELS_PER_PRODUCT)))))


def panel_product(x: Float[Array, "n d"], panels: Panels, precision: lax.Precision | None) -> Float[Array, "n f"]:
    """Return x times the weight that the panels were cut from."""
    # All parts read one repeated x, which fits into a cache. XLA would repeat x for each part unless it is the result of a
    # branch. XLA cannot know that the branch is always taken. It drops an optimization_barrier before it fuses.
    always = lax.population_count(lax.bitcast_convert_type(x[0, 0], jnp.int32)) <= 32
    x = lax.cond(always, lambda x: x, lambda x: -x, x)
    # A batch of products: in one product with two free axes, XLA would join the panels again.
    repeated = jnp.broadcast_to(x, (panels.parts[0].shape[0], *x.shape))
    out = []
    for part in panels.parts:
        columns = jnp.einsum("pnd,pdf->pnf", repeated[: len(part)], part, precision=precision)
        out.append(jnp.swapaxes(columns, 0, 1).reshape(x.shape[0], -1))
    return out[0] if len(out) == 1 else jnp.concatenate(out, 1)


def traced_layer_numbers(num_layers: int, lengths: Int[Array, "..."]) -> list[Int[Array, ""]]:
    """Return 0 to num_layers - 1 as traced numbers that XLA cannot fold to constants.

    lengths: at least 1, which XLA does not know.
    """
    numbers = [jnp.int32(i) for i in range(num_layers)]
    return lax.cond(lengths.min() > 0, lambda: numbers, lambda: [jnp.int32(0)] * num_layers)


def keep_gradients(params: Any) -> Any:
    """Return zeros like the parameters, whose memory the gradients of the next update take.

    Freed memory would go back to the host of a virtual machine, and to allocate it again costs a tenth of a step.
    """
    return jax.tree.map(jnp.zeros_like, params)


def step_in_place(update: Callable, grads: Any, opt_state: Any, params: Any, ok: Bool[Array, ""]) -> tuple[Any, Any]:
    """Return parameters and optimizer state after one step of optax's `update`, or unchanged if not `ok`."""
    changes, _ = update(grads, opt_state, params)
    new_params = select(ok, optax.apply_updates(params, changes), params)
    # Compute the moments again after the parameters (`written` makes XLA wait for them): then both are written in place.
    # `written` is False for parameters that were not finite before.
    written = jnp.isfinite(sum(leaf[(0,) * leaf.ndim] for leaf in jax.tree.leaves(new_params)))
    zeros = jax.tree.map(jnp.zeros_like, opt_state)
    _, new_state = update(grads, select(written, opt_state, zeros), params)
    return new_params, select(ok & written, new_state, opt_state)


def select(condition: Bool[Array, ""], new: Any, old: Any) -> Any:
    """Return the leaves of `new` if the condition holds, else those of `old`."""
    return jax.tree.map(lambda n, o: jnp.where(condition, n, o), new, old)
