"""The keys of MRLM's YAML files and configuration classes, and what they set here.

`KEYS`: section -> key -> the setting that means the same, or a rule for keys that need one (keys with the same rule are read
together), the reason why the key is refused, or why it is ignored with a warning, because its value changes nothing
here. `config` and the reader of YAML files (`layers`) use this one table.
`AGENT_KEYS` has the keys of an entry of `agents`; those of environments are in `environment_keys`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from jmarl.config.yaml_file import Given
from jmarl.mrlm import rules
from jmarl.mrlm.environment_keys import environments
from jmarl.mrlm.rules import Ignored, Refused, Rollouts, Rule, Steps, only

Entry = str | Rule | Refused | Ignored

NO_CRITIC = Ignored("GRPO has no critic")
SHARDED = Ignored("strategy=fsdp divides weights, gradients and moments over all devices of the mesh")
COLLECT_EVERY = Ignored("trajectories are given, or written by solvers before training")
LAUNCHED = Ignored("who starts the processes says it: jmarl launch, torchrun or srun")
GENERATION: dict[str, Entry] = {
    "max_new_tokens": "max_new_tokens",
    "min_new_tokens": "min_new_tokens",
    "do_sample": rules.sampling,
    "temperature": rules.sampling,
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "num_beams": only(1, "completions are sampled, never searched by beams"),
    "length_penalty": Ignored("it is for beam search"),
    "num_return_sequences": only(1, "the group of a prompt is grpo.group_size, or num_generations"),
    "eos_token_id": Refused("a completion ends with the end tokens of its model, in generation_config.json"),
    "pad_token_id": Ignored("padding is masked"),
    "max_length": Refused("set max_new_tokens, which counts the completion without its prompt"),
}

KEYS: dict[str, dict[str, Entry]] = {
    "training": {
        "algorithm": "algorithm",
        "num_epochs": rules.number_of_updates,
        "num_iterations": rules.number_of_updates,
        "batch_size": rules.batches,
        "mini_batch_size": rules.batches,
        "num_rollouts_per_iteration": rules.batches,
        "episodes_per_iteration": rules.batches,
        "gradient_accumulation_steps": rules.batches,
        "learning_rate": "learning_rate",
        "optimizer": rules.optimizer,
        "weight_decay": "weight_decay",
        "max_grad_norm": "max_grad_norm",
        "adam_beta1": "adam_b1",
        "adam_beta2": "adam_b2",
        "adam_epsilon": "adam_eps",
        "lr_scheduler": rules.schedule,
        "warmup_steps": rules.warmup,
        "max_episode_length": rules.turns,
        "eval_every": rules.evaluation,
        "eval_episodes": rules.evaluation,
        "save_every": "save_every",
        "save_total_limit": "save_total_limit",
        "checkpoint_dir": rules.directory,
        "log_every": "log_every",
        "log_dir": Ignored("logs are in the run's directory, checkpoint_dir"),
        "use_tensorboard": "tensorboard",
        "use_wandb": rules.wandb,
        "wandb_project": rules.wandb,
        "wandb_entity": rules.wandb,
        "wandb_run_name": rules.wandb,
        "wandb_mode": rules.wandb,
        "use_bf16": rules.precision,
        "use_fp16": rules.precision,
        "seed": "seed",
    },
    "ppo": {
        "clip_range": rules.clip_range,
        "clip_range_vf": "value_clip",
        "value_clip_range": "value_clip",
        "gamma": "gamma",
        "gae_lambda": "gae_lambda",
        "num_ppo_epochs": "num_epochs",
        "value_loss_coef": rules.value_loss,
        "entropy_coef": "entropy_coef",
        "target_kl": "target_kl",
        "normalize_advantages": rules.token_advantages,
        "kl_coef": "kl_coef",
    },
    "grpo": {
        "group_size": "num_generations",
        "clip_range": rules.clip_range,
        "gamma": "gamma",
        "entropy_coef": "entropy_coef",
        "num_grpo_epochs": "num_epochs",
        "target_kl": "target_kl",
        "kl_coef": "kl_coef",
        "normalize_rewards": rules.group_advantages,
        "normalize_advantages": rules.group_advantages,
        "reward_normalization": rules.group_advantages,
        "temperature": rules.group_temperature,
        "gae_lambda": NO_CRITIC,
        "value_loss_coef": NO_CRITIC,
        "value_clip_range": NO_CRITIC,
    },
    "dpo": {
        "beta": "beta",
        "loss_type": "preference_loss",
        "label_smoothing": "label_smoothing",
        "reference_free": "reference_free",
    },
    "sft": {
        "mode": rules.imitation,
        "bc_weight": rules.imitation,
        "world_model_weight": rules.imitation,
        "filter_low_reward": rules.low_rewards,
        "min_reward_threshold": rules.low_rewards,
        "max_trajectories": "num_tasks",
        "collect_every": COLLECT_EVERY,
    },
    "model": {
        "model_name_or_path": "models",
        "model_type": only("causal_lm", "models are decoders"),
        "tokenizer_name_or_path": rules.tokenizer,
        "torch_dtype": rules.precision,
        "dtype": rules.precision,
        "use_lora": rules.lora,
        "lora_r": rules.lora,
        "lora_alpha": rules.lora,
        "lora_dropout": rules.lora,
        "lora_target_modules": rules.lora,
        "gradient_checkpointing": rules.checkpointing,
        "device": rules.device,
        "device_map": Ignored("the setting mesh places weights, such as mesh: agent=2,data=2"),
        "trust_remote_code": Ignored("code of models is never run: their families are built in"),
        "use_flash_attention": Ignored("the platform chooses the attention"),
        "load_in_8bit": only(False, "weights are not quantized; a .gguf file is read at full precision"),
        "load_in_4bit": only(False, "weights are not quantized; a .gguf file is read at full precision"),
        **GENERATION,
    },
    "generation": GENERATION,
    "distributed": {
        "enabled": rules.distributed,
        "strategy": rules.distributed,
        "num_gpus": rules.distributed,
        "num_nodes": rules.distributed,
        "node_rank": LAUNCHED,
        "nnodes": rules.distributed,
        "nproc_per_node": rules.distributed,
        "world_size": rules.distributed,
        "backend": Ignored("the compiler chooses: NCCL between GPUs"),
        "master_addr": LAUNCHED,
        "master_port": LAUNCHED,
        "gpu_ids": Refused("set the environment variable CUDA_VISIBLE_DEVICES"),
        "fsdp_sharding_strategy": SHARDED,
        "fsdp_cpu_offload": only(False, "weights are never moved to the host: set gradient_checkpointing, or use more devices"),
        "deepspeed_config": Refused("there is no DeepSpeed here: choose strategy fsdp"),
        "zero_stage": Ignored("there is no DeepSpeed here"),
    },
    "dataset": {
        "type": rules.dataset,
        "path": rules.dataset,
        "name": rules.dataset,
        "subset": "subset",
        "split": "split",
        "eval_split": "held_out_split",
        "max_samples": "num_tasks",
    },
    "output": {
        "save_dir": rules.directory,
        "log_interval": "log_every",
        "eval_interval": rules.evaluation,
        "save_interval": "save_every",
    },
}


def agents(values: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """One model per role, in the order of the environment's roles."""
    entries = values["agents"]
    if not isinstance(entries, list) or not entries:
        raise ValueError("agents is a list with one model per role")
    models, settings = [], {"frozen_agents": [], "roles": [], "learning_rate": []}
    for i, entry in enumerate(entries):
        entry = {"model_name_or_path": entry} if isinstance(entry, str) else entry
        if entry.get("model_name_or_path") is None:
            raise ValueError(f"agent {i} has no model_name_or_path")
        models.append(entry["model_name_or_path"])
        if entry.get("mode", "server") not in ("server", "client"):
            raise ValueError(f"mode={entry['mode']!r} of agent {i}: choose server (trained) or client (frozen)")
        if entry.get("mode") == "client":
            settings["frozen_agents"].append(i)
        for key, name in (("system_prompt", "roles"), ("learning_rate", "learning_rate")):
            if key in entry:
                settings[name].append(entry[key])
    for name in ("roles", "learning_rate"):
        if len(settings[name]) not in (0, len(entries)):
            raise ValueError(f"{len(settings[name])} of {len(entries)} agents have a {name}: give all one, or none")
    return {"models": models, **{name: value for name, value in settings.items() if value}}


