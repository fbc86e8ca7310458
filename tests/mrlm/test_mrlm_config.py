"""The sections of all four algorithms of MRLM, by the table that YAML files use too."""

from __future__ import annotations

import pytest

from jmarl import TrainConfig
from jmarl.mrlm.config import DPOConfig, ExperimentConfig, GRPOConfig, PPOConfig, SFTConfig, TrainingConfig


def resolved(section: str, **sections):
    return ExperimentConfig(**sections).resolve(section, {"algorithm": section})


def test_dpo_and_sft_are_read():
    training = TrainingConfig(algorithm="dpo", batch_size=4, gradient_accumulation_steps=2, num_epochs=7)
    config, other = resolved("dpo", training=training, dpo=DPOConfig(beta=0.2, loss_type="ipo"))
    assert config == TrainConfig.of(
        algorithm="dpo", batch_size=8, micro_batches=2, num_updates=7, beta=0.2, preference_loss="ipo"
    )  # fmt: skip
    assert other == {}
    sft = SFTConfig(mode="world_model", filter_low_reward=True, min_reward_threshold=0.5, max_trajectories=10)
    config, other = resolved("sft", sft=sft, training=TrainingConfig(seed=3, eval_every=2, eval_episodes=5))
    assert config == TrainConfig.of(algorithm="sft", bc_weight=0.0, world_model_weight=1.0, seed=3, eval_every=2)
    assert other == {"min_reward": 0.5, "num_tasks": 10, "held_out": 5}


def test_rollouts_are_split_into_steps_and_evaluated():
    training = TrainingConfig(num_rollouts_per_iteration=8, batch_size=2, use_bf16=True, eval_every=5, wandb_project="p")
    ppo = PPOConfig(value_loss_coef=0.7, normalize_advantages=False, clip_range=0.1)
    config, other = ExperimentConfig(training, ppo, tags=["x"], max_new_tokens=5).resolve("ppo", {"algorithm": "ippo"})
    assert config == TrainConfig.of(
        algorithm="ippo", num_generations=1, num_prompts=8, num_minibatches=4, compute_dtype="bfloat16", eval_every=5,
        eval_generations=1,
        value_coef=0.7, separate_critic=False, advantage_scale="none", clip_eps_low=0.1, clip_eps_high=0.1, max_new_tokens=5,
    )  # fmt: skip
    assert other == {"held_out": 20, "wandb": {"project": "p"}, "tags": ["x"]}


def test_own_settings_win_over_sections():
    config = ExperimentConfig(TrainingConfig(learning_rate=1.0), learning_rate=2.0).train_config("grpo", {"algorithm": "grpo"})
    assert config.optimizer.learning_rate == 2.0


@pytest.mark.parametrize(
    ("section", "sections", "message"),
    [
        ("grpo", dict(grpo=GRPOConfig(value_loss_coef=0.5)), "GRPOConfig: GRPO has no critic"),
        ("sft", dict(sft=SFTConfig(collect_every=2)), "sft trains on given trajectories"),
        ("sft", dict(sft=SFTConfig(mode="both")), "mode='both' is not allowed: choose behavioral_cloning"),
        ("sft", dict(training=TrainingConfig(mini_batch_size=2)), "mini_batch_size has no effect on given texts"),
        ("ppo", dict(training=TrainingConfig(use_bf16=True, use_fp16=True)), "two types"),
        ("ppo", dict(training=TrainingConfig(log_dir="x")), "set checkpoint_dir"),
        ("dpo", dict(sft=SFTConfig()), "section sft has no effect for the trainer of 'dpo'"),
    ],
)
def test_what_cannot_act_is_refused_with_the_reason(section, sections, message):
    with pytest.raises(ValueError, match=message):
        resolved(section, **sections)
