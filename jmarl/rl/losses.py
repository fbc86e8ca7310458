"""Losses of tokens and pairs: arrays in, `(scalar, metrics)` out.

Arrays are [P, G, T] of one agent. Losses that treat every token alone (all except ratios of level `sequence`) also take any
tokens [M]. Metrics have the shape of the tokens; the caller averages them. The advantage of a whole completion may have size 1
on the token axis. `weights` say how tokens are averaged (`token_weights`). They are computed for the whole batch, so that the
losses of its parts add up to the loss of the batch.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

Tokens = Float[Array, "*tokens"]
BroadcastTokens = Float[Array, "*#tokens"]
Pairs = Float[Array, " pair"]
Result = tuple[Float[Array, ""], dict[str, Array]]  # the loss and its metrics


def token_weights(
    mask: Bool[Array, "prompt group token"],
    aggregation: str,
    valid: Bool[Array, "prompt group"] | None = None,
    max_length: int | None = None,
) -> Float[Array, "prompt group token"]:
    """Return weights w such that the loss is sum(w * token loss).

    Args:
        mask: tokens that are trained. The weight of the others is 0.
        aggregation: `token_mean`, the mean over all tokens (DAPO, arXiv 2503.14476); `sequence_mean`, the mean over completions
            of each mean over tokens (GRPO, arXiv 2402.03300); `sequence_sum`, the mean over completions of each sum
            (REINFORCE); `constant`, the sum over all tokens divided by completions * max_length (Dr. GRPO, arXiv 2503.20783).
        valid: completions that are counted, even if empty. None: all.
        max_length: maximum length of a completion, not the length of the longest one. None: T.
    """
    w = mask.astype(jnp.float32)
    rows = w[..., 0].size if valid is None else jnp.maximum(valid.sum(), 1)
    if aggregation == "token_mean":
        return w / jnp.maximum(w.sum(), 1)
    if aggregation == "sequence_mean":
        return w / jnp.maximum(w.sum(-1, keepdims=True), 1) / rows
    if aggregation == "sequence_sum":
        return w / rows
    return w / (rows * (max_length or w.shape[-1]))


def policy_gradient(logprobs: Tokens, old_logprobs: Tokens, advantages: BroadcastTokens, weights: Tokens) -> Result:
    """Return -sum w A log pi (REINFORCE, Williams 1992). The log-probabilities of the behavior policy are not used."""
    del old_logprobs
    return -jnp.sum(weights * advantages * logprobs), {}


def clipped_surrogate(
    logprobs: Tokens,
    old_logprobs: Tokens,
    advantages: BroadcastTokens,
    weights: Tokens,
    *,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
    level: str = "token",
    dual: float = 0.0,
) -> Result:
    """Return -sum w min(r A, clip(r, 1 - eps_low, 1 + eps_high) A) with r = pi / pi_old (PPO, arXiv 1707.06347).

    Args:
        logprobs: log-probabilities of the policy.
        old_logprobs: log-probabilities of the behavior policy.
        advantages: advantage of each token, or of each completion.
        weights: weight of each token in the loss.
        eps_low: lower clipping range.
        eps_high: upper clipping range.
        level: `token`: one ratio per token; `sequence`: one per completion, the geometric mean over its tokens (GSPO, arXiv
            2507.18071); `turn`: the same as `sequence`, because a completion is one turn.
        dual: if above 1, the loss is at most dual * |A| where A < 0 (dual clip, arXiv 1912.09729). 0: off.

    Returns:
        The loss, and the metric `clip_share`: tokens whose ratio is clipped.
    """
    mask = weights > 0
    log_ratio = jnp.where(mask, logprobs - old_logprobs, 0)
    if level != "token":
        mean = log_ratio.sum(-1, keepdims=True) / jnp.maximum(mask.sum(-1, keepdims=True), 1)
        log_ratio = jnp.broadcast_to(mean, log_ratio.shape)
    ratio = jnp.exp(log_ratio)
    gain = jnp.minimum(ratio * advantages, jnp.clip(ratio, 1 - eps_low, 1 + eps_high) * advantages)
    if dual:
        gain = jnp.where(advantages < 0, jnp.maximum(gain, dual * advantages), gain)
    outside = ((ratio < 1 - eps_low) & (advantages < 0)) | ((ratio > 1 + eps_high) & (advantages > 0))
    return -jnp.sum(weights * gain), {"clip_share": outside & mask}


def cispo(
    logprobs: Tokens, old_logprobs: Tokens, advantages: BroadcastTokens, weights: Tokens, *, eps_low: float, eps_high: float
) -> Result:
    """Return -sum w sg(clip(r, 1 - eps_low, 1 + eps_high)) A log pi (CISPO, arXiv 2506.13585), sg: stop gradient.

    The importance weight is clipped, but no token loses its gradient. eps_low >= 1 means no lower bound. Arguments and metric
    as for `clipped_surrogate`.
    """
    mask = weights > 0
    ratio = jnp.exp(jnp.where(mask, logprobs - old_logprobs, 0))
    clipped = jax.lax.stop_gradient(jnp.clip(ratio, 1 - eps_low, 1 + eps_high))
    loss = -jnp.sum(weights * clipped * advantages * jnp.where(mask, logprobs, 0))
    return loss, {"clip_share": (clipped != ratio) & mask}


def value_loss(values: Tokens, targets: Tokens, old_values: Tokens, weights: Tokens, *, clip: float = 0.0) -> Result:
    """Return sum w (y - v)², or sum w max((y - v)², (y - v_clip)²) if clip > 0 (as in PPO's code, arXiv 2005.12729).

    Args:
        values: values v of the critic.
        targets: targets y.
        old_values: values before the update.
        weights: weight of each token in the loss.
        clip: v_clip differs from the old value by at most clip. 0: off.

    Returns:
        The loss, and the metrics `value` and, with clipping, `value_clip_share`.
    """
    mask = weights > 0
    error = (targets - values) ** 2
    metrics = {"value": values}
    if clip:
        clipped = old_values + jnp.clip(values - old_values, -clip, clip)
        metrics["value_clip_share"] = (jnp.abs(values - old_values) > clip) & mask
        error = jnp.maximum(error, (targets - clipped) ** 2)
    return jnp.sum(weights * jnp.where(mask, error, 0)), metrics


def preference(margins: Pairs, weights: Pairs, *, kind: str = "sigmoid", beta: float = 0.1, smoothing: float = 0.0) -> Result:
    """Return sum w l(m), the loss of preferring the chosen completion of each pair to the rejected one.

    sigmoid: l = -(1 - s) log sigma(beta m) - s log sigma(-beta m). This is DPO (arXiv 2305.18290) if m is the log-ratio to the
    reference of the chosen completion minus that of the rejected one, and Bradley-Terry if m is a difference of scores and
    beta = 1. hinge: l = max(0, 1 - beta m) (SLiC, arXiv 2305.10425). ipo: l = (m - 1 / (2 beta))² (arXiv 2310.12036), with m
    from mean log-probabilities per token, as in TRL.

    Args:
        margins: margin m of each pair.
        weights: weight of each pair.
        kind: `sigmoid`, `hinge` or `ipo`.
        beta: scale of the margin.
        smoothing: s, the assumed share of wrong labels; read by `sigmoid`.

    Returns:
        The loss, and the metrics `accuracy` (0.5 if the margin is 0) and `margin`, which is not times beta as TRL's
        `rewards/margins`.
    """
    if kind == "sigmoid":
        pair_losses = -(1 - smoothing) * jax.nn.log_sigmoid(beta * margins) - smoothing * jax.nn.log_sigmoid(-beta * margins)
    elif kind == "hinge":
        pair_losses = jnp.maximum(0, 1 - beta * margins)
    else:
        pair_losses = (margins - 1 / (2 * beta)) ** 2
    accuracy = jnp.where(margins == 0, 0.5, margins > 0)
    return jnp.sum(weights * pair_losses), {"accuracy": accuracy, "margin": margins}


def cross_entropy(logprobs: Tokens, weights: Tokens) -> Result:
    """Return -sum w log pi. On an agent's own tokens this is behavior cloning; on the answers that it gets, a world model."""
    return -jnp.sum(weights * logprobs), {}


def kl_estimate(logprobs: Tokens, ref_logprobs: Tokens, kind: str) -> Tokens:
    """Estimate KL(policy || reference) per token ("Approximating KL divergence", Schulman 2020).

    With d = ref - policy: k1 = -d, k2 = d² / 2, k3 = e^d - d - 1.

    The expected gradient depends on where the estimate is used. Subtracted from the reward, k1 gives the gradient of
    KL(policy || reference). k3 gives that minus the gradient of KL(reference || policy), which is almost 0 near the reference;
    k2 also gives almost 0 there. As a term of the loss, k2 gives the gradient of KL(policy || reference), k3 that of
    KL(reference || policy), and k1 gives 0.

    Args:
        logprobs: log-probabilities of the policy for the sampled tokens.
        ref_logprobs: log-probabilities of the reference for the same tokens.
        kind: `k1`, `k2` or `k3`.
    """
    d = ref_logprobs - logprobs
    if kind == "k1":
        return -d
    if kind == "k2":
        return 0.5 * d * d
    return jnp.exp(d) - d - 1
