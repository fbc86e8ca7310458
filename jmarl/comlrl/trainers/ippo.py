"""The old path of `IPPOTrainer` and its configuration."""

from jmarl.comlrl.trainers.actor_critic import IPPOConfig as IPPOConfig
from jmarl.comlrl.trainers.actor_critic import IPPOTrainer as IPPOTrainer
