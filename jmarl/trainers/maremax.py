"""The old path of `MAReMaxTrainer` and its configuration."""

from jmarl.trainers.reinforce import MAReMaxConfig as MAReMaxConfig
from jmarl.trainers.reinforce import MAReMaxTrainer as MAReMaxTrainer
