"""The names of CoMLRL, MRLM and TRL for settings, typed for editors and type checkers.

`config.aliases` says which field each name sets; a test holds the two equal. At runtime the class is empty: the constructor of
a `TrainerConfig` translates these names, and they are no fields of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    UNSET: Any = None

    @dataclass(frozen=True, kw_only=True)
    class OtherNames:
        """Other names of the fields of `TrainerConfig`."""

        # CoMLRL
        agent_learning_rate: float | tuple[float, ...] = UNSET
        discount: float = UNSET
        use_separate_critic: bool | None = UNSET
        value_loss_coef: float | None = UNSET
        value_clip_range: float | None = UNSET
        dpo_beta: float | None = UNSET
        preference_num_candidates: int = UNSET
        preference_pairs_per_sample: int | None = UNSET
        comparator_policy: Literal["current", "initial", "history", "model", "api"] | None = UNSET
        comparator_history_k: int | None = UNSET
        comparator_model_name: str | None = UNSET
        comparator_api_model: str | None = UNSET
        comparator_api_url: str | None = UNSET
        preference_replay_mode: Literal["current", "nearest_k", "all", "lambda_decay"] | None = UNSET
        preference_replay_k: int | None = UNSET
        preference_replay_lambda: float | None = UNSET
        # MRLM
        group_size: int = UNSET
        clip_range_vf: float | None = UNSET
        num_ppo_epochs: int = UNSET
        num_grpo_epochs: int = UNSET
        lr_scheduler: Literal["constant", "linear", "cosine"] = UNSET
        checkpoint_dir: str = UNSET
        lora_r: int = UNSET
        lora_target_modules: str | None = UNSET
        # TRL and transformers
        per_device_train_batch_size: int = UNSET
        max_steps: int = UNSET
        max_completion_length: int = UNSET
        num_iterations: int = UNSET
        num_generations_eval: int = UNSET
        epsilon: float | None = UNSET
        epsilon_high: float | None = UNSET
        delta: float | None = UNSET
        importance_sampling_level: Literal["token", "sequence"] | None = UNSET
        scale_rewards: bool | Literal["none", "std", "group", "batch", "batch_std", "running_std"] | None = UNSET
        mask_truncated_completions: bool | None = UNSET
        loss_type: Literal["sigmoid", "hinge", "ipo", "grpo", "bnpo", "dapo", "dr_grpo"] | None = UNSET
        logging_steps: int = UNSET
        router_aux_loss_coef: float | None = UNSET
        save_steps: int | None = UNSET
        eval_steps: int = UNSET
        warmup_steps: int = UNSET
        lr_scheduler_type: Literal["constant", "constant_with_warmup", "linear", "cosine"] = UNSET
        adam_beta1: float = UNSET
        adam_beta2: float = UNSET
        adam_epsilon: float = UNSET
        stop_strings: str | tuple[str, ...] = UNSET
        stop_sequences: str | tuple[str, ...] = UNSET
        # verl
        lr: float = UNSET

else:

    class OtherNames:
        """See the typed class above."""
