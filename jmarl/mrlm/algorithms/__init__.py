"""MRLM's trainers.

    policy_env = LLMEnvironment("Qwen/Qwen2.5-1.5B-Instruct", mode=EnvironmentMode.SERVER)
    eval_envs = [MathReasoningEnvironment(MathProblemGenerator()) for _ in range(4)]
    training = TrainingConfig(algorithm="ppo", num_epochs=50)
    config = ExperimentConfig(training=training, ppo=PPOConfig(clip_range=0.2, gamma=0.99))
    PPOTrainer(policy_env, eval_envs, config).train(num_iterations=50)

Open `trainer.py` first.
"""

from jmarl.mrlm.algorithms.data import PreferenceDataset as PreferenceDataset
from jmarl.mrlm.algorithms.data import PreferencePair as PreferencePair
from jmarl.mrlm.algorithms.data import Trajectory as Trajectory
from jmarl.mrlm.algorithms.data import TrajectoryDataset as TrajectoryDataset
from jmarl.mrlm.algorithms.dpo import DPOTrainer as DPOTrainer
from jmarl.mrlm.algorithms.grpo import GRPOTrainer as GRPOTrainer
from jmarl.mrlm.algorithms.ppo import PPOConfig as PPOConfig
from jmarl.mrlm.algorithms.ppo import PPOTrainer as PPOTrainer
from jmarl.mrlm.algorithms.sft import SFTTrainer as SFTTrainer
from jmarl.mrlm.algorithms.trainer import BaseTrainer as BaseTrainer
from jmarl.mrlm.names import refusing

__getattr__ = refusing(__name__)
