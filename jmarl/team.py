"""Describe a team: its agents, sorted into stacks of one architecture and vocabulary; load and save its parameters.

Agents with equal architecture and vocabulary share a stack; a team of different models has several stacks. Agents exchange
text, so stacks may have different vocabularies. Each agent of a stack has its own tokenizer, with its chat template and other
settings, and its own end tokens. Shared weights are one parameter set that plays several roles.
"""

from __future__ import annotations

import dataclasses
import functools
import shutil
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
from jaxtyping import Bool, Int

from jmarl.config import Run, TrainConfig, check_argument
from jmarl.config.paths import expand_home
from jmarl.models.agent import Agent, agents_by_model, describe_tokenizer, vocabulary_digest
from jmarl.models.config import ModelConfig
from jmarl.models.decoder import init_params
from jmarl.models.heads import without_value_head
from jmarl.models.hub.tokenize import stop_ids
from jmarl.models.lora import INIT, AdapterKind, describe, model_of
from jmarl.models.sharding import DeviceMesh, copy_to, mesh_for, state_shardings
from jmarl.models.stack import share_params, stack_params, to_host, unstack
from jmarl.processes import exchange
from jmarl.types import StackState, TeamState

draw_params = jax.jit(init_params, static_argnums=0)
TEAM = "a team, such as jmarl.Team.load([model] * 2), or the first value of make_team(agents)"  # to be given


@dataclasses.dataclass(frozen=True)
class StackSpec:
    """The constant description of a stack."""

    config: ModelConfig
    tokenizer: Any = dataclasses.field(repr=False)  # of the first agent; the others have its vocabulary
    members: tuple[tuple[int, ...], ...]
    """For each parameter set the agents of the team that it plays: one, or with shared weights all. Equally many for each."""
    tokenizers: tuple[Any, ...] = dataclasses.field(default=(), repr=False)  # of each agent, in `order`; empty: the first one's
    generation_configs: tuple[Mapping[str, Any], ...] = ()  # of each agent, in `order`, see `Agent`; empty: none has any
    mesh: DeviceMesh | None = dataclasses.field(default=None, compare=False, repr=False)  # where it is; None: on one device

    @property
    def order(self) -> list[int]:
        """Agents of the team, in the order of the stack's arrays [A, roles]."""
        return [agent for roles in self.members for agent in roles]

    @property
    def generation_config(self) -> Mapping[str, Any]:
        """That of the first agent."""
        return self.generation_configs[0] if self.generation_configs else {}

    @property
    def stop(self) -> tuple[int, ...]:
        """Token ids that end a completion of the first agent. The first of them also pads arrays."""
        return stop_ids(self.tokenizer, self.generation_config.get("eos_token_id", ()))

    @property
    def stops(self) -> Int[np.ndarray, "agent role stop"]:
        """Token ids that end completions of each agent; its first one is repeated if others have more."""
        rows = [self.of(agent).stop for agent in self.order]
        width = max(map(len, rows))
        padded = np.array([[*row, *row[:1] * (width - len(row))] for row in rows], np.int32)
        return padded.reshape(*np.shape(self.members), width)

    @functools.cached_property
    def allowed(self) -> Bool[np.ndarray, " vocab"] | None:
        """Which ids have a token; the sampler draws no others. None: all have one."""
        allowed = np.zeros(self.config.vocab_size, bool)
        allowed[[i for i in self.tokenizer.get_vocab().values() if i < len(allowed)]] = True  # tokenizers may have more
        return None if allowed.all() else allowed

    def of(self, agent: int) -> StackSpec:
        """Return the description of a stack with one agent of this stack alone."""
        i = self.order.index(agent)
        tokenizer = self.tokenizers[i] if self.tokenizers else self.tokenizer
        return StackSpec(self.config, tokenizer, ((agent,),), (), self.generation_configs[i : i + 1])


