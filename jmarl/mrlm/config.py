"""MRLM's configuration sections. Their keys and what each sets here are in one table, `jmarl.config.mrlm_keys`.

A setting that is None has the default of `TrainConfig` (one PPO epoch, learning rate 1e-5, …), not that of MRLM. A key that
cannot act here is refused with the reason when the trainer is made.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

from jmarl.algorithms import find_row
from jmarl.config import SECTION_OF, TrainConfig, did_you_mean
from jmarl.config.experiment import TOP_SETTINGS
from jmarl.config.layers import Layers
from jmarl.config.validation import with_known_names
from jmarl.config.yaml_file import YamlFile

SET_BY_TRAINERS = {"algorithm", "frozen_agents"}


@with_known_names
@dataclasses.dataclass(frozen=True)
class TrainingConfig:
    """Settings of all algorithms."""

    algorithm: str | None = None
    """ppo, grpo, dpo or sft; must be that of the trainer."""
    num_epochs: int | None = None
    """Updates."""
    num_iterations: int | None = None
    """Updates, as num_epochs."""
    batch_size: int | None = None
    """Tasks of an update, which learns from all of their episodes; of dpo and sft the pairs or texts of an update."""
    mini_batch_size: int | None = None
    """Tasks of an optimizer step; None: all."""
    num_rollouts_per_iteration: int | None = None
    """Tasks of an update; batch_size is then that of an optimizer step."""
    episodes_per_iteration: int | None = None
    """As num_rollouts_per_iteration."""
    gradient_accumulation_steps: int | None = None
    """An optimizer step learns from this many times batch_size, in as many parts."""
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
    eval_every: int | None = None
    """Updates between evaluations on held-out tasks."""
    eval_episodes: int | None = None
    """Held-out tasks of an evaluation, of which each is played once; of dpo and sft the held-out pairs or trajectories."""
    checkpoint_dir: str | None = None
    save_every: int | None = None
    save_total_limit: int | None = None
    log_every: int | None = None
    log_dir: str | None = None
    """Refused: logs are in checkpoint_dir."""
    use_tensorboard: bool | None = None
    use_wandb: bool | None = None
    wandb_project: str | None = None
    wandb_entity: str | None = None
    wandb_run_name: str | None = None
    wandb_mode: str | None = None
    use_bf16: bool | None = None
    """Compute in bfloat16, with float32 master weights."""
    use_fp16: bool | None = None
    """As use_bf16, with a warning."""
    seed: int | None = None


@with_known_names
@dataclasses.dataclass(frozen=True)
class PPOConfig:
    """Settings of PPO (arXiv 1707.06347)."""

    clip_range: float | None = None
    clip_range_vf: float | None = None
    gamma: float | None = None
    gae_lambda: float | None = None
    num_ppo_epochs: int | None = None
    value_loss_coef: float | None = None
    """Weight of the value loss; the critic is then a head of the policy."""
    entropy_coef: float | None = None
    target_kl: float | None = None
    normalize_advantages: bool | None = None
    """Divide advantages by their std over the batch."""
    kl_coef: float | None = None


@with_known_names
@dataclasses.dataclass(frozen=True)
class GRPOConfig:
    """Settings of GRPO (arXiv 2402.03300)."""

    group_size: int | None = None
    clip_range: float | None = None
    gamma: float | None = None
    entropy_coef: float | None = None
    num_grpo_epochs: int | None = None
    target_kl: float | None = None
    kl_coef: float | None = None
    normalize_rewards: bool | None = None
    """Divide advantages by their std."""
    normalize_advantages: bool | None = None
    """As normalize_rewards."""
    reward_normalization: str | None = None
    """Over what the std is taken: group, batch or running."""
    temperature: float | None = None
    gae_lambda: float | None = None
    """Refused, as the next two: GRPO has no critic."""
    value_loss_coef: float | None = None
    value_clip_range: float | None = None


@with_known_names
@dataclasses.dataclass(frozen=True)
class DPOConfig:
    """Settings of DPO (arXiv 2305.18290)."""

    beta: float | None = None
    loss_type: str | None = None
    """sigmoid, hinge or ipo."""
    label_smoothing: float | None = None
    reference_free: bool | None = None


@with_known_names
@dataclasses.dataclass(frozen=True)
class SFTConfig:
    """Settings of supervised training on trajectories."""

    mode: str | None = None
    """behavioral_cloning, world_model or combined."""
    bc_weight: float | None = None
    world_model_weight: float | None = None
    filter_low_reward: bool | None = None
    """Leave out trajectories whose sum of rewards is below min_reward_threshold."""
    min_reward_threshold: float | None = None
    max_trajectories: int | None = None
    """Trajectories to train on at most."""
    collect_every: int | None = None
    """Refused: trajectories are given."""


CLASSES: dict[str, type] = {
    "training": TrainingConfig,
    "ppo": PPOConfig,
    "grpo": GRPOConfig,
    "dpo": DPOConfig,
    "sft": SFTConfig,
}


class Resolved(NamedTuple):
    """The settings of a trainer."""

    config: TrainConfig
    other: dict[str, Any]  # given settings outside of `TrainConfig`: held_out, wandb, min_reward, num_tasks, tags, ...


class ExperimentConfig:
    """The sections of an experiment.

    Args:
        training, ppo, grpo, dpo, sft: the sections; the section of another algorithm than the trainer's is an error.
        experiment_name, description, tags: shown by W&B.
        **settings: any setting of `TrainConfig` by its own name, such as max_new_tokens=64; it wins over a section's.
    """

    def __init__(
        self,
        training: TrainingConfig | None = None,
        ppo: PPOConfig | None = None,
        grpo: GRPOConfig | None = None,
        dpo: DPOConfig | None = None,
        sft: SFTConfig | None = None,
        **settings: Any,
    ):
        self.sections: dict[str, Any] = {"training": training, "ppo": ppo, "grpo": grpo, "dpo": dpo, "sft": sft}
        for name, value in self.sections.items():
            if value is not None and not isinstance(value, CLASSES[name]):
                raise TypeError(f"{name}= is a {CLASSES[name].__name__}(...), got {type(value).__name__}")
        known = {"algorithm", *SECTION_OF, *TOP_SETTINGS} - SET_BY_TRAINERS - {"seeds"}
        for name in settings.keys() - known:
            if name in SET_BY_TRAINERS:
                raise TypeError(f"ExperimentConfig: {name!r} is set by the trainer and its policies")
            hint = did_you_mean(name, known) or "; help(jmarl.TrainConfig) lists its settings"
            raise TypeError(f"ExperimentConfig has no setting {name!r}{hint}")
        self.training, self.settings = training or TrainingConfig(), settings

    def resolve(self, section: str, defaults: Mapping[str, Any]) -> Resolved:
        """Return the settings of a trainer that reads `section`. defaults: by names in `TrainConfig`."""
        algorithm = self.training.algorithm or section
        if algorithm != section:
            raise ValueError(f"training has algorithm={algorithm!r}, but this is the trainer of {section!r}: use its trainer")
        names = ("training", section)
        unused = [name for name, value in self.sections.items() if value is not None and name not in names]
        if unused:
            raise ValueError(f"the section {unused[0]} has no effect for the trainer of {section!r}: remove it")
        layers = Layers()
        layers.add(YamlFile("defaults", dict(defaults), {}))
        for name in names:
            given = {key: x for key, x in vars(self.sections[name] or CLASSES[name]()).items() if x is not None}
            given.pop("algorithm", None)  # of a team it is another row, which the trainer chooses
            layers.add(YamlFile(CLASSES[name].__name__, {name: given}, {}))
        layers.add(YamlFile("ExperimentConfig", self.settings, {}))
        values = {name: given.value for name, given in layers.settings(lambda name: find_row(name).data).items()}
        if values.get("num_turns", 1) > 1:
            values.setdefault("branching", "chain")
        own = {"algorithm", *SECTION_OF}
        config = TrainConfig.of(**{name: x for name, x in values.items() if name in own})
        return Resolved(config, {name: x for name, x in values.items() if name not in own})

    def train_config(self, section: str, defaults: Mapping[str, Any]) -> TrainConfig:
        """Return the configuration of a trainer that reads `section`; see `resolve`."""
        return self.resolve(section, defaults).config

    @property
    def num_turns(self) -> int | None:
        """The limit of turns of an episode, if it is set."""
        return self.settings.get("num_turns", self.training.max_episode_length)
