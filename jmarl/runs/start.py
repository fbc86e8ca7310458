"""Prepare a run: its critics and initial state, copies and digests of its initial parameters, and what identifies it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.stages import Lowered

from jmarl.algorithms import Algorithm, resolve, with_ample_memory
from jmarl.config import TrainConfig
from jmarl.envs.base import Environment, describe
from jmarl.files import fingerprint
from jmarl.hardware import memory_in_use, memory_pool
from jmarl.learning.choose import Work, bytes_on_device, choose, is_open, update_settings, with_settings
from jmarl.learning.critics import make_critics
from jmarl.learning.optimizer import init_stack
from jmarl.learning.per_agent import initial_state, settings_of_stack, with_adapters
from jmarl.learning.setup import Setup, make_setup, mesh_of_critics
from jmarl.logs.terminal import say
from jmarl.models import lora, sharding
from jmarl.models.heads import with_value_head
from jmarl.models.hub.agents import Agent
from jmarl.models.hub.peft import merge
from jmarl.models.stack import is_shared, map_own, unstack
from jmarl.preferences.pairs import Pair, Trajectory
from jmarl.team import Team
from jmarl.types import TeamState

C = TypeVar("C", bound=TrainConfig)


def start(team: Team, params: Sequence[Any], cfg: TrainConfig) -> tuple[Setup, TeamState]:
    """Return the setup of a run and its state at step 0, on the devices where it trains.

    params: parameters [A, ...] of each stack, which are donated.
    """
    algorithm, mesh = resolve(cfg), sharding.mesh_for(cfg.run.mesh, [len(spec.members) for spec in team.stacks])
    params = with_adapters(team, params, cfg, mesh)
    critics, critic_params = make_critics(team, params, algorithm, cfg.run.seed)
    if algorithm.has_value_head:
        params = [with_value_head(stack) for stack in params]
    state, own = initial_state(team, params, algorithm, cfg.run, mesh), algorithm.row.critic == "own"
    learns = [stack.opt_state != () for stack in state.stacks] if own else [True]  # frozen agents have frozen critics
    move = sharding.place if own or mesh is None else sharding.put  # a copy of an agent's weights may be on all devices
    critic_states = tuple(
        init_stack(
            move(weights, mesh_of_critics(algorithm, mesh)),
            settings_of_stack(critics.algorithm, cfg.run, spec.members, team.num_agents)[0],
            learns=critic_learns,
        )
        for spec, weights, critic_learns in zip(critics.specs, critic_params, learns, strict=False)
    )
    return make_setup(team, critics, algorithm, cfg, mesh), state._replace(critics=critic_states)


def settle_updates(
    setup: Setup, state: TeamState, cfg: C, longest: Callable[[], tuple[Work, Callable[[Setup], Iterable[Lowered]]]]
) -> tuple[Setup, C]:
    """Return the setup and the settings of a run without auto: choose how its updates fit into the memory, and say so.

    Args:
        setup, state: of the run.
        cfg: its settings; those in `setup` differ if a reward model rewards the team.
        longest: returns the largest update, and a function from a setup to its programs.
    """
    room = memory_pool()
    if is_open(setup.cfg) and room is not None:
        work, updates = longest()
        setup, line = choose(setup, work, max(bytes_on_device(state), memory_in_use()), [room], updates)
        if cfg.run.progress:
            say(line)
    elif is_open(setup.cfg):  # a platform that does not say how much memory it has
        setup = with_settings(setup, update_settings(with_ample_memory(setup.cfg)))
    return setup, cfg.replace(**update_settings(setup.cfg))


def say_what_runs(team: Team, params: Sequence[Any], cfg: TrainConfig) -> None:
    """Show the line with which a run begins: who learns, where, how long, and where to. params: of each stack, [A, ...]."""
    if not cfg.run.progress:
        return
    counts = [len(spec.members) for spec in team.stacks]
    stacks = list(zip(counts, params, strict=True))
    sizes = " + ".join(f"{count} x {short_number(agent_size(stack, count))}" for count, stack in stacks)
    devices = jax.devices()
    where = f"written to {cfg.run.output_dir}" if cfg.run.output_dir else "nothing is written (set output_dir)"
    in_bfloat16 = cfg.sampling.compute_dtype == "bfloat16"
    precision = "; computes in bfloat16, weights in float32" if in_bfloat16 else ""
    trained = [short_number(lora.num_trained(spec.config, cfg.lora)) for spec in team.stacks] if cfg.lora.lora_rank else []
    trained_text = f", of which LoRA trains {' + '.join(trained)}{' each' * (sum(counts) > 1)}" if trained else ""
    agents = f"{team.num_agents} agent{'s' * (team.num_agents > 1)} ({sizes} parameters{trained_text})"
    say(
        f"{cfg.algorithm}: {agents} on {len(devices)} x {devices[0].device_kind}, "
        f"{cfg.run.num_updates} update{'s' * (cfg.run.num_updates != 1)}, {where}{precision}"
    )


def agent_size(stack: Any, count: int) -> int:
    """Return the number of parameters of each of the `count` agents of a stack; those that they share count for each."""
    leaves = jax.tree.leaves(stack, is_leaf=is_shared)
    return sum(x.value.size if is_shared(x) else x.size // count for x in leaves)


def short_number(count: float) -> str:
    """Return a number as "135 M", "1.2 M", "12 k" or "850"."""
    for unit, name in ((1e6, " M"), (1e3, " k")):
        if count >= 0.9995 * unit:
            return f"{count / unit:,.{int(count < 9.95 * unit)}f}{name}"
    return f"{count:.0f}"


def say_what_data(data: Sequence[Pair] | Sequence[Trajectory], held_out: Sequence[Any], cfg: TrainConfig) -> None:
    """Show how many pairs or trajectories a run learns from, and of which agents if the data says so."""
    if not cfg.run.progress:
        return
    counts = Counter(item.agent for item in data if isinstance(item, Trajectory) and item.agent)
    agents = f" of {len(counts)} agents ({', '.join(f'{name}: {n}' for name, n in counts.items())})" if len(counts) > 1 else ""
    kind = "trajectories" if isinstance(data[0], Trajectory) else "pairs"
    say(f"learns from {len(data)} {kind}{agents}" + (f"; {len(held_out)} held out" if held_out else ""))


def say_what_is_shared(line: str, cfg: TrainConfig) -> None:
    """Show a line about held-out data that are trained on too, if there is one."""
    if line and cfg.run.progress:
        say(line)


def run_identity(setup: Setup, items: Sequence[dict], env: Environment) -> dict[str, Any]:
    """Return what must not change when a run on items resumes: team, critics, environment, data and reward, as JSON values."""
    return {
        "team": setup.team.describe(),
        "critics": Team(setup.critics.specs).describe(),
        "environment": describe(env),
        "options": fingerprint.of_options(env),
        "data": fingerprint.of_data(items),
        "reward": fingerprint.of_reward(env),
        "error_handling": fingerprint.error_handling(env),
    }


def first_agent(team: Team, params: Sequence[Any]) -> Agent:
    """Return the first agent of a team as it was loaded."""
    spec = team.stacks[0]
    weights = merge(spec.config, jax.device_get(unstack(params[0], 0)))
    return Agent("first", spec.config, weights, spec.tokenizer, spec.generation_config)


def copy_initial(params: Sequence[Any], algorithm: Algorithm, mesh: Mesh | None) -> list[Any]:
    """Return copies on the mesh of each stack's parameters, for rounds that use them as reference or comparator; else []."""
    settings = algorithm.preference
    if settings.comparator != "initial" and (algorithm.row.learned or settings.reference_free):
        return []
    return [sharding.place(map_own(jnp.copy, stack), mesh) for stack in params]


def initial_digests(params: Sequence[Any], algorithm: Algorithm) -> list[str]:
    """Return the digest of each stack's parameters if they are the reference of preferences, which must not change when a run
    resumes; else []. With LoRA the digests of the bases are compared instead."""
    has_reference = algorithm.row.margin in ("own", "joint") and not algorithm.preference.reference_free
    return [lora.digest(stack) for stack in params] if has_reference and not algorithm.lora.lora_rank else []
