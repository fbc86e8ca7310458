"""`ExperimentConfig`: who plays (`TeamConfig`), what (`TaskConfig`) and how the team learns (`TrainConfig`).

    ExperimentConfig.of(models=["a", "b"], environment="math_verifier", algorithm="magrpo", learning_rate=1e-6)
    ExperimentConfig(TeamConfig(("a", "b")), TaskConfig("math_verifier"), TrainConfig.of(learning_rate=1e-6))  # the same

The tree of plain values that `as_dict` returns is the YAML file, and `ExperimentConfig.of(**tree)` reads it. Names are unique
in the whole tree, so that short names are enough. `runs.experiment.run_experiment` runs it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, Literal, Self

from jmarl.config.aliases import OTHER_NAMES
from jmarl.config.constraints import EXPERIMENT, TASK, TEAM, require
from jmarl.config.sections import Section, is_default
from jmarl.config.train_config import SECTION_OF, SECTIONS, TrainConfig
from jmarl.config.validation import Count, CountOrOff, Positive, Share, check_fields, check_names, did_you_mean


@dataclasses.dataclass(frozen=True, repr=False)
class TeamConfig(Section):
    """Who plays: the agents of the team."""

    constraints = TEAM
    paths = ("models",)

    models: tuple[str, ...]
    """Model of each agent: a name, a directory, a .gguf file or a Hub id. One, also as a plain text, is for all num_agents."""
    num_agents: Count | None = None
    """Agents of the team, which all start from the one model; None: one per model."""
    roles: tuple[str, ...] = ()
    """One fixed instruction per agent, in front of each of its prompts (of a list of chat messages: as system message); empty:
    none. For data with a reward; an environment writes its agents' prompts itself. The prompt behind it is the item's "prompt",
    or what the agent's function in formatters writes."""
    shared_weights: bool = False
    """All agents are roles of one set of parameters; else each agent has its own."""
    random_weights: bool = False
    """Start from random weights, other ones for each agent and each seed: of models, config.json and tokenizer.json are enough.
    Without LoRA."""

    def __post_init__(self) -> None:
        if isinstance(self.models, str):
            object.__setattr__(self, "models", (self.models,))
        super().__post_init__()

    @property
    def size(self) -> int:
        """The number of agents."""
        return self.num_agents or len(self.models)


@dataclasses.dataclass(frozen=True, repr=False)
class EnvironmentConfig(Section):
    """An environment by its name, and the arguments of its constructor."""

    name: str
    """A name of `jmarl.make`: of a built-in environment, or module:Class or file.py:Class."""
    options: dict[str, Any] = dataclasses.field(default_factory=dict, hash=False)
    """Keyword arguments of its constructor."""


