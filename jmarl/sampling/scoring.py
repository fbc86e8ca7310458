"""Log-probabilities of given completions, with gradients: the same decoder and the same prefix sharing as the sampler.

The prompt is computed once a group, also in the backward pass. Output logits exist for `CHUNK` tokens at a time, never for
[row, token, vocabulary] at once. The backward pass of `score` computes a chunk's logits again instead of keeping them;
`score_loss` takes the gradient of a chunk while it has them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

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


def _of_logits(z, targets, entropy, normaliser, of_logp, of_entropy, temperature: float) -> jax.Array:
    """Gradient by the logits [M, V] of a scalar whose gradients by log-probability and entropy are given.

    With p = softmax(z / T): d log p_y / dz_j = (1[j = y] - p_j) / T and dH / dz_j = -p_j (log p_j + H) / T. By hand, because
    autodiff keeps or repeats the reductions of the forward pass; this is one pass.
    """
    logs = (z - normaliser[:, None]) / temperature
    dz = -jnp.exp(logs) * (of_logp[:, None] + of_entropy[:, None] * (logs + entropy[:, None]))
    return jnp.where(jnp.arange(z.shape[-1]) == targets[:, None], dz + of_logp[:, None], dz) / temperature


def _float32_zeros(head) -> Any:
    return jax.tree.map(lambda w: jnp.zeros(w.shape, jnp.float32), head)  # a sum of many chunks, also of bfloat16


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
    head, *saved = saved

    def chunk(of_head, inputs):
        x, target, entropy, normaliser, of_logp, of_entropy = inputs
        z, pull = jax.vjp(decoder.logits, head, x)
        of_chunk, of_x = pull(_of_logits(z, target, entropy, normaliser, of_logp, of_entropy, temperature))
        return jax.tree.map(jnp.add, of_head, of_chunk), of_x

    of_head, of_hidden = lax.scan(chunk, _float32_zeros(head), (*saved, *cotangents))
    return jax.tree.map(lambda g, w: g.astype(w.dtype), of_head, head), of_hidden, None


_chunked.defvjp(_chunked_forward, _chunked_backward)


TokenLoss = Callable[[jax.Array, jax.Array, Any], tuple[jax.Array, dict]]


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _summed(head, hidden: jax.Array, targets: jax.Array, data: Any, loss: TokenLoss, temperature: float):
    """Sum over chunks of `loss` and its metrics; data: leaves [C, M]. Arguments otherwise as for `_chunked`."""
    return _summed_forward(head, hidden, targets, data, loss, temperature)[0]


def _summed_forward(head, hidden, targets, data, loss, temperature):
    """The gradients are made here, where the logits are at hand, and only scaled in the backward pass (as Liger's fused
    cross-entropy does, arXiv 2410.10989)."""

    def chunk(of_head, inputs):
        x, target, data = inputs
        z, pull = jax.vjp(decoder.logits, head, x)
        logp, entropy, normaliser = _statistics(z, target, temperature)
        out, (of_logp, of_entropy) = jax.value_and_grad(loss, (0, 1), has_aux=True)(logp, entropy, data)
        of_chunk, of_x = pull(_of_logits(z, target, entropy, normaliser, of_logp, of_entropy, temperature))
        return jax.tree.map(jnp.add, of_head, of_chunk), (out, of_x)

    of_head, (out, of_hidden) = lax.scan(chunk, _float32_zeros(head), (hidden, targets, data))
    of_head = jax.tree.map(lambda g, w: g.astype(w.dtype), of_head, head)
    return jax.tree.map(lambda x: x.sum(0), out), (of_head, of_hidden)


def _summed_backward(loss, temperature, saved, cotangents):
    of_head, of_hidden = jax.tree.map(lambda g: g * cotangents[0].astype(g.dtype), saved)
    return of_head, of_hidden, None, None


_summed.defvjp(_summed_forward, _summed_backward)


def _chunks(x: jax.Array) -> jax.Array:
    """x [M, ...] as [C, M / C, ...] with zeros behind; equal chunks, so that the padding is less than one token a chunk."""
    m = x.shape[0]
    size = -(-m // -(-m // CHUNK))
    return jnp.pad(x, ((0, -m % size),) + ((0, 0),) * (x.ndim - 1)).reshape(-1, size, *x.shape[1:])


def token_scores(params, hidden: jax.Array, targets: jax.Array, temperature: float):
    """Log-probability and entropy [M] of targets [M] under the distribution of hidden states [M, D]."""
    scores = _chunked(decoder.output_weight(params), _chunks(hidden), _chunks(targets), temperature)
    return jax.tree.map(lambda x: x.reshape(-1)[: targets.shape[0]], scores)


def hidden_states(params, cfg: ModelConfig, prompts, lengths, tokens, remat: str) -> jax.Array:
    """The final hidden states [P * G * T, D] from which tokens [P, G, T] are predicted."""
    p, g, t = tokens.shape
    last = jnp.take_along_axis(prompts, lengths[:, None] - 1, 1)  # [P, 1]
    inputs = jnp.concatenate([jnp.broadcast_to(last[:, None], (p, g, 1)), tokens[..., :-1]], -1)
    return decoder.hidden_states(params, cfg, prompts, lengths - 1, inputs, remat).reshape(p * g * t, -1)


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
    hidden = hidden_states(params, cfg, prompts, lengths, tokens, remat)
    flat = token_scores(params, hidden, tokens.reshape(-1), temperature or 1.0)
    return Scores(*(x.reshape(tokens.shape) for x in flat))


def score_loss(
    params, hidden: jax.Array, tokens: jax.Array, data: Any, loss: TokenLoss, *, temperature: float = 1.0
) -> tuple[jax.Array, dict]:
    """A loss that is a sum over tokens, and its metrics, from the scores of tokens [P, G, T] under their `hidden_states`. Its
    gradient computes the logits once; through `token_scores` they are computed twice (a fifteenth of an update at SmolLM2's
    size, more with larger vocabularies).

    loss: log-probabilities [M], entropies [M] and data of M tokens -> their part of the loss and of each metric, scalars; must
    not look from one token to another. data: pytree with leaves [P, G, T]. Padding is made of tokens whose data are all 0 or
    false: their loss and metrics must be 0. Only the loss has a gradient, and only by hidden states and parameters.
    """
    data = jax.tree.map(lambda x: _chunks(x.reshape(-1)), data)
    targets = _chunks(tokens.reshape(-1))
    summed: Any = _summed(decoder.output_weight(params), _chunks(hidden), targets, data, loss, temperature)
    return summed[0], lax.stop_gradient(summed[1])
