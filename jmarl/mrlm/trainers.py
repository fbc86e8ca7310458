"""MRLM's quick start: policies and environments go in, `train` is called.

    policy_env = LLMEnvironment(load_agent("Qwen/Qwen2.5-1.5B-Instruct"), mode=EnvironmentMode.SERVER)
    eval_envs = [MathReasoningEnvironment(MathProblemGenerator()) for _ in range(4)]
    config = ExperimentConfig(TrainingConfig(algorithm="ppo", num_epochs=50), ppo=PPOConfig(clip_range=0.2, gamma=0.99))
    PPOTrainer(policy_env, eval_envs, config).train(num_iterations=50)

A policy in mode SERVER learns, one in mode CLIENT plays as it was loaded; a list of policies is a team. The environments named
`eval_envs` are those in which policies play and are rewarded, in training too; held-out tasks (their split `eval`) are for
`evaluate`. Equal environments are one: here episodes are played side by side anyway. Different ones are a mixture with equal
weights. An episode goes on until it is done, at most `max_turns` of its environment; where that is None at most
`max_episode_length`, or else 16 turns. Several turns are a chain: a completion goes on with a single one.

What a script does not say is as `TrainConfig` has it (one PPO epoch, learning rate 1e-5, …), not as MRLM had it. Left
out: mini-batches by tokens, mixed precision by GradScaler, DPO and SFT in this form (`jmarl.comlrl.trainers.DPOTrainer` and
`SFTTrainer` take data sets).
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jmarl.comlrl.trainers.reinforce import check_tokenizer, load_agents, present
from jmarl.config import SECTION_OF, TrainConfig, did_you_mean
from jmarl.envs.messages import MAX_TURNS, EnvironmentMode, as_text_environment
from jmarl.envs.mixture import Mixture
from jmarl.envs.vector import LockStep
from jmarl.evaluation.evaluate import evaluate, numbers
from jmarl.models.hub.agents import Agent
from jmarl.team import make_team, placed, policies, save_team
from jmarl.training.train import TrainResult, check_settings, check_team, environment_of, train

NUM_TASKS, NUM_EPISODES = 1000, 20  # that training draws from; held-out ones


SET_BY_TRAINERS = {"algorithm", "frozen_agents"}


class Section(dict):
    """Settings under MRLM's names, `names`, each for the field of `TrainConfig` that means the same."""

    names: Mapping[str, str] = {}

    def __init__(self, **settings: Any):
        for name in settings:
            if name not in self.names:
                meant = did_you_mean(name, self.names) or f"; it has {', '.join(self.names)}"
                raise TypeError(f"{type(self).__name__} has no setting {name!r}{meant}")
        fields = [self.names[name] for name in settings]
        for field in fields:
            if fields.count(field) > 1:
                both = [name for name in settings if self.names[name] == field]
                raise TypeError(f"{type(self).__name__}: {' and '.join(both)} are the same setting, give one of them")
        super().__init__(zip(fields, settings.values(), strict=True))


class TrainingConfig(Section):
    """What every algorithm has. num_epochs, num_iterations: updates; batch_size: tasks of an update, which learns
    from all of their episodes."""

    names = {
        **{"algorithm": "algorithm", "num_epochs": "num_updates", "num_iterations": "num_updates"},
        **{"batch_size": "num_prompts", "learning_rate": "learning_rate"},
        **{"optimizer": "optimizer", "weight_decay": "weight_decay", "max_grad_norm": "max_grad_norm"},
        **{"adam_beta1": "adam_b1", "adam_beta2": "adam_b2", "adam_epsilon": "adam_eps", "lr_scheduler": "lr_schedule"},
        **{"warmup_steps": "warmup_updates", "max_episode_length": "num_turns", "checkpoint_dir": "output_dir"},
        **{"save_every": "save_every", "save_total_limit": "save_total_limit", "log_every": "log_every"},
    }


