"""Critics: decoders with a value head, trained like agents but on the value loss only.

`own`: one of every agent, a model of its own or a head of the agent itself; it reads what the agent reads. `central`: one of
the team, which reads the prompts of all agents ("[Agent 0] ...", one per line) and, as critic of type q, their completions too;
it learns the mean of the agents' returns and makes one step per batch.

A value is given once per completion, before it (v) or after it (q), or before each of its tokens (rows with `per_token`). How
values of a rollout become returns and batches is in `rollout.critic_values`. Left out: own critics with another tokenizer than
their agents."""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int, Shaped

from jmarl.algorithms import Algorithm
from jmarl.memory import are_shapes
from jmarl.models import decoder, lora
from jmarl.models.agent import Agent
from jmarl.models.config import ModelConfig
from jmarl.models.heads import values_of, with_value_head
from jmarl.models.platforms import COMPILER_OPTIONS
from jmarl.models.rows import on_rows
from jmarl.models.sharding import (
    DeviceMesh,
    mesh_of_one_model,
    model_on,
    on_devices,
    place_agents,
    state_shardings,
    state_specs,
)
from jmarl.models.stack import map_own, per_agent, share_params, stack_params, take_agents
from jmarl.objectives.policy import batch_logprobs, kl_penalty
from jmarl.sampling.scoring import hidden_states
from jmarl.team import StackSpec, Team
from jmarl.types import TRACES, Batch, StackState

Critics = tuple[tuple[StackSpec, ...], list[Any]]  # one per stack or one of the team, and the parameters [A, ...] of each stack


def make_central_critic(team: Team, params: Sequence[Any], algorithm: Algorithm, seed: int) -> Critics:
    """Return the critic of the team. Arguments as of `setup.make_critics`."""
    model, first = team.critic, team.stacks[0]
    mesh = mesh_of_one_model(first.mesh)
    fields = first.generation_config if model is None else model.generation_config
    if model is None:
        config, tokenizer, weights = first.config, first.tokenizer, map_own(lambda x: take_agents(x, slice(1)), params[0])
    else:
        config, tokenizer, weights = model.config, model.tokenizer, stacked_model(model, 1, algorithm, seed, mesh)
    spec = StackSpec(config, tokenizer, (tuple(range(team.num_agents)),), (), (fields,) * team.num_agents, mesh=mesh)
    return (spec,), [with_value_head(map_own(jnp.copy, weights))]


def make_own_critics(team: Team, params: Sequence[Any], algorithm: Algorithm, seed: int) -> Critics:
    """Return the critics of single agents. Arguments as of `setup.make_critics`."""
    model = team.critic
    if model is None:
        return team.stacks, [with_value_head(map_own(jnp.copy, p)) for p in params]
    specs, stacks = [], []
    for spec in team.stacks:
        if model.tokenizer.get_vocab() != spec.tokenizer.get_vocab():
            raise ValueError(
                f"the critic model {model.name!r} has another vocabulary than agents {spec.order}: an own critic reads its "
                "agent's tokens; a central one (maac, mappo) may be any model"
            )
        specs.append(dataclasses.replace(spec, config=model.config))
        stacks.append(with_value_head(stacked_model(model, len(spec.members), algorithm, seed, spec.mesh)))
    return tuple(specs), stacks


def stacked_model(model: Agent, count: int, algorithm: Algorithm, seed: int, mesh: DeviceMesh | None) -> Any:
    """Return parameters [A, ...] of `count` critics that start from a model; with LoRA new adapters over it."""
    shardings = None if mesh is None else partial(state_shardings, mesh)
    if not algorithm.lora.lora_rank:
        return stack_params([model.params] * count, shardings)
    params = [share_params([model.params], shardings)]
    return lora.init_models(params, [(model.config, count)], algorithm.lora, seed, lora.INIT_CRITICS)[0]


def on_stack(
    f: Callable[..., Float[Array, "prompt group token"]],
    params: Any,
    spec: StackSpec,
    prompts: Int[Array | np.ndarray, "agent prompt prompt_token"],
    lengths: Int[Array | np.ndarray, "agent prompt"],
    tokens: Int[Array | np.ndarray, "agent prompt group token"],
    algorithm: Algorithm,
) -> Float[Array, "agent prompt group token"]:
    """Return a number of each token after the prompts, computed by a stack of models.

    f: of one agent: (params, weights to compute with, architecture, prompts, lengths, tokens) -> numbers. It is compiled once
    for each object, so give the same one again."""
    mesh, arrays = spec.mesh, (jnp.asarray(prompts), jnp.asarray(lengths), tokens)
    if mesh is not None:
        arrays = place_agents(arrays, mesh)
    mode = algorithm.optimizer.per_agent
    return _on_stack(params, *arrays, f=f, model=spec.config, dtype=algorithm.compute_dtype, mode=mode, mesh=mesh)


