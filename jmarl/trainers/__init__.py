"""Trainer classes with the names and arguments of older scripts; each fills a `TrainConfig` and calls `train`."""

from jmarl.trainers.reinforce import MAGRPOConfig as MAGRPOConfig
from jmarl.trainers.reinforce import MAGRPOTrainer as MAGRPOTrainer
from jmarl.trainers.reinforce import MAREINFORCEConfig as MAREINFORCEConfig
from jmarl.trainers.reinforce import MAREINFORCETrainer as MAREINFORCETrainer
from jmarl.trainers.reinforce import MAReMaxConfig as MAReMaxConfig
from jmarl.trainers.reinforce import MAReMaxTrainer as MAReMaxTrainer
from jmarl.trainers.reinforce import MARLOOConfig as MARLOOConfig
from jmarl.trainers.reinforce import MARLOOTrainer as MARLOOTrainer
