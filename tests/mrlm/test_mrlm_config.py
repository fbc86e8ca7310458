"""The sections of all four algorithms of MRLM, by the table that YAML files use too."""

from __future__ import annotations

import pytest

from jmarl import TrainConfig
from jmarl.mrlm.algorithms.ppo import PPOConfig as TrainerPPOConfig
from jmarl.mrlm.config import (
    DistributedConfig,
    DPOConfig,
    EnvironmentConfig,
    ExperimentConfig,
    GenerationConfig,
    GRPOConfig,
    ModelConfig,
    OutputConfig,
    PPOConfig,
    SFTConfig,
    TrainingConfig,
    load_config,
    save_config,
)


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


def test_a_setting_of_sampling_does_not_hide_the_rest_of_its_section():
    model = ModelConfig(use_lora=True, lora_r=4, torch_dtype="bfloat16", generation=GenerationConfig(max_new_tokens=64))
    with pytest.warns(UserWarning, match="max_new_tokens"):
        config, _ = resolved("sft", model=model)
    assert (config.lora.lora_rank, config.sampling.compute_dtype) == (4, "bfloat16")
    with pytest.warns(UserWarning, match="max_new_tokens .dpo samples nothing"):
        assert resolved("dpo", model=model)[0].lora.lora_rank == 4


def test_two_sections_that_set_one_thing_are_an_error():
    with pytest.raises(ValueError, match="TrainingConfig and OutputConfig both set log_every"):
        resolved("ppo", training=TrainingConfig(log_every=3), output=OutputConfig(log_interval=5))
    config = ExperimentConfig(output=OutputConfig(save_dir="a")).with_directory("b")
    with pytest.warns(UserWarning, match="save_dir .everything is in checkpoint_dir"):
        config = config.train_config("ppo", {"algorithm": "ippo"})
    assert config.run.output_dir == "b"


@pytest.mark.parametrize("steps", [0.1, "100", -1])
def test_steps_of_the_warm_up_are_a_whole_number(steps):
    with pytest.raises(ValueError, match="warmup_steps=.* must be a whole number >= 0"):
        resolved("ppo", training=TrainingConfig(warmup_steps=steps))


@pytest.mark.parametrize("key", [dict(group_size=0), dict(group_size="4")])
def test_a_group_of_a_wrong_size_is_an_error(key):
    with pytest.raises((ValueError, TypeError), match="num_generations|group_size"):
        resolved("grpo", training=TrainingConfig(num_rollouts_per_iteration=8), grpo=GRPOConfig(**key))


@pytest.mark.parametrize(
    ("section", "sections", "message"),
    [
        ("sft", dict(sft=SFTConfig(mode="both")), "mode='both' is not allowed: choose behavioral_cloning"),
        ("ppo", dict(training=TrainingConfig(use_bf16=True, use_fp16=True)), "two types"),
        (
            "ppo",
            dict(distributed=DistributedConfig(enabled=True, num_nodes=2)),
            r"distributed.num_nodes=2, and here it is 1 \(1 processes\): start them by jmarl launch",
        ),
        ("ppo", dict(model=ModelConfig(load_in_4bit=True)), "load_in_4bit can only be False: weights are not quantized"),
        (
            "ppo",
            dict(model=ModelConfig(generation=GenerationConfig(max_length=9))),
            "ModelConfig, max_length: set max_new_tokens",
        ),
    ],
)
def test_what_cannot_act_is_refused_with_the_reason(section, sections, message):
    with pytest.raises(ValueError, match=message):
        resolved(section, **sections)


