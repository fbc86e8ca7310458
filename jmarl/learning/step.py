"""One update of the agents of a stack: inputs of the loss, gradients over micro-batches, clip, optimizer.

An update is one optimizer step on a batch, or several: passes over its minibatches until the policy has moved as far as
`target_kl` allows. Functions are for one agent; `optimizer_step` and `update_agents` lift them to stacks [A, ...]."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Key, Num, Shaped

from jmarl.algorithms import Algorithm
from jmarl.learning.optimizer import apply_gradients
from jmarl.models import lora
from jmarl.models.config import ModelConfig
from jmarl.models.heads import cast_all_but_value_head
from jmarl.models.sharding import sum_gradients
from jmarl.models.stack import in_turn, per_agent
from jmarl.objectives.objective import LossInputs, Objective, add_balance, model_outputs, own_inputs, split_inputs
from jmarl.rl import masked
from jmarl.types import Data, PerAgent, Running, StackState

AgentMetrics = dict[str, Num[Array, "..."] | Bool[Array, "..."]]
AgentMask = Bool[Array, " agent"]
AgentKeys = Key[Array, " agent"]
Metrics = dict[str, Num[Array, "agent ..."] | AgentMask]
SHUFFLE = 2**31  # folded into the key of an update for the order of its minibatches


class Update(NamedTuple):
    """What an update does: the static part of its program."""

    model: ModelConfig
    objective: Objective
    algorithm: Algorithm  # with one value per setting of the optimizer


# --- one agent ---------------------------------------------------------------------------------------------------------


def loss_inputs(update: Update, batch: Data, state: StackState, key: Key[Array, ""] | None) -> tuple[LossInputs, AgentMetrics]:
    """Return everything that the loss of one agent's batch needs, and metrics of the batch. Dropout consumes the key."""
    targets, metrics = update.objective.prepare(batch, state, update.model, update.algorithm)
    dropout = key if update.algorithm.lora.lora_dropout else None
    return LossInputs(batch.prompts, batch.prompt_lengths, batch.tokens, batch.action_mask, targets, dropout), metrics


def gradients(update: Update, params: Any, inputs: LossInputs, base: Any) -> tuple[Any, AgentMetrics]:
    """Return the gradients of one agent's loss and its metrics, accumulated over micro-batches: equal to those of one big
    batch."""
    model, objective, algorithm = update
    inputs = own_inputs(inputs, model.row_parts, objective)
    # Cast once, not once per micro-batch: float32 weights then need not stay in memory beside those of the compute dtype.
    weights, base = (x and cast_all_but_value_head(x, algorithm.compute_dtype) for x in (params, base))

    def loss(weights: Any, inputs: LossInputs) -> tuple[Float[Array, ""], AgentMetrics]:
        outputs = model_outputs(weights, inputs, base, model, algorithm)
        result = objective.loss(outputs, inputs.targets, algorithm)
        return add_balance(result, outputs.load, parts * model.row_parts, algorithm.loss.router_aux_coef)

    def add(total: tuple[Any, AgentMetrics], part: tuple[Any, AgentMetrics]) -> tuple[Any, AgentMetrics]:
        return jax.tree.map(lambda x, y: x + y.astype(x.dtype), total, part)

    def over_devices(grads: Any, metrics: AgentMetrics) -> tuple[Any, AgentMetrics]:
        return sum_gradients(grads, model), metrics if model.row_parts == 1 else lax.psum(metrics, "data")

    grad, parts = jax.grad(loss, has_aux=True), algorithm.micro_batches
    parts = min(parts, len(inputs.prompts)) if objective.caps_parts else parts
    if parts == 1:
        grads, metrics = grad(weights, inputs)
        return over_devices(jax.tree.map(lambda x, y: x.astype(y.dtype), grads, params), metrics)
    shapes = params, jax.eval_shape(grad, weights, inputs)[1]  # gradients are added up in float32
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    split = split_inputs(inputs, parts, objective)
    return over_devices(*lax.scan(lambda total, part: (add(total, grad(weights, part)), None), zeros, split)[0])


def agent_gradients(
    update: Update, state: StackState, reference: Any, batch: Data, base: Any, key: Key[Array, ""] | None
) -> tuple[Any, AgentMetrics]:
    """Return the gradients and metrics of one agent from its batch."""
    whole = state._replace(params=lora.join(base, state.params), reference=reference)
    inputs, batch_metrics = loss_inputs(update, batch, whole, key)
    grads, metrics = gradients(update, state.params, inputs, base)
    return grads, metrics | batch_metrics


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


