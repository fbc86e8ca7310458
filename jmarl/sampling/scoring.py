"""Log-probabilities of given completions, with gradients. Decoder and prefix sharing are those of the sampler.

Each prompt is computed once for its group, also in the backward pass. Output logits exist for `CHUNK` tokens at a time, never
for all tokens. The backward pass of `score` recomputes the logits of a chunk instead of storing them; `score_loss` computes the
gradient of a chunk while its logits are in memory.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Shaped

from jmarl.models import decoder
from jmarl.models.config import ModelConfig
from jmarl.models.decoder import Params
from jmarl.models.layers.experts import Load

CHUNK = {"float32": 512, "bfloat16": 1024}  # tokens whose logits [CHUNK, V] are in memory together, by compute dtype: each
# chunk adds to a gradient [V, D] in float32, which in bfloat16 on a GPU takes longer than to compute it

HostOrDevice = np.ndarray | Array
Logits = Float[Array, "token vocab"]
PerToken = Float[Array, " token"]
HiddenChunks = Float[Array, "chunk token hidden"]
TargetChunks = Int[Array, "chunk token"]
ScoreChunks = tuple[Float[Array, "chunk token"], Float[Array, "chunk token"]]
LossAndMetrics = tuple[Float[Array, ""], dict[str, Array]]
TokenLoss = Callable[[Array, Array, Any], LossAndMetrics]  # see `score_loss`


class Scores(NamedTuple):
    """Scores of the completions of one agent at the sampling temperature."""

    logprobs: Float[Array, "prompt group token"]
    entropy: Float[Array, "prompt group token"]  # of the next-token distribution, in nats


def _token_statistics(logits: Logits, targets: Int[Array, " token"], temperature: float) -> tuple[PerToken, PerToken, PerToken]:
    """Return the log-probability of each target, the entropy of its distribution, and the normalizer T log sum_j exp(z_j / T)
    of its logits z."""
    top = logits.max(-1)
    weights = jnp.exp((logits - top[:, None]) / temperature)
    total = weights.sum(-1)
    normalizer = top + temperature * jnp.log(total)
    target_logits = jnp.take_along_axis(logits, targets[:, None], -1)[:, 0]
    mean = jnp.sum(weights * (logits - top[:, None]), -1) / total
    return (target_logits - normalizer) / temperature, jnp.log(total) - mean / temperature, normalizer


def _logits_gradient(
    logits: Logits, targets: Array, entropy: PerToken, normalizer: PerToken, cotangents: Sequence[PerToken], temperature: float
) -> Logits:
    """Return the gradient of a scalar with respect to the logits.

    With p = softmax(z / T): d log p_y / dz_j = (1[j = y] - p_j) / T and dH / dz_j = -p_j (log p_j + H) / T. Written by hand,
    because autodiff stores or repeats the reductions of the forward pass; this is one pass.

    Args:
        logits: logits z.
        targets: target y of each token.
        entropy: entropy H of each distribution.
        normalizer: see `_token_statistics`.
        cotangents: gradient of the scalar with respect to log-probabilities and entropies.
        temperature: T.
    """
    d_logprobs, d_entropy = cotangents
    logs = (logits - normalizer[:, None]) / temperature
    dz = -jnp.exp(logs) * (d_logprobs[:, None] + d_entropy[:, None] * (logs + entropy[:, None]))
    return jnp.where(jnp.arange(logits.shape[-1]) == targets[:, None], dz + d_logprobs[:, None], dz) / temperature


def _float32_zeros(head: Params) -> Params:
    """Return zeros for the sum of the gradients of many chunks, in float32 also for bfloat16 parameters."""
    return jax.tree.map(lambda w: jnp.zeros(w.shape, jnp.float32), head)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _score_chunks(
    head: Params, hidden: HiddenChunks, targets: TargetChunks, temperature: float, cap: float | None
) -> ScoreChunks:
    """Return log-probabilities and entropies of targets under hidden states, one chunk at a time. cap: of the logits."""
    return _score_chunks_forward(head, hidden, targets, temperature, cap)[0]


def _score_chunks_forward(
    head: Params, hidden: Array, targets: Array, temperature: float, cap: float | None
) -> tuple[ScoreChunks, Any]:
    def score_chunk(inputs: tuple[Array, Array]) -> tuple[Array, Array, Array]:
        return _token_statistics(decoder.logits(head, inputs[0], cap), inputs[1], temperature)

    logprobs, entropy, normalizer = lax.map(score_chunk, (hidden, targets))
    return (logprobs, entropy), (head, hidden, targets, entropy, normalizer)


def _score_chunks_backward(
    temperature: float, cap: float | None, saved: Any, cotangents: ScoreChunks
) -> tuple[Params, Array, None]:
    head, *saved = saved

    def chunk_gradient(d_head: Params, inputs: tuple[Any, ...]) -> tuple[Params, Array]:
        hidden, targets, entropy, normalizer, *cotangents = inputs
        logits = decoder.logits(head, hidden, cap)
        d_logits = _logits_gradient(logits, targets, entropy, normalizer, cotangents, temperature)
        d_chunk_head, d_hidden = decoder.logits_gradients(head, hidden, d_logits, logits, cap)
        return jax.tree.map(jnp.add, d_head, d_chunk_head), d_hidden

    d_head, d_hidden = lax.scan(chunk_gradient, _float32_zeros(head), (*saved, *cotangents))
    return jax.tree.map(lambda g, w: g.astype(w.dtype), d_head, head), d_hidden, None


_score_chunks.defvjp(_score_chunks_forward, _score_chunks_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def _sum_loss(
    head: Params, hidden: HiddenChunks, targets: TargetChunks, data: Any, loss: TokenLoss, temperature: float, cap: float | None
) -> LossAndMetrics:
    """Return the sums over chunks of the loss and of its metrics. data: leaves [C, M]. Otherwise as `_score_chunks`."""
    return _sum_loss_forward(head, hidden, targets, data, loss, temperature, cap)[0]


def _sum_loss_forward(
    head: Params, hidden: Array, targets: Array, data: Any, loss: TokenLoss, temperature: float, cap: float | None
) -> tuple[LossAndMetrics, Any]:
    """Compute the gradients too, while the logits are in memory; the backward pass only scales them (as Liger's fused
    cross-entropy, arXiv 2410.10989)."""

    def chunk_loss(d_head: Params, inputs: tuple[Array, Array, Any]) -> tuple[Params, Any]:
        hidden, targets, data = inputs
        logits = decoder.logits(head, hidden, cap)
        logprobs, entropy, normalizer = _token_statistics(logits, targets, temperature)
        result, cotangents = jax.value_and_grad(loss, (0, 1), has_aux=True)(logprobs, entropy, data)
        d_logits = _logits_gradient(logits, targets, entropy, normalizer, cotangents, temperature)
        d_chunk_head, d_hidden = decoder.logits_gradients(head, hidden, d_logits, logits, cap)
        return jax.tree.map(jnp.add, d_head, d_chunk_head), (result, d_hidden)

    d_head, (results, d_hidden) = lax.scan(chunk_loss, _float32_zeros(head), (hidden, targets, data))
    d_head = jax.tree.map(lambda g, w: g.astype(w.dtype), d_head, head)
    return jax.tree.map(lambda x: x.sum(0), results), (d_head, d_hidden)


def _sum_loss_backward(
    loss: TokenLoss, temperature: float, cap: float | None, saved: Any, cotangents: Any
) -> tuple[Params, Array, None, None]:
    d_head, d_hidden = jax.tree.map(lambda g: g * cotangents[0].astype(g.dtype), saved)
    return d_head, d_hidden, None, None


_sum_loss.defvjp(_sum_loss_forward, _sum_loss_backward)


def _split_chunks(x: Shaped[Array, "token ..."], chunk: int) -> Shaped[Array, "chunk chunk_token ..."]:
    """Split an array into chunks of equal size of at most `chunk`, padded with zeros by less than one token per chunk."""
    m = x.shape[0]
    size = -(-m // -(-m // chunk))
    return jnp.pad(x, ((0, -m % size),) + ((0, 0),) * (x.ndim - 1)).reshape(-1, size, *x.shape[1:])


def token_scores(
    params: Params,
    hidden: Float[Array, "token hidden"],
    targets: Int[Array, " token"],
    temperature: float,
    cap: float | None = None,
) -> tuple[PerToken, PerToken]:
    """Return the log-probability of each target, and the entropy of the distribution that its hidden state predicts.

    cap: `ModelConfig.logit_cap`."""
    chunk = CHUNK[hidden.dtype.name]
    chunks = _split_chunks(hidden, chunk), _split_chunks(targets, chunk)
    scores = _score_chunks(decoder.output_weight(params), *chunks, temperature, cap)
    return jax.tree.map(lambda x: x.reshape(-1)[: targets.shape[0]], scores)


def hidden_states(
    params: Params,
    cfg: ModelConfig,
    prompts: Int[HostOrDevice, "prompt prompt_token"],
    lengths: Int[HostOrDevice, " prompt"],
    tokens: Int[HostOrDevice, "prompt group token"],
    remat: str,
    counted: Bool[Array, "prompt group token"] | None = None,
) -> tuple[Float[Array, "prompt_group_token hidden"], Load | None]:
    """Return the final hidden states [P * G * T, D] from which the tokens of completions are predicted, and the experts' load.

    Args:
        params: parameters of one agent in the compute dtype.
        cfg: architecture.
        prompts: token ids, padded on the right.
        lengths: lengths of the prompts.
        tokens: token ids of the completions.
        remat: what the backward pass stores, see `decoder.REMAT`.
        counted: the tokens that count in the load of experts, beside those of prompts. None: there is no load.
    """
    prompts, lengths, tokens = map(jnp.asarray, (prompts, lengths, tokens))
    p, g, t = tokens.shape
    last = jnp.take_along_axis(prompts, lengths[:, None] - 1, 1)  # [P, 1]
    inputs = jnp.concatenate([jnp.broadcast_to(last[:, None], (p, g, 1)), tokens[..., :-1]], -1)
    if counted is not None:
        of_prompts = jnp.arange(prompts.shape[1]) < lengths[:, None] - 1
        counted = jnp.concatenate([of_prompts, counted.reshape(p, g * t)], 1)
    hidden, load = decoder.completion_states(params, cfg, prompts, lengths - 1, inputs, remat, counted)
    return hidden.reshape(p * g * t, -1), load


def score(
    params: Params,
    cfg: ModelConfig,
    prompts: Int[HostOrDevice, "prompt prompt_token"],
    lengths: Int[HostOrDevice, " prompt"],
    tokens: Int[HostOrDevice, "prompt group token"],
    *,
    temperature: float = 1.0,
    remat: str = "dots",
) -> Scores:
    """Score the completions of one agent.

    Arguments as for `hidden_states`. A temperature of 0 (greedy) counts as 1, as in the sampler.
    """
    hidden, _ = hidden_states(params, cfg, prompts, lengths, tokens, remat)
    flat = token_scores(params, hidden, jnp.asarray(tokens).reshape(-1), temperature or 1.0, cfg.logit_cap)
    return Scores(*(x.reshape(tokens.shape) for x in flat))


def score_loss(
    params: Params,
    hidden: Float[Array, "prompt_group_token hidden"],
    tokens: Int[Array, "prompt group token"],
    data: Any,
    loss: TokenLoss,
    *,
    temperature: float = 1.0,
    cap: float | None = None,
) -> LossAndMetrics:
    """Return a loss that is a sum over tokens, and its metrics. Its gradient computes the logits once.

    Through `token_scores` they would be computed twice, which costs a fifteenth of an update at the size of SmolLM2-135M, and
    more with larger vocabularies.

    Args:
        params: parameters of one agent in the compute dtype.
        hidden: the `hidden_states` of the tokens.
        tokens: token ids of the completions.
        data: pytree with leaves [P, G, T] that the loss reads.
        loss: function of log-probabilities [M], entropies [M] and data [M] of some tokens. Returns their part of the loss and
            of each metric, scalars. Tokens must not depend on each other. Padding tokens have data 0 or false; their loss and
            metrics must be 0.
        temperature: the sampling temperature.
        cap: `ModelConfig.logit_cap`.

    Returns:
        The loss and its metrics. Only the loss has a gradient, and only with respect to parameters and hidden states.
    """
    chunk = CHUNK[hidden.dtype.name]
    data = jax.tree.map(lambda x: _split_chunks(x.reshape(-1), chunk), data)
    chunks = _split_chunks(hidden, chunk), _split_chunks(tokens.reshape(-1), chunk)
    result: Any = _sum_loss(decoder.output_weight(params), *chunks, data, loss, temperature, cap)
    return result[0], lax.stop_gradient(result[1])
