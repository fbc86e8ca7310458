"""MRLM's configuration sections. Their keys and what each sets here are in one table, `jmarl.mrlm.keys`.

A setting that is None has the default of `TrainConfig` (one PPO epoch, learning rate 1e-5, …), not that of MRLM. When a trainer
is made, keys that change nothing are named in one warning, and a key that would make another run is refused with the reason.
"""

import copy
import dataclasses
import inspect
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from jmarl.algorithms import find_row
from jmarl.config import SECTION_OF, TrainConfig, did_you_mean
from jmarl.config.experiment import TOP_SETTINGS
from jmarl.config.layers import Layers
from jmarl.config.paths import expand_home
from jmarl.config.validation import with_known_names
from jmarl.config.yaml_file import YamlFile, dump_yaml, read_yaml
from jmarl.mrlm.convert import KeyConversion
from jmarl.mrlm.environment_keys import ENVIRONMENT_KEYS
from jmarl.mrlm.keys import GENERATION, KEYS, meaning
from jmarl.mrlm.names import refusing
from jmarl.processes.join import joined_place
from jmarl.processes.place import check_processes

__getattr__ = refusing(__name__)

SET_BY_TRAINERS = {"algorithm", "frozen_agents"}
SAVED_IN = "./checkpoints"  # directory of checkpoints if none is given, as in MRLM


class KeySection:
    """A section: a dataclass with the keys of sections of the table as fields. A setting that is None is not given."""

    if TYPE_CHECKING:

        def __init__(self, *values: Any, **settings: Any): ...
        def __getattr__(self, name: str) -> Any: ...
        def __setattr__(self, name: str, value: Any) -> None: ...

    def __init_subclass__(cls, entries: Mapping[str, Any] | None = None, needed: str = "") -> None:
        if entries is None:  # a user's own subclass
            return
        cls.__annotations__ = dict.fromkeys(entries, Any) | inspect.get_annotations(cls)
        for key in entries.keys() - {needed}:
            setattr(cls, key, None)
        lines = [f"    {key}: {meaning(entry)}" for key, entry in entries.items()]
        cls.__doc__ = "\n".join([cls.__doc__ or "", "", *lines])
        with_known_names(dataclasses.dataclass(cls))


class TrainingConfig(KeySection, entries=KEYS["training"]):
    """Settings of all algorithms."""


class PPOConfig(KeySection, entries=KEYS["ppo"]):
    """Settings of PPO (arXiv 1707.06347)."""


class GRPOConfig(KeySection, entries=KEYS["grpo"]):
    """Settings of GRPO (arXiv 2402.03300)."""


class DPOConfig(KeySection, entries=KEYS["dpo"]):
    """Settings of DPO (arXiv 2305.18290)."""


class SFTConfig(KeySection, entries=KEYS["sft"]):
    """Settings of supervised training on trajectories."""


class GenerationConfig(KeySection, entries=KEYS["generation"]):
    """Settings of sampling. A setting that is None has the default of `jmarl.config.Sampling`."""

    def to_dict(self) -> dict[str, Any]:
        """Return the settings that are given."""
        return {name: value for name, value in vars(self).items() if value is not None}

    to_generation_config = to_dict  # what `LLMEnvironment(generation_config=)` takes


class ModelConfig(KeySection, entries=KEYS["model"]):
    """The model of a policy. A trainer gets the model itself, in an `LLMEnvironment`. generation: sampling in a section of its
    own."""

    generation: GenerationConfig = dataclasses.field(default_factory=GenerationConfig)


class DistributedConfig(KeySection, entries=KEYS["distributed"]):
    """Devices."""


class OutputConfig(KeySection, entries=KEYS["output"]):
    """The run's directory and intervals, beside those of `TrainingConfig`."""


class EnvironmentConfig(KeySection, entries=ENVIRONMENT_KEYS, needed="env_type"):
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


class Resolved(NamedTuple):
    """The settings of a trainer."""

    config: TrainConfig
    other: dict[str, Any]  # given settings outside of `TrainConfig`: held_out, wandb, min_reward, num_tasks, tags, ...