@dataclasses.dataclass(frozen=True)
class Team:
    """The agents that play together, such as `Team.load(["a Hub id or a directory"] * 2)`: sorted into stacks of one
    architecture and tokenizer."""

    stacks: tuple[StackSpec, ...]
    agents: tuple[Agent, ...] = dataclasses.field(default=(), compare=False, repr=False)
    """The loaded agents that training starts from, on the host; empty unless made by `Team.load` or `Team.of`."""
    critic: Agent | None = dataclasses.field(default=None, compare=False, repr=False)
    """Model that critics start from; None: each critic from its agent, a central one from the first agent."""
    reward_model: Agent | None = dataclasses.field(default=None, compare=False, repr=False)
    """Model that the reward model of marlhf and marlhf_iter starts from; None: the first agent."""
    random_weights: bool = False
    """The agents have no weights: a run starts from `random_agents` of its seed, which are drawn on one device."""

    @classmethod
    def load(cls, models: Sequence[str | Path], *, shared_weights: bool = False, random_weights: bool = False) -> Team:
        """Load a team from one name, directory, .gguf file or hub id per agent; equal models are read once.

        Weights are read when they are needed, and then divided over devices at once (`hub.agents.open_agent`). shared_weights:
        all agents are roles of one set of parameters. random_weights: read architectures and tokenizers only, see the field.
        """
        from jmarl.models.hub.agents import open_agent  # what loads and saves is no part of a step

        if isinstance(models, str | Path):
            raise TypeError(f"give one model per agent, such as [{str(models)!r}] * 2, got {models!r}")
        if any(not isinstance(model, str | Path) for model in models):
            raise TypeError("give names or directories of models; `Team.of` makes a team of loaded agents")
        loaded = {model: open_agent(model, weights=not random_weights) for model in map(str, models)}
        team = cls.of([loaded[str(model)] for model in models], shared_weights=shared_weights)
        return dataclasses.replace(team, random_weights=random_weights)

    @classmethod
    def of(
        cls,
        agents: Sequence[Agent],
        *,
        shared_weights: bool = False,
        critic: Agent | None = None,
        reward_model: Agent | None = None,
    ) -> Team:
        """Return a team of loaded agents; see `load` and the fields of the class."""
        return cls(sort_into_stacks(agents, shared_weights), tuple(agents), critic, reward_model)

    def __repr__(self) -> str:  # without tokenizers and weights
        return f"Team({', '.join(agent.name for agent in self.agents) or f'{self.num_agents} agents'})"

    def on(self, mesh: DeviceMesh | None) -> Team:
        """Return this team on a mesh."""
        return dataclasses.replace(self, stacks=tuple(dataclasses.replace(spec, mesh=mesh) for spec in self.stacks))

    def in_context(self, long: bool | Literal["auto"]) -> Team:
        """Return this team with all its models in a context, see `ModelConfig.in_context`."""
        stacks = [dataclasses.replace(spec, config=spec.config.in_context(long)) for spec in self.stacks]
        models = [x and x._replace(config=x.config.in_context(long)) for x in (self.critic, self.reward_model)]
        return self if long == "auto" else Team(tuple(stacks), self.agents, *models, random_weights=self.random_weights)

    @property
    def num_agents(self) -> int:
        """Number of agents; agents of several runs that share a stack count once."""
        return len({agent for s in self.stacks for agent in s.order})

    @property
    def agent_specs(self) -> list[StackSpec]:
        """The specification of each agent, as of a stack of its own."""
        specs = {agent: spec.of(agent) for spec in self.stacks for agent in spec.order}
        return [specs[agent] for agent in range(self.num_agents)]

    def describe(self) -> list[dict[str, Any]]:
        """Return, as JSON, what must be equal when a run resumes from a checkpoint."""
        return [
            dict(
                config=s.config.describe(),
                members=[list(m) for m in s.members],
                tokenizer=vocabulary_digest(s.tokenizer),
                agents=[describe_tokenizer(own.tokenizer, own.stop) for own in map(s.of, s.order)],
            )
            for s in self.stacks
        ]


def to_agents(team: Team, stacks: Sequence[Any]) -> list[Any]:
    """Return one array [P, ...] per agent of the team, from arrays [A, R * P, ...] of each stack. Inverts `to_stacks`.

    R is the number of roles per parameter set. Pytrees are mapped over.
    """

    def take(spec: StackSpec, i: int, x: Any) -> Any:
        return x.reshape(len(spec.order), -1, *x.shape[2:])[i]

    agents: list[Any] = [None] * team.num_agents
    for spec, stack in zip(team.stacks, stacks, strict=True):
        for i, agent in enumerate(spec.order):
            agents[agent] = jax.tree.map(partial(take, spec, i), stack)
    return agents


def to_stacks(team: Team, agents: Sequence[Any] | np.ndarray) -> tuple[Any, ...]:
    """Return arrays [A, R * P, ...] of each stack, from one array [P, ...] per agent of the team.

    R is the number of roles per parameter set. Pytrees are mapped over; `agents` may be an array [N, P, ...].
    """

    def stack(spec: StackSpec, *rows: np.ndarray) -> np.ndarray:
        return np.stack(rows).reshape(len(spec.members), -1, *rows[0].shape[1:])

    return tuple(jax.tree.map(partial(stack, spec), *(agents[agent] for agent in spec.order)) for spec in team.stacks)


