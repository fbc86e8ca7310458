"""Facts about CoMLRL 1.4.3 (PyPI): its public names by module, and the settings of its configurations with their defaults.

Each name can be imported here, and each setting can be written with its default, which gives the run of leaving it out.
"""

from __future__ import annotations

import importlib
import inspect

import pytest

import jmarl.comlrl.trainers as trainers
from jmarl.comlrl.settings.rollouts import Unwritten
from jmarl.comlrl.trainers.centralized import CentralizedMAGRPOConfig
from jmarl.runs.checks import check_settings

# Module of CoMLRL -> its public names.
NAMES = {
    "trainers": "ActorCriticTrainerBase IACConfig IACTrainer MAACConfig MAACTrainer MAGRPOConfig MAGRPOTrainer MADPOConfig "
    "MADPOTrainer MARLHFConfig MARLHFTrainer JointRewardModel MAREINFORCEConfig MAREINFORCETrainer MAReMaxConfig "
    "MAReMaxTrainer MARLOOConfig MARLOOTrainer",
    "trainers.reinforce": "MAGRPOConfig MAGRPOTrainer CentralizedMAGRPOConfig CentralizedMAGRPOTrainer MAREINFORCEConfig "
    "MAREINFORCETrainer MAReMaxConfig MAReMaxTrainer MARLOOConfig MARLOOTrainer",
    "trainers.reinforce.magrpo": "MAGRPOConfig MAGRPOTrainer",
    "trainers.reinforce.centralized_magrpo": "CentralizedMAGRPOConfig CentralizedMAGRPOTrainer",
    "trainers.reinforce.mareinforce": "MAREINFORCEConfig MAREINFORCETrainer",
    "trainers.reinforce.maremax": "MAReMaxConfig MAReMaxTrainer",
    "trainers.reinforce.marloo": "MARLOOConfig MARLOOTrainer",
    "trainers.actor_critic": "ActorCriticTrainerBase IACConfig IACTrainer RolloutSample MAACConfig MAACTrainer",
    "trainers.actor_critic.ac_base": "ActorCriticTrainerBase",
    "trainers.actor_critic.iac": "IACConfig IACTrainer RolloutSample",
    "trainers.actor_critic.maac": "MAACConfig MAACTrainer",
    "trainers.preference": "MADPOConfig MADPOTrainer CentralizedComparatorAdapter CentralizedComparatorParseError "
    "TaggedCentralizedComparatorAdapter MADPOIterConfig MADPOIterTrainer MARLHFConfig MARLHFTrainer MARLHFIterConfig "
    "MARLHFIterTrainer JointRewardModel",
    "trainers.preference.centralized": "CentralizedComparatorAdapter TaggedCentralizedComparatorAdapter",
    "trainers.preference.iterative": "MADPOIterConfig MADPOIterTrainer MARLHFIterConfig MARLHFIterTrainer",
    "trainers.preference.madpo": "MADPOConfig MADPOTrainer",
    "trainers.preference.marlhf": "JointRewardModel MARLHFConfig MARLHFTrainer",
    "schedulers": "DeviceScheduler",
    "schedulers.device_scheduler": "DeviceScheduler",
    "models": "CausalLMWithValueHead ValueHead ActorCriticOutput",
    "models.actor_critic": "CausalLMWithValueHead",
    "utils": "read_checkpoint_metadata build_formatters ensure_pad_token ensure_tokenizer apply_tokenizer_specials "
    "resolve_tokenizers infer_model_name resolve_model_sources clone_reference_models load_reference_models_from_sources "
    "reference_kl_coef reference_kl_enabled reference_kl_for_sequence resolve_reference_devices "
    "validate_reference_kl_config RewardProcessors call_reward_function normalize_reward_lengths resolve_reward_range "
    "set_reward_range DistributedContext local_context unwrap_model",
    "utils.checkpoint": "read_checkpoint_metadata",
    "utils.distributed": "DistributedContext local_context unwrap_model",
    "utils.formatters": "build_formatters",
    "utils.model_loading": "infer_model_name resolve_model_sources",
    "utils.reference_kl": "reference_kl_coef reference_kl_enabled validate_reference_kl_config",
    "utils.reward_processor": "RewardProcessors",
    "utils.reward_utils": "call_reward_function normalize_reward_lengths resolve_reward_range set_reward_range",
    "utils.tokenizer_utils": "apply_tokenizer_specials ensure_pad_token ensure_tokenizer resolve_tokenizers",
}

