"""`TrainConfig`: how a team learns, in sections. The same tree is the Python object, the flags and the YAML file."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import textwrap
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, Self, TypeVar

from jmarl.config.aliases import BY_VALUE, CONVERSIONS, OTHER_NAMES, OTHER_VALUES, REFUSED_VALUES, convert
from jmarl.config.constraints import EPISODES_OF, TRAIN, require
from jmarl.config.preference import Preference
from jmarl.config.run import Run
from jmarl.config.sections import Critic, Episodes, League, LoRA, Loss, Optimizer, Sampling, Section
from jmarl.config.validation import check_names, did_you_mean, explain

C = TypeVar("C")

SECTIONS: dict[str, type] = {
    "sampling": Sampling,
    "episodes": Episodes,
    "loss": Loss,
    "critic": Critic,
    "optimizer": Optimizer,
    "lora": LoRA,
    "preference": Preference,
    "league": League,
    "run": Run,
}
SHORT: dict[str, dict[str, str]] = {  # names that are settings inside their section only
    "league": {"dtype": "snapshot_dtype", "every": "snapshot_every", "sample": "opponents", "share": "opponent_share"}
}
SECTION_OF: dict[str, str] = {field.name: name for name, cls in SECTIONS.items() for field in dataclasses.fields(cls)}


class Explained:
    """The docstring of a class with all settings of `SECTIONS`, for `help`. Written when it is read: it takes their source."""

    def __init__(self, text: str):
        self.text = inspect.cleandoc(text)

    def __get__(self, instance: Any, owner: type) -> str:
        return f"{self.text}\n\n{settings_text()}"


@functools.cache
def settings_text() -> str:
    """Return the settings of all sections: name = default | what is allowed | meaning."""
    lines = []
    for section, cls in SECTIONS.items():
        lines += ["", f"{section}: {inspect.getdoc(cls)}"]
        for name, text in explain(cls).items():
            text = f"    {name} = {text}"
            lines += textwrap.wrap(text, 110, subsequent_indent="        ", break_long_words=False)
    return "\n".join(lines[1:])


def list_settings(cls: type[C]) -> type[C]:
    """Append the settings of all sections to the docstring of a class, for `help`."""
    cls.__doc__ = Explained(cls.__doc__ or "")  # type: ignore[assignment]
    return cls


@list_settings
@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """How a team learns. `of` and `replace` take settings by their short names:

        TrainConfig.of(algorithm="ppo", learning_rate=1e-6)
        TrainConfig(algorithm="ppo", optimizer=Optimizer(learning_rate=1e-6))  # the same

    Settings by section, as name = default | what is allowed | meaning; `jmarl configs settings WORD` finds one by a word:
    """

    algorithm: str = "magrpo"
    """Name of a row of the algorithm table: magrpo, grpo, ippo, madpo, ...; `python -m experiments.algorithms` prints it. Or
    module:name or file.py:name of an AlgorithmRow of your own, or of a loss, which gets the advantages of magrpo."""
    sampling: Sampling = Sampling()
    episodes: Episodes = Episodes()
    loss: Loss = Loss()
    critic: Critic = Critic()
    optimizer: Optimizer = Optimizer()
    lora: LoRA = LoRA()
    preference: Preference = Preference()
    league: League = League()
    run: Run = Run()

    __repr__ = Section.__repr__

    def __post_init__(self) -> None:
        for name, cls in SECTIONS.items():
            if not isinstance(getattr(self, name), cls):
                raise TypeError(f"{name}={getattr(self, name)!r:.60} is not allowed: {name} must be a {cls.__name__}(...)")
        if not isinstance(self.algorithm, str):
            raise TypeError(f"algorithm={self.algorithm!r} is not allowed: algorithm must be of type str")
        settings = {**vars(self.episodes), **vars(self.optimizer), **vars(self.run)}
        require(TRAIN, SimpleNamespace(algorithm=self.algorithm, **settings))
        if self.algorithm in EPISODES_OF:
            object.__setattr__(self, "episodes", dataclasses.replace(self.episodes, **EPISODES_OF[self.algorithm]))

    @classmethod
    def of(cls, **settings: Any) -> Self:
        """Make a configuration from settings by short names, aliases (`config.aliases`) or names of sections.

        A section is a dataclass, or a dict of its settings as in a YAML file: `TrainConfig.of(sampling={"top_p": 0.9})`.
        """
        defaults = {field.name: field.default for field in dataclasses.fields(cls)}
        return cls(**cls._changes(defaults, settings))

    def replace(self, **settings: Any) -> Self:
        """Return a copy with some settings changed; names as for `of`."""
        current = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return dataclasses.replace(self, **self._changes(current, settings))

    @classmethod
    def _changes(cls, current: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields that change, as arguments of the class. current: all fields before."""
        changed: dict[str, Any] = {}
        in_sections: dict[str, dict[str, Any]] = {}
        sections = [value for value in (*current.values(), *settings.values()) if dataclasses.is_dataclass(value)]
        others = functools.reduce(lambda values, section: values | flat(section), sections, dict(current))
        for field, value in by_field(without_sections(settings), set(current), cls.__name__, others).items():
            # `optimizer` is a section, and in it the name of the optimizer. A subclass may have a field of a section's name.
            if field in current and (field != "optimizer" or isinstance(value, Optimizer)):
                changed[field] = value
            else:
                in_sections.setdefault(SECTION_OF[field], {})[field] = value
        for section, values in in_sections.items():
            changed[section] = dataclasses.replace(changed.get(section, current[section]), **values)
        return changed

    def for_seed(self, seed: int, **settings: Any) -> Self:
        """Return the settings of one of several runs (`runs.seeds`): its directory is `seed_S` inside theirs.

        settings: further changes of a subclass, which must be made in the same copy."""
        directory = self.run.output_dir and f"{self.run.output_dir}/seed_{seed}"
        return self.replace(seed=seed, output_dir=directory, progress=False, **settings)

    def eval_sampling(self) -> Sampling:
        """Return how evaluations sample."""
        temperature = self.run.eval_temperature
        return self.sampling if temperature is None else dataclasses.replace(self.sampling, temperature=temperature)

    def eval_episodes(self) -> Episodes:
        """Return the episodes of evaluations, which do not branch and count every turn in full."""
        changes: dict[str, Any] = {}
        if self.episodes.num_turns > 1:
            changes = dict(branching="chain", joint_mode="aligned", gamma=1.0)
        elif self.episodes.forks:
            changes = dict(joint_mode="aligned")
        return dataclasses.replace(self.episodes, **changes)


