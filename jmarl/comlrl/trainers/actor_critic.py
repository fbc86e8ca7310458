"""Trainers with critics: CoMLRL's `trainers.actor_critic`, and the PPO of its older documents."""

from __future__ import annotations

from jmarl.comlrl.eval_metrics import RolloutSample as RolloutSample
from jmarl.comlrl.settings.rollouts import ActorCriticConfig, RolloutConfig
from jmarl.comlrl.trainers.magrpo import MAGRPOTrainer
from jmarl.config import NotNegative


class ActorCriticTrainerBase(MAGRPOTrainer):
    """The base of trainers with critics. Arguments as for `MAGRPOTrainer`; critics start from critic_model= or critics=."""


class IACConfig(ActorCriticConfig, algorithm="iac"):
    """`ActorCriticConfig` of independent actor-critics. As in CoMLRL, one completion per prompt. The critic values the prompt
    (critic_type="v") or, with 2 or more completions, the prompt with a completion ("q")."""

    separate_critic: bool | None = True
    value_clip: NotNegative | None = 0.2
    critic_value_head_hidden_dim: int | None = None
    value_head_hidden_dim: int | None = None


class IACTrainer(ActorCriticTrainerBase):
    """Independent actor-critics, one critic per agent (CoLLM-DC, arXiv 2601.21972). Arguments as for `MAGRPOTrainer`; critics
    start from critic_model= or critics=."""

    config_class = IACConfig


class MAACConfig(ActorCriticConfig, algorithm="maac"):
    """`ActorCriticConfig` of actors with one central critic, which reads the prompts of all agents."""


class MAACTrainer(ActorCriticTrainerBase):
    """Actors with one central critic (CoLLM-CC, arXiv 2601.21972). Arguments as for `MAGRPOTrainer`; critic_model= may be any
    model."""

    config_class = MAACConfig


class IPPOConfig(RolloutConfig, algorithm="ippo"):
    """`RolloutConfig` of independent PPO. Each token has a value, of a separate model per agent (use_separate_critic=True) or
    of a second head of the agent (False)."""


class IPPOTrainer(MAGRPOTrainer):
    """Independent PPO (arXiv 2011.09533). Arguments as for `MAGRPOTrainer`; critics start from critic_model= or critics=."""

    config_class = IPPOConfig


class MAPPOConfig(RolloutConfig, algorithm="mappo"):
    """`RolloutConfig` of PPO with one central critic."""


class MAPPOTrainer(MAGRPOTrainer):
    """PPO with one central critic (arXiv 2103.01955). Arguments as for `MAGRPOTrainer`; critic_model= may be any model."""

    config_class = MAPPOConfig
