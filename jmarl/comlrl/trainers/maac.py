"""The old path of `MAACTrainer` and its configuration."""

from jmarl.comlrl.trainers.actor_critic import MAACConfig as MAACConfig
from jmarl.comlrl.trainers.actor_critic import MAACTrainer as MAACTrainer
