"""The base of the configurations of CoMLRL's trainers: all settings of `TrainConfig` in one flat dataclass.

A name of CoMLRL or TRL sets the field with the same meaning, or is converted (`config.aliases`). A name that has no counterpart
is an error that says what to use instead (`RULES`), and an unknown one is an error that names the nearest known one.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import typing
from collections.abc import Mapping
from typing import Annotated, Any, Literal, dataclass_transform

from jmarl.config import SECTION_OF, Count, Positive, Preference, Range, Run, TrainConfig, by_field, check_fields, check_names
from jmarl.config.aliases import OtherNames, fields_of, other_names, same
from jmarl.config.run import Population
from jmarl.config.sections import Critic, Episodes, League, LoRA, Loss, Optimizer, Sampling

ANY, READ = None, ()
DEVICES = (ANY, "mesh and CUDA_VISIBLE_DEVICES choose the devices")
LINEAR_HEAD = "a value head is one linear layer on the last hidden states: leave it out"
TEAM_WRITES = "a comparator completes the prompt of each agent independently"

# Setting -> the values that it may have, and why no others; ANY: it has no effect, and why. A class that has no such field
# refuses it with the same reason. READ: one that has the field translates it.
RULES: dict[str, tuple[tuple[Any, ...] | None, str]] = {
    "advantage_mode": (READ, "choose the trainer instead: MAGRPO (mean), MAREINFORCE (raw), MARLOO (rloo) or MAReMax (max)"),
    **dict.fromkeys(("bf16", "fp16"), (READ, "set compute_dtype='bfloat16'")),
    **dict.fromkeys(("agent_devices", "reference_devices", "comparator_devices", "reward_model_device"), DEVICES),
    "critic_devices": (ANY, "critics are on the devices of the agents; set mesh to use several devices"),
    "eval_batch_size": (ANY, "all evaluation prompts are played in one batch"),
    **dict.fromkeys(("use_environment_step", "environment_steps_per_pair"), (ANY, "the log counts updates")),
    "log_reward_distribution": (ANY, "completions.jsonl.gz has all rewards"),
    **dict.fromkeys(("policy_checkpoint_dir", "preference_replay_dir"), (ANY, "files are in output_dir")),
    **dict.fromkeys(("critic_value_head_hidden_dim", "value_head_hidden_dim"), ((None, 0), LINEAR_HEAD)),
    "reward_model_name": (READ, "pass reward_model= to the trainer"),
    "reward_num_train_epochs": (READ, "set reward_updates"),
    "reward_train_batch_size": (READ, "set batch_size, which updates of the reward model use too"),
    "reward_max_length": ((None,), "the reward model reads whole texts: leave it out, and shorten prompts or max_new_tokens"),
    "reward_freeze_backbone": ((False,), "a reward model learns with all of its weights: set lora_rank to train adapters"),
    "preference_scoring_reward": (("task",), "the reward of the task ranks the completions of a pair: leave it out"),
    "preference_replay_sample_size": (READ, "every update draws batch_size pairs"),
    "comparator_generation_mode": (("decentralized",), TEAM_WRITES),
    "comparator_centralized_agent_index": ((0,), TEAM_WRITES),
    "comparator_api_key": (READ, "set the environment variable COMPARATOR_API_KEY"),
    "comparator_api_timeout": (ANY, "a request has 120 seconds, three times"),
    "comparator_api_max_n_per_request": (ANY, "one request asks for all completions of a prompt"),
}

# Settings whose texts CoMLRL reads in any case -> value -> its other words for it.
WORDS: dict[str, dict[str, str]] = {
    **dict.fromkeys(("joint_mode", "critic_type", "advantage_mode", "parallel_training", "pair_selection"), {}),
    "rl_algorithm": {"mareinforce": "mareforce"},
    "comparator_policy": {
        "current": "self online current_copy current-offload current_offload copy online_copy",
        "model": "external comparator reference ref",
        "history": "checkpoint previous previous_iteration",
        "api": "http endpoint",
    },
    "comparator_generation_mode": {
        "decentralized": "decentralised multi_agent multi-agent",
        "centralized": "centralised single_agent single-agent",
    },
    "preference_replay_mode": {
        "current": "latest new",
        "nearest_k": "recent_k last_k k",
        "lambda_decay": "lambda td_lambda td-lambda",
        "all": "all_history",
    },
    "preference_scoring_reward": {"task": "oracle environment env", "reward_model": "model learned"},
}


@other_names
class TrainerNames(OtherNames):
    """Other names of settings of trainers: this one counts prompts in CoMLRL's documents, and in TRL something else."""

    per_device_train_batch_size: int = same("num_prompts")


OTHER_NAMES = fields_of(TrainerNames)


def usual_value(name: str, value: Any) -> Any:
    """Return a setting's value as it is written here."""
    if name not in WORDS or not isinstance(value, str):
        return value
    value = value.strip().lower()
    return next((usual for usual, words in WORDS[name].items() if value in words.split()), value)