def minibatches(update: Update, inputs: LossInputs) -> tuple[LossInputs, Int[Array, " part"]]:
    """Split one agent's inputs into minibatches, leaves [part, ...], each with a loss and means of its own. Returns the number
    of trained tokens of each, too."""
    n = update.algorithm.optimizer.num_minibatches
    parts = split_inputs(inputs, n, update.objective, "num_minibatches")
    targets, tokens = jax.vmap(lambda targets: update.objective.targets_of_part(targets, n))(parts.targets)
    return parts._replace(targets=targets), tokens


# --- all agents of a stack ---------------------------------------------------------------------------------------------


class Given(NamedTuple):
    """What an update of a stack reads beside its state, [A, ...] each."""

    reference: Any  # of the KL term; None: there is none
    batch: Data
    agents: PerAgent
    updates: Int[Array, " agent"]  # of the run in which each agent's turn to learn was before: the clock of its schedule
    active: AgentMask | None  # agents that learn in this update; None: all do
    keys: AgentKeys | None  # of dropout and of the order of minibatches; None: neither is used
    base: Any  # with LoRA the frozen parameters


def update_agents(update: Update, state: StackState, given: Given) -> tuple[StackState, Metrics]:
    """Make one update of a stack: a pure function for use inside `jit`. Returns the new state and metrics [A, ...]."""
    _, objective, algorithm = update
    if algorithm.loss.kl_coef and given.base is not None:
        given = given._replace(reference=given.base)  # LoRA's reference: no adapters

    def add_returns(running: Running, batch: Data) -> Running:
        return objective.update_running(running, batch, algorithm)

    before = state
    state = state._replace(running=jax.vmap(add_returns)(state.running, given.batch))
    # Agents without a row to learn from, such as those that did not act, make no step: Adam would move them by its momentum.
    has_rows = jax.vmap(lambda batch: jnp.any(objective.trained_rows(batch, algorithm)))(given.batch)
    if algorithm.steps_per_update == 1:  # on the whole batch
        steps = has_rows if given.active is None else given.active & has_rows
        data = given.reference, given.batch, given.base, given.keys
        state, metrics = optimizer_step(update, state, partial(agent_gradients, update), steps, given, given.updates, *data)
    else:
        state, metrics = several_steps(update, state, given)
    state, metrics = adapt_kl(state, metrics, has_rows, algorithm)
    if given.active is not None:
        state, metrics = keep_inactive(before, state, metrics, given.active)
    return state, metrics


def several_steps(update: Update, state: StackState, given: Given) -> tuple[StackState, Metrics]:
    """Make `num_epochs` passes over `num_minibatches` parts of a batch, an optimizer step each.

    Minibatches are drawn in another order in each epoch. Advantages and reference are those of the whole batch. An agent whose
    policy has moved by more than `target_kl` makes no further step. Metrics are means over the steps made; `steps` counts
    them. The learning rate is that of the last step of the update, whether or not it was made."""
    settings, n = update.algorithm.optimizer, update.algorithm.optimizer.num_minibatches
    whole = state._replace(params=lora.join(given.base, state.params), reference=given.reference, opt_state=(), grads=None)
    inputs, batch_metrics = per_agent(partial(loss_inputs, update), settings.per_agent)(given.batch, whole, given.keys)

    def compute(state: StackState, inputs: LossInputs, base: Any) -> tuple[Any, AgentMetrics]:
        return gradients(update, state.params, inputs, base)

    def epoch(carry: tuple[StackState, AgentMask], number: Int[Array, ""]) -> tuple[tuple[StackState, AgentMask], tuple]:
        shuffled = inputs if given.keys is None or n == 1 else jax.vmap(shuffle, (None, 0, 0))(number, given.keys, inputs)
        parts, tokens = jax.vmap(partial(minibatches, update))(shuffled)

        def step(carry: tuple[StackState, AgentMask], part: Int[Array, ""]) -> tuple[tuple[StackState, AgentMask], tuple]:
            state, learns = carry
            position = given.updates * update.algorithm.steps_per_update + number * n + part
            inputs = jax.tree.map(lambda x: x[:, part], parts)
            if inputs.dropout is not None:  # other keys in each step
                inputs = inputs._replace(dropout=jax.vmap(jax.random.fold_in)(inputs.dropout, position))
            has_tokens = tokens[:, part] > 0  # without, Adam would move the agent by its momentum
            steps, limit = learns & has_tokens, settings.target_kl
            state, metrics = optimizer_step(update, state, compute, steps, given, position, inputs, given.base, limit=limit)
            learns = learns if limit is None else learns & ~(metrics["kl_moved"] > limit)
            return (state, learns), (metrics, learns & has_tokens)

        return lax.scan(step, carry, jnp.arange(n))

    learns = jnp.ones(inputs.tokens.shape[0], bool) if given.active is None else given.active
    (state, _), steps = lax.scan(epoch, (state, learns), jnp.arange(settings.num_epochs))
    metrics, stepped = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), steps)
    last = {name: metrics.pop(name)[-1] for name in ("learning_rate", "skipped")}
    count = {"steps": stepped.sum(0)}
    stepped = stepped.at[0].set(True)  # metrics of the first part are known, whether or not a step was made
    means = {name: masked.mean(x, stepped, 0) for name, x in metrics.items()}
    return state, means | last | batch_metrics | count