class ExperimentConfig:
    """The sections of an experiment.

    Args:
        training, ppo, grpo, dpo, sft, model, distributed, output: the sections. Those of other algorithms than the trainer's
            are ignored with a warning.
        policy_env, eval_envs: for files; a trainer gets its policy and environments itself.
        experiment_name, description, tags: shown by W&B.
        output_dir: the run's directory, if the sections name none.
        **settings: any setting of `TrainConfig` by its own name, such as max_new_tokens=64; it wins over a section's.
    """

    def __init__(
        self,
        training: TrainingConfig | None = None,
        ppo: PPOConfig | None = None,
        grpo: GRPOConfig | None = None,
        dpo: DPOConfig | None = None,
        sft: SFTConfig | None = None,
        model: ModelConfig | None = None,
        distributed: DistributedConfig | None = None,
        output: OutputConfig | None = None,
        policy_env: EnvironmentConfig | None = None,
        eval_envs: Sequence[EnvironmentConfig] = (),
        **settings: Any,
    ):
        self.training, self.model = training or TrainingConfig(), model or ModelConfig()
        self.ppo, self.grpo, self.dpo, self.sft = ppo, grpo, dpo, sft
        self.distributed, self.output = distributed or DistributedConfig(), output or OutputConfig()
        self.policy_env, self.eval_envs = policy_env, list(eval_envs)
        self._check_sections()
        known = {"algorithm", *SECTION_OF, *TOP_SETTINGS} - SET_BY_TRAINERS - {"seeds"}
        for name in settings.keys() - known:
            if name in SET_BY_TRAINERS:
                raise TypeError(f"ExperimentConfig: {name!r} is set by the trainer and its policies")
            hint = did_you_mean(name, known) or "; help(jmarl.TrainConfig) lists its settings"
            raise TypeError(f"ExperimentConfig has no setting {name!r}{hint}")
        self.settings = settings

    def __getattr__(self, name: str) -> Any:
        if name in ("experiment_name", "description", "output_dir", "tags"):
            return self.settings.get(name)
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("experiment_name", "description", "output_dir", "tags"):
            self.settings[name] = value
        else:
            super().__setattr__(name, value)

    @property
    def sections(self) -> dict[str, Any]:
        """The sections by name; None: not given."""
        return {name: getattr(self, name) for name in CLASSES}

    def _check_sections(self) -> None:
        for name, value in self.sections.items():
            if value is not None and not isinstance(value, CLASSES[name]):
                raise TypeError(f"{name}= is a {CLASSES[name].__name__}(...), got {type(value).__name__}")

    def get_algorithm_config(self) -> Any:
        """Return the section of the algorithm."""
        name = (self.training.algorithm or "ppo").lower()
        if name not in ALGORITHMS:
            raise ValueError(f"algorithm={name!r} is not allowed: choose {', '.join(ALGORITHMS)}")
        return self.sections[name] or CLASSES[name]()

    def validate(self) -> list[str]:
        """Return what is wrong with the settings, as texts; an empty list if nothing is."""
        try:
            self.resolve((self.training.algorithm or "ppo").lower(), {})
        except (ValueError, TypeError) as error:
            return [str(error)]
        return []

    def resolve(self, section: str, defaults: Mapping[str, Any]) -> Resolved:
        """Return the settings of a trainer that reads `section`. defaults: by names in `TrainConfig`."""
        self._check_sections()  # they may have been set since
        algorithm = (self.training.algorithm or section).lower()
        if algorithm != section:
            raise ValueError(f"training has algorithm={algorithm!r}, but this is the trainer of {section!r}: use its trainer")
        sources = [(1, YamlFile("defaults", {"algorithm": section, **defaults}, {}))]
        for name, value in self.sections.items():
            if value is None and name != section:
                continue
            given = _given(value or CLASSES[name]())
            if name == "training":
                given.pop("algorithm", None)  # of a team it is another row, which the trainer chooses
            elif name == "model":
                given = _without_model(given, sampled=bool(GENERATION.keys() & defaults.keys()))
            # The rank of all sections is one, so that none overrides another without a word.
            sources.append((2, YamlFile(CLASSES[name].__name__, {name: given}, {})))
        settings, named = dict(self.settings), self.training.checkpoint_dir or self.output.save_dir
        moved = settings.pop("output_dir", named) if named else None
        conversion, layers = KeyConversion([*sources, (3, YamlFile("ExperimentConfig", settings, {}))]), Layers()
        if moved != named:
            conversion.notes["output_dir"] = f"everything is in {named}"
        for rank, source in conversion.sources:
            layers.add(rank, source)
        own = layers.settings()
        values = {name: x.value for name, x in conversion.finish(own, find_row(own["algorithm"].value).data).items()}
        if values.get("num_turns", 1) > 1:
            values.setdefault("branching", "chain")
        if values.get("save_every") and not values.get("output_dir"):
            values["output_dir"] = SAVED_IN
        values.pop("device", None)
        check_processes(values.pop("processes", {}), joined_place())
        own = {"algorithm", *SECTION_OF}
        config = TrainConfig.of(**{name: x for name, x in values.items() if name in own})
        return Resolved(config, {name: x for name, x in values.items() if name not in own})

    def train_config(self, section: str, defaults: Mapping[str, Any]) -> TrainConfig:
        """Return the configuration of a trainer that reads `section`; see `resolve`."""
        return self.resolve(section, defaults).config

    def with_directory(self, path: str) -> "ExperimentConfig":
        """Return this configuration with another directory of the run."""
        other = copy.copy(self)
        other.training = copy.copy(self.training)
        other.training.checkpoint_dir = path
        return other

    @property
    def num_turns(self) -> int | None:
        """The limit of turns of an episode, if it is set."""
        return self.settings.get("num_turns", self.training.max_episode_length)


