"""Trainers and their configurations, each in the module that has its name in CoMLRL.

Open `magrpo.py` first: the other trainers of rollouts differ from it in their configuration only.
"""

from jmarl.comlrl.trainers.dpo import DPOConfig as DPOConfig
from jmarl.comlrl.trainers.dpo import DPOTrainer as DPOTrainer
from jmarl.comlrl.trainers.iac import ActorCriticTrainerBase as ActorCriticTrainerBase
from jmarl.comlrl.trainers.iac import IACConfig as IACConfig
from jmarl.comlrl.trainers.iac import IACTrainer as IACTrainer
from jmarl.comlrl.trainers.ippo import IPPOConfig as IPPOConfig
from jmarl.comlrl.trainers.ippo import IPPOTrainer as IPPOTrainer
from jmarl.comlrl.trainers.maac import MAACConfig as MAACConfig
from jmarl.comlrl.trainers.maac import MAACTrainer as MAACTrainer
from jmarl.comlrl.trainers.madpo import MADPOConfig as MADPOConfig
from jmarl.comlrl.trainers.madpo import MADPOIterConfig as MADPOIterConfig
from jmarl.comlrl.trainers.madpo import MADPOIterTrainer as MADPOIterTrainer
from jmarl.comlrl.trainers.madpo import MADPOTrainer as MADPOTrainer
from jmarl.comlrl.trainers.magrpo import MAGRPOConfig as MAGRPOConfig
from jmarl.comlrl.trainers.magrpo import MAGRPOTrainer as MAGRPOTrainer
from jmarl.comlrl.trainers.mappo import MAPPOConfig as MAPPOConfig
from jmarl.comlrl.trainers.mappo import MAPPOTrainer as MAPPOTrainer
from jmarl.comlrl.trainers.mareinforce import MAREINFORCEConfig as MAREINFORCEConfig
from jmarl.comlrl.trainers.mareinforce import MAREINFORCETrainer as MAREINFORCETrainer
from jmarl.comlrl.trainers.maremax import MAReMaxConfig as MAReMaxConfig
from jmarl.comlrl.trainers.maremax import MAReMaxTrainer as MAReMaxTrainer
from jmarl.comlrl.trainers.marlhf import JointRewardModel as JointRewardModel
from jmarl.comlrl.trainers.marlhf import MARLHFConfig as MARLHFConfig
from jmarl.comlrl.trainers.marlhf import MARLHFIterConfig as MARLHFIterConfig
from jmarl.comlrl.trainers.marlhf import MARLHFIterTrainer as MARLHFIterTrainer
from jmarl.comlrl.trainers.marlhf import MARLHFTrainer as MARLHFTrainer
from jmarl.comlrl.trainers.marloo import MARLOOConfig as MARLOOConfig
from jmarl.comlrl.trainers.marloo import MARLOOTrainer as MARLOOTrainer
from jmarl.comlrl.trainers.sft import SFTConfig as SFTConfig
from jmarl.comlrl.trainers.sft import SFTTrainer as SFTTrainer
