"""Settings of experiments and training runs, as frozen dataclasses.

The room imports nothing else of jmarl. Open `train_config.py` first, then `experiment.py`.
"""

from jmarl.config.aliases import BY_VALUE, OTHER_NAMES, OTHER_VALUES
from jmarl.config.constraints import CHANGES, LORA_TARGETS, ONLY_WITH
from jmarl.config.experiment import EnvironmentConfig, ExperimentConfig, TaskConfig, TeamConfig
from jmarl.config.preference import Preference
from jmarl.config.run import Population, Run
from jmarl.config.sections import (
    Aggregation,
    Chat,
    Critic,
    Episodes,
    League,
    LoRA,
    Loss,
    Optimizer,
    Sampling,
    Scale,
    Section,
    as_chat,
)
from jmarl.config.train_config import SECTION_OF, SECTIONS, TrainConfig, by_field, flat
from jmarl.config.validation import (
    Count,
    CountOrOff,
    NotNegative,
    Positive,
    Range,
    Share,
    check,
    check_argument,
    check_fields,
    check_names,
    did_you_mean,
    per_agent_values,
)

__all__ = [
    "BY_VALUE",
    "CHANGES",
    "LORA_TARGETS",
    "ONLY_WITH",
    "OTHER_NAMES",
    "OTHER_VALUES",
    "SECTIONS",
    "SECTION_OF",
    "Aggregation",
    "Chat",
    "Count",
    "CountOrOff",
    "Critic",
    "EnvironmentConfig",
    "Episodes",
    "ExperimentConfig",
    "League",
    "LoRA",
    "Loss",
    "NotNegative",
    "Optimizer",
    "Population",
    "Positive",
    "Preference",
    "Range",
    "Run",
    "Sampling",
    "Scale",
    "Section",
    "Share",
    "TaskConfig",
    "TeamConfig",
    "TrainConfig",
    "as_chat",
    "by_field",
    "check",
    "check_argument",
    "check_fields",
    "check_names",
    "did_you_mean",
    "flat",
    "per_agent_values",
]
