"""MRLM's settings of `PPOTrainer` in one class: those of training and of PPO."""

import dataclasses
from typing import Any

from jmarl.config.validation import with_known_names
from jmarl.mrlm import sections
from jmarl.mrlm.config import ExperimentConfig


@with_known_names
@dataclasses.dataclass
class PPOConfig(sections.PPOConfig, sections.TrainingConfig):
    """The settings of `TrainingConfig` and of the section `PPOConfig`, under their names."""

    def experiment(self) -> ExperimentConfig:
        """Return the same settings in sections."""

        def part(cls: type) -> dict[str, Any]:
            return {field.name: getattr(self, field.name) for field in dataclasses.fields(cls)}

        training = sections.TrainingConfig(**part(sections.TrainingConfig))
        return ExperimentConfig(training=training, ppo=sections.PPOConfig(**part(sections.PPOConfig)))
