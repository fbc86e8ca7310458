"""The old path of `MAGRPOTrainer` and its configuration."""

from jmarl.comlrl.trainers.reinforce import MAGRPOConfig as MAGRPOConfig
from jmarl.comlrl.trainers.reinforce import MAGRPOTrainer as MAGRPOTrainer
