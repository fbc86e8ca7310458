"""Log-probabilities of given completions, with gradients: the same decoder and the same prefix sharing as the sampler.

The prompt is computed once a group, also in the backward pass. Output logits exist for `CHUNK` tokens at a time, never for
[row, token, vocabulary] at once; the backward pass computes a chunk's logits again instead of keeping them.
"""

from __future__ import annotations

import functools
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


def _statistics(z: jax.Array, targets: jax.Array, temperature: float):
    """Of logits [M, V]: log-probability and entropy [M] at the temperature, and the normaliser T log sum_j exp(z_j / T)."""
    top = z.max(-1)
    weights = jnp.exp((z - top[:, None]) / temperature)
    total = weights.sum(-1)
    normaliser = top + temperature * jnp.log(total)
    picked = jnp.take_along_axis(z, targets[:, None], -1)[:, 0]
    mean = jnp.sum(weights * (z - top[:, None]), -1) / total
    return (picked - normaliser) / temperature, jnp.log(total) - mean / temperature, normaliser


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _chunked(head, hidden: jax.Array, targets: jax.Array, temperature: float):
    """Log-probability and entropy [C, M] of targets [C, M] under hidden states [C, M, D], one chunk at a time."""
    return _chunked_forward(head, hidden, targets, temperature)[0]


def _chunked_forward(head, hidden, targets, temperature):
    def chunk(inputs):
        return _statistics(decoder.logits(head, inputs[0]), inputs[1], temperature)

    logp, entropy, normaliser = lax.map(chunk, (hidden, targets))
    return (logp, entropy), (head, hidden, targets, entropy, normaliser)


def _chunked_backward(temperature, saved, cotangents):
    """With p = softmax(z / T): d log p_y / dz_j = (1[j = y] - p_j) / T and dH / dz_j = -p_j (log p_j + H) / T.

    Written by hand because autodiff keeps or repeats the reductions of the forward pass: here the logits are computed
    again, everything after them is one pass, and the gradient of the head is summed in float32.
    """
    head, *saved = saved

    def chunk(of_head, inputs):
        x, target, entropy, normaliser, of_logp, of_entropy = inputs
        z, pull = jax.vjp(decoder.logits, head, x)
        logs = (z - normaliser[:, None]) / temperature
        dz = -jnp.exp(logs) * (of_logp[:, None] + of_entropy[:, None] * (logs + entropy[:, None]))
        dz = jnp.where(jnp.arange(z.shape[-1]) == target[:, None], dz + of_logp[:, None], dz) / temperature
        of_chunk, of_x = pull(dz)
        return jax.tree.map(jnp.add, of_head, of_chunk), of_x

    zeros = jax.tree.map(lambda w: jnp.zeros(w.shape, jnp.float32), head)
    of_head, of_hidden = lax.scan(chunk, zeros, (*saved, *cotangents))
    return jax.tree.map(lambda g, w: g.astype(w.dtype), of_head, head), of_hidden, None


_chunked.defvjp(_chunked_forward, _chunked_backward)


def token_scores(params, hidden: jax.Array, targets: jax.Array, temperature: float):
    """Log-probability and entropy [M] of targets [M] under the distribution of hidden states [M, D]."""
    m = targets.shape[0]
    size = -(-m // -(-m // CHUNK))  # equal chunks: the padding is less than one token a chunk

    def chunks(x):
        return jnp.pad(x, ((0, -m % size),) + ((0, 0),) * (x.ndim - 1)).reshape(-1, size, *x.shape[1:])

    scores = _chunked(decoder.head(params), chunks(hidden), chunks(targets), temperature)
    return jax.tree.map(lambda x: x.reshape(-1)[:m], scores)


def score(
    params,
    cfg: ModelConfig,
    prompts: jax.Array,
    lengths: jax.Array,
    tokens: jax.Array,
    *,
    temperature: float = 1.0,
    remat: str = "dots",
) -> Scores:
    """Score completions of one agent. params: one agent's, in the compute dtype; prompts [P, S]; lengths [P]; tokens [P, G, T].

    A temperature of 0 (greedy) is scored at temperature 1, as in the sampler."""
    p, g, t = tokens.shape
    last = jnp.take_along_axis(prompts, lengths[:, None] - 1, 1)  # [P, 1]
    inputs = jnp.concatenate([jnp.broadcast_to(last[:, None], (p, g, 1)), tokens[..., :-1]], -1)

    hidden = decoder.groups(params, cfg, prompts, lengths - 1, inputs, remat)
    flat = token_scores(params, hidden.reshape(p * g * t, -1), tokens.reshape(-1), temperature or 1.0)
    return Scores(*(x.reshape(p, g, t) for x in flat))
