"""Trainers and their configurations, each in the module of its package in CoMLRL.

Open `magrpo.py` first: the other trainers of rollouts differ from it in their configuration only.
"""

from jmarl.comlrl.paths import add_paths
from jmarl.comlrl.trainers.actor_critic import ActorCriticTrainerBase as ActorCriticTrainerBase
from jmarl.comlrl.trainers.actor_critic import IACConfig as IACConfig
from jmarl.comlrl.trainers.actor_critic import IACTrainer as IACTrainer
from jmarl.comlrl.trainers.actor_critic import IPPOConfig as IPPOConfig
from jmarl.comlrl.trainers.actor_critic import IPPOTrainer as IPPOTrainer
from jmarl.comlrl.trainers.actor_critic import MAACConfig as MAACConfig
from jmarl.comlrl.trainers.actor_critic import MAACTrainer as MAACTrainer
from jmarl.comlrl.trainers.actor_critic import MAPPOConfig as MAPPOConfig
from jmarl.comlrl.trainers.actor_critic import MAPPOTrainer as MAPPOTrainer
from jmarl.comlrl.trainers.dpo import DPOConfig as DPOConfig
from jmarl.comlrl.trainers.dpo import DPOTrainer as DPOTrainer
from jmarl.comlrl.trainers.dpo import SFTConfig as SFTConfig
from jmarl.comlrl.trainers.dpo import SFTTrainer as SFTTrainer
from jmarl.comlrl.trainers.magrpo import MAGRPOConfig as MAGRPOConfig
from jmarl.comlrl.trainers.magrpo import MAGRPOTrainer as MAGRPOTrainer
from jmarl.comlrl.trainers.preference import JointRewardModel as JointRewardModel
from jmarl.comlrl.trainers.preference import MADPOConfig as MADPOConfig
from jmarl.comlrl.trainers.preference import MADPOIterConfig as MADPOIterConfig
from jmarl.comlrl.trainers.preference import MADPOIterTrainer as MADPOIterTrainer
from jmarl.comlrl.trainers.preference import MADPOTrainer as MADPOTrainer
from jmarl.comlrl.trainers.preference import MARLHFConfig as MARLHFConfig
from jmarl.comlrl.trainers.preference import MARLHFIterConfig as MARLHFIterConfig
from jmarl.comlrl.trainers.preference import MARLHFIterTrainer as MARLHFIterTrainer
from jmarl.comlrl.trainers.preference import MARLHFTrainer as MARLHFTrainer
from jmarl.comlrl.trainers.reinforce import MAREINFORCEConfig as MAREINFORCEConfig
from jmarl.comlrl.trainers.reinforce import MAREINFORCETrainer as MAREINFORCETrainer
from jmarl.comlrl.trainers.reinforce import MAReMaxConfig as MAReMaxConfig
from jmarl.comlrl.trainers.reinforce import MAReMaxTrainer as MAReMaxTrainer
from jmarl.comlrl.trainers.reinforce import MARLOOConfig as MARLOOConfig
from jmarl.comlrl.trainers.reinforce import MARLOOTrainer as MARLOOTrainer

add_paths(__name__)
