"""Configurations of the trainer classes: `TrainConfig` under the names that older scripts use.

A name of either generation of those scripts sets the field that means the same (`OTHER_NAMES`). A name that this
version cannot honour is refused with what to do instead (`REFUSED`), an unknown one with the nearest known name.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from jmarl.config import TrainConfig, check, check_names

OTHER_NAMES = {
    "agent_learning_rate": "learning_rate",
    "per_device_train_batch_size": "num_prompts",
    "rollout_buffer_size": "num_prompts",
    "max_steps": "num_updates",
    "logging_steps": "log_every",
    "save_steps": "save_every",
    "eval_steps": "eval_every",
    "eval_interval": "eval_every",
    "warmup_steps": "warmup_updates",
    "lr_scheduler_type": "lr_schedule",
    "adam_beta1": "adam_b1",
    "adam_beta2": "adam_b2",
    "adam_epsilon": "adam_eps",
    "discount": "gamma",
    "use_separate_critic": "separate_critic",
    "value_loss_coef": "value_coef",
    "value_clip_range": "value_clip",
    "dpo_beta": "beta",
    "loss_type": "preference_loss",
    "preference_num_candidates": "num_generations",
    "preference_pairs_per_sample": "pairs_per_prompt",
    "comparator_policy": "comparator",
    "comparator_history_k": "comparator_lag",
    "comparator_model_name": "comparator_model",
    "comparator_api_model": "comparator_model",
    "comparator_api_url": "comparator_url",
    "preference_replay_mode": "replay",
    "preference_replay_k": "replay_k",
    "preference_replay_lambda": "replay_lambda",
    "lora_r": "lora_rank",
}

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


@dataclasses.dataclass(frozen=True, init=False)
class TrainerConfig(TrainConfig):
    """Settings of a trainer: all fields of `TrainConfig`, and those below. `OTHER_NAMES` can be given and read too.

    The defaults are CoMLRL 1.4.3's wherever it has the setting (20 epochs, learning rate 5e-6, 4 generations of 256
    tokens, temperature 0.6, top-p 0.6, top-k 50), so that a script which leaves them out means the same run. Three
    differ: num_turns is 1 (it had 2), num_prompts 1 (it had 2), and advantages are not divided by their std, because
    that is a switch of its own here (advantage_scale). Such narrow sampling explores little, and it draws from another
    distribution than the one that is scored: temperature=1, top_p=1, top_k=0 gives the exact policy gradient.
    """

    num_updates: int = 0
    """Updates of every agent; 0: num_train_epochs * ceil(items / num_prompts)."""
    num_generations: int = 4
    max_new_tokens: int = 256
    temperature: float = 0.6
    top_k: int = 50
    top_p: float = 0.6
    learning_rate: float = 5e-6
    log_every: int = 50
    num_train_epochs: float = 20
    """Passes over the data set."""
    num_agents: int | None = None
    """Agents of the team; None: as many as agents= has, or 2 of the one model."""
    eval_num_samples: int | None = None
    """Items of eval_dataset that are played, from the first on; None: all."""

    def __init__(self, **settings: Any):
        values = {f.name: f.default for f in dataclasses.fields(self)} | self._known(settings)
        for name, value in values.items():
            object.__setattr__(self, name, value)
        self.__post_init__()

    @classmethod
    def _known(cls, settings: dict[str, Any]) -> dict[str, Any]:
        """Settings by field name."""
        check_names(cls, settings, (*OTHER_NAMES, *REFUSED))
        given: dict[str, str] = {}
        for name in settings:
            if name in REFUSED:
                raise TypeError(f"{cls.__name__}: {name} is not a setting here; {REFUSED[name]}")
            field = OTHER_NAMES.get(name, name)
            if field in given:
                raise TypeError(f"{cls.__name__}: {given[field]} and {name} are the same setting, give one of them")
            given[field] = name
        return {field: settings[name] for field, name in given.items()}

    def __post_init__(self):
        if self.top_k is None:  # how older scripts switch it off
            object.__setattr__(self, "top_k", 0)
        if self.num_updates == -1:
            object.__setattr__(self, "num_updates", 0)
        check("num_updates", self.num_updates, self.num_updates >= 0, ">= 0 (0 counts epochs)")
        check("num_train_epochs", self.num_train_epochs, self.num_train_epochs > 0, "> 0")
        for name in ("num_agents", "eval_num_samples"):
            value = getattr(self, name)
            check(name, value, value is None or value >= 1, ">= 1 or None")
        self._with_updates(self.num_updates or 10**9)  # refuse bad values now

    def __getattr__(self, name: str) -> Any:  # only called for what is no field
        if name not in OTHER_NAMES:
            raise AttributeError(f"{type(self).__name__} has no setting {name!r}")
        return getattr(self, OTHER_NAMES[name])

    def train_config(self, num_items: int) -> TrainConfig:
        """The run that these settings mean on a data set of that many items."""
        return self._with_updates(self.num_updates or self._updates(num_items))

    def _updates(self, num_items: int) -> int:
        """How many updates num_train_epochs passes over the data set take; some trainers count them otherwise."""
        return math.ceil(self.num_train_epochs * math.ceil(num_items / self.num_prompts))

    def _with_updates(self, num_updates: int) -> TrainConfig:
        own: dict[str, Any] = {f.name: getattr(self, f.name) for f in dataclasses.fields(TrainConfig)}
        own["num_updates"] = num_updates
        return TrainConfig(**own)


@dataclasses.dataclass(frozen=True, init=False)
class MAGRPOConfig(TrainerConfig):
    """`TrainerConfig` for MAGRPO: baseline = mean of the group (arXiv 2508.04652)."""

    algorithm: str = "magrpo"
    output_dir: str = "runs/magrpo"


@dataclasses.dataclass(frozen=True, init=False)
class MAREINFORCEConfig(TrainerConfig):
    """`TrainerConfig` for MAREINFORCE: no baseline."""

    algorithm: str = "mareinforce"
    output_dir: str = "runs/mareinforce"


@dataclasses.dataclass(frozen=True, init=False)
class MARLOOConfig(TrainerConfig):
    """`TrainerConfig` for MARLOO: baseline = mean of the group's others."""

    algorithm: str = "marloo"
    output_dir: str = "runs/marloo"


@dataclasses.dataclass(frozen=True, init=False)
class MAReMaxConfig(TrainerConfig):
    """`TrainerConfig` for MAReMax: baseline = best of the group."""

    algorithm: str = "maremax"
    output_dir: str = "runs/maremax"
