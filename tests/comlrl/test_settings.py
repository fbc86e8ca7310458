"""What each setting of CoMLRL does to a run: it is translated, has no effect, or is refused with what to do instead."""

from __future__ import annotations

import pytest

from jmarl import (
    IACConfig,
    IPPOConfig,
    MAACConfig,
    MADPOConfig,
    MADPOIterConfig,
    MAGRPOConfig,
    MARLHFConfig,
    MARLHFIterConfig,
    MARLOOConfig,
)
from jmarl.comlrl.model_config import read_model_config
from jmarl.comlrl.trainers.centralized import CentralizedMAGRPOConfig
from jmarl.config import flat
from jmarl.runs.checks import check_settings

GENERIC_API = dict(comparator_policy="api", comparator_api_url="http://localhost/v1/chat/completions")
API = GENERIC_API | dict(comparator_api_format="openai_chat")

TRANSLATED = [
    # advantages are divided by the std of the group, in actor-critics of the batch
    (MAGRPOConfig, {}, dict(advantage_scale="std", algorithm="magrpo")),
    (MARLOOConfig, dict(advantage_normalization=True), dict(advantage_scale="std", algorithm="marloo")),
    (MAGRPOConfig, dict(advantage_normalization=False), dict(advantage_scale="none")),
    (MAGRPOConfig, dict(advantage_scale="none"), dict(advantage_scale="none")),
    (IACConfig, {}, dict(advantage_scale="batch_std", gae_lambda=0.0)),
    (MAACConfig, dict(advantage_normalization=False), dict(advantage_scale="none")),
    (IPPOConfig, {}, dict(advantage_scale=None)),
    (MAGRPOConfig, dict(algorithm="dr_grpo"), dict(advantage_scale=None, algorithm="dr_grpo")),
    # the baseline is a setting there, an algorithm here
    (MAGRPOConfig, dict(advantage_mode="RLOO"), dict(algorithm="marloo")),
    (MARLOOConfig, dict(advantage_mode="max"), dict(algorithm="maremax")),
    (MAGRPOConfig, dict(advantage_mode="raw"), dict(algorithm="mareinforce")),
    # the summed KL of a completion is subtracted from its return
    (MAGRPOConfig, dict(reference_kl_enabled=True), dict(kl_coef=0.1, kl_in="reward", kl_estimator="k3")),
    (IACConfig, dict(reference_kl_enabled=True, reference_kl_coef=0.3), dict(kl_coef=0.3, kl_in="reward")),
    (MAGRPOConfig, dict(reference_kl_coef=0.3), dict(kl_coef=0.0, kl_in="loss")),
    (MADPOConfig, dict(reference_kl_enabled=True), dict(kl_coef=0.0)),
    # samples of an update: prompts, for actor-critics completions; of several turns the nodes of a tree
    (MAGRPOConfig, dict(rollout_buffer_size=4), dict(num_prompts=4, num_minibatches=1)),
    (MAGRPOConfig, dict(rollout_buffer_size=4, train_batch_size=2), dict(num_prompts=4, num_minibatches=2)),
    (MAGRPOConfig, dict(rollout_buffer_size=4, train_batch_size=8), dict(num_prompts=4, num_minibatches=1)),
    (MAGRPOConfig, dict(per_device_train_batch_size=1, train_batch_size=2), dict(num_prompts=1, num_minibatches=1)),
    (MAGRPOConfig, dict(num_turns=2, rollout_buffer_size=2), dict(num_prompts=1, num_minibatches=1)),
    (MAGRPOConfig, dict(num_turns=2, num_generations=2, rollout_buffer_size=6), dict(num_prompts=2)),
    (IACConfig, dict(num_generations=4, train_batch_size=2), dict(num_prompts=2, num_minibatches=4)),
    (MAACConfig, dict(num_turns=2), dict(num_prompts=4, num_minibatches=1)),
    # prompts, and not updates, between evaluations; pairs count updates
    (MAGRPOConfig, {}, dict(eval_every=8, eval_generations=1)),
    (MAGRPOConfig, dict(eval_interval=0), dict(eval_every=0)),
    (MAGRPOConfig, dict(eval_interval=1, rollout_buffer_size=4), dict(eval_every=1)),
    (MAGRPOConfig, dict(eval_steps=3), dict(eval_every=3)),
    (MADPOConfig, dict(eval_interval=5), dict(eval_every=5)),
    # devices
    (MAGRPOConfig, dict(parallel_training="MP", agent_devices=["cuda:0", "cuda:1"]), dict(mesh="auto")),
    (MAGRPOConfig, dict(parallel_training="none", agent_devices=["cuda:0"]), dict(mesh="agent=1")),
    (MAGRPOConfig, dict(agent_devices="cpu"), dict(mesh="agent=1")),
    (MAGRPOConfig, dict(agent_devices="auto"), dict(mesh="auto")),
    (MAGRPOConfig, dict(agent_devices="cpu", mesh="agent=2"), dict(mesh="agent=2")),
    # several turns
    (MAGRPOConfig, dict(early_termination_threshold=-0.2), dict(early_termination_threshold=None, num_turns=1)),
    (MAGRPOConfig, dict(early_termination_threshold=-0.2, num_turns=2), dict(early_termination_threshold=-0.2)),
    (MAGRPOConfig, dict(joint_mode="CROSS"), dict(joint_mode="cross", cross_credit="sum")),
    # critics: a separate one has a learning rate, a head a weight and, in several steps, a clip
    (IACConfig, {}, dict(critic_learning_rate=5e-6, value_coef=None, value_clip=None)),
    (IACConfig, dict(use_separate_critic=False), dict(critic_learning_rate=None, value_coef=0.6, value_clip=None)),
    (IACConfig, dict(use_separate_critic=False, train_batch_size=4, value_clip_range=0.1), dict(value_clip=0.1)),
    (MAACConfig, dict(use_separate_critic=True), dict(separate_critic=None)),  # true of its central critic
    (IACConfig, dict(critic_learning_rate=None, critic_type="V"), dict(critic_learning_rate=None, critic_type="v")),
    # preferences
    (MADPOConfig, dict(preference_num_candidates=6), dict(num_candidates=6, batch_size=2)),
    (MADPOConfig, dict(num_generations=6, train_batch_size=4), dict(num_candidates=6, batch_size=4)),
    (MADPOConfig, dict(preference_pairs_per_sample=None), dict(pairs_per_prompt=0)),
    (MADPOConfig, dict(pair_selection="all", preference_pairs_per_sample=None), dict(pairs_per_prompt=0)),
    (MADPOIterConfig, {}, dict(round_prompts=20, round_updates=40, num_updates=240)),
    (MADPOIterConfig, dict(preference_replay_sample_size=10), dict(round_updates=5)),
    (MADPOIterConfig, dict(comparator_policy="self"), dict(comparator="current")),
    (MADPOIterConfig, dict(comparator_policy="ref", comparator_agents=["m", "m"]), dict(comparator_model="m")),
    (MADPOIterConfig, dict(preference_replay_mode="all_history"), dict(replay="all")),
    (MADPOIterConfig, dict(preference_replay_k=1), dict(replay="current", replay_k=None)),
    (MADPOIterConfig, API, dict(comparator_url="http://localhost/v1")),
    (MARLHFConfig, dict(num_generations=2), dict(num_generations=2, num_candidates=80, advantage_scale="std")),
    (MARLHFConfig, dict(rl_algorithm="mareforce"), dict(rl_algorithm="mareinforce")),
    (MARLHFConfig, dict(rl_algorithm="iac", num_generations=1), dict(critic_type="v", advantage_scale="batch_std")),
    (MARLHFConfig, dict(reward_num_train_epochs=2, reward_train_batch_size=4), dict(reward_updates=160, batch_size=4)),
    (MARLHFIterConfig, dict(num_iterations=3), dict(round_updates=20, num_updates=60)),
]


