"""The old path of `MADPOTrainer`, its iterative form and their configurations."""

from jmarl.comlrl.trainers.preference import MADPOConfig as MADPOConfig
from jmarl.comlrl.trainers.preference import MADPOIterConfig as MADPOIterConfig
from jmarl.comlrl.trainers.preference import MADPOIterTrainer as MADPOIterTrainer
from jmarl.comlrl.trainers.preference import MADPOTrainer as MADPOTrainer
