"""Value heads: a second head of a decoder that gives one number of each hidden state."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jmarl.models import decoder
from jmarl.models.stack import own_leaves


def with_value_head(params: Any) -> Any:
    """Parameters [A, ...] of stacked decoders with a second head, at first 0 everywhere: one number of each hidden state."""
    agents, size = own_leaves(params)[0][0].shape[0], params["final_norm"].shape[-1]
    return params | {"value": jnp.zeros((agents, size)), "value_bias": jnp.zeros(agents)}


def without_value_head(params: Any) -> Any:
    return {name: w for name, w in params.items() if name not in ("value", "value_bias")}


def values_of(params: Any, hidden: jax.Array) -> jax.Array:
    """Values [...] of hidden states [..., D], in float32 whatever the layers compute in."""
    hidden = hidden.astype(jnp.float32)
    return jnp.matmul(hidden, params["value"], precision=decoder.matmul_precision(hidden)) + params["value_bias"]
