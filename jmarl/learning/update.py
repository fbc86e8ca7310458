"""One update of a stack: loss inputs, gradients over micro-batches, clip, optimizer; for one agent, lifted to the stack.

An update is one optimizer step on a batch, or several: passes over its minibatches until the policy has moved as far as
`target_kl` allows."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.stages import Lowered
from jaxtyping import Array, Bool, Float, Int, Key, Num, Shaped

from jmarl.algorithms import Algorithm
from jmarl.learning.objective import LossInputs, loss_of_inputs, make_loss_inputs, split_inputs
from jmarl.learning.optimizer import apply_gradients, steps_done
from jmarl.learning.targets import ActorCriticTargets, PerToken, PolicyTargets, ValueTargets
from jmarl.models import lora
from jmarl.models.config import ModelConfig
from jmarl.models.heads import cast_all_but_value_head
from jmarl.models.platforms import COMPILER_OPTIONS
from jmarl.models.sharding import batch_shardings, constrain, mesh_of, model_on, over_agents, splits_only_agents
from jmarl.models.stack import in_turn, per_agent
from jmarl.rl import advantages, masked
from jmarl.types import TRACES, Batch, Data, PerAgent, Running, StackState

AgentMetrics = dict[str, Num[Array, ""] | Bool[Array, ""]]
AgentMask = Bool[Array, " agent"]
AgentKeys = Key[Array, " agent"]
Metrics = dict[str, Num[Array, " agent"] | AgentMask]
Values = Float[Array, "agent prompt group token"]
Carry = tuple[StackState, AgentMask]  # and which agents make no further step
SHUFFLE = 2**31  # folded into the key of an update for the order of its minibatches


def gradients(params: Any, inputs: LossInputs, base: Any, model: ModelConfig, algorithm: Algorithm) -> tuple[Any, AgentMetrics]:
    """Return the gradients of `loss_of_inputs` and its metrics, accumulated over micro-batches: equal to those of one big
    batch."""
    loss = functools.partial(loss_of_inputs, model=model, algorithm=algorithm)
    # Cast once, not once per micro-batch: float32 weights then need not stay in memory beside those of the compute dtype.
    weights, base = (x and cast_all_but_value_head(x, algorithm.compute_dtype) for x in (params, base))

    def grad(inputs: LossInputs) -> tuple[Any, AgentMetrics]:
        grads, (metrics, _) = jax.grad(loss, has_aux=True)(weights, inputs, base)
        return grads, metrics

    def add(total: tuple[Any, AgentMetrics], part: tuple[Any, AgentMetrics]) -> tuple[Any, AgentMetrics]:
        return jax.tree.map(lambda x, y: x + y.astype(x.dtype), total, part)

    if algorithm.micro_batches == 1:
        grads, metrics = grad(inputs)
        return jax.tree.map(lambda x, y: x.astype(y.dtype), grads, params), metrics
    shapes = params, jax.eval_shape(grad, inputs)[1]  # gradients are added up in float32
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    parts = split_inputs(inputs, algorithm.micro_batches)
    return lax.scan(lambda total, part: (add(total, grad(part)), None), zeros, parts)[0]


def agent_gradients(
    params: Any,
    reference: Any,
    running: Running,
    batch: Data,
    base: Any = None,
    *,
    model: ModelConfig,
    algorithm: Algorithm,
    trains: str = "policy",
) -> tuple[Any, AgentMetrics, PerToken | None]:
    """Return gradients and metrics of one agent from its batch (no agent axis), and the values of a critic whose
    batch has none: it learns from those of this pass."""
    settings: dict[str, Any] = dict(model=model, algorithm=algorithm)
    if trains != "policy" and isinstance(batch, Batch) and batch.values is None:

        def values_to_targets(values: PerToken) -> tuple[LossInputs, AgentMetrics]:
            whole = lora.join(base, params)
            return make_loss_inputs(reference, running, batch._replace(values=values), whole, **settings, trains=trains)

        dropout = batch.keys if algorithm.lora.lora_dropout else None
        inputs = LossInputs(batch.prompts, batch.prompt_lengths, batch.tokens, None, dropout)
        loss = functools.partial(loss_of_inputs, values_to_targets=values_to_targets, **settings)
        grads, (metrics, values) = jax.grad(loss, has_aux=True)(params, inputs, base)
        return grads, metrics, values
    inputs, batch_metrics = make_loss_inputs(reference, running, batch, lora.join(base, params), **settings, trains=trains)
    grads, metrics = gradients(params, inputs, base, model, algorithm)
    return grads, metrics | batch_metrics, None


def skip_if_held(f: Callable, held: Bool[Array, ""] | None) -> Callable:
    """Return f of one agent, whose computation is skipped where the agent is held: it then gives zeros."""
    if held is None:
        return f

    def f_or_zeros(*arguments: Any) -> Any:
        shapes = jax.eval_shape(f, *arguments)
        zeros = lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)  # noqa: E731
        return lax.cond(held, zeros, lambda: f(*arguments))

    return f_or_zeros


def unless_held(f: Callable, held: AgentMask | None, mode: str) -> Callable:
    """Lift f of one agent to stacks [A, ...]. Held agents get zeros; in mode `map` their computation is skipped."""
    if held is None:
        return per_agent(f, mode)
    return functools.partial(per_agent(lambda held, *arguments: skip_if_held(f, held)(*arguments), mode), held)


def one_step(
    state: StackState,
    reference: Any,
    batch: Data,
    agents: PerAgent,
    base: Any,
    *,
    model: ModelConfig,
    algorithm: Algorithm,
    trains: str,
) -> tuple[StackState, Metrics, Values | None]:
    """Make one optimizer step of a stack [A, ...] on a whole batch.

    Where gradients have no memory of their own (`models.platforms.gradient_memory`) and agents are not computed together, one
    agent makes its step after the other, so that only one agent's gradients are in memory.
    """
    one_agent = functools.partial(agent_gradients, model=model, algorithm=algorithm, trains=trains)
    still = without_rows(batch, algorithm, trains)
    still = still if agents.held is None else agents.held | still
    if algorithm.optimizer.per_agent == "map" and state.grads is None:

        def compute(state: StackState, still: Bool[Array, ""], agents: PerAgent, *data: Any) -> Any:
            return skip_if_held(one_agent, agents.held)(state.params, data[0], state.running, *data[1:])

        def change(
            state: StackState, computed: Any, still: Bool[Array, ""], agents: PerAgent, *_: Any
        ) -> tuple[StackState, Any]:
            grads, metrics, values = computed
            state, step_metrics = apply_gradients(state, grads, metrics["loss"], still, agents, algorithm=algorithm)
            return state, (metrics | step_metrics, values)

        state, (metrics, values) = in_turn(compute, change, state, still, agents, reference, batch, base)
        return state, metrics, values
    lifted = unless_held(one_agent, agents.held, algorithm.optimizer.per_agent)
    grads, metrics, values = lifted(state.params, reference, state.running, batch, base)
    apply = jax.vmap(functools.partial(apply_gradients, algorithm=algorithm))
    state, step_metrics = apply(state, grads, metrics["loss"], still, agents)
    return state, metrics | step_metrics, values


def without_rows(batch: Data, algorithm: Algorithm, trains: str) -> AgentMask:
    """Return which agents have no row to learn from, such as those that did not act: Adam would move them by its
    momentum."""
    if not isinstance(batch, Batch):
        return jnp.zeros(batch.tokens.shape[0], bool)
    valid = jnp.isfinite(batch.rewards)
    if trains == "policy" and algorithm.loss.mask_overlong:
        valid &= batch.ended
    return ~jnp.any(valid, (1, 2))


def several_steps(
    state: StackState,
    reference: Any,
    batch: Data,
    agents: PerAgent,
    base: Any,
    *,
    model: ModelConfig,
    algorithm: Algorithm,
    trains: str,
) -> tuple[StackState, Metrics, None]:
    """Make `num_epochs` passes over `num_minibatches` parts of a batch, an optimizer step each.

    Minibatches are drawn in another order in each epoch. Advantages and reference are those of the whole batch. An agent whose
    policy has moved by more than `target_kl` makes no further step. Metrics are means over the steps made; `steps` counts
    them."""
    settings, n = algorithm.optimizer, algorithm.optimizer.num_minibatches
    make_inputs = functools.partial(make_loss_inputs, model=model, algorithm=algorithm, trains=trains)
    whole = lora.join(base, state.params)
    inputs, batch_metrics = per_agent(make_inputs, settings.per_agent)(reference, state.running, batch, whole)
    one_agent = functools.partial(gradients, model=model, algorithm=algorithm)
    lifted = unless_held(one_agent, agents.held, settings.per_agent)
    apply = jax.vmap(functools.partial(apply_gradients, algorithm=algorithm))

    def epoch(carry: Carry, number: Int[Array, ""]) -> tuple[Carry, tuple]:
        shuffled = inputs if batch.keys is None or n == 1 else jax.vmap(shuffle, (None, 0, 0))(number, batch.keys, inputs)
        parts, tokens = minibatches(shuffled, n)

        def step(carry: Carry, part: Int[Array, ""]) -> tuple[Carry, tuple]:
            state, held = carry
            inputs = jax.tree.map(lambda x: x[:, part], parts)
            if inputs.dropout is not None:  # other keys in each step
                inputs = inputs._replace(dropout=jax.vmap(jax.random.fold_in)(inputs.dropout, steps_done(state)))
            grads, metrics = lifted(state.params, inputs, base)
            if settings.target_kl is not None:
                held |= metrics["kl_moved"] > settings.target_kl
            still = held | (tokens[:, part] == 0)  # without rows Adam would move the agent by its momentum
            state, step_metrics = apply(state, grads, metrics["loss"], still, agents)
            return (state, held), (metrics | step_metrics, ~still)

        return lax.scan(step, carry, jnp.arange(n))

    held = jnp.zeros(inputs.tokens.shape[0], bool) if agents.held is None else agents.held
    (state, _), steps = lax.scan(epoch, (state, held), jnp.arange(settings.num_epochs))
    metrics, stepped = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), steps)
    last = {name: metrics.pop(name)[-1] for name in ("learning_rate", "skipped")}
    count = {"steps": stepped.sum(0)}
    stepped = stepped.at[0].set(True)  # metrics of the first part are known, whether or not a step was made
    means = {name: masked.mean(x, stepped, 0) for name, x in metrics.items()}
    return state, means | last | batch_metrics | count, None


def shuffle(epoch: Int[Array, ""], key: Key[Array, ""], inputs: LossInputs) -> LossInputs:
    """Return one agent's inputs with prompts, and completions within each group, in an order of their own in each epoch. The
    key is consumed."""
    prompts, group, _ = inputs.tokens.shape
    of_prompts, of_group = jax.random.split(jax.random.fold_in(jax.random.fold_in(key, SHUFFLE), epoch))
    order, columns = jax.random.permutation(of_prompts, prompts), jax.random.permutation(of_group, group)
    tokens, targets = jax.tree.map(lambda x: x[order][:, columns], (inputs.tokens, inputs.targets))
    return inputs._replace(
        prompts=inputs.prompts[order], prompt_lengths=inputs.prompt_lengths[order], tokens=tokens, targets=targets
    )


def update_keys(algorithm: Algorithm, seed: int, step: Any, stack: int, agents: int) -> AgentKeys | None:
    """Return keys of an update's dropout and of the order of its minibatches, derived from these numbers alone; None if
    neither is needed. stack: critics are numbered after the agents' stacks."""
    if not algorithm.lora.lora_dropout and algorithm.optimizer.num_minibatches == 1:
        return None
    key = jax.random.key(seed)
    for number in (lora.DROPOUT, step, stack):
        key = jax.random.fold_in(key, number)
    return jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(agents))


