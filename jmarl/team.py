"""A team: its agents, sorted into stacks of one architecture and tokenizer.

Agents with equal architecture and vocabulary share a stack; a team of different models is a tuple of stacks. Agents exchange
text, so their tokenizers never meet. Shared weights are one parameter set that plays several roles.
"""

from __future__ import annotations

import dataclasses
import hashlib
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jmarl.models.config import ModelConfig
from jmarl.models.heads import without_value_head
from jmarl.models.hub.agents import Agent, load_agent, save_pretrained
from jmarl.models.hub.peft import merge, save_adapter
from jmarl.models.hub.tokenize import stop_ids
from jmarl.models.lora import describe, digest, model_of
from jmarl.models.sharding import mesh_for, place
from jmarl.models.stack import share_params, stack_params, unstack
from jmarl.types import StackState, TeamState


@dataclasses.dataclass(frozen=True)
class StackSpec:
    """What does not change about a stack. members[a] are the agents of the team that parameter set a plays: one each, or
    with shared weights all of them (every set plays equally many)."""

    config: ModelConfig
    tokenizer: Any
    members: tuple[tuple[int, ...], ...]

    @property
    def order(self) -> list[int]:
        """Agents of the team as they lie in the stack's arrays [A, roles]."""
        return [agent for roles in self.members for agent in roles]

    @property
    def stop(self) -> tuple[int, ...]:
        return stop_ids(self.tokenizer)


@dataclasses.dataclass(frozen=True)
class Team:
    """Who plays: the agents, sorted into stacks of one architecture and tokenizer."""

    stacks: tuple[StackSpec, ...]
    agents: tuple[Agent, ...] = dataclasses.field(default=(), compare=False, repr=False)
    """The agents as they were loaded, on the host, where `Team.load` or `Team.of` made the team: what training starts from."""

    @classmethod
    def load(cls, models: Sequence[str | Path], *, shared_weights: bool = False) -> Team:
        """Load a team by one name, directory, .gguf file or hub id per agent; equal ones are read once.

        shared_weights: all agents are roles of one set of parameters.
        """
        if isinstance(models, str | Path):
            raise TypeError(f"give one model per agent, such as [{str(models)!r}] * 2, got {models!r}")
        loaded = {str(model): load_agent(model) for model in models}
        return cls.of([loaded[str(model)] for model in models], shared_weights=shared_weights)

    @classmethod
    def of(cls, agents: Sequence[Agent], *, shared_weights: bool = False) -> Team:
        """Make a team of loaded agents; see `load`."""
        return cls(sort_into_stacks(agents, shared_weights), tuple(agents))

    @property
    def num_agents(self) -> int:
        return len({agent for s in self.stacks for agent in s.order})  # with several runs in a stack each is there once a run

    @property
    def agent_specs(self) -> list[StackSpec]:
        """The stack of each agent."""
        specs = {agent: spec for spec in self.stacks for agent in spec.order}
        return [specs[agent] for agent in range(self.num_agents)]

    def describe(self) -> list[dict]:
        """JSON of what must not change between a checkpoint and its resume."""
        return [
            {
                "config": dataclasses.asdict(s.config),
                "members": [list(m) for m in s.members],
                "tokenizer": _digest(s.tokenizer),
            }
            for s in self.stacks
        ]


def to_agents(team: Team, stacks: Sequence[Any]) -> list[Any]:
    """Return one entry [P, ...] per agent of the team, from arrays [A, R * P, ...] of each stack. The inverse of `to_stacks`.

    R: roles of a parameter set. In place of arrays there may be pytrees of them.
    """

    def take(spec: StackSpec, i: int, x: Any) -> Any:
        return x.reshape(len(spec.order), -1, *x.shape[2:])[i]

    agents: list[Any] = [None] * team.num_agents
    for spec, stack in zip(team.stacks, stacks, strict=True):
        for i, agent in enumerate(spec.order):
            agents[agent] = jax.tree.map(partial(take, spec, i), stack)
    return agents


def to_stacks(team: Team, agents: Sequence[Any] | np.ndarray) -> tuple[Any, ...]:
    """Return arrays [A, R * P, ...] of each stack, from one entry [P, ...] per agent of the team.

    R: roles of a parameter set. In place of arrays there may be pytrees of them; agents may be an array [N, P, ...].
    """

    def stack(spec: StackSpec, *rows: np.ndarray) -> np.ndarray:
        return np.stack(rows).reshape(len(spec.members), -1, *rows[0].shape[1:])

    return tuple(jax.tree.map(partial(stack, spec), *(agents[agent] for agent in spec.order)) for spec in team.stacks)


def _digest(tokenizer: Any) -> str:
    return hashlib.sha256(repr(sorted(tokenizer.get_vocab().items())).encode()).hexdigest()[:16]


def kinds_of(agents: Sequence[Agent]) -> dict[Any, list[int]]:
    """Which agents share a stack, by architecture and vocabulary, in the order of the team's stacks."""
    kinds: dict[Any, list[int]] = {}
    digests = {of: _digest(tokenizer) for of, tokenizer in {id(a.tokenizer): a.tokenizer for a in agents}.items()}
    for i, agent in enumerate(agents):
        kinds.setdefault((agent.config, digests[id(agent.tokenizer)]), []).append(i)
    return kinds