class PPOConfig(Section):
    """Of PPO (arXiv 1707.06347)."""

    names = {
        **{"clip_range": "clip_range", "clip_range_vf": "value_clip", "gamma": "gamma", "gae_lambda": "gae_lambda"},
        **{"num_ppo_epochs": "num_epochs", "value_loss_coef": "value_coef", "entropy_coef": "entropy_coef"},
        **{"target_kl": "target_kl"},
    }


class GRPOConfig(Section):
    """Of GRPO (arXiv 2402.03300)."""

    names = {
        **{"group_size": "num_generations", "clip_range": "clip_range", "gamma": "gamma", "entropy_coef": "entropy_coef"},
        **{"num_grpo_epochs": "num_epochs", "target_kl": "target_kl"},
    }


class ExperimentConfig:
    """Sections, and any field of `TrainConfig` by its own name (`max_new_tokens=64`), which wins over a section's."""

    def __init__(
        self,
        training: TrainingConfig | None = None,
        ppo: PPOConfig | None = None,
        grpo: GRPOConfig | None = None,
        **fields: Any,
    ):
        for given, wanted in ((training, TrainingConfig), (ppo, PPOConfig), (grpo, GRPOConfig)):
            if given is not None and not isinstance(given, wanted):
                raise TypeError(f"here stands a {wanted.__name__}(...), got {type(given).__name__}")
        known = {"algorithm", *SECTION_OF} - SET_BY_TRAINERS
        for name in fields.keys() - known:
            if name in SET_BY_TRAINERS:
                raise TypeError(f"ExperimentConfig: {name!r} is set by the trainer and its policies")
            meant = did_you_mean(name, known) or "; help(TrainConfig) lists what it may be"
            raise TypeError(f"ExperimentConfig: {name!r} is unknown{meant}")
        self.training, self.fields = training or {}, fields
        self.sections = {"ppo": ppo or {}, "grpo": grpo or {}}

    def train_config(self, of: str, defaults: Mapping[str, Any]) -> TrainConfig:
        """Settings of a trainer by the section `of`."""
        said = self.training.get("algorithm", of)
        if said != of:
            raise ValueError(f"training says algorithm={said!r}, and this is the trainer of {of!r}: choose one")
        unused = [name for name, given in self.sections.items() if given and name != of]
        if unused:
            raise ValueError(f"the section {unused[0]} is not for the trainer of {of!r}: leave it out")
        found: dict[str, Any] = {**defaults, **self.training, "algorithm": defaults["algorithm"], **self.sections[of]}
        if "clip_range" in found:
            found["clip_eps_low"] = found["clip_eps_high"] = found.pop("clip_range")
        found |= self.fields
        if found.get("num_turns", 1) > 1:
            found.setdefault("branching", "chain")
        return TrainConfig.of(**found)

    @property
    def num_turns(self) -> int | None:
        """Turns of an episode at most, where that is said."""
        return self.fields.get("num_turns", self.training.get("num_turns"))


class LLMEnvironment:
    """A language model as a policy. model: a loaded agent, or a name or path to load; tokenizer: accepted and checked, every
    agent brings its own; mode: SERVER, it is trained, or CLIENT, it stays as it is."""

    def __init__(self, model: Agent | str | os.PathLike, tokenizer: Any = None, mode: EnvironmentMode = EnvironmentMode.SERVER):
        self.agent, self.mode = load_agents(None, model, 1)[0], EnvironmentMode(mode)
        check_tokenizer(tokenizer, [self.agent])


