"""Other names of settings: those of CoMLRL, TRL and others, for the field of `TrainConfig` that means the same."""

from __future__ import annotations

from typing import Any

OTHER_NAMES: dict[str, str] = {
    # CoMLRL
    "agent_learning_rate": "learning_rate",
    "rollout_buffer_size": "num_prompts",
    "eval_interval": "eval_every",
    "discount": "gamma",
    "use_separate_critic": "separate_critic",
    "value_loss_coef": "value_coef",
    "value_clip_range": "value_clip",
    "dpo_beta": "beta",
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
    # TRL and transformers
    "per_device_train_batch_size": "num_prompts",
    "max_steps": "num_updates",
    "max_completion_length": "max_new_tokens",
    "num_iterations": "num_epochs",
    "epsilon": "clip_eps_low",
    "epsilon_high": "clip_eps_high",
    "delta": "dual_clip",
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
