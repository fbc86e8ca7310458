"""The converter: the arguments of CoMLRL's trainers -> what `jmarl.train` takes: settings, a team, and a task to play.

Names become ours first, then values. An `ExperimentConfig` has plain values only; a trainer is given functions and loaded
models, so the result is what `run_experiment` makes of one. All checks that need no model come before models are loaded.
"""

import dataclasses
import warnings
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

from jmarl.algorithms import find_row
from jmarl.comlrl.arguments import (
    check_wandb,
    count_agents,
    is_verbose,
    load_agents,
    load_critic,
    load_single,
    one_of,
    read_args,
    read_formatters,
    read_items,
    read_wandb,
)
from jmarl.comlrl.environment import TrainerEnvironment
from jmarl.comlrl.eval_metrics import EvalMetrics
from jmarl.comlrl.model_config import ModelSettings, add_special_tokens, read_model_config
from jmarl.comlrl.rewards import bind_rewards
from jmarl.comlrl.roles import WithRoles, read_roles
from jmarl.comlrl.settings.rollouts import RolloutConfig
from jmarl.config import TrainConfig
from jmarl.envs.rewards import RewardFunction
from jmarl.models.hub.agents import Agent
from jmarl.runs.checks import check_agents, check_run, environment_of
from jmarl.runs.run import Task
from jmarl.runs.start import place_team
from jmarl.team import Team

# Argument -> its other name.
TWO_NAMES = {
    "model": "agent_model",
    "reward_func": "reward_funcs",
    "reward_processor": "reward_processors",
    "centralized_adapter": "centralized_comparator_adapter",
}


class Converted(NamedTuple):
    """What the arguments of a trainer describe."""

    args: RolloutConfig  # with the number of agents, and all that other arguments say about settings
    config: TrainConfig
    team: Team
    params: list[Any]  # [A, ...] of each stack
    names: list[str]  # of the agents
    task: Task  # its held-out items are all of eval_dataset
    reward: RewardFunction
    wandb_config: dict[str, Any] | None


def convert(arguments: Mapping[str, Any], config_class: type[RolloutConfig], trainer: str) -> Converted:
    """Convert the arguments of a trainer, by name. config_class, trainer: its configuration, and its name for messages."""
    given = SimpleNamespace(**arguments)
    for name, other in TWO_NAMES.items():
        setattr(given, name, one_of(**{name: arguments[name], other: arguments[other]}))
    args = read_args(given.args, config_class, trainer).for_transition(given.external_transition)
    check_wandb(given.wandb_config, args)
    loading = read_model_config(given.model_config, args)
    wandb_config = read_wandb(given.wandb_config)
    items = read_items("train_dataset", given.train_dataset)
    held_out = () if given.eval_dataset is None else read_items("eval_dataset", given.eval_dataset)
    num_roles = count_agents(None if args.centralized else given.agents, given.num_agents, args)
    args = dataclasses.replace(args, compute_dtype=loading.compute_dtype, num_agents=num_roles)
    roles = read_roles(given.centralized_adapter, args.centralized, num_roles, trainer)
    metrics = EvalMetrics(given.eval_logger, given.eval_aggregator, given.metrics_callback, roles and roles.split)
    env = read_environment(given, args, items)
    config = args.train_config(len(items))
    config = config if is_verbose(given.wandb_config) else config.replace(progress=False)
    team_size = num_roles if roles is None else 1
    check_agents(config, team_size)
    others = load_others(given, args, trainer)
    agents = load_agents(given.agents, given.model, team_size, given.tokenizer)
    for agent in agents:
        add_special_tokens(agent.tokenizer, loading.special_tokens)
    config, team, params = place_team(agents, config)
    team = dataclasses.replace(team, **others)
    all_roles = environment_of(team, env if roles is None else WithRoles(env, roles), config)
    task = Task(all_roles, items, held_out, metrics)
    check_run(items, config, wandb_config)
    if ignored := without_effect(given, args, loading):
        warnings.warn(f"{trainer}: these have no effect here: {'; '.join(ignored)}", stacklevel=3)
    return Converted(args, config, team, params, [agent.name for agent in agents], task, env.reward, wandb_config)


def read_environment(given: SimpleNamespace, args: RolloutConfig, items: Sequence[dict]) -> TrainerEnvironment:
    """Return the environment that a trainer's reward, formatters and transition make."""
    if given.reward_func is None:
        raise TypeError("a reward is needed: give reward_func= or reward_funcs=")
    num_roles: Any = args.num_agents
    prompt_per_agent = find_row(args.resolved_algorithm).critic is not None
    reward = RewardFunction(
        bind_rewards(given.reward_func, num_roles, prompt_per_agent and not given.batched_reward),
        num_agents=num_roles,
        weights=given.reward_weights,
        processors=given.reward_processor,
        batched=given.batched_reward,
        on_error=given.on_error,
        timeout=given.reward_timeout,
    )
    formatters, transition = read_formatters(given.formatters, num_roles, items[0]), given.external_transition
    if transition is not None and args.turns == 1:
        warnings.warn("external_transition= is not called, because num_turns is 1", stacklevel=4)
        transition = None
    return TrainerEnvironment(
        reward, formatters, transition, passthrough=args.external_prompt_passthrough, prompt_per_agent=prompt_per_agent
    )


def load_others(given: SimpleNamespace, args: RolloutConfig, trainer: str) -> dict[str, Agent | None]:
    """Return what the critics and the reward model start from, as fields of a team; by default those that settings name.

    Raises a TypeError for one that the algorithm does not have."""
    row, named = find_row(args.resolved_algorithm), args.other_models
    critic_model = named.get("critic_model") if given.critic_model is None and given.critics is None else given.critic_model
    reward_model = named.get("reward_model") if given.reward_model is None else given.reward_model
    for name, value in (("critic_model", critic_model), ("critics", given.critics)):
        if value is not None and row.critic is None and not row.learned:
            raise TypeError(f"{name}= has no effect for {trainer}, which has no critic: it is for IAC, MAAC, IPPO, MAPPO")
    if not row.learned and reward_model is not None:
        raise TypeError(f"reward_model= has no effect for {trainer}, which learns none: it is for MARLHF, MARLHFIter")
    return {
        "reward_model": None if reward_model is None else load_single(reward_model, given.tokenizer),
        "critic": load_critic(critic_model, given.critics, given.tokenizer),
    }


def without_effect(given: SimpleNamespace, args: RolloutConfig, loading: ModelSettings) -> list[str]:
    """Return the arguments and settings that are given and change nothing, each with the reason."""
    ignored = [*args.without_effect(), *loading.without_effect]
    ignored += ["dataset_type="] if given.dataset_type is not None else []
    return ignored + (["metrics_callback= in training steps"] if given.metrics_callback is not None else [])
