"""The keys of MRLM's YAML files and configuration classes, and what they set here.

`KEYS`: section -> key -> the setting that means the same, what one key sets (`One`), the only value that it may have (`Only`),
a rule for keys that are read together, the reason why it is refused, or why it is ignored with a warning, because its value
changes nothing here. The classes of `config` and `convert`, which reads files, flags and these classes, use this one table.
The keys of environments are in `environment_keys`.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from jmarl.config.aliases import OTHER_NAMES
from jmarl.mrlm import rules
from jmarl.mrlm.rules import OptimizerSteps, Rule, Weak


class RefusedKey(NamedTuple):
    """A key that has no effect here."""

    reason: str


class IgnoredKey(NamedTuple):
    """A key that changes nothing here. One warning names all of them."""

    reason: str


class Only(NamedTuple):
    """A key that may only have the one value which asks for nothing. reason: why there is no other."""

    value: Any
    reason: str


class One(NamedTuple):
    """A key from whose value alone settings follow. text: which."""

    settings: Callable[[Any], dict[str, Any]]
    text: str


Entry = str | One | Only | Rule | RefusedKey | IgnoredKey


def named(names: str) -> dict[str, Entry]:
    """Return keys that are a setting here, under the same name or one in the table of other names."""
    return {name: OTHER_NAMES.get(name, name) for name in names.split()}


def warmup(steps: Any) -> dict[str, Any]:
    if type(steps) is not int or steps < 0:
        raise ValueError(f"warmup_steps={steps!r} must be a whole number >= 0")
    return {"warmup_updates": OptimizerSteps(steps)}


def device(name: Any) -> dict[str, Any]:
    if str(name) not in ("auto", "cuda", "gpu", "cpu", "tpu"):
        raise ValueError("choose auto, cpu or cuda; CUDA_VISIBLE_DEVICES chooses among GPUs")
    return {"device": {"cuda": "gpu"}.get(name, name)}


CLIP = One(lambda x: {"clip_eps_low": x, "clip_eps_high": x}, "The ratio is clipped to the same distance below and above 1.")
VALUE_LOSS = "The value loss has a weight where the critic is a head of the policy, as in MRLM."
NO_CRITIC = IgnoredKey("GRPO has no critic")
NO_DEEPSPEED = "there is no DeepSpeed here"
COLLECT_EVERY = IgnoredKey("trajectories are given, or written by solvers before training")
LAUNCHED = IgnoredKey("who starts the processes says it: jmarl launch, torchrun or srun")
QUANTIZED = Only(False, "weights are not quantized; a .gguf file is read at full precision")
GENERATION: dict[str, Entry] = {
    "max_new_tokens": "max_new_tokens",
    "temperature": rules.sampling,
    **named("top_p top_k min_p"),
    "do_sample": rules.sampling,
    **named("repetition_penalty min_new_tokens"),
    "num_beams": Only(1, "completions are sampled, never searched by beams"),
    "num_return_sequences": Only(1, "the group of a prompt is grpo.group_size, or num_generations"),
    "length_penalty": IgnoredKey("it is for beam search"),
    "eos_token_id": RefusedKey("a completion ends with the end tokens of its model, in generation_config.json"),
    "pad_token_id": IgnoredKey("padding is masked"),
    "max_length": RefusedKey("set max_new_tokens, which counts the completion without its prompt"),
}

KEYS: dict[str, dict[str, Entry]] = {
    "training": {
        "algorithm": One(
            lambda x: {"algorithm": x.lower() if isinstance(x, str) and ":" not in x else x}, "The algorithm, in any case."
        ),
        **dict.fromkeys(("num_epochs", "num_iterations"), "num_updates"),
        **dict.fromkeys(("batch_size", "mini_batch_size", "num_rollouts_per_iteration"), rules.batches),
        **dict.fromkeys(("episodes_per_iteration", "gradient_accumulation_steps"), rules.batches),
        "learning_rate": "learning_rate",
        "optimizer": One(
            lambda x: {"optimizer": "adamw" if x == "adam" else x},
            "Adam without weight decay is adamw with weight_decay 0, the default.",
        ),
        **named("weight_decay max_grad_norm adam_beta1 adam_beta2 adam_epsilon"),
        "lr_scheduler": One(
            lambda x: {"lr_schedule": "constant" if x in ("constant_with_warmup", "none") else x},
            "The learning rate schedule: constant, linear or cosine.",
        ),
        "warmup_steps": One(warmup, "Optimizer steps of the warm-up, which become updates."),
        "max_episode_length": rules.turns,
        **dict.fromkeys(("eval_every", "eval_episodes"), rules.evaluation),
        "checkpoint_dir": rules.directory,
        **named("save_every save_total_limit log_every"),
        "log_dir": IgnoredKey("logs are in the run's directory, checkpoint_dir"),
        "use_tensorboard": "tensorboard",
        **dict.fromkeys(("use_wandb", *rules.WANDB), rules.wandb),
        **dict.fromkeys(rules.HALVES, rules.precision),
        "seed": "seed",
    },
    "ppo": {
        "clip_range": CLIP,
        **named("clip_range_vf value_clip_range gamma gae_lambda num_ppo_epochs"),
        "value_loss_coef": One(lambda x: {"value_coef": x, "separate_critic": Weak(False)}, VALUE_LOSS),
        **named("entropy_coef target_kl"),
        "normalize_advantages": One(
            lambda x: {"advantage_scale": "batch_std" if x else "none"},
            "Whether advantages are divided by their std over the batch.",
        ),
        "kl_coef": "kl_coef",
    },
    "grpo": {
        "group_size": "num_generations",
        "clip_range": CLIP,
        **named("gamma entropy_coef num_grpo_epochs target_kl kl_coef"),
        **dict.fromkeys(("normalize_rewards", "normalize_advantages", "reward_normalization"), rules.group_advantages),
        "temperature": One(lambda x: {"temperature": Weak(x)}, "The temperature, if the model has none."),
        **dict.fromkeys(("gae_lambda", "value_loss_coef", "value_clip_range"), NO_CRITIC),
    },
    "dpo": {"beta": "beta", "loss_type": "preference_loss", **named("label_smoothing reference_free")},
    "sft": {
        **dict.fromkeys(("mode", *rules.WEIGHTS), rules.imitation),
        **dict.fromkeys(("filter_low_reward", "min_reward_threshold"), rules.low_rewards),
        "max_trajectories": "num_tasks",
        "collect_every": COLLECT_EVERY,
    },
    "model": {
        "model_name_or_path": One(lambda x: {"models": x if isinstance(x, list) else [x]}, "One model, or one per role."),
        "model_type": Only("causal_lm", "models are decoders"),
        "tokenizer_name_or_path": One(lambda x: {"tokenizer": x}, "The tokenizer, which must be that of the model."),
        **dict.fromkeys(("torch_dtype", "dtype"), rules.precision),
        "trust_remote_code": IgnoredKey("code of models is never run: their families are built in"),
        "use_flash_attention": IgnoredKey("the platform chooses the attention"),
        "gradient_checkpointing": One(
            lambda x: {"remat": "full" if x else "none"},
            "Whether the backward pass computes activations again: of whole layers, or not at all.",
        ),
        "load_in_8bit": QUANTIZED,
        "load_in_4bit": QUANTIZED,
        **dict.fromkeys(("use_lora", "lora_r", "lora_alpha", "lora_dropout", "lora_target_modules"), rules.lora),
        **GENERATION,
        "device": One(device, "The platform is chosen when Python starts; auto is what is there."),
        "device_map": IgnoredKey("the setting mesh places weights, such as mesh: agent=2,data=2"),
    },
    "generation": GENERATION,
    "distributed": {
        **dict.fromkeys(("enabled", "strategy", "num_gpus", "num_nodes"), rules.distributed),
        "node_rank": LAUNCHED,
        **dict.fromkeys(("nnodes", "nproc_per_node", "world_size"), rules.distributed),
        "backend": IgnoredKey("the compiler chooses: NCCL between GPUs"),
        "master_addr": LAUNCHED,
        "master_port": LAUNCHED,
        "gpu_ids": RefusedKey("set the environment variable CUDA_VISIBLE_DEVICES"),
        "fsdp_sharding_strategy": IgnoredKey("strategy=fsdp divides weights, gradients and moments over all devices"),
        "fsdp_cpu_offload": Only(False, "weights are never moved to the host: set gradient_checkpointing, or use more devices"),
        "deepspeed_config": RefusedKey(f"{NO_DEEPSPEED}: choose strategy fsdp"),
        "zero_stage": IgnoredKey(NO_DEEPSPEED),
    },
    "dataset": {
        **dict.fromkeys(("type", "path", "name"), rules.dataset),
        **named("subset split"),
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

AGENT_KEYS = {
    "model_name_or_path": "one of models",
    "mode": "frozen_agents",
    "system_prompt": "roles",
    "learning_rate": "learning_rate",
}
TOP_KEYS = (*KEYS, "agents", "eval_envs", "train_envs", "environment")


def settings_of_key(key: str, entry: str | One | Only, value: Any) -> dict[str, Any]:
    """Return what one key sets. Raises ValueError for a value that cannot act here."""
    if isinstance(entry, Only):
        if value != entry.value:
            raise ValueError(f"{key} can only be {entry.value!r}: {entry.reason}")
        return {}
    return {entry: value} if isinstance(entry, str) else entry.settings(value)


def meaning(entry: Entry) -> str:
    """Return what a key sets, in words."""
    match entry:
        case str():
            return f"as {entry}"
        case RefusedKey():
            return f"refused: {entry.reason}"
        case IgnoredKey():
            return f"ignored: {entry.reason}"
        case Only():
            return f"Only {entry.value!r}: {entry.reason}."
        case One():
            return entry.text
    return " ".join((entry.__doc__ or "").split("\n\n")[0].split())


def policy_env(value: Any) -> str:
    """Return why the policy of MRLM's file changes nothing. Raises ValueError for one that is not the model."""
    entry = value if isinstance(value, Mapping) else {"env_type": value}
    if entry.get("env_type", "llm") not in ("llm", None) or entry.get("custom_class"):
        raise ValueError(f"{value!r:.80} is no policy: the policy is the model, so set model, or agents")
    if entry.get("remote"):
        raise ValueError("remote: the policy is trained here; environments can be remote, and jmarl serve --http offers a team")
    return "the policy is the model, or agents"
