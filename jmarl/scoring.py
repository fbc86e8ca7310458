"""Log-probabilities of given completions, with gradients: the same decoder and the same prefix sharing as the sampler.

The prompt is computed once a group, also in the backward pass. Output logits exist for `CHUNK` tokens at a time, never for
[row, token, vocabulary] at once; the backward pass computes a chunk's logits again instead of keeping them.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jmarl.models import decoder
from jmarl.models.config import ModelConfig

CHUNK = 512  # tokens whose logits [CHUNK, V] are in memory together


class Scores(NamedTuple):
    """Of completions [P, G, T] of one agent, at the sampling temperature."""

    logprobs: jax.Array  # [P, G, T] float32
    entropy: jax.Array  # [P, G, T] float32: of the whole next-token distribution, in nats


def token_scores(params, hidden: jax.Array, targets: jax.Array, temperature: float, entropy_gradient: bool):
    """Log-probability and entropy [M] of targets [M] under the distribution of hidden states [M, D]."""

    @jax.checkpoint
    def chunk(inputs):
        x, target = inputs
        z = decoder.logits(params, x) / temperature
        lse = jax.nn.logsumexp(z, -1)
        picked = jnp.take_along_axis(z, target[:, None], -1)[:, 0]
        entropy = lse - jnp.sum(jnp.exp(z - lse[:, None]) * z, -1)
        return picked - lse, entropy if entropy_gradient else lax.stop_gradient(entropy)

    m = targets.shape[0]
    size = -(-m // -(-m // CHUNK))  # equal chunks: the padding is less than one token a chunk
    padded = jax.tree.map(lambda x: jnp.pad(x, ((0, -m % size),) + ((0, 0),) * (x.ndim - 1)), (hidden, targets))
    split = jax.tree.map(lambda x: x.reshape(-1, size, *x.shape[1:]), padded)
    logp, entropy = lax.map(chunk, split)
    return logp.reshape(-1)[:m], entropy.reshape(-1)[:m]


def score(
    params,
    cfg: ModelConfig,
    prompts: jax.Array,
    lengths: jax.Array,
    tokens: jax.Array,
    *,
    temperature: float = 1.0,
    remat: str = "dots",
    entropy_gradient: bool = True,
) -> Scores:
    """Score completions of one agent. params: one agent's, in the compute dtype; prompts [P, S]; lengths [P]; tokens [P, G, T].

    A temperature of 0 (greedy) is scored at temperature 1, as in the sampler. entropy_gradient=False saves a pass over the
    logits where the entropy is only looked at.
    """
    p, g, t = tokens.shape
    last = jnp.take_along_axis(prompts, lengths[:, None] - 1, 1)  # [P, 1]
    inputs = jnp.concatenate([jnp.broadcast_to(last[:, None], (p, g, 1)), tokens[..., :-1]], -1)

    hidden = decoder.groups(params, cfg, prompts, lengths - 1, inputs, remat)
    flat = token_scores(params, hidden.reshape(p * g * t, -1), tokens.reshape(-1), temperature or 1.0, entropy_gradient)
    return Scores(*(x.reshape(p, g, t) for x in flat))