LISTS: dict[str, Rule] = {"agents": agents, "eval_envs": environments, "train_envs": environments, "environment": environments}
AGENT_KEYS = {
    "model_name_or_path": "one of models",
    "mode": "frozen_agents",
    "system_prompt": "roles",
    "learning_rate": "learning_rate",
}


# --- settings that follow from keys of several sections

PLAY_GROUPS = ("grpo",)  # algorithms of which each completion of a group is an episode


def check_tokenizer(settings: dict[str, Given]) -> None:
    """Drop the name of the tokenizer. Raises ValueError unless it is that of the model."""
    given = settings.pop("tokenizer", None)
    if given is not None and ("models" not in settings or given.value not in settings["models"].value):
        raise ValueError(f"{given.place}: each model brings its own tokenizer: remove this key")


def count_tasks(settings: dict[str, Given], algorithm: str) -> None:
    """Replace a number of episodes by that of tasks: in MRLM's GRPO each completion of a group is an episode.

    Raises ValueError if the episodes are not whole groups."""
    given = settings.get("num_prompts")
    if given is None or not isinstance(given.value, Rollouts):
        return
    size = settings["num_generations"].value if algorithm in PLAY_GROUPS and "num_generations" in settings else 1
    if type(size) is not int or size < 1:
        size = 1  # `ExperimentConfig` refuses it
    if given.value.number % size:
        raise ValueError(
            f"{given.place}: {given.value.number} episodes are not groups of {size}: give a multiple of group_size"
        )
    settings["num_prompts"] = given._replace(value=given.value.number // size)


def count_warmup(settings: dict[str, Given]) -> None:
    """Replace optimizer steps of the warm-up by updates, of which each makes num_epochs * num_minibatches steps. Rounds up."""
    given = settings.get("warmup_updates")
    if given is None or not isinstance(given.value, Steps):
        return
    counts = [settings[name].value for name in ("num_epochs", "num_minibatches") if name in settings]
    per_update = math.prod(count for count in counts if type(count) is int and count > 0)  # others are refused later
    settings["warmup_updates"] = given._replace(value=-(-given.value.number // per_update))
