"""The record of an objective, the inputs and outputs of its loss, and how inputs are split into micro-batches.

`prepare` turns a batch into what the loss needs of every token: advantages, weights, targets of values. It runs once per batch.
`loss` runs once per micro-batch, on the outputs of the model; losses and metrics of micro-batches add up to those of the batch.
All functions are for one agent; `learning` lifts them to a stack.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key, Num, Shaped

from jmarl.algorithms import Algorithm
from jmarl.models import decoder, lora
from jmarl.models.config import ModelConfig
from jmarl.models.heads import values_of
from jmarl.models.layers.experts import Load, balance
from jmarl.models.rows import Division, divide, divided, divided_prompts, own_part
from jmarl.sampling.scoring import hidden_states
from jmarl.types import Running

Metrics = dict[str, Num[Array, "..."] | Bool[Array, "..."]]
PerToken = Float[Array, "prompt group token"]
TokenMask = Bool[Array, "prompt group token"]


class LossInputs(NamedTuple):
    """A batch of one agent with everything that its loss needs."""

    prompts: Int[Array, "prompt prompt_token"]
    prompt_lengths: Int[Array, " prompt"]
    tokens: Int[Array, "prompt group token"]
    mask: TokenMask  # tokens of completions, not padding
    targets: Any  # a pytree of the objective's own, with leaves [prompt, ...]
    dropout: Key[Array, ""] | None = None  # where adapters have dropout
    places: lora.Places | None = None  # of the tokens in the batch, where this device has a part of it and there is dropout


class Outputs(NamedTuple):
    """What the model of one agent computes for the inputs of a loss."""

    params: Any  # of the forward pass, value head included
    weights: Any  # the same in the compute dtype
    hidden: Float[Array, "prompt_group_token dim"]
    tokens: Int[Array, "prompt group token"]
    model: ModelConfig
    load: Load | None = None  # of the experts, if the model has any

    @property
    def values(self) -> PerToken:
        """Return the value before each token, of a model with a value head."""
        return values_of(self.params, self.hidden).reshape(self.tokens.shape)


def keep_running(running: Running, batch: Any, algorithm: Algorithm) -> Running:
    """Return the statistics as they are: the `update_running` of objectives that read none."""
    del batch, algorithm
    return running


class Objective(NamedTuple):
    """What one agent minimizes, as functions. Resolved once per run, see `table.objective_of`."""

    prepare: Callable[..., tuple[Any, Metrics]]
    """(batch, algorithm, model, params, reference, running) -> targets of the loss, and metrics of the batch. Parameters are
    those before the update, adapters with their base; reference: None without a KL term; statistics include the batch."""
    loss: Callable[[Outputs, Any, Algorithm], tuple[Float[Array, ""], Metrics]]
    """(outputs, targets, algorithm) -> loss and metrics. Both add up over micro-batches."""
    trained_rows: Callable[[Any, Algorithm], Bool[Array, "..."]]
    """(batch, algorithm) -> which rows are learned from; without any, the optimizer makes no step"""
    targets_of_part: Callable[[Any, int], tuple[Any, Int[Array, ""]]]
    """(targets of one of n parts of a batch, n) -> the same as of a batch of its own, and the number of its trained tokens"""
    update_running: Callable[[Running, Any, Algorithm], Running]
    """(running, batch, algorithm) -> statistics that include the batch"""
    splits_groups: bool = True  # micro-batches may split the completions of a prompt; not those of a pair
    caps_parts: bool = False  # a batch of fewer prompts than micro_batches has as many parts as prompts


def model_outputs(params: Any, frozen: Any, inputs: LossInputs, model: ModelConfig, algorithm: Algorithm) -> Outputs:
    """Run the model of one agent on the inputs of a loss. frozen: the base, if params are adapters."""
    params = lora.join(frozen, params)
    if inputs.dropout is not None:
        params = lora.with_dropout(params, inputs.dropout, algorithm.lora.lora_dropout, inputs.places)
    weights = decoder.compute_weights(params, model, jnp.dtype(algorithm.compute_dtype))
    rows, counted = (inputs.prompts, inputs.prompt_lengths, inputs.tokens), inputs.mask if model.num_experts else None
    hidden, load = hidden_states(weights, model, *rows, algorithm.remat, counted)
    return Outputs(params, weights, hidden, inputs.tokens, model, load)


def add_balance(
    result: tuple[Float[Array, ""], Metrics], load: Load | None, parts: int, coef: float
) -> tuple[Float[Array, ""], Metrics]:
    """Return loss and metrics with the load-balancing term of the experts, a mean over the parts of a batch.

    load: None: unchanged. coef: its weight in the loss."""
    if load is None:
        return result
    loss, metrics = result
    term = balance(load) / parts
    total = {"loss": metrics["loss"] + coef * term} if coef else {}
    return loss + coef * term if coef else loss, metrics | total | {"router_balance": term}


def own_inputs(inputs: LossInputs, parts: int, objective: Objective) -> LossInputs:
    """Return the inputs of the rows that this device of a mesh computes; padding has weight 0."""
    if parts == 1:
        return inputs
    prompts, group, _ = inputs.tokens.shape
    d = divide(prompts, group, parts, objective.splits_groups)
    cut = partial(divided if objective.splits_groups else divided_prompts, d=d)
    of_tokens = jax.tree.map(cut, (inputs.tokens, inputs.mask, inputs.targets))
    lengths = jnp.maximum(divided_prompts(inputs.prompt_lengths, d), 1)
    own = own_part(LossInputs(divided_prompts(inputs.prompts, d), lengths, *of_tokens), parts)
    if inputs.dropout is None:
        return own
    return own._replace(dropout=inputs.dropout, places=places_of_part(inputs, d, parts))


def places_of_part(inputs: LossInputs, d: Division, parts: int) -> lora.Places:
    """Return the places of this device's tokens among all tokens, which lie prompt by prompt: the prompt, then its rows."""
    (p, s), (_, g, t) = inputs.prompts.shape, inputs.tokens.shape
    places = jnp.arange(p * (s + g * t)).reshape(p, -1)
    rows = divided(places[:, s:].reshape(p, g, t), d)
    own = own_part(jnp.concatenate([divided_prompts(places[:, :s], d), rows.reshape(d.prompts, -1)], 1), parts)
    return lora.Places(own.reshape(-1), places.size)


