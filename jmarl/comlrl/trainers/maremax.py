"""The old path of `MAReMaxTrainer` and its configuration."""

from jmarl.comlrl.trainers.reinforce import MAReMaxConfig as MAReMaxConfig
from jmarl.comlrl.trainers.reinforce import MAReMaxTrainer as MAReMaxTrainer
