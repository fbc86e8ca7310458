"""Layers of several kinds: weights that only some layers have are stacked by themselves, in the order of the layers.

Kinds repeat after a number of layers, `ModelConfig.period`. A scan over layers runs as many at a time.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from jmarl.models.config import ModelConfig
from jmarl.models.weights import ADAPTERS, LAYERS, WEIGHTS, has, is_of

STATES = {"past": "attention", "delta_past": "recurrent"}  # arguments of `decoder.run_layers` -> the layers that continue them


def numbers_with(cfg: ModelConfig, name: str) -> list[int]:
    """Return the numbers, in a period, of the layers that have a leaf: a weight, its adapter, a state, or what all have."""
    if name in STATES:
        return [n for n in range(cfg.period) if is_of(cfg, STATES[name], n)]
    leaf = LAYERS + (ADAPTERS[name].leaf if name in ADAPTERS else name)
    return [n for n in range(cfg.period) if leaf not in WEIGHTS or has(cfg, leaf, n)]


def place_of(cfg: ModelConfig, name: str, layer: int) -> int | None:
    """Return the place of a layer in the stack of a leaf; None if it does not have it."""
    numbers, (period, number) = numbers_with(cfg, name), divmod(layer, cfg.period)
    return period * len(numbers) + numbers.index(number) if number in numbers else None


def by_period(layers: Mapping[str, Any], cfg: ModelConfig) -> dict[str, Any]:
    """Return stacks [period, ...], with an axis of the layers of a period behind it where there are several."""
    return {name: _split(x, len(numbers_with(cfg, name))) for name, x in layers.items()}


def _split(tree: Any, count: int) -> Any:
    # Without -1, which numpy's rule forbids for arrays of size 0, such as one of `lora.with_dropout`.
    return tree if count == 1 else jax.tree.map(lambda x: x.reshape(len(x) // count, count, *x.shape[1:]), tree)


def layers_of_period(period: Mapping[str, Any], cfg: ModelConfig) -> list[dict[str, Any]]:
    """Return the leaves of each layer of one period of `by_period`."""
    numbers = {name: numbers_with(cfg, name) for name in period}

    def leaf(name: str, n: int) -> Any:
        place = numbers[name].index(n)
        return period[name] if len(numbers[name]) == 1 else jax.tree.map(lambda x: x[place], period[name])

    return [{name: leaf(name, n) for name in period if n in numbers[name]} for n in range(cfg.period)]


def layer_of_base(
    base: Mapping[str, tuple[Array, ...]], cfg: ModelConfig, number: int, period: Int[Array, ""]
) -> dict[str, Any]:
    """Return one layer of a period, of leaves with an array for each layer. It is copied, as the slice of a stack would be."""

    def leaves(period: int) -> dict[str, Any]:
        places = {name: place_of(cfg, name, period * cfg.period + number) for name in base}
        return {name: base[name][place] for name, place in places.items() if place is not None}

    return lax.switch(period, [partial(leaves, n) for n in range(cfg.num_layers // cfg.period)]) if base else {}


def join_layers(trees: Sequence[Any]) -> Any:
    """Return the stack of what the layers of a period have, each [period, ...]; None if it is nothing."""
    if len(trees) == 1:
        return trees[0]
    return jax.tree.map(lambda *x: jnp.stack(x, 1).reshape(len(x) * len(x[0]), *x[0].shape[1:]), *trees) if trees else None


def join_kinds(kinds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the stacks of leaves that some of the layers of a period have."""
    names = dict.fromkeys(name for layer in kinds for name in layer)
    return {name: join_layers([layer[name] for layer in kinds if name in layer]) for name in names}