def split_inputs(inputs: LossInputs, n: int, objective: Objective, setting: str = "micro_batches") -> LossInputs:
    """Split inputs into n parts, leaves [n, ...]: over the prompts first, then over the group.

    Every n-th prompt goes into a part, so that turns, roles and padding are spread over all parts. Several turns may give any
    number of prompts; missing ones are padded with weight 0. setting: named in the error where n does not divide the batch."""
    keys = None if inputs.dropout is None else jax.random.split(inputs.dropout, n)
    inputs = inputs._replace(dropout=None)
    prompts, group, _ = inputs.tokens.shape
    group = group if objective.splits_groups else 1
    if prompts > n and prompts % n and prompts * group % n:
        padding = -prompts % n
        inputs = jax.tree.map(lambda x: jnp.pad(x, ((0, padding),) + ((0, 0),) * (x.ndim - 1)), inputs)
        inputs, prompts = inputs._replace(prompt_lengths=jnp.maximum(inputs.prompt_lengths, 1)), prompts + padding
    over_prompts = next(k for k in range(min(n, prompts), 0, -1) if n % k == 0 and prompts % k == 0)
    over_group = n // over_prompts
    if group % over_group:
        if not objective.splits_groups:
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

    of_tokens = inputs.tokens, inputs.mask, inputs.targets
    tokens, mask, targets = jax.tree.map(cut if objective.splits_groups else repeat, of_tokens)
    return LossInputs(repeat(inputs.prompts), repeat(inputs.prompt_lengths), tokens, mask, targets, keys)
