"""Settings of a training run, as frozen dataclasses.

Open `train_config.py` first. This room imports nothing else of jmarl.
"""

from jmarl.config.sections import (
    JOINT_MODES,
    LONG_PROMPTS,
    MAY_BE_ALLOWED,
    Episodes,
    Files,
    Preferences,
    check,
    check_names,
    check_types,
    did_you_mean,
    fits,
    with_known_names,
)
from jmarl.config.train_config import (
    CHOICES,
    DTYPES,
    LORA_TARGETS,
    OF_OPTIMIZER,
    OPTIMIZERS,
    Learning,
    Sampling,
    TrainConfig,
    each,
    single,
)

__all__ = [
    "CHOICES",
    "DTYPES",
    "JOINT_MODES",
    "LONG_PROMPTS",
    "LORA_TARGETS",
    "MAY_BE_ALLOWED",
    "OF_OPTIMIZER",
    "OPTIMIZERS",
    "Episodes",
    "Files",
    "Learning",
    "Preferences",
    "Sampling",
    "TrainConfig",
    "check",
    "check_names",
    "check_types",
    "did_you_mean",
    "each",
    "fits",
    "single",
    "with_known_names",
]
