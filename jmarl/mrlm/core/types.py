"""MRLM's messages, observations, rewards and environments at their module paths; they are defined in `jmarl.envs.messages`."""

from typing import Any

from jmarl.envs.messages import BaseEnvironment as BaseEnvironment
from jmarl.envs.messages import EnvironmentMode as EnvironmentMode
from jmarl.envs.messages import Message as Message
from jmarl.envs.messages import MessageRole as MessageRole
from jmarl.envs.messages import Observation as Observation
from jmarl.envs.messages import Reward as Reward
from jmarl.envs.messages import SimulatedEnvironment as SimulatedEnvironment
from jmarl.mrlm.generation_config import GenerationConfig as GenerationConfig
from jmarl.mrlm.names import refuse


def __getattr__(name: str) -> Any:
    return refuse(__name__, name)
