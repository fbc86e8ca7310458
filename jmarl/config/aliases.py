"""Other names of settings: those of CoMLRL, TRL and others, for the field of `TrainConfig` that means the same.

A name that means something else there is converted (`CONVERSIONS`), given the other settings, or refused with what to write
instead (`REFUSED`). Compared with TRL 1.16 and transformers 5.24. What no setting can express stays as here: group and batch
std are those of a population (TRL: of a sample, which is sqrt(n / (n - 1)) times as large), means over completions leave out
those that mask_truncated_completions masks (TRL counts them as 0), and the first step of a warm-up of n steps has 1/n of the
learning rate (transformers: 0)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar, dataclass_transform

T = TypeVar("T")


class OtherName:
    """Another name of a field of `TrainConfig`, which reads that field."""

    def __init__(self, field: str):
        self.field = field

    def __repr__(self) -> str:  # in `help`
        return f"another name of {self.field}"

    def __get__(self, settings: Any, owner: type) -> Any:
        return self if settings is None else getattr(settings, self.field)


def same(field: str) -> Any:
    """Declare another name of a field."""
    return OtherName(field)


@dataclass_transform(kw_only_default=True, frozen_default=True)
def other_names(cls: type[T]) -> type[T]:
    """Let type checkers see the names of a class as arguments of constructors that translate them. At runtime they are no
    fields and have no types."""
    cls.__annotations__ = {}
    return cls


def fields_of(cls: type) -> dict[str, str]:
    """Return the field that each other name means, of a class and its bases."""
    return {name: x.field for base in reversed(cls.__mro__) for name, x in vars(base).items() if isinstance(x, OtherName)}


@other_names
class OtherNames:
    """The table of other names: name, type and the field that means the same."""

    # CoMLRL
    agent_learning_rate: float | tuple[float, ...] = same("learning_rate")
    discount: float = same("gamma")
    use_separate_critic: bool | None = same("separate_critic")
    value_loss_coef: float | None = same("value_coef")
    value_clip_range: float | None = same("value_clip")
    dpo_beta: float | None = same("beta")
    preference_num_candidates: int = same("num_candidates")
    preference_pairs_per_sample: int | None = same("pairs_per_prompt")
    comparator_policy: Literal["current", "initial", "history", "model", "api"] | None = same("comparator")
    comparator_history_k: int | None = same("comparator_lag")
    comparator_model_name: str | None = same("comparator_model")
    comparator_api_model: str | None = same("comparator_model")
    comparator_api_url: str | None = same("comparator_url")
    preference_replay_mode: Literal["current", "nearest_k", "all", "lambda_decay"] | None = same("replay")
    preference_replay_k: int | None = same("replay_k")
    preference_replay_lambda: float | None = same("replay_lambda")
    # TRL and transformers
    max_steps: int = same("num_updates")
    max_completion_length: int = same("max_new_tokens")
    num_iterations: int = same("num_epochs")
    num_generations_eval: int = same("eval_generations")
    epsilon: float | None = same("clip_eps_low")
    epsilon_high: float | None = same("clip_eps_high")
    delta: float | None = same("dual_clip")
    importance_sampling_level: Literal["token", "sequence"] | None = same("ratio_level")
    scale_rewards: bool | Literal["none", "std", "group", "batch", "batch_std", "running_std"] | None = same("advantage_scale")
    mask_truncated_completions: bool | None = same("mask_overlong")
    loss_type: Literal["sigmoid", "hinge", "ipo", "grpo", "bnpo", "dapo", "dr_grpo"] | None = same("preference_loss")
    logging_steps: int = same("log_every")
    save_steps: int | None = same("save_every")
    eval_steps: int = same("eval_every")
    warmup_steps: int = same("warmup_updates")
    lr_scheduler_type: Literal["constant", "constant_with_warmup", "linear", "cosine"] = same("lr_schedule")
    router_aux_loss_coef: float | None = same("router_aux_coef")
    adam_beta1: float = same("adam_b1")
    adam_beta2: float = same("adam_b2")
    adam_epsilon: float = same("adam_eps")
    # MRLM, verl and others
    lr: float = same("learning_rate")
    group_size: int = same("num_generations")
    clip_range_vf: float | None = same("value_clip")
    num_ppo_epochs: int = same("num_epochs")
    num_grpo_epochs: int = same("num_epochs")
    lr_scheduler: Literal["constant", "linear", "cosine"] = same("lr_schedule")
    checkpoint_dir: str = same("output_dir")
    lora_r: int = same("lora_rank")
    stop_strings: str | tuple[str, ...] = same("stop")
    stop_sequences: str | tuple[str, ...] = same("stop")
    lora_target_modules: str | None = same("lora_targets")


OTHER_NAMES: dict[str, str] = fields_of(OtherNames)

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
