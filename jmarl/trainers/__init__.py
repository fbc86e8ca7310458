"""Trainer classes with the names and arguments of older scripts; each fills a `TrainConfig` and calls `train`."""

from jmarl.trainers.actor_critic import IACConfig as IACConfig
from jmarl.trainers.actor_critic import IACTrainer as IACTrainer
from jmarl.trainers.actor_critic import IPPOConfig as IPPOConfig
from jmarl.trainers.actor_critic import IPPOTrainer as IPPOTrainer
from jmarl.trainers.actor_critic import MAACConfig as MAACConfig
from jmarl.trainers.actor_critic import MAACTrainer as MAACTrainer
from jmarl.trainers.actor_critic import MAPPOConfig as MAPPOConfig
from jmarl.trainers.actor_critic import MAPPOTrainer as MAPPOTrainer
from jmarl.trainers.reinforce import MAGRPOConfig as MAGRPOConfig
from jmarl.trainers.reinforce import MAGRPOTrainer as MAGRPOTrainer
from jmarl.trainers.reinforce import MAREINFORCEConfig as MAREINFORCEConfig
from jmarl.trainers.reinforce import MAREINFORCETrainer as MAREINFORCETrainer
from jmarl.trainers.reinforce import MAReMaxConfig as MAReMaxConfig
from jmarl.trainers.reinforce import MAReMaxTrainer as MAReMaxTrainer
from jmarl.trainers.reinforce import MARLOOConfig as MARLOOConfig
from jmarl.trainers.reinforce import MARLOOTrainer as MARLOOTrainer