def optimizer_step(
    update: Update,
    state: StackState,
    compute: Callable,
    steps: AgentMask,
    given: Given,
    position: Int[Array, " agent"],
    *data: Any,
    limit: float | None = None,
) -> tuple[StackState, Metrics]:
    """Make one optimizer step of some agents of a stack.

    Where gradients have no memory of their own (`models.platforms.gradient_memory`) and agents are not computed together, one
    agent makes its step after the other, so that only one agent's gradients are in memory.

    Args:
        update: the static part of the program.
        state: of the stack, [A, ...].
        compute: (state, *data) of one agent -> its gradients and metrics. Zeros stand for those of inactive agents.
        steps: agents that make a step.
        given: see `Given`; of it only `agents` and `active` are read.
        position: of the step in each agent's schedule.
        data: further arguments of `compute`, [A, ...].
        limit: an agent makes no step if its policy has moved by more, in the metric `kl_moved`; None: no limit.
    """

    def change(state: StackState, grads: Any, metrics: AgentMetrics, steps: Any, agent: PerAgent, position: Any) -> tuple:
        steps = steps if limit is None else steps & ~(metrics["kl_moved"] > limit)
        settings: Any = dict(algorithm=update.algorithm, model=update.model)
        state, step_metrics = apply_gradients(state, grads, metrics["loss"], steps, agent, position, **settings)
        return state, metrics | step_metrics

    active, mode = given.active, update.algorithm.optimizer.per_agent
    read = state._replace(opt_state=(), grads=None)  # all that `compute` reads
    if mode == "map" and state.grads is None:

        def compute_one(state: StackState, active: Any, steps: Any, agent: Any, position: Any, *data: Any) -> Any:
            return compute(state, *data) if active is None else only_active(compute, active, state, *data)

        def change_one(state: StackState, computed: Any, active: Any, steps: Any, agent: Any, position: Any, *_: Any) -> Any:
            grads, metrics = computed
            return change(state, grads, metrics, steps, agent, position)

        return in_turn(compute_one, change_one, state, active, steps, given.agents, position, *data)
    if active is None:
        grads, metrics = per_agent(compute, mode)(read, *data)
    else:
        grads, metrics = per_agent(partial(only_active, compute), mode)(active, read, *data)
    return jax.vmap(change)(state, grads, metrics, steps, given.agents, position)


def only_active(compute: Callable, active: Bool[Array, ""], *arguments: Any) -> Any:
    """Return compute(*arguments) of one agent if it is active, else zeros. In mode `map` they are not computed then."""
    shapes = jax.eval_shape(compute, *arguments)
    zeros = lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)  # noqa: E731
    return lax.cond(active, lambda: compute(*arguments), zeros)


def adapt_kl(state: StackState, metrics: Metrics, has_rows: AgentMask, algorithm: Algorithm) -> tuple[StackState, Metrics]:
    """Move the KL coefficient of each agent that has rows towards its target (arXiv 1909.08593); metrics show the one that was
    used."""
    if not algorithm.loss.kl_coef:
        return state, metrics
    used, target = state.running.kl_coef, algorithm.loss.kl_target
    if target is None:
        return state, metrics | {"kl_coef": used}
    error = jnp.where(has_rows, jnp.nan_to_num(jnp.clip(metrics["kl"] / target - 1, -0.2, 0.2)), 0)
    running = state.running._replace(kl_coef=used * (1 + 0.1 * error))
    return state._replace(running=running), metrics | {"kl_coef": used}


def keep_inactive(before: StackState, after: StackState, metrics: Metrics, active: AgentMask) -> tuple[StackState, Metrics]:
    """Restore the statistics and counts of inactive agents; their parameters and moments have not changed."""

    def choose(old: Shaped[Array, "agent ..."], new: Shaped[Array, "agent ..."]) -> Shaped[Array, "agent ..."]:
        return jnp.where(active.reshape(-1, *[1] * (old.ndim - 1)), new, old)

    running, skipped = jax.tree.map(choose, (before.running, before.skipped), (after.running, after.skipped))
    return after._replace(running=running, skipped=skipped), metrics | {"frozen": ~active}