def without_sections(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with the contents of sections that are dicts in place of the sections.

    Raises TypeError for a name that its section does not have, and for one that is also set outside."""
    dicts = {name: value for name, value in settings.items() if name in SECTIONS and isinstance(value, Mapping)}
    merged = {name: value for name, value in settings.items() if name not in dicts}
    for section, values in dicts.items():
        short = SHORT.get(section, {})
        values = {short.get(str(name), str(name)): value for name, value in values.items()}
        names = [field for field, owner in SECTION_OF.items() if owner == section]
        aliases = [name for name, field in OTHER_NAMES.items() if field in names]
        check_names(SECTIONS[section], values, [*aliases, *BY_VALUE])
        for name, value in values.items():
            if name in merged:
                raise TypeError(f"{name} is set twice, in {section} and outside: give it once")
            merged[name] = value
    return merged


def by_field(
    settings: Mapping[str, Any],
    own: set[str],
    owner: str,
    others: Mapping[str, Any],
    other_names: Mapping[str, str] = OTHER_NAMES,
) -> dict[str, Any]:
    """Return settings by the names of fields.

    Args:
        settings: values by the names of fields or other names.
        own: fields that are in no section.
        owner: the class named in errors.
        others: all settings by field, as they are without these; what a name of TRL means may depend on them.
        other_names: names that are read besides those of fields.

    Raises TypeError for an unknown name, with the nearest known one, and for two names of one field; ValueError for a value of
    another name that has no counterpart here."""
    names: dict[str, str] = {}
    fields: dict[str, Any] = {}
    converted: dict[str, Any] = {}
    for name, value in settings.items():
        if name in BY_VALUE and isinstance(value, list | tuple) and len(value) == 1:
            value = value[0]  # as in TRL's DPO
        if name in REFUSED_VALUES and not isinstance(value, list | tuple | dict) and value in REFUSED_VALUES[name]:
            raise ValueError(f"{name}={value!r} is not allowed: {REFUSED_VALUES[name][value]}")
        if name in BY_VALUE and not isinstance(value, list | tuple | dict) and value in BY_VALUE[name]:
            field, value = BY_VALUE[name][value]
        else:
            field = name if name in own else other_names.get(name, name)
        if field not in own and field not in SECTION_OF:
            meant = did_you_mean(name, [*own, *SECTION_OF, *other_names]) or f"; help({owner}) lists its settings"
            raise TypeError(f"{owner} has no setting {name!r}{meant}")
        if field in names:
            raise TypeError(f"{owner}: {names[field]} and {name} are the same setting, give one of them")
        names[field] = name
        if name in CONVERSIONS and name not in own:
            converted[name] = value
        else:
            fields[field] = OTHER_VALUES[field].get(value, value) if field in OTHER_VALUES else value
    return convert(converted, fields, others)


def flat(config: Any) -> dict[str, Any]:
    """Return all settings of a configuration by their short names, without its sections."""
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    settings = {name: value for name, value in values.items() if not dataclasses.is_dataclass(value)}
    for section in values.values():
        if dataclasses.is_dataclass(section):
            settings |= flat(section)
    return settings