@partial(jax.jit, static_argnames=("f", "model", "dtype", "mode", "mesh"), compiler_options=COMPILER_OPTIONS)
def _on_stack(
    params: Any,
    prompts: Int[Array, "agent prompt prompt_token"],
    lengths: Int[Array, "agent prompt"],
    tokens: Int[Array, "agent prompt group token"],
    *,
    f: Callable[..., Float[Array, "prompt group token"]],
    model: ModelConfig,
    dtype: str,
    mode: str,
    mesh: DeviceMesh | None,
) -> Float[Array, "agent prompt group token"]:
    TRACES[f.__name__] += 1
    model = model_on(mesh, model)

    def one_agent(params: Any, *rows: jax.Array) -> jax.Array:
        weights = decoder.compute_weights(params, model, jnp.dtype(dtype))
        return on_rows(partial(f, params, weights, model), model.placement.row_parts, *rows)

    specs = state_specs(mesh, params), P("agent"), P("agent"), P("agent")
    return on_devices(per_agent(one_agent, mode), mesh, specs, P("agent"))(params, prompts, lengths, tokens)


def values(params: Any, weights: Any, model: ModelConfig, prompts: Array, lengths: Array, tokens: Array) -> Array:
    """Return the values before tokens, see `on_stack`."""
    return values_of(params, hidden_states(weights, model, prompts, lengths, tokens, "full")[0]).reshape(tokens.shape)


def check_context(
    spec: StackSpec, lengths: Int[Array | np.ndarray, "agent prompt"], tokens: Shaped[Array | np.ndarray, "... token"]
) -> None:
    """Raise a ValueError for more tokens than a critic of another model than its agent can read."""
    longest, limit = int(np.max(lengths)) + tokens.shape[-1] - 1, spec.config.context
    if longest > limit:
        raise ValueError(
            f"a critic reads up to {longest} tokens, more than its context of {limit}: use a critic with a longer context"
        )


def value_stack(
    params: Any,
    spec: StackSpec,
    prompts: Int[Array | np.ndarray, "agent prompt prompt_token"],
    lengths: Int[Array | np.ndarray, "agent prompt"],
    tokens: Int[Array | np.ndarray, "agent prompt group token"],
    algorithm: Algorithm,
) -> Float[Array | np.ndarray, "agent prompt group token"]:
    """Return the values by a stack of critics before each of the tokens after the prompts; 0 where params are shapes."""
    if are_shapes(params):
        return np.broadcast_to(np.float32(0), tokens.shape)
    check_context(spec, lengths, tokens)
    return on_stack(values, params, spec, prompts, lengths, tokens, algorithm)


@partial(jax.jit, static_argnames=("model", "algorithm", "mesh"), compiler_options=COMPILER_OPTIONS)
def _penalties(
    reference: Any,
    kl_coef: Float[Array, " agent"],
    batch: Batch,
    *,
    model: ModelConfig,
    algorithm: Algorithm,
    mesh: DeviceMesh | None,
) -> tuple[Float[Array, "agent prompt group token"], Float[Array, "agent prompt group token"]]:
    TRACES["penalties"] += 1
    model = model_on(mesh, model)

    def one_agent(reference: Any, kl_coef: jax.Array, batch: Batch) -> tuple[jax.Array, jax.Array]:
        ref = batch_logprobs(reference, batch, model, algorithm)
        mask = batch.action_mask & jnp.isfinite(batch.rewards)[..., None]
        return ref, kl_penalty(batch, ref, mask, kl_coef, algorithm)

    specs = state_specs(mesh, reference), P("agent"), P("agent")
    return on_devices(per_agent(one_agent, algorithm.optimizer.per_agent), mesh, specs, P("agent"))(reference, kl_coef, batch)


def with_penalty(batch: Batch, stack: StackState, spec: StackSpec, algorithm: Algorithm) -> Batch:
    """Return a stack's batch with the reference's log-probabilities and the KL penalty of each token. Both are computed once,
    before the update, with the present coefficient, for agents and critics alike. Both are 0 where the stack is of shapes."""
    if are_shapes(stack.frozen):
        zeros = np.broadcast_to(np.float32(0), batch.tokens.shape)
        return batch._replace(ref_logprobs=zeros, penalty=zeros)
    mesh = spec.mesh
    if mesh is not None:
        batch = place_agents(batch, mesh)
    ref, penalty = _penalties(stack.frozen, stack.running.kl_coef, batch, model=spec.config, algorithm=algorithm, mesh=mesh)
    return batch._replace(ref_logprobs=ref, penalty=penalty)
