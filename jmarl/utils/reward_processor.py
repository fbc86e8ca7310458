"""The old path of `RewardProcessors`."""

from jmarl.rewards import RewardProcessors as RewardProcessors
