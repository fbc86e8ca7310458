"""The agent axis: agents of one architecture stacked on axis 0, and functions of one agent lifted to it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

from jmarl.types import Shared


def stack_params(agents: Sequence[Any]) -> Any:
    """One pytree [A, ...] of float32 from A agents' pytrees; they must have the same structure and shapes."""
    first = jax.tree.structure(agents[0])
    for i, other in enumerate(agents):
        if jax.tree.structure(other) != first:
            raise ValueError(f"agent {i} has other parameters than agent 0: only one architecture fits a stack")
    return jax.tree.map(lambda *xs: jnp.stack([jnp.asarray(x, jnp.float32) for x in xs]), *agents)


def share_params(agents: Sequence[Any]) -> Any:
    """One pytree of float32 that A agents share (`Shared` leaves): that of the first, to which the others must be equal."""
    for i, other in enumerate(agents[1:], 1):
        for (path, x), y in zip(jax.tree_util.tree_flatten_with_path(agents[0])[0], jax.tree.leaves(other), strict=True):
            if x is not y and not np.array_equal(x, y):
                raise ValueError(
                    f"agents 0 and {i} of a stack start from different weights ({jax.tree_util.keystr(path)}), and LoRA keeps "
                    "one base a stack: give them one model, or train all weights (lora_rank=0)"
                )
    return jax.tree.map(lambda x: Shared(jnp.asarray(x, jnp.float32)), agents[0])


def per_agent(f: Callable, mode: str) -> Callable:
    """f of one agent as a function of stacks [A, ...]: mode `vmap`, all at once; `map`, one after the other, with the
    temporary memory of one."""

    def lifted(*stacked):
        own, whole = own_leaves(stacked)
        if own[0].shape[0] == 1:  # no axis of one: XLA's matrix products would carry it along
            return jax.tree.map(lambda x: jnp.asarray(x)[None], f(*whole([x[0] for x in own])))

        def of_agent(own):
            return f(*whole(own))

        return lax.map(of_agent, own) if mode == "map" else jax.vmap(of_agent)(own)

    return lifted


def is_shared(x: Any) -> bool:
    return isinstance(x, Shared)


def own_leaves(tree: Any) -> tuple[list, Callable]:
    """The leaves [A, ...] of a stacked pytree without those that agents share, and a function that puts the pytree of one agent
    together from its part of them."""
    leaves, structure = jax.tree.flatten(tree, is_leaf=is_shared)

    def whole(own):
        rest = iter(own)
        return structure.unflatten([x.value if is_shared(x) else next(rest) for x in leaves])

    return [x for x in leaves if not is_shared(x)], whole


def map_own(f: Callable, tree: Any) -> Any:
    """`jax.tree.map` over the leaves that are not shared."""
    return jax.tree.map(lambda x: x if is_shared(x) else f(x), tree, is_leaf=is_shared)


def part(x: Any, index: int | slice) -> Any:
    """x[index] of an array [A, ...] that may lie on several devices. Waits for it: with many programs
    that move data between devices in flight, XLA for CPUs can wait for itself forever (one of 30 starts of four seeds did)."""
    return x[index] if isinstance(x, np.ndarray) else jax.block_until_ready(x[index])


def unstack(tree: Any, agent: int) -> Any:
    """One agent's part of a stacked pytree, with what it shares; of arrays on several devices put together on the host. Arrays
    that are partly in other processes are refused."""

    def of_agent(x):
        if not isinstance(x, jax.Array) or isinstance(x, Tracer) or len(x.sharding.device_set) == 1:
            return x[agent]
        if not x.is_fully_addressable:  # the shards of other processes would stay unset
            raise ValueError(
                f"an array {list(x.shape)} is spread over {jax.process_count()} processes, and this one holds only a part "
                "of it: gather it in every process first (jax.experimental.multihost_utils.process_allgather)"
            )
        found = np.empty(x.shape[1:], x.dtype)
        for shard in x.addressable_shards:
            first, last, _ = shard.index[0].indices(len(x))
            if first <= agent < last:
                found[shard.index[1:]] = shard.data[agent - first]
        return found

    own, whole = own_leaves(tree)
    return whole([of_agent(x) for x in own])


def library(arrays: Any) -> Any:
    """numpy for arrays that are all on the host, where they then stay and no program runs; jax's for others."""
    return np if all(isinstance(x, np.ndarray) for x in jax.tree.leaves(arrays)) else jnp


def fetched(arrays: Any) -> Any:
    """Arrays as those of the host; where all are, they stay as they are."""
    return arrays if library(arrays) is np else jax.device_get(arrays)
