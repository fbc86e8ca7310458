"""Other names of settings: those of CoMLRL, TRL and others, for the field of `TrainConfig` that means the same.

A name that means something else there is converted (`CONVERSIONS`), given the other settings, or refused with what to write
instead (`REFUSED`). Compared with TRL 1.16 and transformers 5.24. What no setting can express stays as here: group and batch
std are those of a population (TRL: of a sample, which is sqrt(n / (n - 1)) times as large), means over completions leave out
those that mask_truncated_completions masks (TRL counts them as 0), and the first step of a warm-up of n steps has 1/n of the
learning rate (transformers: 0)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

OTHER_NAMES: dict[str, str] = {
    # CoMLRL
    "agent_learning_rate": "learning_rate",
    "discount": "gamma",
    "use_separate_critic": "separate_critic",
    "value_loss_coef": "value_coef",
    "value_clip_range": "value_clip",
    "dpo_beta": "beta",
    "preference_num_candidates": "num_candidates",
    "preference_pairs_per_sample": "pairs_per_prompt",
    "comparator_policy": "comparator",
    "comparator_history_k": "comparator_lag",
    "comparator_model_name": "comparator_model",
    "comparator_api_model": "comparator_model",
    "comparator_api_url": "comparator_url",
    "preference_replay_mode": "replay",
    "preference_replay_k": "replay_k",
    "preference_replay_lambda": "replay_lambda",
    # TRL and transformers
    "max_steps": "num_updates",
    "max_completion_length": "max_new_tokens",
    "num_iterations": "num_epochs",
    "num_generations_eval": "eval_generations",
    "epsilon": "clip_eps_low",
    "epsilon_high": "clip_eps_high",
    "delta": "dual_clip",
    "importance_sampling_level": "ratio_level",
    "scale_rewards": "advantage_scale",
    "mask_truncated_completions": "mask_overlong",
    "loss_type": "preference_loss",
    "logging_steps": "log_every",
    "save_steps": "save_every",
    "eval_steps": "eval_every",
    "warmup_steps": "warmup_updates",
    "lr_scheduler_type": "lr_schedule",
    "router_aux_loss_coef": "router_aux_coef",
    "adam_beta1": "adam_b1",
    "adam_beta2": "adam_b2",
    "adam_epsilon": "adam_eps",
    # verl and others
    "lr": "learning_rate",
    "group_size": "num_generations",
    "clip_range_vf": "value_clip",
    "num_ppo_epochs": "num_epochs",
    "num_grpo_epochs": "num_epochs",
    "lr_scheduler": "lr_schedule",
    "checkpoint_dir": "output_dir",
    "lora_r": "lora_rank",
    "stop_strings": "stop",
    "stop_sequences": "stop",
    "lora_target_modules": "lora_targets",
}

# field -> other value -> value
OTHER_VALUES: dict[str, dict[Any, str]] = {
    "joint_mode": {"align": "aligned", "crossed": "cross"},
    "advantage_scale": {"group": "std", True: "std", "batch": "batch_std", False: "none"},
    "lr_schedule": {"constant_with_warmup": "constant"},
}

# name -> value -> the field and value that it means; other values mean the field of OTHER_NAMES
BY_VALUE: dict[str, dict[str, tuple[str, str]]] = {
    "loss_type": {  # of TRL's GRPO; of its DPO it is the preference loss
        "grpo": ("loss_aggregation", "sequence_mean"),
        "bnpo": ("loss_aggregation", "token_mean"),
        "dapo": ("loss_aggregation", "token_mean"),
        "dr_grpo": ("loss_aggregation", "constant"),
    }
}

# --- names that mean something else elsewhere

NO_LOSS = "this loss is no algorithm here"
REFUSED_VALUES: dict[str, dict[Any, str]] = {
    "loss_type": {"cispo": "set algorithm='cispo'", "sapo": NO_LOSS, "luspo": NO_LOSS, "vespo": NO_LOSS},
}

# Names of others that are no settings here, with what to write instead.
REFUSED: dict[str, str] = {
    "per_device_train_batch_size": "in TRL it counts the completions of a device: set num_prompts, the prompts of an update, "
    "each with num_generations completions, or for dpo, sft and reward_model batch_size, the pairs or texts of an update",
    "per_device_eval_batch_size": "all held-out prompts are played at once, with eval_generations completions each",
    "gradient_accumulation_steps": "set num_prompts to the prompts of an update, and micro_batches to the number of parts",
    "generation_batch_size": "it counts completions: set num_prompts, the prompts of an update, and num_generations",
    "steps_per_generation": "set num_minibatches, the optimizer steps of a pass over a batch",
    "rollout_buffer_size": "in CoMLRL it counts samples, which are nodes of a tree or completions: set num_prompts, the "
    "prompts of an update",
    "train_batch_size": "set num_minibatches, the optimizer steps of a pass over a batch",
    "eval_interval": "in CoMLRL it counts prompts: set eval_every, which counts updates",
    "num_train_epochs": "set num_updates, the number of updates",
    "max_prompt_length": "prompts are not cut to a length; long_prompts is about those that do not fit the context",
    "warmup_ratio": "set warmup_updates, the number of updates",
    "lr_scheduler_kwargs": "lr_schedule has no parameters besides warmup_updates",
    "save_strategy": "set save_every, the updates between checkpoints, or 0",
    "eval_strategy": "set eval_every, the updates between evaluations",
    "logging_strategy": "metrics of every update are logged",
    "gradient_checkpointing": "set remat: none, dots or full",
    "disable_dropout": "there is no dropout besides lora_dropout",
    "log_completions": "completions.jsonl.gz in output_dir has all of them",
    "vllm_importance_sampling_cap": "set importance_cap, and importance_level: token or sequence",
    "vllm_importance_sampling_clip_max": "set importance_cap, and importance_level: token or sequence",
    "optim": "set optimizer: adamw, lion or sgd",
}

# A conversion takes a value and all settings by field, as they are without it, and returns what it sets.
Conversion = Callable[[Any, Mapping[str, Any]], dict[str, Any]]
WEIGHT_BOUNDS = frozenset({"cispo"})  # algorithms whose epsilon_high is the bound of a weight in TRL, and which have no epsilon
HIGHEST_CLIP = 0.28  # the largest default of clip_eps_high in algorithms with dual_clip


@dataclasses.dataclass(frozen=True)
class StepsAsUpdates:
    """Optimizer steps, as updates: an update has num_epochs * num_minibatches of them."""

    name: str

    def __call__(self, value: Any, settings: Mapping[str, Any]) -> dict[str, Any]:
        field, counts = OTHER_NAMES[self.name], (settings["num_epochs"], settings["num_minibatches"])
        if isinstance(value, float):
            raise ValueError(
                f"{self.name}={value} is not allowed: a share of all steps has no meaning here; set {field}, updates"
            )
        if not all(type(x) is int for x in (value, *counts)) or value <= 0:
            return {field: value}
        steps = counts[0] * counts[1]
        if value % steps:
            raise ValueError(
                f"{self.name}={value} is not allowed: it counts optimizer steps, of which an update has num_epochs * "
                f"num_minibatches = {steps}: give a multiple of {steps}, or set {field}, which counts updates"
            )
        return {field: value // steps}


def bounds_weights(settings: Mapping[str, Any]) -> bool:
    """Return whether the algorithm that trains the team bounds weights, see `WEIGHT_BOUNDS`."""
    return not WEIGHT_BOUNDS.isdisjoint((settings["algorithm"], settings["rl_algorithm"]))


def upper_clip(value: Any, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Convert epsilon_high, which in CISPO is the bound of the ratio itself: 1 + clip_eps_high here."""
    if not bounds_weights(settings) or type(value) not in (int, float):
        return {"clip_eps_high": value}
    if value < 1:
        raise ValueError(
            f"epsilon_high={value} is not allowed: in cispo it is the bound of the ratio, at least 1 here; set clip_eps_high "
            "for the bound 1 + clip_eps_high"
        )
    return {"clip_eps_high": value - 1}


