"""Read and check the arguments of trainers: agents, data sets, formatters, tokenizers, W&B."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterable, Mapping, Sequence, Sized
from typing import Any

import jax

from jmarl.comlrl.config import TrainerConfig
from jmarl.envs.reward_environment import Formatter, bind_formatter, default_formatter
from jmarl.models.hub.agents import Agent, load_agent

Model = str | os.PathLike | Agent  # a name, a directory, a .gguf file, a Hub id, or a loaded agent


def one_of(**arguments: Any) -> Any:
    """Return the value of two names of one argument, or None if neither is set. Raises TypeError if both are."""
    values = {name: value for name, value in arguments.items() if value is not None}
    if len(values) > 1:
        raise TypeError(f"{' and '.join(f'{name}=' for name in values)} mean the same: give one of them")
    return next(iter(values.values()), None)


def load_agents(agents: Sequence[Model] | None, model: Model | None, num_agents: int) -> list[Agent]:
    """Return the loaded agents: of `agents`, or `num_agents` of one `model`. Each name is loaded once."""
    if (agents is None) == (model is None):
        raise TypeError("give either agents= (a list) or model= (what all agents start from)")
    sources = [model] * num_agents if agents is None else list(agents)
    by_name: dict[str, Agent] = {}
    loaded = []
    for i, source in enumerate(sources):
        if not isinstance(source, str | os.PathLike | Agent):
            raise TypeError(f"agent {i} is a {type(source).__name__}: load it with jmarl.load_agent, or give its name")
        if isinstance(source, Agent):
            loaded.append(source)
            continue
        name = os.fspath(source)
        if name not in by_name:
            by_name[name] = load_agent(source)
        loaded.append(by_name[name])
    return loaded


def load_critic(critic_model: Model | None, critics: Sequence[Model] | None) -> Agent | None:
    """Return the model that critics start from; None: they start from their agents."""
    if critics is not None and (isinstance(critics, str | os.PathLike | Agent) or not len(critics)):
        raise TypeError("critics= is a list of models or names; one is critic_model=")
    if critics is not None:
        different = [critic for critic in critics if critic is not critics[0] and critic != critics[0]]
        if different:
            raise ValueError(
                f"critics= names {1 + len(different)} different models: all critics start from one, give critic_model="
            )
    model = one_of(critic_model=critic_model, critics=None if critics is None else critics[0])
    return None if model is None else load_agents([model], None, 1)[0]


def read_items(argument: str, dataset: Iterable[Mapping] | None) -> Sequence[Any]:
    """Return a data set as something with a length and an index. Raises unless its first item is a dict.

    argument: the name in error messages.
    """
    if dataset is None or isinstance(dataset, Mapping | str):
        raise TypeError(
            f"{argument}= is a datasets.Dataset or a list of dicts; got {type(dataset).__name__}. Dataset.from_dict turns "
            "columns into a data set"
        )
    items: Any = dataset if isinstance(dataset, Sized) else list(dataset)
    if not len(items):
        raise ValueError(f"{argument}= has no items")
    if not isinstance(items[0], Mapping):
        raise TypeError(f"{argument}= is a series of dicts; its first item is a {type(items[0]).__name__}")
    return items


def read_formatters(formatters: Formatter | Sequence[Formatter] | None, num_agents: int, item: Mapping) -> list[Formatter]:
    """Return one formatter per agent, after a trial of each on an item."""
    if formatters is None:
        if "prompt" not in item:
            raise ValueError(f"items need a 'prompt', or formatters= that write one; the first item has {list(item)}")
        return [default_formatter] * num_agents
    per_agent = [formatters] * num_agents if callable(formatters) else list(formatters)
    if len(per_agent) != num_agents:
        raise ValueError(f"{len(per_agent)} formatters for {num_agents} agents: give one for all, or one per agent")
    for i, formatter in enumerate(per_agent):
        prompt = bind_formatter(formatter)(dict(item), None)
        if not isinstance(prompt, str):
            raise TypeError(f"formatter {i} returned a {type(prompt).__name__} for the first item; a prompt is a string")
    return per_agent


def count_agents(agents: Sequence[Model] | None, num_agents: int | None, args: TrainerConfig) -> int:
    """Return the size of the team. Raises ValueError if agents=, num_agents= and the settings disagree."""
    if agents is not None and (isinstance(agents, str | os.PathLike | Agent) or not isinstance(agents, Sequence)):
        raise TypeError(f"agents= is a list of agents or names, got {type(agents).__name__}; one is model=")
    sizes = {
        "agents=": None if agents is None else len(agents),
        "num_agents=": num_agents,
        f"num_agents of {type(args).__name__}": args.num_agents,
    }
    sizes = {name: size for name, size in sizes.items() if size is not None}
    if len(set(sizes.values())) > 1:
        raise ValueError("the number of agents is not clear: " + ", ".join(f"{name} {n}" for name, n in sizes.items()))
    return next(iter(sizes.values()), 2)


def check_args(args: Any, config_class: type[TrainerConfig], trainer: str) -> None:
    """Raise a TypeError unless `args` is a configuration of the trainer's class."""
    if not isinstance(args, config_class):
        raise TypeError(f"{trainer} takes args={config_class.__name__}(...), got {type(args).__name__}")


def check_tokenizer(tokenizer: Any, agents: Sequence[Agent]) -> None:
    """Raise a ValueError for a tokenizer (or a list of one per agent) whose vocabulary differs from that of its agent."""
    if tokenizer is None:
        return
    tokenizers = list(tokenizer) if isinstance(tokenizer, list | tuple) else [tokenizer] * len(agents)
    if len(tokenizers) != len(agents):
        raise ValueError(
            f"{len(tokenizers)} tokenizers for {len(agents)} agents: leave tokenizer= out, each agent has its own tokenizer"
        )
    for i, (checked, agent) in enumerate(zip(tokenizers, agents, strict=True)):
        vocabulary, own = checked.get_vocab(), agent.tokenizer.get_vocab()
        if vocabulary != own:
            raise ValueError(
                f"tokenizer= has another vocabulary ({len(vocabulary)} tokens) than agent {i}, {agent.name!r} ({len(own)} "
                "tokens): leave it out, each agent has its own tokenizer"
            )


def check_wandb(wandb_config: Mapping[str, Any] | None, args: TrainerConfig) -> None:
    """Raise if W&B is requested and cannot log. Called before any model is loaded."""
    if wandb_config is None:
        return
    if importlib.util.find_spec("wandb") is None:
        raise ImportError("wandb_config is given, but W&B is not installed: pip install 'jmarl[wandb]'")
    if not args.output_dir:
        raise ValueError("wandb_config is given, but output_dir is empty, so nothing would be logged: set output_dir")


def check_not_deleted(params: list[Any]) -> list[Any]:
    """Return the parameters of stacks. Raises RuntimeError if a training that did not finish has deleted them."""
    if any(x.is_deleted() for x in jax.tree.leaves(params)):  # updates are made in place
        raise RuntimeError(
            "train() did not finish, and the weights it was changing are lost: make a new trainer; with resume=True in its "
            "settings it continues from the last checkpoint"
        )
    return params
