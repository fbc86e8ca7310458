"""Policy losses: arrays in, `(scalar, metrics)` out; they see no model, tokenizer or config.

All arrays are [P, G, T] of one agent, or [M] of any of its tokens where the loss does not look from one token to another (all
but ratios of level `sequence`); metrics have that shape too, averaged by the caller. An advantage is a token's; that of a whole
completion may have size 1 in the token axis. `weights` say how tokens are averaged (`token_weights`); they are made for the
whole batch, so that the losses of its parts add up to the batch's loss exactly.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def token_weights(mask: jax.Array, aggregation: str, valid: jax.Array | None = None, longest: int | None = None) -> jax.Array:
    """Weights w such that the loss is sum(w * token loss); 0 outside mask [P, G, T]. The rows that are valid [P, G]
    (None: all) count as sequences, also empty ones.

    token_mean: mean over all tokens (DAPO, arXiv 2503.14476) · sequence_mean: mean of each completion's mean (GRPO) ·
    sequence_sum: mean of each completion's sum (REINFORCE) · constant: sum over (rows · longest), where longest is what a
    completion may have (None: T), not what it has: Dr. GRPO (arXiv 2503.20783).
    """
    w = mask.astype(jnp.float32)
    rows = w[..., 0].size if valid is None else jnp.maximum(valid.sum(), 1)
    if aggregation == "token_mean":
        return w / jnp.maximum(w.sum(), 1)
    if aggregation == "sequence_mean":
        return w / jnp.maximum(w.sum(-1, keepdims=True), 1) / rows
    if aggregation == "sequence_sum":
        return w / rows
    return w / (rows * (longest or w.shape[-1]))


def policy_gradient(logp, old_logp, advantages, weights) -> tuple[jax.Array, dict]:
    """-sum w A log pi (REINFORCE); old_logp is not used."""
    del old_logp
    return -jnp.sum(weights * advantages * logp), {}


def clipped_surrogate(
    logp,
    old_logp,
    advantages,
    weights,
    *,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
    level: str = "token",
    dual: float = 0.0,
) -> tuple[jax.Array, dict]:
    """-sum w min(r A, clip(r, 1 - eps_low, 1 + eps_high) A), r = pi / pi_old (PPO, arXiv 1707.06347).

    level: `token`, or `sequence` (GSPO, arXiv 2507.18071: one ratio a completion, the geometric mean over its tokens); `turn`
    is the same, because a completion is one turn's.
    dual > 1: for A < 0 the loss is also bounded by dual · |A| (dual clip, arXiv 1912.09729); 0 is off.
    """
    mask = weights > 0
    log_ratio = jnp.where(mask, logp - old_logp, 0)
    if level != "token":
        mean = log_ratio.sum(-1, keepdims=True) / jnp.maximum(mask.sum(-1, keepdims=True), 1)
        # The value is the sequence's ratio; the gradient reaches every token with its share.
        log_ratio = jnp.broadcast_to(mean, log_ratio.shape)
    ratio, a = jnp.exp(log_ratio), advantages
    gain = jnp.minimum(ratio * a, jnp.clip(ratio, 1 - eps_low, 1 + eps_high) * a)
    if dual:
        gain = jnp.where(a < 0, jnp.maximum(gain, dual * a), gain)
    outside = ((ratio < 1 - eps_low) & (a < 0)) | ((ratio > 1 + eps_high) & (a > 0))
    return -jnp.sum(weights * gain), {"clip_share": outside & mask}


def cispo(logp, old_logp, advantages, weights, *, eps_low: float, eps_high: float) -> tuple[jax.Array, dict]:
    """-sum w sg(clip(r, 1 - eps_low, 1 + eps_high)) A log pi: the importance weight is clipped, no token's gradient is dropped
    (CISPO, arXiv 2506.13585). eps_low >= 1 is no lower bound."""
    mask = weights > 0
    ratio = jnp.exp(jnp.where(mask, logp - old_logp, 0))
    clipped = jax.lax.stop_gradient(jnp.clip(ratio, 1 - eps_low, 1 + eps_high))
    return -jnp.sum(weights * clipped * advantages * jnp.where(mask, logp, 0)), {"clip_share": (clipped != ratio) & mask}


def value_loss(values, targets, old, weights, *, clip: float = 0.0) -> tuple[jax.Array, dict]:
    """sum w (y - v)² (MSE where the weights are those of a mean); clip > 0: of the larger of it and (y - v_clip)², where v_clip
    is v kept within clip of the old value (PPO's code, arXiv 2005.12729). All arrays [P, G, T]."""
    mask = weights > 0
    error = (targets - values) ** 2
    metrics = {"value": values}
    if clip:
        kept = old + jnp.clip(values - old, -clip, clip)
        metrics["value_clip_share"] = (jnp.abs(values - old) > clip) & mask
        error = jnp.maximum(error, (targets - kept) ** 2)
    return jnp.sum(weights * jnp.where(mask, error, 0)), metrics


def preference(margins, weights, *, kind: str = "sigmoid", beta: float = 0.1, smoothing: float = 0.0) -> tuple[jax.Array, dict]:
    """sum w l(m) of margins m [P]: how much more of what was chosen than of what was rejected.

    sigmoid: -(1 - s) log sigma(beta m) - s log sigma(-beta m), s the share of labels that may be wrong: DPO (arXiv 2305.18290)
    where m is the log-ratio to the reference of the chosen completion minus that of the rejected one; Bradley-Terry where m is
    a difference of scores and beta 1. hinge: max(0, 1 - beta m) (SLiC, arXiv 2305.10425). ipo: (m - 1 / (2 beta))² (arXiv
    2310.12036), whose m is of mean log-probabilities a token, as in TRL.
    """
    if kind == "sigmoid":
        each = -(1 - smoothing) * jax.nn.log_sigmoid(beta * margins) - smoothing * jax.nn.log_sigmoid(-beta * margins)
    elif kind == "hinge":
        each = jnp.maximum(0, 1 - beta * margins)
    else:
        each = (margins - 1 / (2 * beta)) ** 2
    right = jnp.where(margins == 0, 0.5, margins > 0)  # a tie is decided by a coin
    return jnp.sum(weights * each), {"accuracy": right, "margin": margins}


def cross_entropy(logp, weights) -> tuple[jax.Array, dict]:
    """-sum w log pi of tokens (behaviour cloning; of what answers an agent: a world model)."""
    return -jnp.sum(weights * logp), {}


def kl_estimate(logp: jax.Array, ref_logp: jax.Array, kind: str) -> jax.Array:
    """Per-token estimate of KL(policy || reference), d = ref - policy: k1 = -d, k2 = d²/2, k3 = e^d - d - 1 (Schulman 2020,
    "Approximating KL divergence").

    What follows from them on samples of the policy is another matter than their means. Taken from a reward, k1 has the
    gradient of KL(policy || reference); k3 has that less the gradient of KL(reference || policy), next to nothing near the
    reference, and k2 as little. In a loss, k2 has the gradient of KL(policy || reference), k3 that of KL(reference || policy),
    and k1 none.
    """
    d = ref_logp - logp
    if kind == "k1":
        return -d
    if kind == "k2":
        return 0.5 * d * d
    return jnp.exp(d) - d - 1