def both_clips(value: Any, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Convert epsilon, which is also the upper clip where epsilon_high is not set."""
    if bounds_weights(settings) and value is not None:
        raise ValueError(
            f"epsilon={value} is not allowed: TRL's cispo does not clip from below; set epsilon_high, or clip_eps_low to clip"
        )
    upper = settings["clip_eps_high"]
    return {"clip_eps_low": value, "clip_eps_high": value if upper is None else upper}


def bound_above_clip(value: Any, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Convert delta, which bounds the ratio before it is clipped: dual_clip, if it is not below the clip."""
    upper = settings["clip_eps_high"]
    lowest = 1 + (HIGHEST_CLIP if upper is None else upper)
    if type(value) in (int, float) and value < lowest:
        raise ValueError(f"delta={value} is not allowed: it must be at least 1 + clip_eps_high = {lowest:g}, or None (off)")
    return {"dual_clip": value}


def schedule(value: Any, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Convert lr_scheduler_type, where constant ignores the warm-up."""
    if value == "constant" and settings["warmup_updates"]:
        raise ValueError(
            f"lr_scheduler_type='constant' is not allowed with warmup_updates={settings['warmup_updates']}: in transformers it "
            "has no warm-up; give constant_with_warmup, or no warm-up"
        )
    return {"lr_schedule": OTHER_VALUES["lr_schedule"].get(value, value)}


CONVERSIONS: dict[str, Conversion] = {  # in the order in which they are made
    **{name: StepsAsUpdates(name) for name in ("max_steps", "warmup_steps", "save_steps", "eval_steps", "logging_steps")},
    "epsilon_high": upper_clip,
    "epsilon": both_clips,
    "delta": bound_above_clip,
    "lr_scheduler_type": schedule,
}


def convert(values: Mapping[str, Any], fields: Mapping[str, Any], others: Mapping[str, Any]) -> dict[str, Any]:
    """Return fields with the values of names in `CONVERSIONS`.

    values: by these names; fields: the other settings that are given, by field; others: all settings as they were before."""
    fields = dict(fields)
    for name, conversion in CONVERSIONS.items():
        if name in values:
            fields |= conversion(values[name], {**others, **fields})
    return fields