@pytest.mark.parametrize(("config", "settings", "expected"), TRANSLATED)
def test_a_setting_is_translated(config, settings, expected):
    run = flat(config(**settings).train_config(20))
    assert {name: run[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("config", "settings", "names"),
    [
        (MAGRPOConfig, {}, []),
        (MAGRPOConfig, dict(eval_batch_size=4, agent_devices=["cuda:0"]), ["agent_devices", "eval_batch_size"]),
        (MAACConfig, dict(critic_devices=["cuda:1"], reference_devices="cuda:0"), ["critic_devices", "reference_devices"]),
        (IACConfig, dict(num_turns=2, train_batch_size=1), ["train_batch_size"]),
        (MADPOConfig, dict(environment_steps_per_pair=1), ["environment_steps_per_pair"]),
        (MADPOIterConfig, dict(log_reward_distribution=True, policy_checkpoint_dir="x"), ["log_reward", "policy_checkpoint"]),
        (MARLHFConfig, dict(reward_model_device="cpu"), ["reward_model_device"]),
    ],
)
def test_settings_without_effect_are_listed(config, settings, names):
    lines = config(**settings).without_effect()
    assert len(lines) == len(names) and all(any(line.startswith(name) for line in lines) for name in names)


@pytest.mark.parametrize(
    ("config", "settings", "error", "message"),
    [
        (MAGRPOConfig, dict(parallel_training="ddp"), ValueError, "parallel_training='ddp' is not allowed"),
        (MAGRPOConfig, dict(advantage_mode="median"), ValueError, "advantage_mode='median' is not allowed"),
        (MAGRPOConfig, dict(rollout_buffer_size=3, train_batch_size=2), ValueError, "a divisor of the 3 samples"),
        (MAGRPOConfig, dict(advantage_normalization=False, advantage_scale="std"), TypeError, "are the same setting"),
        (MAGRPOConfig, dict(reference_kl_enabled=True, kl_coef=0.1), TypeError, "are the same setting"),
        (MAGRPOConfig, dict(reference_kl_coef=-1), ValueError, "reference_kl_coef=-1"),
        (MAGRPOConfig, dict(critic_devices="cuda:0"), TypeError, "critic_devices is not a setting here"),
        (MAGRPOConfig, dict(eval_batch_size=0), ValueError, "eval_batch_size=0"),
        (IACConfig, dict(value_head_hidden_dim=8), ValueError, "a value head is one linear layer"),
        (CentralizedMAGRPOConfig, dict(num_turns=2), ValueError, "num_turns=2 is not allowed"),
        (CentralizedMAGRPOConfig, dict(collaboration_mode="decentralized"), ValueError, "one of .'centralized',."),
        (MARLHFConfig, dict(reward_freeze_backbone=True), ValueError, "set lora_rank"),
        (MARLHFConfig, dict(reward_max_length=64), ValueError, "reads whole texts: leave it out"),
        (MARLHFIterConfig, dict(preference_scoring_reward="learned"), ValueError, "the reward of the task ranks"),
        (MADPOIterConfig, dict(comparator_generation_mode="centralised"), ValueError, "of each agent independently"),
        (MADPOIterConfig, dict(comparator_num_candidates=5), ValueError, "None or 20, as of the team"),
        (MADPOIterConfig, dict(comparator_policy="model", comparator_agents=["a", "b"]), ValueError, "names of one model"),
        (MADPOIterConfig, GENERIC_API, ValueError, "needs an OpenAI-compatible API"),
        (MADPOIterConfig, API | dict(comparator_api_key="k"), ValueError, "COMPARATOR_API_KEY"),
    ],
)
def test_a_setting_that_would_make_another_run_is_refused(config, settings, error, message):
    with pytest.raises(error, match=message):
        config(**settings)


def test_a_reward_model_and_its_team_have_numbers_of_completions_of_their_own():
    config = MARLHFConfig(preference_num_candidates=1, output_dir="").train_config(2)
    with pytest.raises(ValueError, match="num_candidates=1 is too small for algorithm='marlhf': pairs need 2"):
        check_settings(config)


@pytest.mark.parametrize(
    ("model_config", "dtype", "ignored"),
    [
        (None, "auto", ()),
        ({}, "auto", ()),
        ({"torch_dtype": "torch.bfloat16", "special_tokens": {}}, "bfloat16", ()),
        ({"dtype": "fp32", "attn_implementation": "sdpa"}, "float32", ("model_config['attn_implementation']",)),
        ({"torch_dtype": None, "model_kwargs": {"torch_dtype": "bfloat16"}, "critic_model_kwargs": None}, "bfloat16", ()),
        ({"model_kwargs": {"torch_dtype": "auto"}, "critic_value_head_hidden_dim": None}, "auto", ()),
    ],
)
def test_the_type_of_a_model_config_is_the_compute_type(model_config, dtype, ignored):
    settings = read_model_config(model_config, MAGRPOConfig())
    assert (settings.compute_dtype, settings.without_effect) == (dtype, ignored)
    written = MAGRPOConfig(compute_dtype="bfloat16")
    if dtype == "float32":
        with pytest.raises(ValueError, match="different types .*compute_dtype=bfloat16"):
            read_model_config(model_config, written)
    else:
        assert read_model_config(model_config, written).compute_dtype == "bfloat16"


@pytest.mark.parametrize(
    ("model_config", "error", "message"),
    [
        ({"torch_dtype": "float16"}, ValueError, "torch_dtype='float16' .* use 'bfloat16'"),
        ({"model_kwargs": {"dtype": "bf16"}, "critic_model_kwargs": {"dtype": "float32"}}, ValueError, "different types"),
        ({"critic_value_head_hidden_dim": 64}, ValueError, "a value head is one linear layer"),
        ("bfloat16", TypeError, "model_config= is a dict"),
    ],
)
def test_a_model_config_that_would_make_another_run_is_refused(model_config, error, message):
    with pytest.raises(error, match=message):
        read_model_config(model_config, MAGRPOConfig())
