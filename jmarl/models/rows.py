"""Divide the rows [P, G] of a batch, G completions of each of P prompts, evenly over devices.

Whole prompts are divided where their number allows it. Else their groups are, and every device that has a part of a group has
its prompt too. What still does not divide is padded with rows of zeros.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int, Shaped


class Division(NamedTuple):
    """How rows are divided: `over_group` parts of each group, then `prompts` prompts, padding included."""

    over_group: int
    prompts: int


def divide(prompts: int, group: int, parts: int, splits_groups: bool = True) -> Division:
    """Return the division with the fewest rows on a device; of equal ones the one that splits groups least."""

    def division(over_group: int) -> Division:
        return Division(over_group, -(-prompts * over_group // parts) * parts)

    divisors = [k for k in range(1, group + 1 if splits_groups else 2) if group % k == 0]
    return min(map(division, divisors), key=lambda d: (d.prompts * (group // d.over_group), d.over_group))


def divided(x: Shaped[Array, "prompt group ..."], d: Division) -> Shaped[Array, "part_prompt part_group ..."]:
    """Return arrays of rows, divided."""
    p, g = x.shape[:2]
    return pad_prompts(x.reshape(p * d.over_group, g // d.over_group, *x.shape[2:]), d)


def divided_prompts(x: Shaped[Array, "prompt ..."], d: Division) -> Shaped[Array, "part_prompt ..."]:
    """Return arrays of prompts, repeated for each part of their group."""
    return pad_prompts(x if d.over_group == 1 else jnp.repeat(x, d.over_group, 0), d)


def pad_prompts(x: Shaped[Array, "prompt ..."], d: Division) -> Shaped[Array, "part_prompt ..."]:
    """Return an array padded with zeros, keys with the first one."""
    missing = d.prompts - x.shape[0]
    padding = jnp.broadcast_to(x[:1], (missing, *x.shape[1:]))
    if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        padding = jnp.zeros_like(padding)
    return jnp.concatenate([x, padding]) if missing else x


def joined(x: Shaped[Array, "part_prompt part_group ..."], prompts: int, group: int) -> Shaped[Array, "prompt group ..."]:
    """Return rows as before `divided`."""
    return x[: prompts * group // x.shape[1]].reshape(prompts, group, *x.shape[2:])


def own_part(tree: Any, parts: int) -> Any:
    """Return the part of divided arrays that this device of `data` computes."""

    def take(x: Array) -> Array:
        size = x.shape[0] // parts
        return lax.dynamic_slice_in_dim(x, lax.axis_index("data") * size, size)

    return jax.tree.map(take, tree)


def on_rows(
    f: Callable[..., Shaped[Array, "prompt group token"]],
    parts: int,
    prompts: Int[Array, "prompt prompt_token"],
    lengths: Int[Array, " prompt"],
    tokens: Int[Array, "prompt group token"],
) -> Shaped[Array, "prompt group token"]:
    """Return f(prompts, lengths, tokens), of which each device of `data` computes its rows."""
    if parts == 1:
        return f(prompts, lengths, tokens)
    p, g = tokens.shape[:2]
    d = divide(p, g, parts)
    whole = divided_prompts(prompts, d), jnp.maximum(divided_prompts(lengths, d), 1), divided(tokens, d)
    return joined(lax.all_gather(f(*own_part(whole, parts)), "data", tiled=True), p, g)
