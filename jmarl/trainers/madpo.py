"""The old path of `MADPOTrainer`, its iterative form and their configurations."""

from jmarl.trainers.preference import MADPOConfig as MADPOConfig
from jmarl.trainers.preference import MADPOIterConfig as MADPOIterConfig
from jmarl.trainers.preference import MADPOIterTrainer as MADPOIterTrainer
from jmarl.trainers.preference import MADPOTrainer as MADPOTrainer
