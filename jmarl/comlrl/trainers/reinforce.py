"""Trainers with the names and arguments of older scripts: critic-free multi-agent policy gradients (others are made of them).

A trainer loads and checks what it is given, fills a `TrainConfig` and calls `jmarl.training.train.train`, as everything else
does. The four classes differ by the algorithm their configuration names and by nothing else. What is not there yet
(user-made evaluation metrics) is refused, never ignored.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from pathlib import Path
from typing import Any, Literal

import jax

from jmarl.comlrl.config import MAGRPOConfig, MAREINFORCEConfig, MAReMaxConfig, MARLOOConfig, TrainerConfig
from jmarl.envs.reward_environment import Formatter, Transition, bind_formatter, default_formatter
from jmarl.envs.rewards import Processor, RewardFunction
from jmarl.evaluation.evaluate import evaluate
from jmarl.learning.per_agent import check_agents
from jmarl.models.hub.agents import Agent, load_agent
from jmarl.team import agents_of, make_team, placed, policies, save_team
from jmarl.training.train import TrainResult, check_run, environment_of, train

NOT_YET = {
    "eval_logger": "evaluation reports the reward; put other figures into a reward function of weight 0",
    "eval_aggregator": "evaluation reports the reward; put other figures into a reward function of weight 0",
    "model_config": "load agents with jmarl.load_agent and pass them as agents=; dtypes are set by compute_dtype",
}


class MAGRPOTrainer:
    """Multi-agent GRPO (arXiv 2508.04652): trains a team of language models on a joint reward.

    Args:
        model, agent_model: one name, path or loaded agent that all `num_agents` agents start from (two names of one
            argument).
        num_agents: agents of the team; default: what `args` says, else 2.
        agents: in place of a model, the agents themselves: loaded ones (`jmarl.load_agent`), names or paths, of one
            model or of different ones.
        reward_func, reward_funcs: one function or a list (two names of one argument). Each gets a list of completions
            per agent, and `batch_items`, `prompts`, `rng` where its signature names them; see `jmarl.envs.rewards`.
        reward_weights: one a function; default 1 / (number of functions).
        reward_processor, reward_processors: one callable for the weighted sum, or a list with one a function.
        batched_reward: False calls rewards once per joint action, with lists of one; True once a step with all of them.
        on_error, reward_timeout: what follows where a reward raises, and how many seconds one call may take, as on_error and
            timeout of `make_reward`.
        formatters: item -> prompt, one for all agents or a list with one an agent; default: the item's "prompt".
        args: the settings, of this trainer's configuration class.
        train_dataset, eval_dataset: a `datasets.Dataset`, a list or any other series of dicts.
        tokenizer: accepted and checked; every agent brings its own, and this must have the same vocabulary.
        external_transition: writes the prompts of the next turn, where there are several; see
            `jmarl.envs.reward_environment.RewardEnvironment`.
        wandb_config: keyword arguments of `wandb.init`; needs the extra `wandb` and an output directory.
    """

    config_class: type[TrainerConfig] = MAGRPOConfig
    critic: Agent | None = None  # what critics start from, in trainers that have them
    reward_model: Agent | None = None  # and reward models

    def __init__(
        self,
        model: str | os.PathLike | Agent | None = None,
        *,
        agent_model: str | os.PathLike | Agent | None = None,
        agents: Sequence[Agent | str | os.PathLike] | None = None,
        num_agents: int | None = None,
        reward_func: Callable | Sequence[Callable] | None = None,
        reward_funcs: Callable | Sequence[Callable] | None = None,
        reward_weights: Sequence[float] | None = None,
        reward_processor: Processor | Sequence[Processor | None] | None = None,
        reward_processors: Processor | Sequence[Processor | None] | None = None,
        batched_reward: bool = False,
        on_error: Literal["raise", "mask"] | float = "raise",
        reward_timeout: float | None = None,
        formatters: Formatter | Sequence[Formatter] | None = None,
        args: TrainerConfig | None = None,
        train_dataset: Iterable[Mapping] | None = None,
        eval_dataset: Iterable[Mapping] | None = None,
        tokenizer: Any = None,
        wandb_config: Mapping[str, Any] | None = None,
        model_config: None = None,
        external_transition: Transition | None = None,
        eval_logger: None = None,
        eval_aggregator: None = None,
    ):
        for name, value in dict(eval_logger=eval_logger, eval_aggregator=eval_aggregator, model_config=model_config).items():
            if value is not None:
                raise NotImplementedError(f"{name}= is not in this version: {NOT_YET[name]}")
        self.args = self.config_class() if args is None else args
        if not isinstance(self.args, self.config_class):
            wants = self.config_class.__name__
            raise TypeError(f"{type(self).__name__} takes args={wants}(...), got {type(args).__name__}")
        check_wandb(wandb_config, self.args)
        self.wandb_config = None if wandb_config is None else dict(wandb_config)
        self.items = items_of("train_dataset", train_dataset)
        self.eval_items = () if eval_dataset is None else self._eval_items(eval_dataset)
        functions = one_of(reward_func=reward_func, reward_funcs=reward_funcs)
        if functions is None:
            raise TypeError("a reward is needed: give reward_func= or reward_funcs=")
        processors = one_of(reward_processor=reward_processor, reward_processors=reward_processors)
        team_size = self._team_size(agents, num_agents)
        how: dict[str, Any] = dict(weights=reward_weights, processors=processors, batched=batched_reward, on_error=on_error)
        how |= dict(timeout=reward_timeout)
        self.reward = RewardFunction(functions, num_agents=team_size, **how)
        formatters = formatters_of(formatters, team_size, self.items[0])
        self.config = self.args.train_config(len(self.items))
        check_agents(self.config, team_size)
        loaded = load_agents(agents, one_of(model=model, agent_model=agent_model), team_size)
        check_tokenizer(tokenizer, loaded)
        self._names = [agent.name for agent in loaded]
        self.team, self._params = make_team(loaded, lora=self.args.lora_rank > 0)
        self.env = environment_of(self.team, self.reward, formatters, external_transition, self.config)
        check_run(self.items, self.config, wandb_config)
        self._params = placed(self.team, self._params, self.config.run.mesh)

    @property
    def num_agents(self) -> int:
        return self.team.num_agents

    @property
    def params(self) -> list[Any]:
        """The present parameters [A, ...] of each stack."""
        return present(self._params)

    @property
    def agents(self) -> list[Agent]:
        """The agents with their present weights, as `load_agent` returns them; with LoRA the adapters are merged."""
        return [agent._replace(name=name) for agent, name in zip(agents_of(self.team, self.params), self._names, strict=True)]

    def train(self) -> TrainResult:
        """Train as the settings say; afterwards the trainer holds the trained weights, also where it was interrupted.

        A second call trains on from them, with a new optimiser, and moves what the first one wrote to `earlier_1`. After an
        interruption it is refused, because the run has not ended: a trainer with resume=True goes on.
        """
        arguments = (self.team, self.env, self.items, self.config)
        models: dict[str, Any] = dict(critic=self.critic, reward_model=self.reward_model)
        result = train(*arguments, **models, params=self.params, eval_items=self.eval_items, wandb_config=self.wandb_config)
        self._params = policies(result.state)
        return result

    def evaluate(self, eval_dataset: Iterable[Mapping] | None = None) -> dict[str, float]:
        """Mean return of the present weights on `eval_dataset` (default: the trainer's), and half its 95 % interval."""
        items = self.eval_items if eval_dataset is None else self._eval_items(eval_dataset)
        if not len(items):
            raise ValueError("there is nothing to evaluate on: give eval_dataset= here or to the trainer")
        result = evaluate(self.team, self.params, items, self.env, self.config)
        return {"eval/reward": result.mean, "eval/reward_ci95": result.interval}

    def save_model(self, output_dir: str | os.PathLike) -> None:
        """Write every agent as a Hugging Face directory: `agent_0/`, `agent_1/`, …"""
        save_team(Path(output_dir), self.team, self.params)

    def _eval_items(self, dataset: Iterable[Mapping]) -> Sequence[Any]:
        items = items_of("eval_dataset", dataset)
        count = len(items) if self.args.eval_num_samples is None else min(self.args.eval_num_samples, len(items))
        return [items[i] for i in range(count)]

    def _team_size(self, agents: Sequence | None, num_agents: int | None) -> int:
        """From agents=, num_agents= and the settings, which must agree."""
        said = {"num_agents=": num_agents, f"num_agents of {type(self.args).__name__}": self.args.num_agents}
        if agents is not None:
            if isinstance(agents, str | os.PathLike | Agent) or not isinstance(agents, Sequence):
                raise TypeError(f"agents= is a list of agents or names, got {type(agents).__name__}; one is model=")
            said = {"agents=": len(agents), **said}
        sizes = {name: size for name, size in said.items() if size is not None}
        if len(set(sizes.values())) > 1:
            raise ValueError("the number of agents is not clear: " + ", ".join(f"{k} {v}" for k, v in sizes.items()))
        return next(iter(sizes.values()), 2)


class MAREINFORCETrainer(MAGRPOTrainer):
    """Multi-agent REINFORCE: no baseline. Arguments as for `MAGRPOTrainer`."""

    config_class = MAREINFORCEConfig


class MARLOOTrainer(MAGRPOTrainer):
    """Multi-agent leave-one-out: the baseline is the mean of the group's others. Arguments as for `MAGRPOTrainer`."""

    config_class = MARLOOConfig


class MAReMaxTrainer(MAGRPOTrainer):
    """Multi-agent ReMax: the baseline is the best of the group. Arguments as for `MAGRPOTrainer`."""

    config_class = MAReMaxConfig


def present(params: list[Any]) -> list[Any]:
    """Parameters of stacks, unless a training that did not finish has used them up."""
    if any(x.is_deleted() for x in jax.tree.leaves(params)):  # updates are made in place
        raise RuntimeError(
            "train() did not finish, and the weights it was changing are lost: make a new trainer, with resume=True in its "
            "settings to go on from the last checkpoint"
        )
    return params


def one_of(**arguments: Any) -> Any:
    """The value of two names of one argument; None if neither is given."""
    given = {name: value for name, value in arguments.items() if value is not None}
    if len(given) > 1:
        raise TypeError(f"{' and '.join(f'{name}=' for name in given)} mean the same: give one of them")
    return next(iter(given.values()), None)


def load_agents(agents: Sequence | None, model: Any, num_agents: int) -> list[Agent]:
    """Loaded agents; one that is named several times is read once."""
    if (agents is None) == (model is None):
        raise TypeError("give either agents= (a list) or model= (what all agents start from)")
    sources = [model] * num_agents if agents is None else list(agents)
    loaded: dict[str, Agent] = {}
    for i, source in enumerate(sources):
        if not isinstance(source, str | os.PathLike | Agent):
            raise TypeError(f"agent {i} is a {type(source).__name__}: load it with jmarl.load_agent, or give its name")
        if not isinstance(source, Agent) and os.fspath(source) not in loaded:
            loaded[os.fspath(source)] = load_agent(source)
    return [source if isinstance(source, Agent) else loaded[os.fspath(source)] for source in sources]


def formatters_of(formatters: Formatter | Sequence[Formatter] | None, num_agents: int, item: Mapping) -> list[Formatter]:
    """One formatter an agent, each tried on an item."""
    if formatters is None:
        if "prompt" not in item:
            raise ValueError(f"items need a 'prompt', or formatters= that make one; the first item has {list(item)}")
        return [default_formatter] * num_agents
    each = [formatters] * num_agents if callable(formatters) else list(formatters)
    if len(each) != num_agents:
        raise ValueError(f"{len(each)} formatters for {num_agents} agents: give one, or one an agent")
    for i, formatter in enumerate(each):
        prompt = bind_formatter(formatter)(dict(item), None)
        if not isinstance(prompt, str):
            raise TypeError(f"formatter {i} returned a {type(prompt).__name__} for the first item; a prompt is a string")
    return each


def items_of(argument: str, dataset: Any) -> Any:
    """A data set as something with a length and items by number; the first item must be a dict."""
    if dataset is None or isinstance(dataset, Mapping | str):
        hint = "a datasets.Dataset or a list of dicts; Dataset.from_dict makes one of columns"
        raise TypeError(f"{argument}= is {hint}; got {type(dataset).__name__}")
    items = dataset if isinstance(dataset, Sized) else list(dataset)
    if not len(items):
        raise ValueError(f"{argument}= has no items")
    if not isinstance(items[0], Mapping):  # type: ignore[index]
        raise TypeError(f"{argument}= is a series of dicts; its first item is a {type(items[0]).__name__}")  # type: ignore[index]
    return items


def check_tokenizer(tokenizer: Any, agents: Sequence[Agent]) -> None:
    """Refuse a tokenizer, or one an agent, whose vocabulary is not the agents' own."""
    if tokenizer is None:
        return
    each = list(tokenizer) if isinstance(tokenizer, list | tuple) else [tokenizer] * len(agents)
    if len(each) != len(agents):
        raise ValueError(f"{len(each)} tokenizers for {len(agents)} agents: leave tokenizer= out, agents bring their own")
    for i, (given, agent) in enumerate(zip(each, agents, strict=True)):
        theirs, own = given.get_vocab(), agent.tokenizer.get_vocab()
        if theirs != own:
            raise ValueError(
                f"tokenizer= has another vocabulary ({len(theirs)} tokens) than agent {i}, {agent.name!r} ({len(own)} "
                "tokens): leave it out, every agent brings its own"
            )


def check_wandb(wandb_config: Mapping[str, Any] | None, args: TrainerConfig) -> None:
    """Refuse W&B where it cannot work, before any model is loaded."""
    if wandb_config is None:
        return
    if importlib.util.find_spec("wandb") is None:
        raise ImportError("wandb_config is given, but W&B is not installed: pip install 'jmarl[wandb]'")
    if not args.output_dir:
        raise ValueError("wandb_config is given, but output_dir is empty, so nothing would be logged: set output_dir")