def check_arguments(team: Any, cfg: Any, reward: Any = ()) -> None:
    """Raise a TypeError unless team is a team, cfg are the settings of training, and reward is given."""
    check_argument("team", team, Team, TEAM)
    example = "TrainConfig.of(learning_rate=1e-6), of a dict TrainConfig.of(**settings); an ExperimentConfig has one in .train"
    check_argument("cfg", cfg, TrainConfig, f"a TrainConfig, such as {example}")
    if reward is None:
        raise TypeError("reward is None: give a reward function or an environment")


def check_agents(agents: Any) -> None:
    """Raise an error unless agents is a list of loaded agents."""
    listed = isinstance(agents, Sequence) and not isinstance(agents, Agent | str)
    wrong = [agent for agent in agents if not isinstance(agent, Agent)] if listed else [agents]
    if wrong:
        given = "one agent alone" if isinstance(agents, Agent) else f"{wrong[0]!r:.60}"
        raise TypeError(f"a team is made of a list of agents, such as [load_agent(name)] * 2; got {given}")
    if not agents:
        raise ValueError("a team needs at least one agent, got none")


def sort_into_stacks(agents: Sequence[Agent], shared_weights: bool = False) -> tuple[StackSpec, ...]:
    """Return the stacks of a team. Raises TypeError unless agents is a list of agents, ValueError if different models are to
    share weights."""
    check_agents(agents)
    models = agents_by_model(agents).values()
    if shared_weights and len(models) > 1:
        raise ValueError(f"shared_weights needs agents of one model, got {len(models)} different models")
    return tuple(
        StackSpec(
            agents[indices[0]].config,
            agents[indices[0]].tokenizer,
            (tuple(indices),) if shared_weights else tuple((i,) for i in indices),
            tuple(agents[i].tokenizer for i in indices),
            tuple(agents[i].generation_config for i in indices),
        )
        for indices in models
    )


def stack_agents(stacks: Sequence[StackSpec], agents: Sequence[Agent], lora: bool = False) -> list[Any]:
    """Return the stacked parameters [A, ...] of each stack, on its devices.

    lora: agents of a stack share one copy of their parameters, which must be equal.
    """
    shardings = [None if spec.mesh is None else partial(state_shardings, spec.mesh) for spec in stacks]
    if missing := [agents[roles[0]].name for spec in stacks for roles in spec.members if not agents[roles[0]].params]:
        raise ValueError(f"agent {missing[0]} has no weights: load it with them, or train a team with random_weights=True")
    models = ([agents[roles[0]].params for roles in spec.members] for spec in stacks)
    return list(map(share_params if lora else stack_params, models, shardings))


def make_team(agents: Sequence[Agent], shared_weights: bool = False, lora: bool = False) -> tuple[Team, list[Any]]:
    """Return a team and the stacked parameters [A, ...] of each of its stacks, for callers that keep parameters themselves.

    shared_weights: all agents are roles of the first one's parameters. lora: see `stack_agents`.
    """
    stacks = sort_into_stacks(agents, shared_weights)
    return Team(stacks), stack_agents(stacks, agents, lora)


def random_agents(team: Team, seed: int) -> list[Agent]:
    """Return the agents with random weights (`init_params`), which follow from the seed and the number of the agent in the
    team; with shared weights the first agent alone has them."""
    key = jax.random.fold_in(jax.random.key(seed), INIT)
    owners = {roles[0] for spec in team.stacks for roles in spec.members}

    def draw(i: int, agent: Agent) -> Agent:
        return agent._replace(params=jax.device_get(draw_params(agent.config, jax.random.fold_in(key, i))))

    return [draw(i, agent) if i in owners else agent for i, agent in enumerate(team.agents)]


def initial_params(team: Team, params: Sequence[Any] | None, lora: bool = False, seed: int = 0) -> Sequence[Any]:
    """Return the parameters of each stack: `params`, or those of the team's agents. seed: of random weights.

    Raises ValueError if the team has none, and TypeError if params are not those of its stacks.
    """
    check_argument("team", team, Team, TEAM)
    if params is not None:
        listed = isinstance(params, list | tuple) and all(isinstance(stack, Mapping) for stack in params)
        if not listed or len(params) != len(team.stacks):
            given = f"a list of {len(params)}" if listed else f"of type {type(params).__name__}"
            wanted = f"a list of {len(team.stacks)}, the parameters of each stack of the team"
            raise TypeError(f"params is {given}: give {wanted}, as make_team(agents) and policies(result.state) return it")
        return params
    if not team.agents:
        raise ValueError(
            "params is None, and the team brings none: make it with Team.load or Team.of, or give those that make_team(agents) "
            "or policies(result.state) returns"
        )
    return stack_agents(team.stacks, random_agents(team, seed) if team.random_weights else team.agents, lora)


