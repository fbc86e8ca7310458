"""The old path of `MAGRPOTrainer` and its configuration."""

from jmarl.trainers.reinforce import MAGRPOConfig as MAGRPOConfig
from jmarl.trainers.reinforce import MAGRPOTrainer as MAGRPOTrainer