@pytest.mark.parametrize(
    ("section", "sections", "key"),
    [
        ("grpo", dict(grpo=GRPOConfig(value_loss_coef=0.5)), "grpo.value_loss_coef (GRPO has no critic)"),
        ("sft", dict(sft=SFTConfig(collect_every=2)), "sft.collect_every (trajectories are given"),
        ("sft", dict(training=TrainingConfig(mini_batch_size=2)), "mini_batch_size (a step takes batch_size texts)"),
        ("sft", dict(model=ModelConfig(temperature=0.7)), "model.temperature (sft samples nothing)"),
        ("ppo", dict(training=TrainingConfig(log_dir="x")), "training.log_dir (logs are in"),
        ("dpo", dict(sft=SFTConfig(), grpo=GRPOConfig()), "grpo (the algorithm is dpo), sft (the algorithm is dpo)"),
        (
            "ppo",
            dict(training=TrainingConfig(checkpoint_dir="a"), output_dir="b"),
            "output_dir (everything is in a)",
        ),
        (
            "ppo",
            dict(distributed=DistributedConfig(backend="gloo", zero_stage=2)),
            "distributed.zero_stage (there is no DeepSpeed",
        ),
    ],
)
def test_settings_that_change_nothing_are_named_in_one_warning(section, sections, key):
    with pytest.warns(UserWarning) as caught:
        config = resolved(section, **sections).config
    (warning,) = caught
    assert key in str(warning.message)
    kept = {name: x for name, x in sections.items() if name == "training" and x.checkpoint_dir}
    assert config == resolved(section, **kept).config


def test_the_sections_of_a_model_and_of_devices_are_read():
    model = ModelConfig(
        model_name_or_path="unused", torch_dtype="bfloat16", use_lora=True, lora_r=4, gradient_checkpointing=True
    )
    config, _ = resolved("ppo", model=model, distributed=DistributedConfig(enabled=True, strategy="fsdp"))
    assert (config.sampling.compute_dtype, config.lora.lora_rank, config.run.mesh) == ("bfloat16", 4, "data=all")
    config, _ = resolved("ppo", output=OutputConfig(save_dir="out", save_interval=3))
    assert (config.run.output_dir, config.run.save_every) == ("out", 3)


def test_a_generation_config_of_the_policy_overrides_that_of_the_model():
    experiment = ExperimentConfig(model=ModelConfig(max_new_tokens=7, generation=GenerationConfig(temperature=0.7)))
    assert experiment.resolve("ppo", {"algorithm": "ppo"}).config.sampling.max_new_tokens == 7
    policy = experiment.resolve("ppo", {"algorithm": "ppo", "max_new_tokens": 5}).config.sampling
    assert (policy.max_new_tokens, policy.temperature) == (5, 1.0)
    assert experiment.model.generation.to_generation_config() == {"temperature": 0.7}


def test_the_settings_of_ppo_in_one_class_equal_those_in_sections():
    one = TrainerPPOConfig(num_epochs=3, batch_size=2, clip_range=0.1, value_clip_range=0.3, eval_every=2, eval_episodes=4)
    training = TrainingConfig(num_epochs=3, batch_size=2, eval_every=2, eval_episodes=4)
    sections = resolved("ppo", training=training, ppo=PPOConfig(clip_range=0.1, clip_range_vf=0.3))
    assert one.experiment().resolve("ppo", {"algorithm": "ppo"}) == sections
    with pytest.raises(TypeError, match="no setting 'num_eval_episodes'; did you mean 'eval_episodes'"):
        TrainerPPOConfig(num_eval_episodes=3)  # type: ignore[call-arg]


def test_checkpoints_have_a_directory_where_none_is_given():
    assert resolved("ppo", training=TrainingConfig(save_every=5)).config.run.output_dir == "./checkpoints"


def test_a_saved_configuration_is_read_again(tmp_path):
    config = ExperimentConfig(
        training=TrainingConfig(algorithm="ppo", num_epochs=5, batch_size=2),
        ppo=PPOConfig(clip_range=0.1),
        model=ModelConfig(model_name_or_path="a", generation=GenerationConfig(top_p=0.9)),
        eval_envs=[EnvironmentConfig("math", max_turns=2)],
        experiment_name="x",
    )
    config.output_dir = "out"
    save_config(config, tmp_path / "c.yaml")
    again = load_config(tmp_path / "c.yaml")
    assert vars(again) == vars(config) and again.experiment_name == "x" and again.get_algorithm_config() == config.ppo
    assert again.validate() == [] and again.resolve("ppo", {}) == config.resolve("ppo", {})
    again.training.batch_size = 0
    assert "batch_size must be a whole number >= 1" in again.validate()[0]
