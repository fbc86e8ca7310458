"""Join settings of several sources, each of which overrides the ones before: files, then flags.

A source spells a setting in the tree of `ExperimentConfig` (`optimizer: {learning_rate: 1e-5}`), by its short name
(`learning_rate: 1e-5`) or by an alias. All become one setting, so that a flag in one spelling overrides a file in another one.
Errors name the file and the line. Keys of other projects are converted before: a source brings what they set (`converted`).
"""

import copy
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jmarl.config.aliases import CONVERSIONS, OTHER_NAMES
from jmarl.config.experiment import MODULES, PART_OF, PARTS, TOP_SETTINGS, ExperimentConfig
from jmarl.config.train_config import SECTION_OF, SECTIONS, SHORT, by_field
from jmarl.config.validation import did_you_mean
from jmarl.config.yaml_file import Given, KeyPath, YamlFile, put

NUM_HELD_OUT = 20
TREES = ("options", "wandb", "chat_template_kwargs", "perturb", "train_envs", "eval_envs", "environment")  # with any keys
FLAGS = "flags"  # the place of settings of flags with names of their own, which say what they are
OUTSIDE = ("device", "processes")  # settings of the command line alone, and what the processes are compared with


class TreePart(NamedTuple):
    """The value of a part of a setting in `TREES`. path: keys of mappings and numbers of list items that lead to it."""

    path: Sequence[str]
    value: Any


def flag_source(path: str, value: Any, name: str = "--set") -> YamlFile:
    """Return `--set PATH=VALUE` as a source. PATH goes into mappings by key and into lists by number.

    name: what messages call the flag."""
    keys = path.split(".")  # agents: a list in files of MRLM
    pairs = enumerate(zip(keys, keys[1:], strict=False))
    depth = next((i for i, (key, x) in pairs if key in TREES or (key == "agents" and x.isdigit())), len(keys))
    if depth < len(keys):
        keys, value = keys[: depth + 1], TreePart(keys[depth + 1 :], value)
    for key in reversed(keys[1:]):
        value = {key: value}
    return YamlFile(f"{name} {path}", {keys[0]: value}, {}, is_flag=True)


class Layers:
    """The settings of all sources so far: `own`, by short name.

    other_keys: those of other projects, which hints for unknown keys may name."""

    def __init__(self, other_keys: Iterable[str] = ()) -> None:
        self.own: dict[str, Given] = {}
        self.other_keys = tuple(other_keys)
        self.rank = 0

    def add(self, rank: int, source: YamlFile) -> None:
        """Add a source, whose settings override those of sources of a lower rank."""
        self.rank = rank
        for name, given in source.converted.items():
            self._put(name, given)
        for key, value in source.tree.items():
            self._read_key(str(key), value, source, (key,))

    def settings(self) -> dict[str, Given]:
        """Return all settings, with environments as dicts of name and options.

        Evaluations in other environments than those of training have `NUM_HELD_OUT` tasks by default."""
        result = {name: given for name, given in self.own.items() if name != "environment" or given.value is not None}
        for name in result.keys() & {"train_envs", "eval_envs"}:
            entries = result[name].value if isinstance(result[name].value, list) else [result[name].value]
            result[name] = result[name]._replace(value=[environment_of(entry, result[name].place) for entry in entries])
        if has(result, "eval_envs") and (has(result, "train_envs") or has(result, "environment")):
            result.setdefault("held_out", Given(NUM_HELD_OUT, 0, result["eval_envs"].place))
        return result

    def _read_key(self, key: str, value: Any, source: YamlFile, path: KeyPath) -> None:
        """Read a key at the top of a source."""
        if key in PARTS and isinstance(value, Mapping):
            for name, x in value.items():
                self._read_in_part(key, name, x, source, (*path, name))
        elif key in (*TOP_SETTINGS, "device"):
            if value is None and key in ("experiment_name", "description", "tags", "device"):
                return
            self._put(key, Given(value, self.rank, place_of(source, path)))
        else:
            self._read_in_part(PART_OF.get(key, ""), key, value, source, path)

    def _read_in_part(self, part: str, name: str, value: Any, source: YamlFile, path: KeyPath) -> None:
        """Read a setting of a part of `ExperimentConfig`, or of a section of its part train."""
        if name in SECTIONS and isinstance(value, Mapping):
            for field, x in value.items():
                if SECTION_OF.get(OTHER_NAMES.get(field, str(field))) not in (name, None):
                    fields = [field for field, section in SECTION_OF.items() if section == name]
                    raise unknown_key(field, name, fields, source, (*path, field))
                self._read_setting("train", SHORT.get(name, {}).get(str(field), str(field)), x, source, (*path, field))
        else:
            self._read_setting(part, name, value, source, path)

    def _read_setting(self, part: str, name: str, value: Any, source: YamlFile, path: KeyPath) -> None:
        if PART_OF.get(name) != part or not part:
            known = [n for n, p in PART_OF.items() if not part or p == part]
            raise unknown_key(name, part, known if part else [*known, *TOP_SETTINGS, *self.other_keys], source, path)
        place = place_of(source, path)
        if name in CONVERSIONS:
            put(self.own, OTHER_NAMES[name], Given(value, self.rank, place, name))
            return
        if part == "train" and name != "algorithm":
            value = tuple(value) if isinstance(value, list) else value  # hashable
            [(name, value)] = by_field({name: value}, {"algorithm"}, ExperimentConfig.__name__, {}).items()
        self._put(name, Given(value, self.rank, place))

    def _put(self, name: str, given: Given) -> None:
        """Set a setting, a part of one, or an environment with its options."""
        if isinstance(given.value, TreePart):
            name, given = self._changed(name, given)
        if name == "environment":
            one = environment_of(given.value, given.place) if given.value is not None else {"name": None, "options": {}}
            given = given._replace(value=one["name"])
            self._drop_options(given)
            if one["options"]:
                put(self.own, "options", given._replace(value=one["options"]))
        put(self.own, name, given)

    def _changed(self, name: str, given: Given) -> tuple[str, Given]:
        """Return the setting that a part of one changes, and its value."""
        keys, value = given.value
        if name == "environment":
            if keys[0] == "name" and len(keys) == 1:
                options = self.own["options"].value if "options" in self.own else {}
                return name, given._replace(value={"name": value, "options": options})
            if keys[0] != "options":
                raise not_in_environment(keys)
            name, keys = "options", keys[1:]
        old = self.own.get(name)
        return name, given._replace(
            value=changed_tree(old.value if old else None, name, TreePart(keys, value)) if keys else value
        )

    def _drop_options(self, environment: Given) -> None:
        """Drop the options that an earlier source gives to another environment, or as parts of its own entry.

        Raises ValueError for those of a flag."""
        old, options = self.own.get("environment"), self.own.get("options")
        if old is None or options is None or options.rank == environment.rank:
            return
        if options.place != old.place:
            if old.value == environment.value:
                return
            if options.place.startswith("--set"):
                raise ValueError(
                    f"{environment.place}: it replaces the environment with the options of {options.place}: give it before them"
                )
        del self.own["options"]


