"""The old path of `MAREINFORCETrainer` and its configuration."""

from jmarl.comlrl.trainers.reinforce import MAREINFORCEConfig as MAREINFORCEConfig
from jmarl.comlrl.trainers.reinforce import MAREINFORCETrainer as MAREINFORCETrainer
