"""The old path of `MARLOOTrainer` and its configuration."""

from jmarl.trainers.reinforce import MARLOOConfig as MARLOOConfig
from jmarl.trainers.reinforce import MARLOOTrainer as MARLOOTrainer
