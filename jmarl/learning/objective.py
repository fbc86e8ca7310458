"""The loss of one agent on a batch of rollouts, pairs or texts.

`make_loss_inputs` turns a batch into what the loss needs of every token: advantages, weights, targets of values.
`loss_of_inputs` runs the model on them. The first is computed once per batch, the second once per micro-batch; losses and
metrics of micro-batches add up to those of the batch. All functions are for one agent; `update` lifts them to a stack."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key, Shaped

from jmarl.algorithms import Algorithm
from jmarl.learning.data_objective import (
    PairTargets,
    TextTargets,
    make_pair_targets,
    make_text_targets,
    pairs_loss,
    texts_loss,
)
from jmarl.learning.targets import (
    ActorCriticTargets,
    Metrics,
    PerToken,
    PolicyTargets,
    ValueTargets,
    make_policy_targets,
    make_value_targets,
)
from jmarl.models import decoder, lora
from jmarl.models.config import ModelConfig
from jmarl.models.heads import values_of
from jmarl.rl import losses, masked
from jmarl.sampling.scoring import hidden_states, score_loss, token_scores
from jmarl.types import Data, PreferenceBatch, Running, TextBatch

Targets = PolicyTargets | ValueTargets | ActorCriticTargets | PairTargets | TextTargets


class LossInputs(NamedTuple):
    """A batch of one agent with everything that its loss needs."""

    prompts: Int[Array, "prompt prompt_token"]
    prompt_lengths: Int[Array, " prompt"]
    tokens: Int[Array, "prompt group token"]
    targets: Targets | None  # None: they are made from values of the same pass (`values_to_targets`)
    dropout: Key[Array, ""] | None = None  # where adapters have dropout

    @property
    def trained_tokens(self) -> Bool[Array, "..."]:
        """Return which tokens of rollouts are trained."""
        assert isinstance(self.targets, PolicyTargets | ValueTargets | ActorCriticTargets)
        return self.targets.policy.mask if isinstance(self.targets, ActorCriticTargets) else self.targets.mask


def split_inputs(inputs: LossInputs, n: int, setting: str = "micro_batches") -> LossInputs:
    """Split inputs into n parts, leaves [n, ...]: over the prompts first, then over the group.

    Every n-th prompt goes into a part, so that turns, roles and padding are spread over all parts. Several turns may give any
    number of prompts; missing ones are padded with weight 0. setting: named in the error where n does not divide the batch."""
    keys = None if inputs.dropout is None else jax.random.split(inputs.dropout, n)
    inputs = inputs._replace(dropout=None)
    prompts, group, _ = inputs.tokens.shape
    in_pairs = isinstance(inputs.targets, PairTargets)  # a pair stays together
    group = 1 if in_pairs else group
    if prompts > n and prompts % n and prompts * group % n:
        padding = -prompts % n
        inputs = jax.tree.map(lambda x: jnp.pad(x, ((0, padding),) + ((0, 0),) * (x.ndim - 1)), inputs)
        inputs, prompts = inputs._replace(prompt_lengths=jnp.maximum(inputs.prompt_lengths, 1)), prompts + padding
    over_prompts = next(k for k in range(min(n, prompts), 0, -1) if n % k == 0 and prompts % k == 0)
    over_group = n // over_prompts
    if group % over_group:
        if in_pairs or isinstance(inputs.targets, TextTargets):
            raise ValueError(f"{setting}={n} is more than the {prompts} pairs or texts of an update: use at most batch_size")
        raise ValueError(
            f"{setting}={n} does not divide {prompts} prompts of {group} completions evenly: use a divisor of {prompts}, or "
            f"that times a divisor of {group}; they follow from num_prompts, num_generations and num_minibatches"
        )

    def cut(x: Shaped[Array, "prompt group ..."]) -> Shaped[Array, "part part_prompt part_group ..."]:
        x = x.reshape(prompts // over_prompts, over_prompts, over_group, group // over_group, *x.shape[2:])
        return jnp.moveaxis(x, (1, 2), (0, 1)).reshape(n, x.shape[0], *x.shape[3:])

    def repeat(x: Shaped[Array, "prompt ..."]) -> Shaped[Array, "part part_prompt ..."]:  # parts of a group share their prompt
        by_part = jnp.swapaxes(x.reshape(prompts // over_prompts, over_prompts, *x.shape[1:]), 0, 1)
        return jnp.repeat(by_part, over_group, 0)

    tokens, targets = jax.tree.map(repeat if in_pairs else cut, (inputs.tokens, inputs.targets))
    return LossInputs(repeat(inputs.prompts), repeat(inputs.prompt_lengths), tokens, targets, keys)


def make_loss_inputs(
    reference: Any,
    running: Running,
    batch: Data,
    params: Any,
    *,
    model: ModelConfig,
    algorithm: Algorithm,
    trains: str = "policy",
) -> tuple[LossInputs, Metrics]:
    """Return everything that the loss of one agent's batch needs, and metrics of the batch.

    running: statistics that include this batch's returns; params: the agent before the update, read only where its
    log-probabilities are computed again; trains: `policy`, `values` (a critic) or `both`."""
    targets: Targets
    metrics: Metrics = {}
    if isinstance(batch, PreferenceBatch):
        targets = make_pair_targets(batch, algorithm)
    elif isinstance(batch, TextBatch):
        targets = make_text_targets(batch)
    else:
        policy = values = None
        if trains != "values":
            policy, metrics = make_policy_targets(reference, running, batch, params, model, algorithm)
        if trains != "policy":
            values, value_metrics = make_value_targets(batch, algorithm)
            metrics |= value_metrics
        if policy is not None and values is not None:
            targets = ActorCriticTargets(policy, values)
        else:
            targets = policy if policy is not None else values  # type: ignore[assignment]  # one of them is made
    dropout = batch.keys if algorithm.lora.lora_dropout else None
    return LossInputs(batch.prompts, batch.prompt_lengths, batch.tokens, targets, dropout), metrics


ValuesToTargets = Callable[[PerToken], tuple[LossInputs, Metrics]]


def loss_of_inputs(
    params: Any,
    inputs: LossInputs,
    base: Any = None,
    values_to_targets: ValuesToTargets | None = None,
    *,
    model: ModelConfig,
    algorithm: Algorithm,
) -> tuple[Float[Array, ""], tuple[Metrics, PerToken | None]]:
    """Return the loss of one agent's inputs, its metrics, and values where they are of this pass.

    Loss and metrics are additive over micro-batches. base: the frozen parameters that params are adapters of.
    values_to_targets: makes the targets from the values of this very pass, where the inputs have none."""
    params = lora.join(base, params)
    if inputs.dropout is not None:
        params = lora.with_dropout(params, inputs.dropout, algorithm.lora.lora_dropout)
    weights = decoder.cast(params, jnp.dtype(algorithm.compute_dtype))
    hidden = hidden_states(weights, model, inputs.prompts, inputs.prompt_lengths, inputs.tokens, algorithm.remat)
    tokens, targets = inputs.tokens, inputs.targets
    if isinstance(targets, PairTargets):
        loss, metrics = pairs_loss(pair_numbers(params, weights, hidden, tokens, algorithm), targets, algorithm)
        return loss, (metrics, None)
    if isinstance(targets, TextTargets):
        text_loss = functools.partial(texts_loss, algorithm=algorithm)
        loss, metrics = score_loss(weights, hidden, tokens, targets, text_loss)
        return loss, (metrics, None)
    if isinstance(targets, PolicyTargets):
        loss, metrics = policy_loss(weights, hidden, tokens, targets, algorithm)
        return loss, (metrics, None)
    values, new_values, metrics = values_of(params, hidden).reshape(tokens.shape), None, {}
    if values_to_targets is not None:
        new_values = jax.lax.stop_gradient(values)
        inputs, metrics = values_to_targets(new_values)
        targets = inputs.targets
    if isinstance(targets, ValueTargets):
        loss, value_metrics = critic_loss(values, targets, algorithm)
        return loss, (metrics | value_metrics | {"loss": loss}, new_values)
    assert isinstance(targets, ActorCriticTargets)
    loss, policy_metrics = policy_loss(weights, hidden, tokens, targets.policy, algorithm)
    head_loss, value_metrics = critic_loss(values, targets.values, algorithm)
    loss = loss + algorithm.value_coef * head_loss
    return loss, (metrics | policy_metrics | value_metrics | {"loss": loss}, new_values)


def critic_loss(values: PerToken, targets: ValueTargets, algorithm: Algorithm) -> tuple[Float[Array, ""], Metrics]:
    """Return the value loss and its metrics, additive over parts of a batch."""
    clip = algorithm.value_clip
    loss, metrics = losses.value_loss(values, targets.targets, targets.old_values, targets.weights, clip=clip)
    return loss, {name: jnp.sum(targets.weights * x) for name, x in metrics.items()} | {"value_loss": loss}


def policy_loss(
    weights: Any,
    hidden: Float[Array, "prompt_group_token dim"],
    tokens: Int[Array, "prompt group token"],
    targets: PolicyTargets,
    algorithm: Algorithm,
) -> tuple[Float[Array, ""], Metrics]:
    """Return `token_loss` of all tokens from their hidden states.

    It is computed for some tokens at a time, unless the ratio is that of whole completions. weights: parameters in the compute
    dtype."""
    loss, temperature = functools.partial(token_loss, algorithm=algorithm), algorithm.temperature or 1.0
    if algorithm.options.get("level", "token") != "token":
        scores = token_scores(weights, hidden, tokens.reshape(-1), temperature)
        logp, entropy = (x.reshape(tokens.shape) for x in scores)
        return loss(logp, entropy, targets)
    return score_loss(weights, hidden, tokens, targets, loss, temperature=temperature)


def token_loss(
    logp: Float[Array, "*token"], entropy: Float[Array, "*token"], targets: PolicyTargets, algorithm: Algorithm
) -> tuple[Float[Array, ""], Metrics]:
    """Return the loss of tokens [P, G, T] or [M] and their part of its metrics."""
    settings = algorithm.loss
    loss, metrics = algorithm.row.loss(logp, targets.old_logprobs, targets.advantages, targets.weights, **algorithm.options)
    if settings.entropy_coef:
        loss = loss - settings.entropy_coef * jnp.sum(targets.weights * entropy)
    if settings.kl_coef:
        # At padding the difference may overflow, and 0 times infinity is NaN.
        safe_logp = jnp.where(targets.mask, logp, targets.ref_logprobs)
        kl = losses.kl_estimate(safe_logp, targets.ref_logprobs, settings.kl_estimator or "k3")
        metrics["kl"] = kl
        if settings.kl_in == "loss":
            loss = loss + jnp.sum(targets.kl_weights * kl)
    drift = logp - targets.old_logprobs
    metrics |= {"entropy": entropy, "ratio": jnp.exp(drift), "mismatch": jnp.abs(drift)}
    if algorithm.optimizer.target_kl is not None:
        metrics["kl_moved"] = losses.kl_estimate(targets.old_logprobs, logp, "k3")
    metrics = {name: masked.total(targets.share * x, targets.mask) for name, x in metrics.items()}
    return loss, metrics | {"loss": loss}


def pair_numbers(
    params: Any,
    weights: Any,
    hidden: Float[Array, "prompt_group_token dim"],
    tokens: Int[Array, "prompt group token"],
    algorithm: Algorithm,
) -> PerToken:
    """Return what pairs are compared by, for each token.

    Log-probabilities (at temperature 1, whatever was sampled with), or values before the tokens. weights: params in the compute
    dtype."""
    if algorithm.row.margin == "score":
        return values_of(params, hidden).reshape(tokens.shape)
    return token_scores(weights, hidden, tokens.reshape(-1), 1.0)[0].reshape(tokens.shape)