def minibatches(inputs: LossInputs, n: int) -> tuple[LossInputs, Int[Array, "agent part"]]:
    """Split inputs [A, ...] into n parts [A, n, ...], each with a loss and means of its own; and return the trained
    tokens of each."""
    parts = jax.vmap(functools.partial(split_inputs, n=n, setting="num_minibatches"))(inputs)
    tokens = parts.trained_tokens.sum((2, 3, 4))

    def policy_part(policy: PolicyTargets) -> PolicyTargets:
        share = policy.mask / jnp.maximum(tokens, 1)[..., None, None, None]
        return policy._replace(weights=n * policy.weights, kl_weights=n * policy.kl_weights, share=share)

    def value_part(values: ValueTargets) -> ValueTargets:
        return values._replace(weights=n * values.weights)

    targets = parts.targets
    if isinstance(targets, ActorCriticTargets):
        # A value head also learns from what the policy leaves out.
        tokens_of_head = targets.values.mask.sum((2, 3, 4))
        targets = ActorCriticTargets(policy_part(targets.policy), value_part(targets.values))
        return parts._replace(targets=targets), jnp.maximum(tokens, tokens_of_head)
    targets = policy_part(targets) if isinstance(targets, PolicyTargets) else value_part(targets)  # type: ignore[arg-type]
    return parts._replace(targets=targets), tokens


