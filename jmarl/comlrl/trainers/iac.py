"""IAC: independent actor-critics, one critic per agent (CoLLM-DC, arXiv 2601.21972)."""

from __future__ import annotations

from jmarl.comlrl.config import trainer_config
from jmarl.comlrl.eval_metrics import RolloutSample as RolloutSample
from jmarl.comlrl.peer_settings import ActorCriticConfig
from jmarl.comlrl.trainers.magrpo import MAGRPOTrainer
from jmarl.config import NotNegative


@trainer_config
class IACConfig(ActorCriticConfig):
    """`ActorCriticConfig` of independent actor-critics. As in CoMLRL, one completion per prompt. The critic values the prompt
    (critic_type="v") or, with 2 or more completions, the prompt with a completion ("q")."""

    algorithm: str = "iac"
    output_dir: str = "runs/iac"
    separate_critic: bool | None = True
    value_clip: NotNegative | None = 0.2
    critic_value_head_hidden_dim: int | None = None
    value_head_hidden_dim: int | None = None


class ActorCriticTrainerBase(MAGRPOTrainer):
    """The base of trainers with critics. Arguments as for `MAGRPOTrainer`; critics start from critic_model= or critics=."""


class IACTrainer(ActorCriticTrainerBase):
    """Independent actor-critics. Arguments as for `MAGRPOTrainer`; critics start from critic_model= or critics=."""

    config_class = IACConfig