@dataclasses.dataclass(frozen=True, repr=False)
class TaskConfig(Section):
    """What is played or learned from: an environment, prompts with a reward, or given pairs or texts."""

    constraints = TASK
    paths = ("data", "held_out")

    environment: str | None = None
    """Environment to train in: a name of `jmarl.make`, or module:Class or file.py:Class. None: see data and eval_envs."""
    options: dict[str, Any] = dataclasses.field(default_factory=dict, hash=False)
    """Keyword arguments of the constructor of environment."""
    train_envs: tuple[EnvironmentConfig, ...] = ()
    """Several environments to train in instead of environment, a mixture with equal weights. Each is a name or a dict of name
    and options."""
    eval_envs: tuple[EnvironmentConfig, ...] = ()
    """Environments to evaluate in, and to train in if no other is given. Several are a mixture with equal weights. Each is a
    name or a dict of name and options. Empty: the environments that are trained in."""
    data: str | None = None
    """Prompts, pairs or texts: a file (.json, .jsonl, .csv, .tsv, .parquet, also .gz), a directory saved by `datasets`, or the
    Hub id of a data set. In a YAML file a relative path is first looked for beside that file, as are modules."""
    subset: str | None = None
    """Configuration of the data sets of the Hub, if they have several."""
    split: str = "train"
    """Split to train on, of a data set of the Hub or a saved one."""
    min_reward: float | None = None
    """Leave out texts (algorithm sft) whose sum of rewards is lower; None: none."""
    reward: str | tuple[str, ...] | None = None
    """Reward of the completions of data, as module:function or file.py:function, also with a directory in front, or a list of
    several, whose weighted sum counts; see `jmarl.envs.rewards`. None: data are given pairs or texts."""
    reward_weights: tuple[float, ...] = ()
    """Weights of several reward functions, one for each; empty: all have the same, and they sum to 1."""
    on_error: Literal["raise", "mask"] | float = "raise"
    """What happens when a reward function raises or is late: the run ends (raise), its joint actions do not count (mask), or
    this number takes the place of their reward."""
    timeout: Positive | None = None
    """Seconds that one call of a reward function, or with pool of an environment, may take; None: no limit, in a pool 60."""
    pool: Literal["processes", "ray"] | None = None
    """Where environments and reward functions are called. None: in this process. processes: in pool_workers processes of this
    machine. ray: in pool_workers actors on a cluster of Ray, that of RAY_ADDRESS or of this machine (`ray start --head`); all
    nodes must be able to import what is called. In a pool the calls of an environment run at once, each with a time limit
    (timeout); a lost call is repeated, and then its joint action does not count. A reward function is called with a whole step,
    by one worker."""
    pool_workers: Count = 2
    """Processes or actors of each environment, and of the rewards."""
    max_error_share: Share = 0.5
    """With on_error mask or a number: the run ends if rewards fail on more than this share of the joint actions of the last 5
    calls; 1 never ends it."""
    eval_metrics: str | None = None
    """Further metrics of evaluations, as module:function or file.py:function: (held-out items, their rollout) -> numbers by
    name, which are logged as eval/NAME."""
    formatters: tuple[str, ...] = ()
    """Functions item -> prompt for data, as module:function or file.py:function: one for all agents, or one per agent. For
    prompts of other fields of the item, or that differ in more than an instruction; for an instruction alone, roles are enough.
    Empty: the item's "prompt"."""
    external_transition: str | None = None
    """Writes the prompts of later turns on data, as module:function or file.py:function; see
    `reward_environment.RewardEnvironment`."""
    in_turns: bool = False
    """Agents may write one after another: None in place of a prompt means that an agent does not act in that turn, and the
    reward gets "" as its completion. For agent 1 to read what agent 0 wrote, set num_turns to 2, let the function of agent 1 in
    formatters return None, which is its first turn, and external_transition return [None, the prompt of agent 1]. With
    branching=chain agent 1 writes one completion for each of agent 0; with tree, the default, it writes num_generations for
    each. `jmarl init` writes an example."""
    num_tasks: Count | None = None
    """Train on the first tasks only; None: on all of the data, or 1000 of an environment."""
    held_out: CountOrOff | str = 0
    """Tasks that are evaluated on and never trained on. A number: so many of the environment's split eval, or the last of the
    data. A text: a file, directory or Hub id, as data."""
    held_out_split: str = "test"
    """Split of held_out if that is a data set of the Hub or a saved one."""

    def __post_init__(self) -> None:
        for name in ("train_envs", "eval_envs"):
            if isinstance(value := getattr(self, name), list | tuple):
                object.__setattr__(self, name, tuple(map(_environment, value)))
        super().__post_init__()

    @property
    def trains_in_environments(self) -> bool:
        """Whether environments to train in are named."""
        return self.environment is not None or bool(self.train_envs)

    @property
    def reward_names(self) -> tuple[str, ...]:
        """The reward functions."""
        return (self.reward,) if isinstance(self.reward, str) else self.reward or ()


def _environment(value: Any) -> Any:
    """Return an environment of a file or a flag, which is a name or a dict, as a record."""
    if isinstance(value, str):
        return EnvironmentConfig(value)
    if isinstance(value, Mapping):
        check_names(EnvironmentConfig, value)
        return EnvironmentConfig(**value)
    return value


