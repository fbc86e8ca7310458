"""MRLM's configuration sections. Each setting sets the field of `TrainConfig` with the same meaning.

A setting that is None has the default of `TrainConfig` (one PPO epoch, learning rate 1e-5, …), not that of MRLM.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from jmarl.config import OTHER_NAMES, SECTION_OF, TrainConfig, did_you_mean
from jmarl.config.validation import with_known_names

SET_BY_TRAINERS = {"algorithm", "frozen_agents"}


@dataclasses.dataclass(frozen=True)
class Section:
    """Base of the sections. Names that are not in `own_names` mean the same in MRLM and in `config.aliases`."""

    own_names: ClassVar[Mapping[str, str]] = {}

    def fields(self) -> dict[str, Any]:
        """Return the settings that are not None, by their names in `TrainConfig`."""
        names: dict[str, str] = {}
        settings: dict[str, Any] = {}
        for name, value in vars(self).items():
            if value is None:
                continue
            field = self.own_names.get(name) or OTHER_NAMES.get(name, name)
            if field in names:
                raise TypeError(f"{type(self).__name__}: {names[field]} and {name} are the same setting, give one of them")
            names[field] = name
            settings[field] = value
        return settings

    def __post_init__(self) -> None:
        self.fields()  # raises for two names of one setting


@with_known_names
@dataclasses.dataclass(frozen=True)
class TrainingConfig(Section):
    """Settings of all algorithms."""

    own_names = {
        "num_epochs": "num_updates",
        "num_iterations": "num_updates",
        "batch_size": "num_prompts",
        "max_episode_length": "num_turns",
    }

    algorithm: str | None = None
    """ppo or grpo; must be that of the trainer."""
    num_epochs: int | None = None
    """Updates."""
    num_iterations: int | None = None
    """Updates, as num_epochs."""
    batch_size: int | None = None
    """Tasks of an update, which learns from all of their episodes."""
    learning_rate: float | None = None
    optimizer: str | None = None
    weight_decay: float | None = None
    max_grad_norm: float | None = None
    adam_beta1: float | None = None
    adam_beta2: float | None = None
    adam_epsilon: float | None = None
    lr_scheduler: str | None = None
    warmup_steps: int | None = None
    max_episode_length: int | None = None
    """Turns of an episode at most."""
    checkpoint_dir: str | None = None
    save_every: int | None = None
    save_total_limit: int | None = None
    log_every: int | None = None


@with_known_names
@dataclasses.dataclass(frozen=True)
class PPOConfig(Section):
    """Settings of PPO (arXiv 1707.06347)."""

    clip_range: float | None = None
    clip_range_vf: float | None = None
    gamma: float | None = None
    gae_lambda: float | None = None
    num_ppo_epochs: int | None = None
    value_loss_coef: float | None = None
    entropy_coef: float | None = None
    target_kl: float | None = None


@with_known_names
@dataclasses.dataclass(frozen=True)
class GRPOConfig(Section):
    """Settings of GRPO (arXiv 2402.03300)."""

    group_size: int | None = None
    clip_range: float | None = None
    gamma: float | None = None
    entropy_coef: float | None = None
    num_grpo_epochs: int | None = None
    target_kl: float | None = None


class ExperimentConfig:
    """The sections of an experiment.

    Args:
        training, ppo, grpo: the sections; the section of another algorithm than the trainer's is an error.
        **settings: any setting of `TrainConfig` by its own name, such as max_new_tokens=64; it wins over a section's.
    """

    def __init__(
        self,
        training: TrainingConfig | None = None,
        ppo: PPOConfig | None = None,
        grpo: GRPOConfig | None = None,
        **settings: Any,
    ):
        for name, value, cls in (
            ("training", training, TrainingConfig),
            ("ppo", ppo, PPOConfig),
            ("grpo", grpo, GRPOConfig),
        ):
            if value is not None and not isinstance(value, cls):
                raise TypeError(f"{name}= is a {cls.__name__}(...), got {type(value).__name__}")
        known = {"algorithm", *SECTION_OF} - SET_BY_TRAINERS
        for name in settings.keys() - known:
            if name in SET_BY_TRAINERS:
                raise TypeError(f"ExperimentConfig: {name!r} is set by the trainer and its policies")
            hint = did_you_mean(name, known) or "; help(jmarl.TrainConfig) lists its settings"
            raise TypeError(f"ExperimentConfig has no setting {name!r}{hint}")
        self.training, self.settings = training or TrainingConfig(), settings
        self.sections: dict[str, Section | None] = {"ppo": ppo, "grpo": grpo}

    def train_config(self, section: str, defaults: Mapping[str, Any]) -> TrainConfig:
        """Return the configuration of a trainer that reads `section`. defaults: by names in `TrainConfig`."""
        algorithm = self.training.algorithm or section
        if algorithm != section:
            raise ValueError(f"training has algorithm={algorithm!r}, but this is the trainer of {section!r}: use its trainer")
        unused = [name for name, value in self.sections.items() if value is not None and name != section]
        if unused:
            raise ValueError(f"the section {unused[0]} has no effect for the trainer of {section!r}: remove it")
        own = self.sections[section]
        fields = {**defaults, **self.training.fields(), "algorithm": defaults["algorithm"], **(own.fields() if own else {})}
        if "clip_range" in fields:
            fields["clip_eps_low"] = fields["clip_eps_high"] = fields.pop("clip_range")
        fields |= self.settings
        if fields.get("num_turns", 1) > 1:
            fields.setdefault("branching", "chain")
        return TrainConfig.of(**fields)

    @property
    def num_turns(self) -> int | None:
        """The limit of turns of an episode, if it is set."""
        return self.settings.get("num_turns", self.training.max_episode_length)
