"""Configurations of CoMLRL's trainer classes: flat, under the names that its scripts use.

A name of CoMLRL or TRL sets the field that means the same (`config.aliases`). A name that cannot be honored here is refused
with what to do instead (`REFUSED`), an unknown one with the nearest known name."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar, dataclass_transform

from jmarl.config import (
    OTHER_NAMES,
    SECTION_OF,
    Count,
    Critic,
    Episodes,
    LoRA,
    Loss,
    Optimizer,
    Positive,
    Preference,
    Range,
    Run,
    Sampling,
    TrainConfig,
    by_field,
    check_fields,
    check_names,
)

REFUSED = {
    "advantage_mode": "choose the trainer instead: MAGRPO (mean), MAREINFORCE (raw), MARLOO (rloo) or MAReMax (max)",
    "advantage_normalization": "set advantage_scale='std' (divide by the group's std) or 'none'",
    "reference_kl_enabled": "set kl_coef: above 0 the KL term is on",
    "reference_kl_coef": "set kl_coef: above 0 the KL term is on",
    "reference_devices": "the reference lies beside the weights it belongs to; set mesh for several devices",
    "parallel_training": "set mesh, such as mesh='agent=2'",
    "agent_devices": "set mesh, such as mesh='agent=2'",
    "train_batch_size": "an update uses all prompts of its rollout; set num_minibatches for several steps on them",
    "gradient_accumulation_steps": "set num_prompts to the prompts of one update and micro_batches to the parts",
    "eval_batch_size": "all evaluation prompts are played in one batch; set eval_num_samples",
    "critic_devices": "critics lie beside the agents; set mesh for several devices",
    "critic_value_head_hidden_dim": "a value head is one linear layer on the last hidden states",
    "value_head_hidden_dim": "a value head is one linear layer on the last hidden states",
    "external_prompt_passthrough": "a formatter without a parameter external_prompts leaves later prompts as they are",
    "reward_model_name": "pass reward_model= to the trainer",
    "reward_num_train_epochs": "set reward_updates",
    "reward_train_batch_size": "set batch_size, which the reward model's updates have too",
    "preference_replay_sample_size": "every update draws batch_size pairs",
    "comparator_api_key": "set the environment variable COMPARATOR_API_KEY",
    "comparator_generation_mode": "a comparator writes for each agent by itself",
    "bf16": "set compute_dtype='bfloat16'",
    "fp16": "set compute_dtype='bfloat16'",
}


T = TypeVar("T", bound="TrainerConfig")


@dataclass_transform(kw_only_default=True, frozen_default=True)
def trainer_config(cls: type[T]) -> type[T]:
    """Make a frozen dataclass with keyword arguments, whose constructor also takes the names of `OTHER_NAMES`."""
    cls = dataclasses.dataclass(frozen=True, kw_only=True)(cls)
    init = cls.__init__

    @functools.wraps(init)
    def with_other_names(self: T, **settings: Any) -> None:
        init(self, **cls.known(settings))

    cls.__init__ = with_other_names  # type: ignore[method-assign]
    return cls


@trainer_config
class TrainerConfig(Sampling, Episodes, Loss, Critic, Optimizer, LoRA, Preference, Run):
    """Settings of a trainer: all settings of `TrainConfig`, and those below. The names of `OTHER_NAMES` can be given and read
    too.

    The defaults are CoMLRL 1.4.3's where it has the setting (20 epochs, learning rate 5e-6, 4 generations of 256 tokens,
    temperature 0.6, top-p 0.6, top-k 50), so that a script which leaves them out means the same run. Three differ: num_turns is
    1 (it had 2), num_prompts 1 (it had 2), and advantages are not divided by their std, which is a setting of its own here
    (advantage_scale). Such narrow sampling explores little, and it draws from another distribution than the one that is scored:
    temperature=1, top_p=1, top_k=0 gives the exact policy gradient."""

    algorithm: str = "magrpo"
    num_updates: Annotated[int, Range(0, note="0 counts epochs")] = 0
    """Updates of every agent; 0: num_train_epochs * ceil(items / num_prompts)."""
    num_generations: Count = 4
    max_new_tokens: Count = 256
    temperature: Annotated[float, Range(0, note="0 is greedy")] = 0.6
    top_k: Annotated[int, Range(0, note="0 is off")] = 50
    top_p: Annotated[float, Range(0, 1, low_open=True, note="1 is off")] = 0.6
    learning_rate: Positive | tuple[Positive, ...] = 5e-6
    log_every: Count = 50
    num_train_epochs: Positive = 20
    """Passes over the data set."""
    num_agents: Count | None = None
    """Agents of the team; None: as many as agents= has, or 2 of the one model."""
    eval_num_samples: Count | None = None
    """Items of eval_dataset that are played, from the first on; None: all."""

    @classmethod
    def known(cls, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Return settings by field name. Raises TypeError for names that are refused or unknown, or mean the same field."""
        for name in settings:
            if name in REFUSED:
                raise TypeError(f"{cls.__name__}: {name} is not a setting here; {REFUSED[name]}")
        own = {field.name for field in dataclasses.fields(cls)}
        check_names(cls, settings, [*OTHER_NAMES, *REFUSED])
        return by_field(settings, own, cls.__name__)

    def __post_init__(self) -> None:
        if self.top_k is None:  # how CoMLRL scripts switch it off
            object.__setattr__(self, "top_k", 0)
        if self.num_updates == -1:
            object.__setattr__(self, "num_updates", 0)
        check_fields(self)
        self._with_updates(self.num_updates or 10**9)  # raises for settings that do not fit each other

    def __getattr__(self, name: str) -> Any:  # only called for names that are not fields
        if name not in OTHER_NAMES:
            raise AttributeError(f"{type(self).__name__} has no setting {name!r}")
        return getattr(self, OTHER_NAMES[name])

    def train_config(self, num_items: int) -> TrainConfig:
        """Return the run that these settings mean on a data set of that many items."""
        return self._with_updates(self.num_updates or self._updates(num_items))

    def _updates(self, num_items: int) -> int:
        """Return how many updates num_train_epochs passes over the data set take; some trainers count them differently."""
        return math.ceil(self.num_train_epochs * math.ceil(num_items / self.num_prompts))

    def _with_updates(self, num_updates: int) -> TrainConfig:
        settings = {name: getattr(self, name) for name in SECTION_OF} | {"num_updates": num_updates}
        return TrainConfig.of(algorithm=self.algorithm, **settings)


@trainer_config
class MAGRPOConfig(TrainerConfig):
    """`TrainerConfig` for MAGRPO: baseline = mean of the group (arXiv 2508.04652)."""

    algorithm: str = "magrpo"
    output_dir: str = "runs/magrpo"


@trainer_config
class MAREINFORCEConfig(TrainerConfig):
    """`TrainerConfig` for MAREINFORCE: no baseline."""

    algorithm: str = "mareinforce"
    output_dir: str = "runs/mareinforce"


@trainer_config
class MARLOOConfig(TrainerConfig):
    """`TrainerConfig` for MARLOO: baseline = mean of the group's others."""

    algorithm: str = "marloo"
    output_dir: str = "runs/marloo"


@trainer_config
class MAReMaxConfig(TrainerConfig):
    """`TrainerConfig` for MAReMax: baseline = best of the group."""

    algorithm: str = "maremax"
    output_dir: str = "runs/maremax"