def has(settings: Mapping[str, Given], name: str) -> bool:
    """Return whether a setting is given and not empty."""
    return name in settings and bool(settings[name].value)


def environment_of(entry: Any, place: str) -> dict[str, Any]:
    """Return an environment, a name or a mapping with one, as a dict of its name and options."""
    if isinstance(entry, str):
        return {"name": entry, "options": {}}
    if not isinstance(entry, Mapping) or "name" not in entry:
        raise ValueError(f"{place}: {entry!r:.60} is no environment: give its name, or a mapping of its name and options")
    if unknown := entry.keys() - {"name", "options"}:
        raise ValueError(f"{place}: an environment with a name has options, and no {min(unknown)}")
    return {"name": entry["name"], "options": dict(entry.get("options") or {})}


def not_in_environment(path: Sequence[str]) -> ValueError:
    """Return the error for a part of the environment that is one of its options."""
    name = ".".join(["options", *path])
    return ValueError(f"--set {'.'.join(['environment', *path])}: the environment's options are not in environment: set {name}")


def changed_tree(old: Any, key: str, part: TreePart) -> Any:
    """Return the value of a setting in `TREES` with one of its parts changed. old: the value before, or None."""
    tree: Any = copy.deepcopy(old) if old is not None else {}
    at, path = tree, part.path
    for i, name in enumerate(path):
        index: Any = int(name) if isinstance(at, list) and name.isdigit() else name
        if not (isinstance(at, dict) or (isinstance(at, list) and index in range(len(at)))):
            raise ValueError(f"--set {'.'.join([key, *path])}: there is no {'.'.join([key, *path[: i + 1]])} to set")
        if i == len(path) - 1:
            at[index] = part.value
        else:
            at = at.setdefault(index, {}) if isinstance(at, dict) else at[index]
    return tree


def unknown_key(name: Any, where: str, known: Sequence[str], source: YamlFile, path: KeyPath) -> ValueError:
    """Return the error for an unknown key. where: the part or section that it is in; known: the keys of that."""
    hint = did_you_mean(str(name), known)
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

    def module_or_path(name: str, places: Sequence[Path]) -> str:
        return located_name(name, places) if ":" in name else path(name, places)

    finders = dict.fromkeys(MODULES, located_name) | dict.fromkeys(("data", "held_out", "models"), path)
    finders["strangers"] = module_or_path
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