@dataclass_transform(kw_only_default=True, frozen_default=True)
class Declared:
    """Makes each subclass a frozen dataclass of keyword arguments whose constructor also takes the names of `OTHER_NAMES`.

    algorithm: the default of that setting, and the name of its directory of output."""

    def __init_subclass__(cls, algorithm: str | None = None) -> None:
        if algorithm is not None:
            cls.__annotations__ = {"algorithm": "str", "output_dir": "str"} | inspect.get_annotations(cls)
            cls.algorithm, cls.output_dir = algorithm, vars(cls).get("output_dir", f"runs/{algorithm}")
        own_init = "__init__" in vars(cls)
        init = dataclasses.dataclass(frozen=True, kw_only=True)(cls).__init__
        if own_init:  # of a user, which calls the one that is made here
            return

        @functools.wraps(init)
        def init_with_other_names(self: Any, **settings: Any) -> None:
            init(self, **cls.rename(settings))

        del init_with_other_names.__wrapped__  # type: ignore[attr-defined]  # pdoc would read its types, names of other modules
        init_with_other_names.__signature__ = cls.signature()  # type: ignore[attr-defined]
        cls.__init__ = init_with_other_names  # type: ignore[method-assign]

    @classmethod
    def defaults(cls) -> dict[str, Any]:
        """Return the default of each setting."""
        return {field.name: field.default for field in dataclasses.fields(cls)}  # type: ignore[arg-type]

    @classmethod
    def signature(cls) -> inspect.Signature:
        """Return that of the constructor: all fields and, for editors and notebooks, the names of `OTHER_NAMES`."""
        kind = inspect.Parameter.KEYWORD_ONLY
        try:
            hints = typing.get_type_hints(cls)
        except NameError:  # a user's subclass names a type that is not there at run time
            hints = {field.name: field.type for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
        parameters = {
            name: inspect.Parameter(name, kind, default=default, annotation=hints[name])
            for name, default in cls.defaults().items()
        }
        for name, field in OTHER_NAMES.items():
            parameters.setdefault(name, parameters[field].replace(name=name))
        return inspect.Signature([inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY), *parameters.values()])

    @classmethod
    def rename(cls, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Return settings by field name. Raises TypeError for unknown and refused names, and for two names of one field."""
        others = cls.defaults()
        for name in settings:
            if name in RULES and name not in others:
                raise TypeError(f"{cls.__name__}: {name} is not a setting here; {RULES[name][1]}")
        check_names(cls, settings, [*OTHER_NAMES, *RULES])
        usual = {name: usual_value(name, value) for name, value in settings.items()}
        return by_field(usual, set(others), cls.__name__, others, OTHER_NAMES)


class TrainerConfig(
    Declared, Sampling, Episodes, Loss, Critic, Optimizer, LoRA, Preference, League, Population, Run, TrainerNames
):
    """Settings of a trainer: all settings of `TrainConfig` and those below. The names of `OTHER_NAMES` can be set and read too.

    The defaults are those of CoMLRL 1.4.3 if it has the setting (20 epochs, learning rate 5e-6, 4 generations of 256 tokens,
    temperature 0.6, top-p 0.6, top-k 50), so that a script that leaves them out describes the same run. Three differ: num_turns
    is 1 (CoMLRL: 2), num_prompts is 1 (CoMLRL: 2), and advantages are not divided by their std, which is a setting of its own
    here (advantage_scale). Such narrow sampling explores little, and it samples from another distribution than the one that is
    scored: temperature=1, top_p=1, top_k=0 gives the exact policy gradient.
    """

    algorithm: str = "magrpo"
    num_updates: Annotated[int, Range(0, note="0 counts epochs")] = 0
    """Updates of the team; 0: num_train_epochs * ceil(items / num_prompts)."""
    joint_mode: Literal["aligned", "align", "cross", "crossed", "counterfactual"] = "aligned"  # pyright: ignore
    """As in `Episodes`; CoMLRL writes align."""
    num_generations: Count = 4
    max_new_tokens: Count = 256
    temperature: Annotated[float, Range(0, note="0 is greedy")] = 0.6
    top_k: Annotated[int, Range(0, note="0 is off")] = 50
    top_p: Annotated[float, Range(0, 1, low_open=True, note="1 is off")] = 0.6
    learning_rate: Positive | tuple[Positive, ...] = 5e-6
    log_every: Count = 50
    num_train_epochs: Positive = 20
    """Passes over the data set."""
    num_agents: Count | None = None
    """Agents of the team; None: the number of agents=, or 2 with model=."""
    external_prompt_passthrough: bool = False
    """The transition's texts are the prompts as they are; False: they take the place of the item's prompt in the formatters."""
    eval_num_samples: Count | None = None
    """Evaluate on the first items of eval_dataset only; None: on all."""

    def __post_init__(self) -> None:
        if self.top_k is None:  # CoMLRL's scripts switch it off so
            object.__setattr__(self, "top_k", 0)
        if self.num_updates == -1:
            object.__setattr__(self, "num_updates", 0)
        for name, (allowed, reason) in RULES.items():
            if allowed and vars(self).get(name, allowed[0]) not in allowed:
                raise ValueError(f"{name}={getattr(self, name)!r} is not allowed: {reason}")
        check_fields(self)
        self._with_updates(self.num_updates or 10**9)  # raises for settings that do not fit each other

    @property
    def resolved_algorithm(self) -> str:
        """The row of the table that trains the team."""
        return self.algorithm

    def __getattr__(self, name: str) -> Any:  # called only for names that are neither fields nor other names
        raise AttributeError(f"{type(self).__name__} has no setting {name!r}")

    def train_config(self, num_items: int) -> TrainConfig:
        """Return the configuration of the run on a data set of `num_items` items."""
        return self._with_updates(self.num_updates or self.count_updates(num_items), num_items)

    def run_settings(self, num_items: int) -> dict[str, Any]:
        """Return the settings of `TrainConfig` for a data set of `num_items` items, by their short names."""
        return {name: getattr(self, name) for name in SECTION_OF}

    def count_updates(self, num_items: int) -> int:
        """Return the number of updates in `num_train_epochs` passes over the data set. Some algorithms count differently."""
        return math.ceil(self.num_train_epochs * math.ceil(num_items / self.num_prompts))

    def _with_updates(self, num_updates: int, num_items: int = 1) -> TrainConfig:
        settings = self.run_settings(num_items) | {"num_updates": num_updates}
        return TrainConfig.of(algorithm=self.resolved_algorithm, **settings)
