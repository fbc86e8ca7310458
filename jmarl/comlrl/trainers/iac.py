"""The old path of `IACTrainer` and its configuration."""

from jmarl.comlrl.trainers.actor_critic import IACConfig as IACConfig
from jmarl.comlrl.trainers.actor_critic import IACTrainer as IACTrainer
