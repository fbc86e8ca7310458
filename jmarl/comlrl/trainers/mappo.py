"""The old path of `MAPPOTrainer` and its configuration."""

from jmarl.comlrl.trainers.actor_critic import MAPPOConfig as MAPPOConfig
from jmarl.comlrl.trainers.actor_critic import MAPPOTrainer as MAPPOTrainer
