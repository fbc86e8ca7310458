"""The sections of MRLM's configuration, whose settings are the keys of the one table, `jmarl.mrlm.keys`."""

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from jmarl.config.validation import with_known_names
from jmarl.mrlm.environment_keys import ENVIRONMENT_KEYS
from jmarl.mrlm.keys import KEYS, meaning


class Section:
    """A section: a dataclass with the keys of sections of the table as fields. A setting that is None is not given."""

    if TYPE_CHECKING:

        def __init__(self, *values: Any, **settings: Any): ...
        def __getattr__(self, name: str) -> Any: ...
        def __setattr__(self, name: str, value: Any) -> None: ...

    def __init_subclass__(cls, entries: Mapping[str, Any], needed: str = "") -> None:
        cls.__annotations__ = dict.fromkeys(entries, Any) | vars(cls).get("__annotations__", {})
        for key in entries.keys() - {needed}:
            setattr(cls, key, None)
        lines = [f"    {key}: {meaning(entry)}" for key, entry in entries.items()]
        cls.__doc__ = "\n".join([cls.__doc__ or "", "", *lines])
        with_known_names(dataclasses.dataclass(cls))


class TrainingConfig(Section, entries=KEYS["training"]):
    """Settings of all algorithms."""


class PPOConfig(Section, entries=KEYS["ppo"]):
    """Settings of PPO (arXiv 1707.06347)."""


class GRPOConfig(Section, entries=KEYS["grpo"]):
    """Settings of GRPO (arXiv 2402.03300)."""


class DPOConfig(Section, entries=KEYS["dpo"]):
    """Settings of DPO (arXiv 2305.18290)."""


class SFTConfig(Section, entries=KEYS["sft"]):
    """Settings of supervised training on trajectories."""


class GenerationConfig(Section, entries=KEYS["generation"]):
    """Settings of sampling. A setting that is None has the default of `jmarl.config.Sampling`."""

    def to_dict(self) -> dict[str, Any]:
        """Return the settings that are given."""
        return {name: value for name, value in vars(self).items() if value is not None}

    to_generation_config = to_dict  # what `LLMEnvironment(generation_config=)` takes


class ModelConfig(Section, entries=KEYS["model"]):
    """The model of a policy. A trainer gets the model itself, in an `LLMEnvironment`. generation: sampling in a section of its
    own."""

    generation: GenerationConfig = dataclasses.field(default_factory=GenerationConfig)


class DistributedConfig(Section, entries=KEYS["distributed"]):
    """Devices."""


class OutputConfig(Section, entries=KEYS["output"]):
    """The run's directory and intervals, beside those of `TrainingConfig`."""


class EnvironmentConfig(Section, entries=ENVIRONMENT_KEYS, needed="env_type"):
    """An environment, as in a YAML file."""


EvalEnvConfig = EnvironmentConfig

CLASSES: dict[str, type] = {
    "training": TrainingConfig,
    "ppo": PPOConfig,
    "grpo": GRPOConfig,
    "dpo": DPOConfig,
    "sft": SFTConfig,
    "model": ModelConfig,
    "distributed": DistributedConfig,
    "output": OutputConfig,
}
ALGORITHMS = ("ppo", "grpo", "dpo", "sft")
