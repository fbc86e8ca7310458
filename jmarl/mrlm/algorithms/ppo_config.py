"""MRLM's settings of `PPOTrainer` in one class: those of training and of PPO."""

from jmarl.mrlm import config as sections
from jmarl.mrlm.config import ExperimentConfig
from jmarl.mrlm.keys import KEYS


class PPOConfig(sections.PPOConfig, sections.TrainingConfig, entries=KEYS["training"] | KEYS["ppo"]):
    """The settings of `TrainingConfig` and of the section `PPOConfig`, under their names."""

    def experiment(self) -> ExperimentConfig:
        """Return the same settings in sections."""
        training, ppo = ({key: getattr(self, key) for key in KEYS[name]} for name in ("training", "ppo"))
        return ExperimentConfig(training=sections.TrainingConfig(**training), ppo=sections.PPOConfig(**ppo))
