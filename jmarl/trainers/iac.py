"""The old path of `IACTrainer` and its configuration."""

from jmarl.trainers.actor_critic import IACConfig as IACConfig
from jmarl.trainers.actor_critic import IACTrainer as IACTrainer
