"""Look up the embeddings of tokens."""

import jax
from jaxtyping import Array, Float, Int

from jmarl.models.platforms import sum_by_token


@jax.custom_vjp
def embed(table: Float[Array, "vocabulary dim"], tokens: Int[Array, " token"]) -> Float[Array, "token dim"]:
    """Return the embeddings of tokens. In the gradient, rows of equal tokens are added in float32."""
    return table[tokens]


def _embed_forward(table: Array, tokens: Array) -> tuple[Array, tuple[Array, Array]]:
    return table[tokens], (table, tokens)


def _embed_backward(saved: tuple[Array, Array], d_out: Array) -> tuple[Array, None]:
    table, tokens = saved
    return sum_by_token(tokens, d_out, table.shape[0]).astype(table.dtype), None


embed.defvjp(_embed_forward, _embed_backward)
