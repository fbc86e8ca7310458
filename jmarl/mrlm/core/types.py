"""MRLM's messages, observations and rewards at their module path; they are defined in `jmarl.envs.messages`."""

from jmarl.envs.messages import EnvironmentMode as EnvironmentMode
from jmarl.envs.messages import Message as Message
from jmarl.envs.messages import Observation as Observation
from jmarl.envs.messages import Reward as Reward
