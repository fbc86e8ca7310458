"""The old path of `RewardProcessors`."""

from jmarl.envs.rewards import RewardProcessors as RewardProcessors
