"""The old path of `IPPOTrainer` and its configuration."""

from jmarl.trainers.actor_critic import IPPOConfig as IPPOConfig
from jmarl.trainers.actor_critic import IPPOTrainer as IPPOTrainer
