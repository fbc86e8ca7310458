"""MRLM's policies and the base class of its environments.

Open `llm_environment.py` first; observations, messages and rewards are defined in `jmarl.envs.messages`.
"""

from jmarl.envs.messages import BaseEnvironment as BaseEnvironment
from jmarl.envs.messages import EnvironmentMode as EnvironmentMode
from jmarl.envs.messages import Message as Message
from jmarl.envs.messages import MessageRole as MessageRole
from jmarl.envs.messages import Observation as Observation
from jmarl.envs.messages import Reward as Reward
from jmarl.envs.messages import SimulatedEnvironment as SimulatedEnvironment
from jmarl.mrlm.config import GenerationConfig as GenerationConfig
from jmarl.mrlm.core.llm_environment import LLMEnvironment as LLMEnvironment
from jmarl.mrlm.names import refusing

__getattr__ = refusing(__name__)