def update_statistics(state: StackState, batch: Batch, algorithm: Algorithm) -> StackState:
    """Return the state of a stack whose running statistics include a batch's returns."""
    roles = jnp.zeros(batch.rewards.shape, jnp.int32) if batch.roles is None else batch.roles
    one_agent = functools.partial(advantages.update_running, decay=algorithm.ema_decay)
    return state._replace(running=jax.vmap(one_agent)(state.running, batch.rewards, roles))


def adapt_kl(state: StackState, metrics: Metrics, still: AgentMask, algorithm: Algorithm) -> tuple[StackState, Metrics]:
    """Move each agent's KL coefficient towards its target (arXiv 1909.08593), unless the agent is `still`; metrics show the one
    that was used."""
    if not algorithm.loss.kl_coef:
        return state, metrics
    used, target = state.running.kl_coef, algorithm.loss.kl_target
    if target is None:
        return state, metrics | {"kl_coef": used}
    error = jnp.where(still, 0, jnp.nan_to_num(jnp.clip(metrics["kl"] / target - 1, -0.2, 0.2)))
    running = state.running._replace(kl_coef=used * (1 + 0.1 * error))
    return state._replace(running=running), metrics | {"kl_coef": used}


def update_agents(
    state: StackState,
    reference: Any,
    batch: Data,
    agents: PerAgent | None = None,
    base: Any = None,
    *,
    model: ModelConfig,
    algorithm: Algorithm,
    trains: str = "policy",
) -> tuple[StackState, Metrics, Values | None]:
    """Make one update of a stack [A, ...] on a batch: a pure function for use inside `jit`.

    Arguments are those of `update_stack`, with what is frozen apart from the state. Returns the new state, metrics [A], and the
    values [A, P, G, T] of critics that learn from those of this pass."""
    agents = agents or PerAgent()
    reference = base if algorithm.loss.kl_coef and base is not None else reference  # LoRA's reference: no adapters
    steps = one_step if algorithm.steps_per_update == 1 else several_steps
    before = state
    if trains != "values" and isinstance(batch, Batch):
        state = update_statistics(state, batch, algorithm)
    state, metrics, values = steps(state, reference, batch, agents, base, model=model, algorithm=algorithm, trains=trains)
    state, metrics = adapt_kl(state, metrics, without_rows(batch, algorithm, trains), algorithm)
    if agents.held is not None:
        state, metrics = keep_held(before, state, metrics, agents.held)
    return state, metrics, values


