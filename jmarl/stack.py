"""The agent axis: agents of one architecture stacked on axis 0, and functions of one agent lifted to it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

# Options of the large programs. For CPUs: XLA's default order of operations makes the layers' zero gradients of an update early
# (0.25 GiB an agent at SmolLM2's size), and two copies of the weights before decoding.
COMPILER: dict[str, Any] = {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}


def stack_params(agents: Sequence[Any]) -> Any:
    """One pytree [A, ...] of float32 from A agents' pytrees; they must have the same structure and shapes."""
    first = jax.tree.structure(agents[0])
    for i, other in enumerate(agents):
        if jax.tree.structure(other) != first:
            raise ValueError(f"agent {i} has other parameters than agent 0: only one architecture fits a stack")
    return jax.tree.map(lambda *xs: jnp.stack([jnp.asarray(x, jnp.float32) for x in xs]), *agents)


def per_agent(f: Callable, mode: str) -> Callable:
    """f of one agent as a function of stacks [A, ...]: mode `vmap`, all at once; `map`, one after the other, with the
    temporary memory of one."""

    def lifted(*stacked):
        if jax.tree.leaves(stacked)[0].shape[0] == 1:  # no axis of one: XLA's matrix products would carry it along
            return jax.tree.map(lambda x: jnp.asarray(x)[None], f(*jax.tree.map(lambda x: x[0], stacked)))
        return lax.map(lambda agent: f(*agent), stacked) if mode == "map" else jax.vmap(f)(*stacked)

    return lifted


def unstack(tree: Any, agent: int) -> Any:
    """One agent's part of a stacked pytree."""
    return jax.tree.map(lambda x: x[agent], tree)
