"""The old path of `MARLHFTrainer`, its iterative form and their configurations."""

from jmarl.trainers.preference import MARLHFConfig as MARLHFConfig
from jmarl.trainers.preference import MARLHFIterConfig as MARLHFIterConfig
from jmarl.trainers.preference import MARLHFIterTrainer as MARLHFIterTrainer
from jmarl.trainers.preference import MARLHFTrainer as MARLHFTrainer