class GRPOTrainer:
    """Group baselines. policy_env: an `LLMEnvironment`, or one a role; eval_envs: an environment or several."""

    section, row, several = "grpo", "grpo", "grpo"
    defaults: Mapping[str, Any] = {"num_generations": 4}

    def __init__(
        self,
        policy_env: LLMEnvironment | Sequence[LLMEnvironment],
        eval_envs: Any,
        config: ExperimentConfig | None = None,
    ):
        each = [policy_env] if isinstance(policy_env, LLMEnvironment) else list(policy_env)
        for i, policy in enumerate(each):
            if not isinstance(policy, LLMEnvironment):
                raise TypeError(f"policy {i} is a {type(policy).__name__}: give an LLMEnvironment(model, mode=...)")
        config = config or ExperimentConfig()
        env = one_environment(eval_envs, config.num_turns or MAX_TURNS)
        own: dict[str, Any] = {"num_turns": getattr(env, "max_turns", 1)}
        own["algorithm"] = self.row if len(each) == 1 else self.several
        own["frozen_agents"] = tuple(i for i, policy in enumerate(each) if policy.mode is EnvironmentMode.CLIENT)
        self.config = config.train_config(self.section, {**self.defaults, **own})
        self.names = [policy.agent.name for policy in each]
        self.team, self._params = make_team([policy.agent for policy in each], lora=self.config.lora.lora_rank > 0)
        check_settings(self.config)
        check_team(self.team, self.config)
        environment_of(self.team, env, None, None, self.config)  # refuses what does not fit
        self._params = placed(self.team, self._params, self.config.run.mesh)
        self.env = env

    @property
    def params(self) -> list[Any]:
        """The present parameters [A, ...] of each stack."""
        return present(self._params)

    def train(self, num_iterations: int | None = None) -> TrainResult:
        """So many updates (default: as the settings say); afterwards the trainer holds the trained weights. Held-out tasks are
        played where `eval_every` asks for it. A second call trains on from these weights, with a new optimiser and schedule, on
        the same tasks, and moves what the first one wrote to `earlier_1`; where that was interrupted, it is refused."""
        cfg = self.config if num_iterations is None else self.config.replace(num_updates=num_iterations)
        held_out = self.env.tasks("eval", NUM_EPISODES, cfg.run.seed) if cfg.run.eval_every else ()
        tasks = self.env.tasks("train", NUM_TASKS, cfg.run.seed)
        result = train(self.team, self.env, tasks, cfg, params=self.params, eval_items=held_out)
        self._params = policies(result.state)
        return result

    def evaluate(self, num_episodes: int = NUM_EPISODES) -> dict[str, float]:
        """Mean return over held-out tasks with its 95 % interval, and parts of the reward."""
        tasks = self.env.tasks("eval", num_episodes, self.config.run.seed)
        return numbers(evaluate(self.team, self.params, tasks, self.env, self.config))

    def save_model(self, output_dir: str | os.PathLike) -> None:
        """Write every policy as a Hugging Face directory: `agent_0/`, `agent_1/`, …"""
        save_team(Path(output_dir), self.team, self.params)


class PPOTrainer(GRPOTrainer):
    """PPO with a critic of its own (for a team: IPPO)."""

    section, row, several = "ppo", "ppo", "ippo"
    defaults = {"num_generations": 1}


def one_environment(envs: Any, max_turns: int = MAX_TURNS) -> Any:
    """An environment, or several as one. max_turns: of those in MRLM's words that declare none."""
    found = list(envs) if isinstance(envs, list | tuple) else [envs]
    if not found:
        raise ValueError("eval_envs has no environment")
    if len(found) > 1:
        found = list({content(env): env for env in found}.values())
    names = [type(env).__name__ for env in found]
    numbered = [f"{name}_{names[:i].count(name)}" if names.count(name) > 1 else name for i, name in enumerate(names)]
    each = [env if callable(getattr(env, "observe", None)) else LockStep(as_text_environment(env, max_turns)) for env in found]
    return Mixture(dict(zip(numbered, each, strict=True))) if len(each) > 1 else each[0]


def content(env: Any) -> Any:
    """What tells environments apart."""
    try:
        return pickle.dumps(env)
    except (pickle.PicklingError, TypeError, AttributeError):  # one that holds a lock, a connection, …: only it is itself
        return id(env)
