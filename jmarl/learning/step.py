"""One agent's part of an update: the inputs of its loss, its gradients over micro-batches, and its minibatches.

Functions are for one agent; `program` lifts them to the agents of a stack."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Key, Num

from jmarl.algorithms import Algorithm
from jmarl.models import lora
from jmarl.models.config import ModelConfig
from jmarl.models.heads import cast_all_but_value_head
from jmarl.models.sharding import sum_gradients
from jmarl.objectives.objective import LossInputs, Objective, add_balance, model_outputs, own_inputs, split_inputs
from jmarl.types import Data, Running

AgentMetrics = dict[str, Num[Array, "..."] | Bool[Array, "..."]]
SHUFFLE = 2**31  # folded into the key of an update for the order of its minibatches


def loss_inputs(
    params: Any,
    frozen: Any,
    running: Running,
    batch: Data,
    key: Key[Array, ""] | None,
    model: ModelConfig,
    objective: Objective,
    algorithm: Algorithm,
) -> tuple[LossInputs, AgentMetrics]:
    """Return everything that the loss of one agent's batch needs, and metrics of the batch. Dropout consumes the key.

    params: that are trained. frozen: with LoRA the base, else the reference of the KL term; None: there is none."""
    reference = frozen if algorithm.loss.kl_coef else None
    targets, metrics = objective.prepare(batch, algorithm, model, lora.join(frozen, params), reference, running)
    dropout = key if algorithm.lora.lora_dropout else None
    return LossInputs(batch.prompts, batch.prompt_lengths, batch.tokens, batch.action_mask, targets, dropout), metrics


def gradients(
    params: Any, frozen: Any, inputs: LossInputs, model: ModelConfig, objective: Objective, algorithm: Algorithm
) -> tuple[Any, AgentMetrics]:
    """Return the gradients of one agent's loss and its metrics, accumulated over micro-batches: equal to those of one big
    batch."""
    inputs = own_inputs(inputs, model.placement.row_parts, objective)
    # Cast once, not once per micro-batch: float32 weights then need not stay in memory beside those of the compute dtype.
    weights, frozen = (x and cast_all_but_value_head(x, algorithm.compute_dtype) for x in (params, frozen))

    def loss(weights: Any, inputs: LossInputs) -> tuple[Float[Array, ""], AgentMetrics]:
        outputs = model_outputs(weights, frozen, inputs, model, algorithm)
        result = objective.loss(outputs, inputs.targets, algorithm)
        return add_balance(result, outputs.load, parts * model.placement.row_parts, algorithm.loss.router_aux_coef)

    def add(total: tuple[Any, AgentMetrics], part: tuple[Any, AgentMetrics]) -> tuple[Any, AgentMetrics]:
        return jax.tree.map(lambda x, y: x + y.astype(x.dtype), total, part)

    def over_devices(grads: Any, metrics: AgentMetrics) -> tuple[Any, AgentMetrics]:
        return sum_gradients(grads, model), metrics if model.placement.row_parts == 1 else lax.psum(metrics, "data")

    grad, parts = jax.grad(loss, has_aux=True), algorithm.micro_batches
    parts = min(parts, len(inputs.prompts)) if objective.caps_parts else parts
    if parts == 1:
        grads, metrics = grad(weights, inputs)
        return over_devices(jax.tree.map(lambda x, y: x.astype(y.dtype), grads, params), metrics)
    shapes = params, jax.eval_shape(grad, weights, inputs)[1]  # gradients are added up in float32
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    split = split_inputs(inputs, parts, objective)
    return over_devices(*lax.scan(lambda total, part: (add(total, grad(weights, part)), None), zeros, split)[0])


def reads_keys(algorithm: Algorithm) -> bool:
    """Return whether an update reads random keys: for dropout, or for the order of its minibatches."""
    return bool(algorithm.lora.lora_dropout) or algorithm.optimizer.num_minibatches > 1


def shuffle(epoch: Int[Array, ""], key: Key[Array, ""], inputs: LossInputs) -> LossInputs:
    """Return one agent's inputs with prompts, and completions within each group, in an order of their own in each epoch. The
    key is consumed."""
    prompts, group, _ = inputs.tokens.shape
    of_prompts, of_group = jax.random.split(jax.random.fold_in(jax.random.fold_in(key, SHUFFLE), epoch))
    order, columns = jax.random.permutation(of_prompts, prompts), jax.random.permutation(of_group, group)
    of_tokens = inputs.tokens, inputs.mask, inputs.targets
    tokens, mask, targets = jax.tree.map(lambda x: x[order][:, columns], of_tokens)
    prompts, lengths = inputs.prompts[order], inputs.prompt_lengths[order]
    return inputs._replace(prompts=prompts, prompt_lengths=lengths, tokens=tokens, mask=mask, targets=targets)


def minibatches(inputs: LossInputs, n: int, objective: Objective) -> tuple[LossInputs, Int[Array, " part"]]:
    """Split one agent's inputs into n minibatches, leaves [part, ...], each with a loss and means of its own. Also returns the
    number of trained tokens of each."""
    parts = split_inputs(inputs, n, objective, "num_minibatches")
    targets, tokens = jax.vmap(lambda targets: objective.targets_of_part(targets, n))(parts.targets)
    return parts._replace(targets=targets), tokens
