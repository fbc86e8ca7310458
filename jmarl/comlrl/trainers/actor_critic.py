"""Trainers with critics: arguments and settings as for `MAGRPOTrainer`, and a model that critics start from."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from jmarl.comlrl.config import TrainerConfig, trainer_config
from jmarl.comlrl.trainers.reinforce import MAGRPOTrainer, load_agents, one_of
from jmarl.models.hub.agents import Agent


@trainer_config
class IACConfig(TrainerConfig):
    """`TrainerConfig` for independent actor-critics (CoLLM-DC, arXiv 2601.21972): a critic of every agent's own. One completion
    a prompt, as in CoMLRL; values are given for the prompt (critic_type="v") or, from 2 completions on, after it ("q")."""

    algorithm: str = "iac"
    num_generations: int = 1
    output_dir: str = "runs/iac"


@trainer_config
class MAACConfig(TrainerConfig):
    """`TrainerConfig` for actors with one central critic (CoLLM-CC, arXiv 2601.21972), which reads the prompts of all."""

    algorithm: str = "maac"
    num_generations: int = 1
    output_dir: str = "runs/maac"


@trainer_config
class IPPOConfig(TrainerConfig):
    """`TrainerConfig` for independent PPO (arXiv 2011.09533): a value for every token, by a model beside each agent
    (use_separate_critic=True) or a second head of the agent itself (False)."""

    algorithm: str = "ippo"
    output_dir: str = "runs/ippo"


@trainer_config
class MAPPOConfig(TrainerConfig):
    """`TrainerConfig` for PPO with one central critic (arXiv 2103.01955)."""

    algorithm: str = "mappo"
    output_dir: str = "runs/mappo"


class IACTrainer(MAGRPOTrainer):
    """Independent actor-critic. Arguments as for `MAGRPOTrainer`, and `critic_model` or `critics`: a name, path or loaded agent
    that critics start from, or a list of them, which must be one model. Without it they start from their agents."""

    config_class = IACConfig

    def __init__(
        self,
        model: str | os.PathLike | Agent | None = None,
        *,
        critic_model: str | os.PathLike | Agent | None = None,
        critics: Sequence[str | os.PathLike | Agent] | None = None,
        **arguments: Any,
    ):
        self.critic = self._critic(critic_model, critics)
        super().__init__(model, **arguments)

    @staticmethod
    def _critic(model: Any, critics: Sequence | None) -> Agent | None:
        if critics is not None and (isinstance(critics, str | os.PathLike | Agent) or not len(critics)):
            raise TypeError("critics= is a list of models or names; one is critic_model=")
        different = [] if critics is None else [c for c in critics if c is not critics[0] and c != critics[0]]
        if different:
            raise ValueError(
                f"critics= names {1 + len(different)} different models: all critics start from one, give critic_model="
            )
        source = one_of(critic_model=model, critics=None if critics is None else critics[0])
        return None if source is None else load_agents([source], None, 1)[0]


class MAACTrainer(IACTrainer):
    """Actors with one central critic. Arguments as for `IACTrainer`; the critic may be any model."""

    config_class = MAACConfig


class IPPOTrainer(IACTrainer):
    """Independent PPO. Arguments as for `IACTrainer`."""

    config_class = IPPOConfig


class MAPPOTrainer(IACTrainer):
    """PPO with one central critic. Arguments as for `IACTrainer`; the critic may be any model."""

    config_class = MAPPOConfig