def keep_held(before: StackState, after: StackState, metrics: Metrics, held: AgentMask) -> tuple[StackState, Metrics]:
    """Restore the statistics and counts of held agents [A]; their parameters and moments have not changed."""

    def choose(old: Shaped[Array, "agent ..."], new: Shaped[Array, "agent ..."]) -> Shaped[Array, "agent ..."]:
        return jnp.where(held.reshape(-1, *[1] * (old.ndim - 1)), old, new)

    running, skipped = jax.tree.map(choose, (before.running, before.skipped), (after.running, after.skipped))
    return after._replace(running=running, skipped=skipped), metrics | {"held": held}


class UpdateProgram(NamedTuple):
    """The static settings of the program that updates a stack."""

    model: ModelConfig
    algorithm: Algorithm
    trains: str  # see `update_stack`
    mesh: Mesh | None


@functools.partial(
    jax.jit,
    static_argnames="program",
    donate_argnames="state",
    keep_unused=True,  # the old gradients, whose memory the new ones take
    compiler_options=COMPILER_OPTIONS,
)
def _update(
    state: StackState,
    reference: Any,
    batch: Data,
    agents: PerAgent | None,
    base: Any,
    *,
    program: UpdateProgram,
) -> tuple[StackState, Metrics, Values | None]:
    TRACES["update"] += 1
    (model, algorithm, trains, mesh), count = program, batch.tokens.shape[0]
    # On other meshes, to update one agent after the other would gather all of them from their devices.
    if mesh is not None and not splits_only_agents(mesh, count):
        algorithm = algorithm.with_optimizer(per_agent="vmap")
    model = model_on(mesh, count, model)
    one_device = functools.partial(update_agents, model=model, algorithm=algorithm, trains=trains)
    state, metrics, values = over_agents(one_device, mesh, count)(state, reference, batch, agents, base)
    return constrain(state, mesh), metrics, values


