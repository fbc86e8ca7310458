"""The old path of `MAPPOTrainer` and its configuration."""

from jmarl.trainers.actor_critic import MAPPOConfig as MAPPOConfig
from jmarl.trainers.actor_critic import MAPPOTrainer as MAPPOTrainer
