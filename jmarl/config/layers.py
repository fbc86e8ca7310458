"""Join settings of several sources, each of which overrides the ones before: files, then flags.

A source spells a setting in the tree of `ExperimentConfig` (`optimizer: {learning_rate: 1e-5}`), by its short name
(`learning_rate: 1e-5`) or by an alias. All become one setting, so that a flag in one spelling overrides a file in another one.
Errors name the file and the line. A subclass may read further keys: it overrides `read_key` and what that calls.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jmarl.config.aliases import CONVERSIONS, OTHER_NAMES
from jmarl.config.experiment import MODULES, PART_OF, PARTS, TOP_SETTINGS, ExperimentConfig
from jmarl.config.train_config import SECTION_OF, SECTIONS, by_field
from jmarl.config.validation import did_you_mean
from jmarl.config.yaml_file import Given, KeyPath, YamlFile, put

TREES = ("options", "wandb", "chat_template_kwargs", "train_envs", "eval_envs", "environment")  # with content of any keys
FLAGS = "flags"  # the place of settings of flags with names of their own, which say what they are
OUTSIDE = ("device", "processes")  # settings of the command line alone, and what the processes are compared with


class Layers:
    """The settings of all sources so far: `own`, by short name.

    Class attributes, which a subclass may extend: `trees`, settings whose values are lists or mappings of any content, and
    `top_keys`, keys at the top of a source that are no settings of a part."""

    trees: tuple[str, ...] = TREES
    top_keys: tuple[str, ...] = TOP_SETTINGS

    def __init__(self) -> None:
        self.own: dict[str, Given] = {}
        self.rank = 0

    def add(self, source: YamlFile) -> None:
        """Add a file, whose settings override those of earlier sources."""
        self.rank += 1
        for key, value in source.tree.items():
            self.read_key(str(key), value, source, (key,))

    def add_flag(self, path: str, value: Any, source: str = "--set") -> None:
        """Add the value of `--set PATH=VALUE`. PATH goes into mappings by key and into lists by number.

        source: what messages call it."""
        self.rank += 1
        keys = path.split(".")
        depth = next((i for i, key in enumerate(keys) if key in self.trees), len(keys))
        if depth < len(keys) - 1:
            value = self._changed_tree(keys[depth], keys[depth + 1 :], value)
            keys = keys[: depth + 1]
        for key in reversed(keys[1:]):
            value = {key: value}
        self.read_key(keys[0], value, YamlFile(f"{source} {path}", {}, {}), (keys[0],))

    # reading one source

    def read_key(self, key: str, value: Any, source: YamlFile, path: KeyPath) -> None:
        """Read a key at the top of a source."""
        if key in PARTS and isinstance(value, Mapping):
            for name, x in value.items():
                self.read_in_part(key, name, x, source, (*path, name))
        elif key in TOP_SETTINGS:
            if value is None and key in ("experiment_name", "description", "tags"):
                return
            put(self.own, key, Given(value, self.rank, place_of(source, path)))
        else:
            self.read_in_part(PART_OF.get(key, ""), key, value, source, path)

    def read_in_part(self, part: str, name: str, value: Any, source: YamlFile, path: KeyPath) -> None:
        """Read a setting of a part of `ExperimentConfig`, or of a section of its part train."""
        if name in SECTIONS and isinstance(value, Mapping):
            for field, x in value.items():
                if SECTION_OF.get(OTHER_NAMES.get(field, str(field))) not in (name, None):
                    fields = [field for field, section in SECTION_OF.items() if section == name]
                    raise self.unknown(field, name, fields, source, (*path, field))
                self._setting("train", field, x, source, (*path, field))
        else:
            self._setting(part, name, value, source, path)

    def _setting(self, part: str, name: str, value: Any, source: YamlFile, path: KeyPath) -> None:
        if PART_OF.get(name) != part or not part:
            known = [n for n, p in PART_OF.items() if not part or p == part]
            raise self.unknown(name, part, known if part else [*known, *self.top_keys], source, path)
        place = place_of(source, path)
        if name in CONVERSIONS:
            put(self.own, OTHER_NAMES[name], Given(value, self.rank, place, name))
            return
        if part == "train" and name != "algorithm":
            value = tuple(value) if isinstance(value, list) else value  # hashable
            [(name, value)] = by_field({name: value}, {"algorithm"}, ExperimentConfig.__name__, {}).items()
        put(self.own, name, Given(value, self.rank, place))

    def tree(self, key: str) -> Given | None:
        """Return the value so far of a setting in `trees`."""
        return self.own.get(key)

    def _changed_tree(self, key: str, path: list[str], value: Any) -> Any:
        """Return the value of a setting in `trees` with one of its parts changed."""
        given, options = self.tree(key), self.own.get("options")
        if key == "environment" and (given is None or isinstance(given.value, str) or (options and options.rank > given.rank)):
            name = ".".join(["options", *path])
            raise ValueError(f"--set {'.'.join([key, *path])}: the environment's options are not in environment: set {name}")
        top: Any = copy.deepcopy(given.value) if given and given.value is not None else {}
        part = top
        for i, name in enumerate(path):
            index: Any = int(name) if isinstance(part, list) and name.isdigit() else name
            if not (isinstance(part, dict) or (isinstance(part, list) and index in range(len(part)))):
                raise ValueError(f"--set {'.'.join([key, *path])}: there is no {'.'.join([key, *path[: i + 1]])} to set")
            if i == len(path) - 1:
                part[index] = value
            else:
                part = part.setdefault(index, {}) if isinstance(part, dict) else part[index]
        return top

    def unknown(self, name: Any, where: str, known: Iterable[str], source: YamlFile, path: KeyPath) -> ValueError:
        """Return the error for an unknown key. where: the part or section that it is in; known: the keys of that."""
        hint = did_you_mean(str(name), list(known))
        if not hint and name in PART_OF:
            hint = f"; {name} is a setting outside of {where}"
        inside = f" in {where}" if where else ""
        return ValueError(f"{place_of(source, path)}: unknown key{inside}{hint or '; it has no effect'}")


def place_of(source: YamlFile, path: KeyPath) -> str:
    """Return where a key is: of a file its line too."""
    return f"{source.place(path)}: {'.'.join(map(str, path))}" if source.lines else source.name


def experiment_config(settings: Mapping[str, Given]) -> ExperimentConfig:
    """Return the configuration of settings by short name. Errors about a value say where it was given."""
    values = {given.name or name: given.value for name, given in settings.items() if name not in OUTSIDE}
    if not values.get("models"):
        raise ValueError("no model is given: set model, or a list of models (or agents), one per role")
    if not any(values.get(name) for name in ("environment", "train_envs", "eval_envs", "data")):
        raise ValueError("nothing to learn from is given: set environment, train_envs, eval_envs or data (dataset)")
    try:
        return ExperimentConfig.of(**values)
    except (ValueError, TypeError) as error:
        name = str(error).partition("=")[0]
        name = OTHER_NAMES.get(name, name)
        if name in settings:
            raise type(error)(f"{settings[name].place}: {error}") from error
        raise


def located(given: Mapping[str, Given], folders: Sequence[Path]) -> dict[str, Given]:
    """Return settings that say where their files and modules are, if they are beside a YAML file.

    Other relative paths and modules, and those of flags, belong to the current directory.

    folders: those of the YAML files, the last file first."""

    def path(name: str, places: Sequence[Path]) -> str:
        return next((str(place / name) for place in places if name and (place / name).exists()), name)

    def placed(value: Any, find: Callable[[str, Sequence[Path]], str], places: Sequence[Path]) -> Any:
        if isinstance(value, Mapping):  # an environment with its options
            return {key: placed(x, find, places) if key == "name" else x for key, x in value.items()}
        if isinstance(value, list | tuple):
            return [placed(x, find, places) for x in value]
        return find(value, places) if isinstance(value, str) else value

    finders = dict.fromkeys(MODULES, located_name) | dict.fromkeys(("data", "held_out", "models"), path)
    return {
        name: x._replace(value=placed(x.value, finders[name], folders_of(x.place, folders))) if name in finders else x
        for name, x in given.items()
    }


def folders_of(place: str, folders: Sequence[Path]) -> Sequence[Path]:
    """Return the folders that files and modules of a setting may be in, besides the current one. place: where it was given."""
    folders = [folder for folder in folders if folder != Path.cwd()]
    own = Path(os.path.abspath(place.rpartition(", line ")[0])).parent
    return () if place == FLAGS or place.startswith("--") else [own] if own in folders else folders


def located_name(name: str, folders: Sequence[Path]) -> str:
    """Return a name of `import_object` with the first folder that has its file in front."""
    directory, _, module = name.rpartition(":")[0].rpartition("/")
    if not module or directory.startswith("/") or module.startswith("jmarl."):
        return name
    parts = module.replace(".", "/")
    ends = (module,) if module.endswith(".py") else (f"{parts}.py", f"{parts}/__init__.py")
    return next((f"{x}/{name}" for x in folders if any((x / directory / end).is_file() for end in ends)), name)