@dataclasses.dataclass(frozen=True)
class ExperimentConfig:
    """Who plays, what, and how the team learns. `of` and `replace` take settings by their short names:

    cfg = ExperimentConfig.of(models=("a Hub id or a directory",), num_agents=2, environment="math", learning_rate=1e-6)
    result = jmarl.run_experiment(cfg)
    """

    team: TeamConfig
    """Who plays."""
    task: TaskConfig
    """What is played or learned from."""
    train: TrainConfig = TrainConfig()
    """How the team learns."""
    seeds: tuple[int, ...] = ()
    """Train once from each of these seeds, in one program (`train_seeds`); empty: once, from the seed of `train`."""
    experiment_name: str = ""
    """Name of the experiment; `jmarl train` writes to runs/<experiment_name> if there is no output_dir. W&B shows it."""
    description: str = ""
    """What the experiment is for; kept in the run's config.yaml, and shown by W&B."""
    tags: tuple[str, ...] = ()
    """Words to find the run by; kept in the run's config.yaml, and shown by W&B."""
    wandb: dict[str, Any] = dataclasses.field(default_factory=dict, hash=False)
    """Keyword arguments of `wandb.init`, such as project and mode: offline; empty: no W&B."""

    def __post_init__(self) -> None:
        for name in PARTS:
            _check_part(name, getattr(self, name))
        check_fields(self, TOP_SETTINGS)
        more = {"size": self.team.size, "keep_best": self.train.run.keep_best, "seeds": self.seeds}
        more["members"] = self.train.population.members
        require(EXPERIMENT, SimpleNamespace(**vars(self.team), **vars(self.task), **more))

    def with_seeds(self) -> Self:
        """Return a copy with the seeds of a population's members, if there is one and none are given."""
        first, count = self.train.run.seed, self.train.population.members
        return dataclasses.replace(self, seeds=tuple(range(first, first + count))) if count and not self.seeds else self

    @classmethod
    def of(cls, **settings: Any) -> Self:
        """Make a configuration from settings by short names, aliases or names of parts and sections.

        A part is a dataclass or a dict, so that `ExperimentConfig.of(**tree)` reads a YAML file. Raises TypeError for an
        unknown name, with the nearest known one, and for a setting that is given twice.
        """
        whole, by_part = _split(settings)
        whole.setdefault("train", TrainConfig())
        for part, values in by_part.items():
            if part in whole:
                whole[part] = _replace(whole[part], values)
            elif "models" not in values and part == "team":
                raise TypeError("ExperimentConfig needs models: one name, path or Hub id per agent, or one for all agents")
            else:
                whole[part] = PARTS[part](**values)
        missing = [part for part in PARTS if part not in whole]
        if missing:
            names = {"team": "models", "task": "environment, eval_envs or data"}
            raise TypeError(f"ExperimentConfig needs {names[missing[0]]}: its part {missing[0]} is not set")
        return cls(**whole)

    def replace(self, **settings: Any) -> Self:
        """Return a copy with some settings changed; names as for `of`."""
        whole, by_part = _split(settings)
        for part, values in by_part.items():
            whole[part] = _replace(whole.get(part, getattr(self, part)), values)
        return dataclasses.replace(self, **whole)

    def as_dict(self) -> dict[str, Any]:
        """Return the tree of plain values (dicts, lists, texts, numbers) that a YAML or JSON file holds."""
        return plain_values(self)

    def changed_dict(self) -> dict[str, Any]:
        """Return the tree of `as_dict` without settings that have their defaults; `of` reads it as the same configuration."""
        return plain_values(self, only_changed=True)


TOP_SETTINGS = ("seeds", "experiment_name", "description", "tags", "wandb")  # beside the parts
MODULES = (  # settings that name code
    "environment", "train_envs", "eval_envs", "reward", "formatters", "external_transition", "algorithm", "rl_algorithm",
    "eval_metrics", "strangers",
)  # fmt: skip
PARTS: dict[str, type] = {"team": TeamConfig, "task": TaskConfig, "train": TrainConfig}
PART_OF: dict[str, str] = {
    field.name: part for part in ("team", "task") for field in dataclasses.fields(PARTS[part])
} | dict.fromkeys(("algorithm", *SECTIONS, *SECTION_OF, *OTHER_NAMES), "train")


def _split(settings: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Return what replaces whole parts (and the settings beside them), and the settings of each part."""
    whole: dict[str, Any] = {}
    by_part: dict[str, dict[str, Any]] = {}
    for name, value in settings.items():
        if name in TOP_SETTINGS or (name in PARTS and not isinstance(value, Mapping)):
            if name in PARTS:
                _check_part(name, value)
            whole[name] = value
            continue
        if name not in PARTS and name not in PART_OF:
            hint = did_you_mean(name, [*PARTS, *TOP_SETTINGS, *PART_OF]) or "; help(jmarl.ExperimentConfig) lists its settings"
            raise TypeError(f"ExperimentConfig has no setting {name!r}{hint}")
        part = name if name in PARTS else PART_OF[name]
        own = value if name in PARTS else {name: value}
        if part != "train":  # `TrainConfig.of` checks those of train
            check_names(PARTS[part], own)
        twice = by_part.setdefault(part, {}).keys() & own.keys()
        if twice:
            raise TypeError(f"{min(twice)} is set twice, in {part} and outside: give it once")
        by_part[part] |= own
    return whole, by_part


def _check_part(name: str, value: Any) -> None:
    cls = PARTS[name]
    if not isinstance(value, cls):
        raise TypeError(f"{name}={value!r:.60} is not allowed: {name} must be a {cls.__name__}(...)")


def _replace(part: Any, values: Mapping[str, Any]) -> Any:
    return part.replace(**values) if isinstance(part, TrainConfig) else dataclasses.replace(part, **values)


def plain_values(value: Any, only_changed: bool = False) -> Any:
    """Return settings as dicts, lists, texts and numbers. only_changed: without those that have their defaults."""
    if dataclasses.is_dataclass(value):
        values = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        if only_changed:
            values = {field.name: values[field.name] for field in dataclasses.fields(value) if not is_default(value, field)}
        return {name: plain_values(x, only_changed) for name, x in values.items()}
    if isinstance(value, Mapping):
        return {name: plain_values(x, only_changed) for name, x in value.items()}
    if type(value).__module__ == "numpy":  # a number; the command line starts without numpy
        return value.item()
    return [plain_values(x, only_changed) for x in value] if isinstance(value, tuple | list) else value
