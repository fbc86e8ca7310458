"""MAAC: actors with one central critic (CoLLM-CC, arXiv 2601.21972)."""

from __future__ import annotations

from jmarl.comlrl.config import trainer_config
from jmarl.comlrl.peer_settings import ActorCriticConfig
from jmarl.comlrl.trainers.iac import ActorCriticTrainerBase


@trainer_config
class MAACConfig(ActorCriticConfig):
    """`ActorCriticConfig` of actors with one central critic, which reads the prompts of all agents."""

    algorithm: str = "maac"
    output_dir: str = "runs/maac"


class MAACTrainer(ActorCriticTrainerBase):
    """Actors with one central critic. Arguments as for `MAGRPOTrainer`; critic_model= may be any model."""

    config_class = MAACConfig
