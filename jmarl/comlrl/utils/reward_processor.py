"""`RewardProcessors` at its module path in CoMLRL; it is defined in `jmarl.envs.rewards`."""

from jmarl.envs.rewards import RewardProcessors as RewardProcessors
