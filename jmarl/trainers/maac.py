"""The old path of `MAACTrainer` and its configuration."""

from jmarl.trainers.actor_critic import MAACConfig as MAACConfig
from jmarl.trainers.actor_critic import MAACTrainer as MAACTrainer
