"""Add a value head to decoders: a second head that maps each hidden state to one number."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jmarl.models.decoder import Params, cast
from jmarl.models.gpu import matmul_precision
from jmarl.models.stack import own_leaves


def with_value_head(params: Params) -> Params:
    """Add a value head that is 0 everywhere to stacked parameters [A, ...]."""
    agents, size = own_leaves(params)[0][0].shape[0], params["final_norm"].shape[-1]
    return params | {"value": jnp.zeros((agents, size)), "value_bias": jnp.zeros(agents)}


def without_value_head(params: Params) -> Params:
    """Remove the value head, if there is one."""
    return {name: w for name, w in params.items() if name not in ("value", "value_bias")}


def cast_all_but_value_head(params: Params, dtype: jax.typing.DTypeLike) -> Params:
    """Cast parameters, or some of them, to the compute dtype; a value head stays in float32."""
    return cast(params, dtype) | {name: w for name, w in params.items() if name in ("value", "value_bias")}


def values_of(params: Params, hidden: Float[Array, "*batch dim"]) -> Float[Array, "*batch"]:
    """Return the values of hidden states, in float32 whatever the compute dtype."""
    hidden = hidden.astype(jnp.float32)
    return jnp.matmul(hidden, params["value"], precision=matmul_precision(hidden)) + params["value_bias"]
