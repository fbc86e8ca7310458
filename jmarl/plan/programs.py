"""Make the programs of a run from shapes alone: no weights are read, and none are on a device."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
from jax.stages import Lowered

from jmarl.algorithms import on_platform
from jmarl.config import Sampling, TrainConfig
from jmarl.learning.choose import update_settings, with_settings
from jmarl.learning.setup import Setup
from jmarl.models.config import ModelConfig
from jmarl.models.decoder import init_params
from jmarl.models.sharding import state_shardings
from jmarl.randomness import Randomness
from jmarl.rollout.chunks import num_parts
from jmarl.rollout.zeros import zero_prompts
from jmarl.runs.precompile import programs_of_run
from jmarl.runs.start import start
from jmarl.sampling.generate import SampleRequest, bucket
from jmarl.sampling.refill import empty_pending
from jmarl.team import StackSpec, Team, map_stacks, stack_agents
from jmarl.types import StackState, TeamState

Programs = dict[str, Lowered]  # by name
KINDS = ("sampling", "greedy sampling", "update", "update of critics", "evaluation")  # in the order of a plan


class UnknownTokenizer:
    """Stands for the tokenizer of a model of which only config.json is here."""

    eos_token_id = 0
    added_tokens_decoder: dict[int, Any] = {}

    def __init__(self, vocab_size: int):
        self.vocab_size = vocab_size

    def get_vocab(self) -> dict[str, int]:
        """Return a token for every id; the first one ends a completion."""
        return {f"<{i}>": i for i in range(self.vocab_size)}


def shapes_of_agent(config: ModelConfig) -> Any:
    """Return the shapes of an agent's parameters."""
    return jax.eval_shape(lambda: init_params(config, jax.random.key(0)))


def shapes_of_run(team: Team, cfg: TrainConfig, devices: Sequence[Any], prompt_tokens: int = 1) -> tuple[Setup, TeamState]:
    """Return the setup of a run, and the shapes of its state at step 0 on devices, as its mesh divides it.

    team: of agents whose parameters are shapes. Settings that are auto are resolved as far as the platform says it.
    prompt_tokens: length of the longest prompt, for completions that begin early.
    """
    platform = devices[0].platform
    cfg, setups, step = on_platform(cfg, platform), list[Setup](), np.int32(0)
    # One tree per model: agents of one model may share it.
    models = {id(agent.params): agent.params for agent in team.agents}

    def state_of_run(models: dict[int, Any]) -> TeamState:
        agents = [a._replace(params=models[id(a.params)]) for a in team.agents]
        params = stack_agents(team.stacks, agents, cfg.lora.lora_rank > 0)
        setup, state = start(team, params, cfg, devices)
        setups.append(setup)
        return state

    state: Any = jax.eval_shape(state_of_run, models)
    if platform != "cpu":  # gradients have memory of their own on CPUs only
        state = map_stacks(state, lambda stack: stack._replace(grads=None))

    def on(spec: StackSpec, stack: StackState) -> StackState:
        single = SingleDeviceSharding(devices[0])
        shardings = jax.tree.map(lambda _: single, stack) if spec.mesh is None else state_shardings(spec.mesh, stack)
        return jax.tree.map(lambda x, y: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=y), stack, shardings)

    shapes = state._replace(
        stacks=tuple(map(on, setups[0].team.stacks, state.stacks)),
        critics=tuple(map(on, setups[0].critics, state.critics)),
    )
    # What is auto on a GPU stays so: this process has none, for which `start` resolved it.
    setup = with_settings(setups[0], update_settings(cfg))
    return setup, with_pending(setup, shapes._replace(step=step), prompt_tokens)


def with_pending(setup: Setup, state: TeamState, prompt_tokens: int) -> TeamState:
    """Return the state of a run with async_steps with the shapes of completions that have begun; of others, the same."""
    cfg, group = setup.cfg, setup.cfg.episodes.num_generations
    if not cfg.episodes.async_steps:
        return state
    pending, leaf = [], jax.tree.leaves(state.stacks)[0]
    platform = next(iter(leaf.sharding.device_set)).platform
    prompts = zero_prompts(setup.team, cfg.episodes.num_prompts, widths_of(setup.team, prompt_tokens))
    for spec, encoded in zip(setup.team.stacks, prompts, strict=True):
        shapes = jax.eval_shape(partial(empty_pending, encoded, group, spec.config, cfg.sampling, platform, spec.stops))
        place = leaf.sharding if spec.mesh is None else NamedSharding(spec.mesh.mesh, P("agent"))
        pending.append(jax.tree.map(lambda x, place=place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), shapes))
    return state._replace(pending=tuple(pending))


def programs_of_shapes(setup: Setup, state: TeamState, prompt_tokens: int, eval_items: int = 0) -> Programs:
    """Return the programs of a step, and the sampler of an evaluation, by name.

    prompt_tokens: length of the longest prompt of the first turn, padded like those of a run. Of several turns, in chains, the
    update has all rows, with prompts that hold the turns before; the samplers are those of the first turn. Left out: a central
    critic, and passes that only compute values or the penalties of a reward.
    """
    team, cfg, widths = setup.team, setup.cfg, widths_of(setup.team, prompt_tokens)

    def request_of(items: Sequence[Any], settings: Sampling, group: int, purpose: int) -> SampleRequest:
        count = len(items) // num_parts(len(items), cfg.episodes)
        prompts, ids = zero_prompts(team, count, widths), np.arange(count, dtype=np.uint32)
        return SampleRequest(prompts, settings, Randomness(0, 0, purpose), group, ids)

    tasks = range(cfg.episodes.num_prompts)
    programs = programs_of_run(setup, state, tasks, range(eval_items), tasks, request_of, any_turn=True)
    in_order = sorted(programs, key=lambda program: (program[0] == "evaluation", program[1], KINDS.index(program[0])))
    return {kind if len(team.stacks) == 1 else f"{kind} of stack {i}": lowered for kind, i, lowered in in_order}


def widths_of(team: Team, prompt_tokens: int) -> list[int]:
    """Return the length of the prompts of each stack, as they are padded."""
    return [min(bucket(prompt_tokens), spec.config.context) for spec in team.stacks]
