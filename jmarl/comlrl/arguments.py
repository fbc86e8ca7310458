"""Read and check the arguments of trainers: agents, data sets, formatters, tokenizers, W&B."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from jmarl.comlrl.settings.base import TrainerConfig
from jmarl.envs.reward_environment import Formatter, bind_formatter, default_formatter
from jmarl.envs.rows import GIVE, Rows, read_rows
from jmarl.models.hub.agents import Agent, open_agent
from jmarl.models.hub.transformers_model import TransformersModel, agent_from_transformers, check_fast, is_peft_model

# A name, a directory, a .gguf file, a Hub id, a loaded agent, or a loaded model of transformers.
Model = str | os.PathLike | Agent | TransformersModel
C = TypeVar("C", bound=TrainerConfig)


def one_of(**arguments: Any) -> Any:
    """Return the value of two names of one argument, or None if neither is set. Raises TypeError if both are."""
    values = {name: value for name, value in arguments.items() if value is not None}
    if len(values) > 1:
        raise TypeError(f"{' and '.join(f'{name}=' for name in values)} mean the same: give one of them")
    return next(iter(values.values()), None)


def one_per_agent(what: str, values: Any, num_agents: int) -> list[Any]:
    """Return one value per agent, of a list or of one for all. Raises ValueError for a list of another length.

    what: the plural for messages."""
    per_agent = list(values) if isinstance(values, list | tuple) else [values] * num_agents
    if len(per_agent) != num_agents:
        raise ValueError(f"{len(per_agent)} {what} for {num_agents} agents: give one for all, or one per agent")
    return per_agent


def load_agents(agents: Sequence[Model] | None, model: Model | None, num_agents: int, tokenizer: Any = None) -> list[Agent]:
    """Return the loaded agents: of `agents`, or `num_agents` of one `model`. Each name and each model object is read once.

    tokenizer: one for all agents or a list of one per agent, which the agents then use; None: those of the models. Raises
    ValueError for a tokenizer whose vocabulary differs from that of its model.
    """
    if agents is None and model is None:
        raise TypeError("give either agents= (a list) or model= (what all agents start from)")
    if agents is not None and model is not None and any(not same_source(agent, model) for agent in agents):
        raise TypeError(
            f"give either agents= (a list) or model= (what all agents start from): {model!r:.60} is another than one of "
            f"{list(agents)!r:.120}"
        )
    sources = [model] * num_agents if agents is None else list(agents)
    by_source: dict[Any, Agent] = {}
    loaded = []
    for i, (source, own) in enumerate(zip(sources, one_per_agent("tokenizers", tokenizer, len(sources)), strict=True)):
        key = os.fspath(source) if isinstance(source, str | os.PathLike) else (id(source), id(own))
        if key not in by_source:
            by_source[key] = _load(source, own, i)
        agent = by_source[key]
        loaded.append(agent if own is None or own is agent.tokenizer else _with_tokenizer(agent, own, i))
    return loaded


def same_source(first: Model, second: Model) -> bool:
    """Return whether two arguments are one model: the same object, or the same name.

    A loaded agent has a name, and so has a model of transformers; two of the latter may have different weights.
    """
    if first is second or (isinstance(first, TransformersModel) and isinstance(second, TransformersModel)):
        return first is second
    return name_of(first) == name_of(second) is not None


def name_of(source: Any) -> str | None:
    """Return the name of a model; None for other objects."""
    if isinstance(source, TransformersModel):
        return source.config.name_or_path
    source = source.name if isinstance(source, Agent) else source
    return os.fspath(source) if isinstance(source, str | os.PathLike) else None


def _load(source: Any, tokenizer: Any, index: int) -> Agent:
    """Return one agent: loaded, by its name, or of a model of `transformers`. index: of the agent, for errors."""
    if isinstance(source, Agent):
        return source
    if isinstance(source, str | os.PathLike):
        return open_agent(source)
    if is_peft_model(source):
        raise TypeError(
            f"agent {index} is a {type(source).__name__}: give model.merge_and_unload(), and set lora_rank to train adapters"
        )
    if isinstance(source, TransformersModel):
        return agent_from_transformers(source, tokenizer)
    raise TypeError(
        f"agent {index} is a {type(source).__name__}: load it with jmarl.load_agent or AutoModelForCausalLM, or give its name"
    )


def _with_tokenizer(agent: Agent, tokenizer: Any, index: int) -> Agent:
    """Return the agent with another tokenizer. Raises ValueError if its vocabulary differs. index: of the agent."""
    check_fast(tokenizer)
    vocabulary, own = tokenizer.get_vocab(), agent.tokenizer.get_vocab()
    if vocabulary != own:
        raise ValueError(
            f"tokenizer= has another vocabulary ({len(vocabulary)} tokens) than agent {index}, {agent.name!r} ({len(own)} "
            "tokens): leave it out, each agent has its own tokenizer"
        )
    return agent._replace(tokenizer=tokenizer)


def load_critic(critic_model: Model | None, critics: Sequence[Model] | None, tokenizer: Any = None) -> Agent | None:
    """Return the model that critics start from; None: they start from their agents.

    tokenizer: of a model of transformers, which brings none.
    """
    if critics is not None and (not isinstance(critics, list | tuple) or isinstance(critics, Agent) or not critics):
        raise TypeError("critics= is a list of models or names; one is critic_model=")
    first = None if critics is None else critics[0]
    if different := [critic for critic in critics or () if not same_source(critic, first)]:  # type: ignore[arg-type]
        raise ValueError(
            f"critics= names {1 + len(different)} different models: all critics start from one, give critic_model="
        )
    if critic_model is not None and first is not None and same_source(critic_model, first):
        critic_model = None
    model = one_of(critic_model=critic_model, critics=first)
    return None if model is None else load_single(model, tokenizer)


def load_single(model: Model, tokenizer: Any = None) -> Agent:
    """Load a critic or reward model. tokenizer: of the agents; a model of transformers, which brings none, uses it."""
    one_tokenizer = isinstance(model, TransformersModel) and not isinstance(tokenizer, list | tuple)
    return load_agents([model], None, 1, tokenizer if one_tokenizer else None)[0]


def read_items(argument: str, dataset: Rows | None) -> list[dict]:
    """Return the rows of a data set, in anything that `read_rows` reads. Raises an error that names the argument.

    argument: the name in error messages.
    """
    if dataset is None:
        raise TypeError(f"{argument}= is needed: give {GIVE}")
    try:
        items = read_rows(dataset)
    except (TypeError, ValueError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError  # subclasses have other arguments
        raise kind(f"{argument}= cannot be read: {error}") from error
    if not items:
        raise ValueError(f"{argument}= has no items")
    return items


def read_formatters(formatters: Formatter | Sequence[Formatter] | None, num_agents: int, item: Mapping) -> list[Formatter]:
    """Return one formatter per agent, after a trial of each on an item."""
    if formatters is None:
        if "prompt" not in item:
            raise ValueError(f"items need a 'prompt', or formatters= that write one; the first item has {list(item)}")
        return [default_formatter] * num_agents
    per_agent = one_per_agent("formatters", formatters if callable(formatters) else list(formatters), num_agents)
    for i, formatter in enumerate(per_agent):
        prompt = bind_formatter(formatter)(dict(item), None)
        if not isinstance(prompt, str):
            raise TypeError(
                f"formatter {i} returned a {type(prompt).__name__} for the first item; a prompt is a string or a list of "
                "chat messages"
            )
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


def read_args(args: C | None, config_class: type[C], trainer: str) -> C:
    """Return the settings of a trainer. Raises a TypeError for those of another one."""
    if args is not None and not isinstance(args, config_class):
        raise TypeError(f"{trainer} takes args={config_class.__name__}(...), got {type(args).__name__}")
    return config_class() if args is None else args


def check_wandb(wandb_config: Mapping[str, Any] | None, args: TrainerConfig) -> None:
    """Raise if W&B is requested and cannot log. Called before any model is loaded."""
    if wandb_config is None:
        return
    if not isinstance(wandb_config, Mapping):
        raise TypeError(f"wandb_config= is a dict such as {{'project': 'mine'}}, got {type(wandb_config).__name__}")
    if importlib.util.find_spec("wandb") is None:
        raise ImportError("wandb_config is given, but W&B is not installed: pip install 'jmarl[wandb]'")
    if not args.output_dir:
        raise ValueError("wandb_config is given, but output_dir is empty, so nothing would be logged: set output_dir")


def read_wandb(wandb_config: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return the keyword arguments of `wandb.init`. CoMLRL's run_name is the name, and the entries of its config_sections are
    added to the run's configuration."""
    if wandb_config is None:
        return None
    own = ("run_name", "config_sections", "output_dir")
    settings = {name: value for name, value in wandb_config.items() if name not in own and value is not None}
    if name := wandb_config.get("name") or wandb_config.get("run_name"):
        settings["name"] = name
    sections = wandb_config.get("config_sections")
    if isinstance(sections, Mapping):
        settings["config"] = dict(settings.get("config", {})) | dict(sections)
    if "dir" in settings:
        os.makedirs(settings["dir"], exist_ok=True)
    return settings


def is_verbose(wandb_config: Mapping[str, Any] | None) -> bool:
    """Return CoMLRL's switch of progress bars, config_sections.output.verbose of wandb_config; on by default."""
    sections = (wandb_config or {}).get("config_sections")
    output = sections.get("output") if isinstance(sections, Mapping) else None
    return bool(output.get("verbose", True)) if isinstance(output, Mapping) else True
