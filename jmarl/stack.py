"""The agent axis: stacking agents of one architecture on axis 0."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp


def stack_params(agents: Sequence[Any]) -> Any:
    """One pytree [A, ...] of float32 from A agents' pytrees; they must have the same structure and shapes."""
    first = jax.tree.structure(agents[0])
    for i, other in enumerate(agents):
        if jax.tree.structure(other) != first:
            raise ValueError(f"agent {i} has other parameters than agent 0: only one architecture fits a stack")
    return jax.tree.map(lambda *xs: jnp.stack([jnp.asarray(x, jnp.float32) for x in xs]), *agents)


def unstack(tree: Any, agent: int) -> Any:
    """One agent's part of a stacked pytree."""
    return jax.tree.map(lambda x: x[agent], tree)
