"""Trains teams of language models to work together with multi-agent reinforcement learning in JAX.

The names below are loaded when they are first used, so `import jmarl` costs nothing. The loop itself is
`jmarl.train.train`: a module and a function cannot both be `jmarl.train`, so the function is imported from its module.
"""

import importlib
import logging
from typing import Any

_HOME = {
    "Agent": "weights",
    "load_agent": "weights",
    "save_pretrained": "weights",
    "Sampling": "config",
    "TrainConfig": "config",
    "Team": "team",
    "make_team": "team",
    "save_team": "team",
    "agents_of": "team",
    "policies": "team",
    "TrainResult": "train",
    "train_seeds": "seeds",
    "cross_play": "crossplay",
    "load_runs": "crossplay",
    "RewardFunction": "rewards",
    "RewardProcessors": "rewards",
    "make_reward": "rewards",
    "MAGRPOConfig": "trainers.reinforce",
    "MAGRPOTrainer": "trainers.reinforce",
    "MAREINFORCEConfig": "trainers.reinforce",
    "MAREINFORCETrainer": "trainers.reinforce",
    "MARLOOConfig": "trainers.reinforce",
    "MARLOOTrainer": "trainers.reinforce",
    "MAReMaxConfig": "trainers.reinforce",
    "MAReMaxTrainer": "trainers.reinforce",
    "IACConfig": "trainers.actor_critic",
    "IACTrainer": "trainers.actor_critic",
    "IPPOConfig": "trainers.actor_critic",
    "IPPOTrainer": "trainers.actor_critic",
    "MAACConfig": "trainers.actor_critic",
    "MAACTrainer": "trainers.actor_critic",
    "MAPPOConfig": "trainers.actor_critic",
    "MAPPOTrainer": "trainers.actor_critic",
    "MADPOConfig": "trainers.preference",
    "MADPOTrainer": "trainers.preference",
    "MADPOIterConfig": "trainers.preference",
    "MADPOIterTrainer": "trainers.preference",
    "MARLHFConfig": "trainers.preference",
    "MARLHFTrainer": "trainers.preference",
    "MARLHFIterConfig": "trainers.preference",
    "MARLHFIterTrainer": "trainers.preference",
    "DPOConfig": "trainers.preference",
    "DPOTrainer": "trainers.preference",
    "SFTConfig": "trainers.preference",
    "SFTTrainer": "trainers.preference",
    "load_reward_model": "learned_reward",
    "load_pairs": "pairs",
    "load_trajectories": "pairs",
}

# transformers advises to install PyTorch when it is imported; its tokenizers, all that is used of it here, do without.
logging.getLogger("transformers").addFilter(lambda record: not record.getMessage().startswith("PyTorch was not found"))


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'jmarl' has no attribute {name!r}; it has {', '.join(_HOME)}")
    return getattr(importlib.import_module(f"jmarl.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
