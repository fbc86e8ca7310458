"""The old path of `MARLOOTrainer` and its configuration."""

from jmarl.comlrl.trainers.reinforce import MARLOOConfig as MARLOOConfig
from jmarl.comlrl.trainers.reinforce import MARLOOTrainer as MARLOOTrainer