def _given(section: Any) -> dict[str, Any]:
    """Return the settings of a section that are given, as in a YAML file."""
    values = {name: _given(x) if dataclasses.is_dataclass(x) else x for name, x in vars(section).items()}
    return {name: list(x) if isinstance(x, tuple) else x for name, x in values.items() if x is not None and x != {}}


def _without_model(given: Mapping[str, Any], sampled: bool) -> dict[str, Any]:
    """Return the settings of a model section without what the policies say. sampled: whether they have a generation_config."""
    left_out = {"model_name_or_path", "tokenizer_name_or_path", "device_map", "trust_remote_code", "device"}
    left_out |= {*GENERATION, "generation"} if sampled else set()
    return {name: value for name, value in given.items() if name not in left_out}


def load_config(path: str | os.PathLike) -> ExperimentConfig:
    """Read a YAML file of MRLM. `jmarl train --config` runs one, also one with other spellings of the settings."""
    tree = dict(read_yaml(Path(path)).tree)
    for name, cls in CLASSES.items():
        if isinstance(tree.get(name), Mapping):
            section = dict(tree[name])
            if name == "model" and section.get("generation") is not None:
                section["generation"] = GenerationConfig(**section["generation"])
            tree[name] = cls(**section)
    if isinstance(tree.get("policy_env"), Mapping):
        tree["policy_env"] = EnvironmentConfig(**tree["policy_env"])
    entries: list[Mapping[str, Any]] = [
        {"env_type": entry} if isinstance(entry, str) else entry for entry in tree.get("eval_envs") or ()
    ]
    tree["eval_envs"] = [EnvironmentConfig(**entry) for entry in entries]
    return ExperimentConfig(**{name: value for name, value in tree.items() if value is not None})


def save_config(config: ExperimentConfig, path: str | os.PathLike) -> None:
    """Write a configuration as a YAML file that `load_config` and `jmarl train --config` read."""
    tree: dict[str, Any] = dict(config.settings)
    tree |= {name: values for name, section in config.sections.items() if section is not None and (values := _given(section))}
    if config.policy_env is not None:
        tree["policy_env"] = _given(config.policy_env)
    if config.eval_envs:
        tree["eval_envs"] = [_given(entry) for entry in config.eval_envs]
    Path(expand_home(path)).write_text(dump_yaml(tree), encoding="utf-8")