def without_gradients(state: TeamState) -> TeamState:
    """Return a state without gradients and pending completions, as in the result of a run."""
    return map_stacks(state._replace(pending=()), lambda stack: stack._replace(grads=None))


def to_checkpoint(state: TeamState) -> TeamState:
    """Return a state as in a checkpoint: without gradients, and with LoRA without the base."""
    return map_stacks(state, lambda stack: stack._replace(grads=None, base=None))


def map_stacks(state: TeamState, f: Callable[[StackState], StackState]) -> TeamState:
    """Apply f to each stack of agents and of critics."""
    return state._replace(stacks=tuple(map(f, state.stacks)), critics=tuple(map(f, state.critics)))


def on_mesh(team: Team, run: Run, devices: Sequence[Any] | None = None) -> Team:
    """Return a team on the devices, of those given or of this process, and in the context that the settings of a run name."""
    mesh = mesh_for(run.mesh, [len(spec.members) for spec in team.stacks], run.strategy, devices)
    return team.in_context(run.long_context).on(mesh)


def moved(team: Team, params: Sequence[Any] | None, run: Run) -> tuple[Team, list[Any]]:
    """Return a team and its `initial_params` on the devices that the settings of a run name; the arrays given are kept."""
    team = on_mesh(team, run)
    params = initial_params(team, params, seed=run.seed)
    return team, [copy_to(x, spec.mesh) for x, spec in zip(params, team.stacks, strict=True)]


def policies(state: TeamState) -> list[Any]:
    """Return the parameters [A, ...] of each stack's models, without value heads."""
    check_argument("state", state, TeamState, "the state of a result, result.state")
    return [without_value_head(model_of(stack)) for stack in state.stacks]


def agents_of(team: Team, params: Sequence[Any]) -> list[Agent]:
    """Return the agents, on the host and with merged adapters: as `load_agent` reads them from the files of `save_team`."""
    from jmarl.models.hub.peft import merge

    params, agents = initial_params(team, params), list[Any]([None] * team.num_agents)
    for spec, stack in zip(team.stacks, params, strict=True):
        for a, roles in enumerate(spec.members):
            merged = merge(spec.config, to_host(unstack(stack, a)))
            for agent in roles:
                own = spec.of(agent)
                agents[agent] = Agent(f"agent_{agent}", spec.config, merged, own.tokenizer, own.generation_config)
    return agents


MODEL_FILES = ("*.json", "*.safetensors", "*.jinja", "additional_chat_templates", "adapter", "merges.txt", "vocab.txt")


def save_team(directory: str | Path, team: Team, params: Sequence[Any]) -> None:
    """Write every agent as a Hugging Face directory `agent_0/`, `agent_1/`, …; params: of each stack, [A, ...].

    With LoRA adapters are merged into the weights, and also written for `peft` to `agent_0/adapter/`, … All agents are written
    under temporary names first, so that an error changes no old files. Only then those of an older model are replaced.
    """
    from jmarl.models.hub.agents import save_pretrained
    from jmarl.models.hub.peft import merge, save_adapter

    params = initial_params(team, params)
    root, renames = Path(expand_home(directory)), list[tuple[Path, Path]]()  # temporary and final directory

    def write(spec: StackSpec, roles: Sequence[int], model: Any, adapters: AdapterKind) -> None:
        merged = merge(spec.config, model)
        for agent in roles:
            temporary = root / f"agent_{agent}.saving"
            renames.append((temporary, root / f"agent_{agent}"))
            shutil.rmtree(temporary, ignore_errors=True)  # left by a save that was killed
            own = spec.of(agent)
            save_pretrained(temporary, spec.config, merged, own.tokenizer, own.generation_config)
            if adapters.rank:
                save_adapter(temporary / "adapter", spec.config, model, adapters.alpha)

    try:
        for spec, stack in zip(team.stacks, params, strict=True):
            for a, roles in enumerate(spec.members):  # all processes give their part, and the first one writes
                model = to_host(unstack(stack, a))
                exchange.write_in_first(partial(write, spec, roles, model, describe(stack)))
    except BaseException:
        for temporary, _ in renames:
            shutil.rmtree(temporary, ignore_errors=True)
        raise
    exchange.write_in_first(lambda: [_replace_directory(*paths) for paths in renames])


def _replace_directory(new: Path, final: Path) -> None:
    """Move directory `new` to `final`, and with it files in `final` that are not of a model."""
    old = final.with_name(f"{final.name}.old")
    shutil.rmtree(old, ignore_errors=True)  # left by a save that was killed
    if final.exists():
        for path in final.iterdir():
            if not (new / path.name).exists() and not any(path.match(name) for name in MODEL_FILES):
                path.rename(new / path.name)
        final.rename(old)
    new.rename(final)
    shutil.rmtree(old, ignore_errors=True)
