"""What completions were expected to get: values of critics, or the return of greedy completions; and what critics learn from.

A critic is a decoder with a second head (`objective.with_value_head`), trained like an agent but on the value loss alone.
`own`: one of every agent, beside it or as a head of the agent itself; it reads what the agent read. `central`: one of the team,
which reads the prompts of all agents ("[Agent 0] …", one a line) and as critic of type q their completions as well; it learns
the mean of the agents' returns and takes one step a batch.

Values are given once a completion, before it (v) or after it (q), or before each of its tokens (rows with the advantage `gae`).
Returns of several turns are lambda-returns over the values of the nodes (`returns.discounted`); within a completion the return
comes with its last token. Left out: own critics with another tokenizer than their agents'.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jmarl.algorithms import algorithm, shares_critic, value_kind
from jmarl.config import Learning, TrainConfig
from jmarl.learning.objective import kl_penalty, logprobs_of
from jmarl.models import decoder, lora
from jmarl.models.heads import values_of, with_value_head
from jmarl.models.hub.agents import Agent
from jmarl.models.platforms import COMPILER_OPTIONS
from jmarl.models.sharding import apart, batch_shardings, mesh_of, over_agents
from jmarl.models.stack import map_own, part, per_agent, share_params, stack_params
from jmarl.sampling.scoring import hidden_states
from jmarl.team import StackSpec, Team
from jmarl.types import TRACES, Batch, StackState


class Critics(NamedTuple):
    """What does not change about a team's critics."""

    specs: tuple[StackSpec, ...]  # of each stack its own, or one of the team; empty: there are none beside the agents
    learning: Learning


def make_critics(
    team: Team, params: Sequence[Any], learning: Learning, model: Agent | None = None, seed: int = 0
) -> tuple[Critics, list]:
    """The critics that an algorithm asks for, and the parameters of each stack of them: those of the agents, or of `model`,
    with a new head. params: the agents', which are copied; with LoRA their adapters are, and the base is shared. seed: of
    adapters over `model`."""
    row = algorithm(learning.algorithm)
    rate = learning.critic_learning_rate or learning.learning_rate
    once: dict[str, Any] = dict(num_epochs=1, num_minibatches=1) if row.critic == "central" else {}
    plain: dict[str, Any] = dict(kl_coef=0.0, kl_target=None, target_kl=None)
    of_critics = dataclasses.replace(learning, learning_rate=rate, **plain, **once)
    if row.critic is None or shares_critic(learning):
        if model is not None:
            raise ValueError(f"a critic model was given, but algorithm={learning.algorithm!r} has no critic beside its agents")
        return Critics((), of_critics), []
    if row.critic == "central":
        first = team.stacks[0]
        config, tokenizer = (first.config, first.tokenizer) if model is None else (model.config, model.tokenizer)
        weights = map_own(lambda x: part(x, slice(1)), params[0]) if model is None else of_model(model, 1, learning, seed)
        spec = StackSpec(config, tokenizer, (tuple(range(team.num_agents)),))
        return Critics((spec,), of_critics), [with_value_head(map_own(jnp.copy, weights))]
    if model is None:
        return Critics(team.stacks, of_critics), [with_value_head(map_own(jnp.copy, p)) for p in params]
    specs, weights = [], []
    for spec in team.stacks:
        if model.tokenizer.get_vocab() != spec.tokenizer.get_vocab():
            raise ValueError(
                f"the critic model {model.name!r} has another vocabulary than agents {spec.order}: an own critic reads its "
                "agent's tokens; a central one (maac, mappo) may be any model"
            )
        specs.append(dataclasses.replace(spec, config=model.config))
        weights.append(with_value_head(of_model(model, len(spec.members), learning, seed)))
    return Critics(tuple(specs), of_critics), weights


def of_model(model: Agent, count: int, learning: Learning, seed: int) -> Any:
    """Parameters [A, ...] of so many critics that start from a model; with LoRA new adapters over it."""
    if not learning.lora_rank:
        return stack_params([model.params] * count)
    params = [share_params([model.params])]
    return lora.models(params, [(model.config, count)], learning, seed, lora.OF_CRITICS)[0]


def trains(learning: Learning) -> str:
    """What an update of the agents trains, as `update.update_stack` names it."""
    return "both" if shares_critic(learning) else "policy"


