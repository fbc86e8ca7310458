"""The old path of `MAREINFORCETrainer` and its configuration."""

from jmarl.trainers.reinforce import MAREINFORCEConfig as MAREINFORCEConfig
from jmarl.trainers.reinforce import MAREINFORCETrainer as MAREINFORCETrainer