ALL = dict(
    agent_learning_rate=5e-6, max_new_tokens=256, temperature=0.6, top_p=0.6, top_k=50, num_train_epochs=20, num_agents=2,
    logging_steps=50, num_turns=2, discount=1.0, early_termination_threshold=-0.2, external_prompt_passthrough=False,
    rollout_buffer_size=2, train_batch_size=None, advantage_normalization=True, parallel_training="none", agent_devices=None,
    reference_kl_enabled=False, reference_kl_coef=0.1, reference_devices=None, eval_interval=16, eval_num_samples=4,
    eval_batch_size=1,
)  # fmt: skip
REINFORCE = ALL | dict(num_generations=4, joint_mode="aligned", advantage_mode="mean")
ACTOR_CRITIC = ALL | dict(
    num_generations=1, num_train_epochs=40, rollout_buffer_size=8, top_k=None, logging_steps=1, critic_learning_rate=5e-6,
    critic_type="v", value_loss_coef=0.6, critic_devices=None,
)  # fmt: skip
HEADS = dict(value_clip_range=0.2, use_separate_critic=True, critic_value_head_hidden_dim=None, value_head_hidden_dim=None)
PAIRS = ALL | dict(
    num_turns=1, early_termination_threshold=None, joint_mode="aligned", advantage_mode="mean",
    collaboration_mode="decentralized", preference_num_candidates=80, preference_pairs_per_sample=16,
    pair_selection="reward_gap", dpo_beta=0.1, use_environment_step=True, environment_steps_per_pair=2,
)  # fmt: skip
REWARD = dict(
    rl_algorithm="magrpo", num_generations=4, reward_model_name=None, reward_model_device="cuda:0", reward_learning_rate=1e-5,
    reward_num_train_epochs=1, reward_train_batch_size=1, reward_max_length=None, reward_freeze_backbone=False,
    critic_model_name=None, critic_learning_rate=None, critic_devices=None, critic_type="v", value_loss_coef=0.6,
)  # fmt: skip
ROUNDS = dict(
    preference_num_candidates=20, preference_pairs_per_sample=4, pair_selection="comparator_reward", num_iterations=6,
    preference_replay_mode="current", preference_replay_k=None, preference_replay_lambda=None, preference_replay_dir=None,
    preference_replay_sample_size=None, log_reward_distribution=False, policy_checkpoint_dir=None, comparator_policy="current",
    comparator_generation_mode="decentralized", comparator_centralized_agent_index=0, comparator_model_name=None,
    comparator_agents=None, comparator_devices=None, comparator_num_candidates=None, comparator_history_k=None,
    comparator_api_url=None, comparator_api_format="generic", comparator_api_model=None, comparator_api_timeout=120.0,
    comparator_api_max_n_per_request=None, comparator_api_headers=None, comparator_api_key=None, comparator_api_key_env=None,
    comparator_api_key_header="Authorization", comparator_api_key_prefix="Bearer", comparator_api_extra_body=None,
    comparator_api_response_field="completions",
)  # fmt: skip
MARLHF_ITER = PAIRS | REWARD | HEADS | ROUNDS
MARLHF_ITER |= dict(num_train_epochs=2, reward_num_train_epochs=2, preference_scoring_reward="task")
# Configuration -> its settings with their defaults, and how many they are.
SETTINGS = {
    trainers.MAGRPOConfig: (REINFORCE, 26),
    trainers.MAREINFORCEConfig: (REINFORCE | dict(advantage_mode="raw"), 26),
    trainers.MAReMaxConfig: (REINFORCE | dict(advantage_mode="max"), 26),
    trainers.MARLOOConfig: (REINFORCE | dict(advantage_mode="rloo"), 26),
    CentralizedMAGRPOConfig: (REINFORCE | dict(num_turns=1, collaboration_mode="centralized"), 27),
    trainers.IACConfig: (ACTOR_CRITIC | HEADS, 32),
    trainers.MAACConfig: (ACTOR_CRITIC, 28),
    trainers.MADPOConfig: (PAIRS, 32),
    trainers.MADPOIterConfig: (PAIRS | ROUNDS | dict(num_train_epochs=1), 60),
    trainers.MARLHFConfig: (PAIRS | REWARD | HEADS, 50),
    trainers.MARLHFIterConfig: (MARLHF_ITER, 79),
}
CONFIGS = pytest.mark.parametrize("config", SETTINGS, ids=lambda config: config.__name__)


@pytest.mark.parametrize("module", NAMES)
def test_public_names_are_at_their_module_paths(module):
    imported = importlib.import_module(f"jmarl.comlrl.{module}")
    missing = [name for name in NAMES[module].split() if not hasattr(imported, name)]
    assert not missing
    for name in NAMES[module].split():  # one object by every path, also by those of the older documents
        if name.endswith(("Trainer", "Config")):
            assert getattr(imported, name) is getattr(importlib.import_module(getattr(imported, name).__module__), name)


@CONFIGS
def test_every_setting_can_be_written_with_its_default(config):
    settings, count = SETTINGS[config]
    assert len(settings) == count
    for name, value in settings.items():
        config(**{name: value})
    check_settings(config(**settings, output_dir="").train_config(20))  # no two of them are other names of one field


@CONFIGS
def test_the_defaults_are_those_of_comlrl(config):
    """Three are resolved later: num_agents is the number of agents=, top_k=None is 0, and num_turns is 1 for a trainer without
    a transition. early_termination_threshold is None, see `RolloutConfig`."""
    written = dict(SETTINGS[config][0]) | {"num_agents": None, "early_termination_threshold": None}
    written |= {"top_k": written["top_k"] or 0}
    default = config()
    assert {name: getattr(default, name) for name in written} == written
    del written["num_turns"]
    assert config(**written).train_config(20) == default.train_config(20)


@CONFIGS
def test_the_signature_names_every_setting(config):
    """The application scripts drop what `inspect.signature(Config.__init__)` does not name."""
    assert set(SETTINGS[config][0]) <= set(inspect.signature(config.__init__).parameters)


def test_num_turns_is_2_with_a_transition_and_1_without():
    config = trainers.MAGRPOConfig()
    assert config.num_turns == 2 and isinstance(config.num_turns, Unwritten) and config.turns == 1
    assert config.for_transition(None).turns == 1
    assert config.for_transition(lambda **_: ["a", "b"]).train_config(1).episodes.num_turns == 2
    assert trainers.MADPOConfig().for_transition(lambda **_: ["a", "b"]).turns == 1
    assert trainers.MAGRPOConfig(num_turns=2).for_transition(None).turns == 2
