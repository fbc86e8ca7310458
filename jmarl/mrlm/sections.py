"""The sections of MRLM's configuration. `jmarl.mrlm.keys` has what each setting means here."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jmarl.config.validation import with_known_names
from jmarl.mrlm.generation_config import GenerationConfig


@with_known_names
@dataclasses.dataclass
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
    """Episodes of an update, of GRPO the completions of all groups; batch_size is then that of an optimizer step."""
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
    """Without effect: logs are in checkpoint_dir."""
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
@dataclasses.dataclass
class PPOConfig:
    """Settings of PPO (arXiv 1707.06347)."""

    clip_range: float | None = None
    clip_range_vf: float | None = None
    value_clip_range: float | None = None
    """As clip_range_vf."""
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
@dataclasses.dataclass
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
    """Without effect, as the next two: GRPO has no critic."""
    value_loss_coef: float | None = None
    value_clip_range: float | None = None


@with_known_names
@dataclasses.dataclass
class DPOConfig:
    """Settings of DPO (arXiv 2305.18290)."""

    beta: float | None = None
    loss_type: str | None = None
    """sigmoid, hinge or ipo."""
    label_smoothing: float | None = None
    reference_free: bool | None = None


@with_known_names
@dataclasses.dataclass
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
    """Without effect: trajectories are given, or written by solvers before training."""


@with_known_names
@dataclasses.dataclass
class ModelConfig:
    """The model of a policy. A trainer gets the model itself, in an `LLMEnvironment`."""

    model_name_or_path: str | None = None
    model_type: str | None = None
    tokenizer_name_or_path: str | None = None
    torch_dtype: Any = None
    """Type of the computation: float32 or bfloat16; master weights are float32."""
    dtype: Any = None
    trust_remote_code: bool | None = None
    use_flash_attention: bool | None = None
    gradient_checkpointing: bool | None = None
    load_in_8bit: bool | None = None
    load_in_4bit: bool | None = None
    use_lora: bool | None = None
    lora_r: int | None = None
    lora_alpha: float | None = None
    lora_dropout: float | None = None
    lora_target_modules: Sequence[str] | None = None
    max_new_tokens: int | None = None
    """Sampling, as the next ones; a policy's own generation_config overrides it."""
    min_new_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    do_sample: bool | None = None
    num_beams: int | None = None
    num_return_sequences: int | None = None
    repetition_penalty: float | None = None
    length_penalty: float | None = None
    eos_token_id: int | None = None
    pad_token_id: int | None = None
    max_length: int | None = None
    device: str | None = None
    device_map: Any = None
    generation: GenerationConfig = dataclasses.field(default_factory=GenerationConfig)
    """Sampling, in a section of its own."""


@with_known_names
@dataclasses.dataclass
class EnvironmentConfig:
    """An environment, as in a YAML file."""

    env_type: str
    mode: str | None = None
    max_turns: int | None = None
    max_attempts: int | None = None
    difficulty_range: Sequence[int] | None = None
    dataset: str | None = None
    problems: Sequence[Mapping[str, Any]] | str | None = None
    timeout: float | None = None
    reward_scale: float | None = None
    reward_clip: Any = None
    reward_bias: float | None = None
    remote: bool | None = None
    server_address: str | Sequence[str] | None = None
    custom_class: str | None = None
    custom_kwargs: Mapping[str, Any] | None = None


EvalEnvConfig = EnvironmentConfig


@with_known_names
@dataclasses.dataclass
class DistributedConfig:
    """Devices."""

    enabled: bool | None = None
    strategy: str | None = None
    """ddp or fsdp: batches are divided over all devices of all processes, and with fsdp weights too."""
    num_gpus: int | None = None
    """Of a node; None: all."""
    num_nodes: int | None = None
    """This and the next ones: what the processes that `jmarl launch` or torchrun starts are compared with."""
    node_rank: int | None = None
    nnodes: int | None = None
    nproc_per_node: int | None = None
    world_size: int | None = None
    backend: str | None = None
    master_addr: str | None = None
    master_port: int | None = None
    gpu_ids: Sequence[int] | None = None
    """Refused: set CUDA_VISIBLE_DEVICES."""
    fsdp_sharding_strategy: str | None = None
    fsdp_cpu_offload: bool | None = None
    deepspeed_config: Any = None
    zero_stage: int | None = None


@with_known_names
@dataclasses.dataclass
class OutputConfig:
    """The run's directory and intervals, beside those of `TrainingConfig`."""

    save_dir: str | None = None
    log_interval: int | None = None
    eval_interval: int | None = None
    save_interval: int | None = None


CLASSES: dict[str, type] = {
    "training": TrainingConfig,
    "ppo": PPOConfig,
    "grpo": GRPOConfig,
    "dpo": DPOConfig,
    "sft": SFTConfig,
    "model": ModelConfig,
    "distributed": DistributedConfig,
    "output": OutputConfig,
}
ALGORITHMS = ("ppo", "grpo", "dpo", "sft")