def update_stack(
    state: StackState,
    batch: Data,
    *,
    model: ModelConfig,
    algorithm: Algorithm,
    trains: str = "policy",
    agents: PerAgent | None = None,
) -> tuple[StackState, Metrics, Values | None]:
    """Make one update of every agent of a stack [A, ...], where the state lies. The state is donated.

    trains: `policy`; `values`, of a stack of critics; `both`, of agents with a value head. agents: settings that differ between
    the agents, see `per_agent`. Returns the new state, metrics [A], and values [A, P, G, T] of critics whose batch had none.
    """
    arguments, mesh = _arguments(state, batch, agents)
    updated, metrics, values = _update(*arguments, program=UpdateProgram(model, algorithm, trains, mesh))
    return updated._replace(reference=state.reference, base=state.base), metrics, values


def lower_update(
    state: StackState,
    batch: Data,
    *,
    model: ModelConfig,
    algorithm: Algorithm,
    trains: str = "policy",
    agents: PerAgent | None = None,
) -> Lowered:
    """Return the program of `update_stack` for such arguments; nothing is donated."""
    arguments, mesh = _arguments(state, batch, agents)
    return _update.lower(*arguments, program=UpdateProgram(model, algorithm, trains, mesh))


def _arguments(state: StackState, batch: Data, agents: PerAgent | None) -> tuple[tuple, Mesh | None]:
    """Return the arrays that `_update` takes, on the mesh of the state, and the mesh."""
    mesh = mesh_of(state.params)
    if mesh is not None:
        batch, agents = jax.device_put((batch, agents), batch_shardings(mesh, (batch, agents)))
    trained = state._replace(reference=None, base=None)  # frozen: neither donated nor returned
    return (trained, state.reference, batch, agents, state.base), mesh