def sort_into_stacks(agents: Sequence[Agent], shared_weights: bool = False) -> tuple[StackSpec, ...]:
    """Return the stacks of a team. Raises an error for what is no list of agents, and for different models that share
    weights."""
    if not agents:
        raise ValueError("a team needs at least one agent, got none")
    wrong = [agents] if isinstance(agents, Agent) else [agent for agent in agents if not isinstance(agent, Agent)]
    if wrong:
        got = "one agent alone" if isinstance(agents, Agent) else f"{wrong[0]!r:.60}"
        raise TypeError(f"a team is made of a list of agents, such as [load_agent(name)] * 2; got {got}")
    kinds = kinds_of(agents)
    if shared_weights and len(kinds) > 1:
        raise ValueError(f"shared_weights needs agents of one model, got {len(kinds)} different ones")
    specs = []
    for (config, _), indices in kinds.items():
        members = (tuple(indices),) if shared_weights else tuple((i,) for i in indices)
        specs.append(StackSpec(config, agents[indices[0]].tokenizer, members))
    return tuple(specs)


def stack_agents(stacks: Sequence[StackSpec], agents: Sequence[Agent], lora: bool = False) -> list[Any]:
    """Return the stacked parameters [A, ...] of each stack.

    lora: one copy of each stack's parameters, which its agents share: all that LoRA needs. They must start from the same.
    """
    params = [[agents[roles[0]].params for roles in spec.members] for spec in stacks]
    return [share_params(trees) if lora else stack_params(trees) for trees in params]


def make_team(agents: Sequence[Agent], shared_weights: bool = False, lora: bool = False) -> tuple[Team, list[Any]]:
    """Return a team and the stacked parameters [A, ...] of each of its stacks, for callers that keep parameters themselves.

    shared_weights: all agents are roles of the first one's parameters. lora: see `stack_agents`.
    """
    stacks = sort_into_stacks(agents, shared_weights)
    return Team(stacks), stack_agents(stacks, agents, lora)


def initial_params(team: Team, params: Sequence[Any] | None, lora: bool) -> Sequence[Any]:
    """Return the parameters that training starts from: params, or those of the team's agents. Raises ValueError if there are
    none."""
    if params is not None:
        return params
    if not team.agents:
        raise ValueError("this team has no parameters: make it with Team.load or Team.of, or give params")
    return stack_agents(team.stacks, team.agents, lora)


def without_gradients(state: TeamState) -> TeamState:
    """What a run returns of a state."""
    return each_stack(state, lambda stack: stack._replace(grads=None))


def to_checkpoint(state: TeamState) -> TeamState:
    """What a checkpoint keeps of a state: no gradients, and with LoRA no base."""
    return each_stack(state, lambda stack: stack._replace(grads=None, base=None))


def each_stack(state: TeamState, f: Callable[[StackState], StackState]) -> TeamState:
    """A state with f of each stack, of agents and of critics."""
    return state._replace(stacks=tuple(map(f, state.stacks)), critics=tuple(map(f, state.critics)))


def placed(team: Team, params: Sequence[Any], mesh: str) -> list[Any]:
    """The parameters of each stack where runs with this setting have them; a run then takes them as they lie."""
    where = mesh_for(mesh, [len(spec.members) for spec in team.stacks])
    return [place(of_stack, where) for of_stack in params]


def policies(state: TeamState) -> list[Any]:
    """The parameters [A, ...] of each stack as models, without a critic's head."""
    return [without_value_head(model_of(stack)) for stack in state.stacks]


def bases(state: TeamState) -> list[str]:
    """Of each stack and critic with LoRA the digest of its base, which must not change between a checkpoint and its resume."""
    return [digest(stack.base) for stack in (*state.stacks, *state.critics) if stack.base is not None]


def agents_of(team: Team, params: Sequence[Any]) -> list[Agent]:
    """The agents one by one, on the host: what `load_agent` reads of those that `save_team` writes. Adapters are merged."""
    agents: list[Any] = [None] * team.num_agents
    for spec, stacked in zip(team.stacks, params, strict=True):
        for a, roles in enumerate(spec.members):
            merged = merge(spec.config, jax.device_get(unstack(stacked, a)))
            for agent in roles:
                agents[agent] = Agent(f"agent_{agent}", spec.config, merged, spec.tokenizer)
    return agents


OF_A_MODEL = ("*.json", "*.safetensors", "*.jinja", "adapter", "merges.txt", "vocab.txt")  # what is replaced


def save_team(directory: str | Path, team: Team, params: Sequence[Any]) -> None:
    """Write every agent as a Hugging Face directory `agent_0/`, `agent_1/`, …; params: of each stack, [A, ...]. With LoRA the
    adapters are merged into the weights, and lie beside them for `peft` in `agent_0/adapter/`, …

    All agents are written under other names first: where one cannot be written (a full disk), an error is raised and what was
    there is as it was. Files of an older model are replaced, others that lie beside them stay."""
    root, written = Path(directory), list[tuple[Path, Path]]()
    try:
        for spec, stacked in zip(team.stacks, params, strict=True):
            rank, alpha, _ = describe(stacked)
            for a, roles in enumerate(spec.members):
                of_agent = jax.device_get(unstack(stacked, a))
                merged = merge(spec.config, of_agent)
                for agent in roles:
                    final, where = root / f"agent_{agent}", root / f"agent_{agent}.saving"
                    written.append((where, final))
                    shutil.rmtree(where, ignore_errors=True)  # of a save that was killed
                    save_pretrained(where, spec.config, merged, spec.tokenizer)
                    if rank:
                        save_adapter(where / "adapter", of_agent, alpha)
    except BaseException:
        for where, _ in written:
            shutil.rmtree(where, ignore_errors=True)  # may be there only in part
        raise
    for where, final in written:
        old = final.with_name(f"{final.name}.old")
        shutil.rmtree(old, ignore_errors=True)  # of a save that was killed
        if final.exists():
            for path in final.iterdir():
                if not (where / path.name).exists() and not any(path.match(name) for name in OF_A_MODEL):
                    path.rename(where / path.name)
            final.rename(old)
        where.rename(final)
        shutil.rmtree(old, ignore_errors=True)  # there may be none
