"""Trainers in rounds at their module path in CoMLRL; they are defined in `jmarl.comlrl.trainers.madpo` and `marlhf`."""

from jmarl.comlrl.only_in_comlrl import refused_class
from jmarl.comlrl.trainers.madpo import MADPOIterConfig as MADPOIterConfig
from jmarl.comlrl.trainers.madpo import MADPOIterTrainer as MADPOIterTrainer
from jmarl.comlrl.trainers.marlhf import MARLHFIterConfig as MARLHFIterConfig
from jmarl.comlrl.trainers.marlhf import MARLHFIterTrainer as MARLHFIterTrainer

PreferenceReplayShard = refused_class("PreferenceReplayShard")