@partial(jax.jit, static_argnames=("cfg", "dtype", "mode", "mesh"), compiler_options=COMPILER_OPTIONS)
def _values(params, prompts, lengths, tokens, *, cfg, dtype, mode, mesh):
    TRACES["values"] += 1
    agents = tokens.shape[0]
    how = mode if mesh is None or apart(mesh, agents) else "vmap"

    def of_agent(params, prompts, lengths, tokens):
        weights = decoder.cast(params, jnp.dtype(dtype))
        return values_of(params, hidden_states(weights, cfg, prompts, lengths, tokens, "full")).reshape(tokens.shape)

    return over_agents(per_agent(of_agent, how), mesh, agents)(params, prompts, lengths, tokens)


def check_context(spec: StackSpec, lengths: np.ndarray, tokens: jax.Array) -> None:
    """Refuse more than a critic can read, which only one of another model than its agent's may be asked for."""
    longest, most = int(np.max(lengths)) + tokens.shape[-1] - 1, spec.config.max_positions
    if longest > most:
        raise ValueError(
            f"a critic reads up to {longest} tokens, more than its context of {most}: give one of a longer context"
        )


def value_stack(params: Any, spec: StackSpec, prompts, lengths, tokens, cfg: TrainConfig) -> jax.Array:
    """Values [A, P, G, T] by a stack of critics: before each of tokens [A, P, G, T] behind prompts [A, P, S]."""
    check_context(spec, lengths, tokens)
    mesh, arrays = mesh_of(params), (jnp.asarray(prompts), jnp.asarray(lengths), tokens)
    if mesh is not None:
        arrays = jax.device_put(arrays, batch_shardings(mesh, arrays))
    return _values(params, *arrays, cfg=spec.config, dtype=cfg.compute_dtype, mode=cfg.per_agent, mesh=mesh)


def judges_as_it_learns(learning: Learning) -> bool:
    """Whether the values of tokens are those of the pass in which their critic learns: where that is one step on the whole
    batch, without dropout. Own critics then learn first, and their agents from the values that they gave."""
    steps = learning.num_epochs * learning.num_minibatches * learning.micro_batches
    return value_kind(learning) == "token" and steps == 1 and not learning.lora_dropout


def penalises(learning: Learning) -> bool:
    """Whether the KL penalty of each token is a reward that a critic expects as well: in rows with values of tokens, as in
    InstructGPT (arXiv 2203.02155). Other rows take the sum of a completion's from its return, in the agent's advantage alone,
    which no value of a prompt biases."""
    return value_kind(learning) == "token" and learning.kl_coef > 0 and learning.kl_in == "reward"


@partial(jax.jit, static_argnames=("cfg", "learning", "mode", "mesh"), compiler_options=COMPILER_OPTIONS)
def _penalised(reference, kl_coef, batch, *, cfg, learning, mode, mesh):
    TRACES["penalties"] += 1
    agents = batch.tokens.shape[0]
    how = mode if mesh is None or apart(mesh, agents) else "vmap"

    def of_agent(reference, kl_coef, batch):
        ref = logprobs_of(reference, batch, cfg, learning)
        return ref, kl_penalty(batch, ref, batch.action_mask & jnp.isfinite(batch.rewards)[..., None], kl_coef, learning)

    return over_agents(per_agent(of_agent, how), mesh, agents)(reference, kl_coef, batch)


def penalised(batch: Batch, stack: StackState, spec: StackSpec, cfg: TrainConfig) -> Batch:
    """A stack's batch with the reference's log-probabilities and the KL penalty of each token: made once, before the update, by
    the coefficient of the moment, for agents and critics alike."""
    mesh = mesh_of(stack.params)
    if mesh is not None:
        batch = jax.device_put(batch, batch_shardings(mesh, batch))
    static: dict[str, Any] = dict(cfg=spec.config, learning=cfg.learning(), mode=cfg.per_agent, mesh=mesh)
    reference = stack.reference if stack.base is None else stack.base  # LoRA's with its adapters off
    ref, penalty = _penalised(reference, stack.running.kl_coef, batch, **static)
    return batch._replace(ref_logprobs=ref, penalty=penalty)
