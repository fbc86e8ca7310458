"""The old path of `MARLHFTrainer`, its iterative form and their configurations."""

from jmarl.comlrl.trainers.preference import MARLHFConfig as MARLHFConfig
from jmarl.comlrl.trainers.preference import MARLHFIterConfig as MARLHFIterConfig
from jmarl.comlrl.trainers.preference import MARLHFIterTrainer as MARLHFIterTrainer
from jmarl.comlrl.trainers.preference import MARLHFTrainer as MARLHFTrainer
