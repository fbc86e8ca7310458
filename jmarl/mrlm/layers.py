"""Read files and flags in jmarl's spelling or in MRLM's, which may be mixed (`training: {learning_rate: 1e-5}`).

Keys of MRLM become settings of jmarl, by the table in `keys`. Keys that share a rule are collected over all sources, and the
rule is applied once all are known. Then nothing of MRLM is left: `config.layers.experiment_config` makes the configuration.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from jmarl.config.experiment import TOP_SETTINGS
from jmarl.config.layers import TREES, Layers, place_of
from jmarl.config.yaml_file import Given, KeyPath, YamlFile, put
from jmarl.mrlm.environment_keys import is_same
from jmarl.mrlm.keys import AGENT_KEYS, GENERATION, KEYS, LISTS, check_tokenizer, count_tasks, count_warmup
from jmarl.mrlm.rules import (
    Ignored,
    Refused,
    Rule,
    UnusedKey,
    Weak,
    policy_env,
    precedence,
    wandb,
)

MADE_BY: dict[str, Rule] = {"options": LISTS["environment"], "wandb": wandb}  # trees that keys of MRLM set too
WITH_CRITIC = ("ppo", "ippo", "mappo")  # algorithms of MRLM's section ppo

ALGORITHM_SECTIONS: dict[str, Callable[[str, str], bool]] = {  # section -> whether it is for an algorithm of a kind
    "ppo": lambda algorithm, kind: algorithm in WITH_CRITIC,
    "grpo": lambda algorithm, kind: kind == "rollouts" and algorithm not in WITH_CRITIC,
    "dpo": lambda algorithm, kind: kind == "pairs",
    "sft": lambda algorithm, kind: kind == "texts",
}

ONE_NAME = {  # keys for one thing, of which the newest counts
    "eval_interval": "eval_every",
    "num_iterations": "num_epochs",
    "episodes_per_iteration": "num_rollouts_per_iteration",
    "torch_dtype": "dtype",
}

HALVES = ("use_bf16", "use_fp16")  # types of half the width, of which one source sets one

GROUP_SIZES = dict.fromkeys(WITH_CRITIC, 1) | {"grpo": 4}  # completions of a task in MRLM, where batch_size counts tasks


class MRLMLayers(Layers):
    """The settings of all sources so far, whose keys are jmarl's or MRLM's.

    `rules` holds the keys that are read together by their rule, `sections` the sections with their places, and `opened` those
    of them that a file has: a flag sets its key and nothing else. `pending` are the sections of algorithms, which are read
    once the algorithm is known. `unused` are keys that change nothing.
    """

    trees = (*TREES, "agents")
    top_keys = (*KEYS, *LISTS, *TOP_SETTINGS)

    def __init__(self) -> None:
        super().__init__()
        self.rules: dict[Rule, dict[str, Given]] = {}
        self.sections: dict[str, str] = {}
        self.opened: set[str] = set()
        self.pending: list[tuple[str, Any, YamlFile, int, bool]] = []
        self.unused: dict[str, str] = {}  # key -> reason
        self.sampled: dict[tuple[str, str], str] = {}  # (place, setting) of a key of sampling -> the key
        self.notes: list[str] = []
        self.is_flag = False

    def add(self, source: YamlFile) -> None:
        self.is_flag = False
        of_flags = self.sections.keys() - self.opened
        super().add(source)
        self.opened |= self.sections.keys() - of_flags

    def add_flag(self, path: str, value: Any, source: str = "--set") -> None:
        self.is_flag = True
        super().add_flag(path, value, source)

    def settings(self, kind_of: Callable[[str], str]) -> dict[str, Given]:
        """Return our settings by short name. kind_of: algorithm -> what it learns from: rollouts, pairs or texts.

        Warns once of all keys that change nothing."""
        algorithms = [name for name in ALGORITHM_SECTIONS if name in self.sections]
        naming = [name for name in algorithms if name in self.opened]
        chosen = "algorithm" in self.own
        if not chosen and len(naming) == 1:  # as in MRLM, the section names it
            self.own["algorithm"] = Given(naming[0], 0, self.sections[naming[0]])
        algorithm = self.own["algorithm"].value if "algorithm" in self.own else "magrpo"
        kind = kind_of(algorithm)
        self._read_pending(algorithm, kind, chosen)
        result, weak = dict(self.own), dict[str, Given]()
        if "training" in self.opened and algorithm in GROUP_SIZES:
            weak["num_generations"] = Given(GROUP_SIZES[algorithm], 0, self.sections["training"])
        for rule, keys in self.rules.items():
            for name, given in self._outputs(rule, keys, kind).items():
                if isinstance(given.value, Weak):
                    weak.setdefault(name, given._replace(value=given.value.value))
                elif name == "wandb" and name in result and result[name].value and result[name].rank < given.rank:
                    result[name] = given._replace(value=self._more_wandb(result[name], keys))
                elif name == "output_dir" and name in result and result[name].rank == given.rank:  # of a file that has both
                    if result[name].value != given.value:
                        self.unused["output_dir"] = f"everything is in {next(iter(keys))}"
                    result[name] = given
                else:
                    put(result, name, given)
        if "temperature" in weak.keys() & result.keys() and weak["temperature"].value != result["temperature"].value:
            self.unused["grpo.temperature"] = "the model has a temperature"
        result = weak | result
        given_pairs = "reward" not in result and ("data" in result or not result.keys() & {"environment", "train_envs"})
        if kind == "texts" or (kind == "pairs" and given_pairs):  # nothing is sampled
            for name in [name for name, given in result.items() if (given.place, name) in self.sampled]:
                self.unused[self.sampled[result.pop(name).place, name]] = f"{algorithm} samples nothing"
        check_tokenizer(result)
        count_tasks(result, algorithm)
        count_warmup(result)
        self._warn()
        return result

    def _read_pending(self, algorithm: str, kind: str, chosen: bool) -> None:
        """Read the sections of algorithms. chosen: whether the algorithm is set, so that sections of others are ignored."""
        rank = self.rank
        for name, values, source, own_rank, is_flag in self.pending:
            self.rank = own_rank
            if ALGORITHM_SECTIONS[name](algorithm, kind):
                for key, x in (values or {}).items():
                    self._mrlm(name, key, x, source, (name, key))
            elif chosen and not is_flag:
                if values is not None:
                    self.unused[name] = f"the algorithm is {algorithm}"
            else:
                place = place_of(source, (name, *(values or {})))
                raise ValueError(f"{place}: the section {name} has no effect for algorithm={algorithm!r}: remove it")
        self.pending, self.rank = [], rank

    def _warn(self) -> None:
        """Show one warning of all that changes nothing or is done in another way."""
        keys = ", ".join(f"{key} ({reason})" for key, reason in self.unused.items())
        parts = [*dict.fromkeys(self.notes), *([f"keys that change nothing here: {keys}"] if keys else [])]
        if parts:
            warnings.warn("; ".join(parts), stacklevel=3)
        self.unused, self.notes = {}, []

    def _more_wandb(self, older: Given, keys: Mapping[str, Given]) -> dict[str, Any]:
        """Return arguments of `wandb.init` with those of newer keys of MRLM, each of which sets one of them."""
        newer = {key: given.value for key, given in keys.items() if given.rank > older.rank}
        on = newer.pop("use_wandb", True)
        return {**older.value, **(wandb(newer, "rollouts")["wandb"] if newer else {})} if on else {}

    def _outputs(self, rule: Rule, keys: Mapping[str, Given], kind: str) -> dict[str, Given]:
        """Return what a rule sets. Each setting has the rank of the newest source that sets or changes it.

        So a key of a new source does not lift settings that come from keys of older ones."""
        values: dict[str, Any] = {}
        origin: dict[str, tuple[int, str]] = {}
        for rank in (ranks := sorted({given.rank for given in keys.values()})):
            last = rank == ranks[-1]
            newest = {key: given for key, given in keys.items() if given.rank == rank}
            new = self._apply(rule, {key: given for key, given in keys.items() if given.rank <= rank}, kind, strict=last)
            if new is None:  # the older keys need the newer ones
                continue
            alone = self._apply(rule, newest, kind, strict=False) or {}
            place = max(given.place for given in newest.values())
            for name, value in new.items():
                again = name in alone and alone[name] == value and not isinstance(value, Weak)
                if name not in values or values[name] != value or again:
                    origin[name] = (rank, place)
            values = new
        return {name: Given(value, *origin[name]) for name, value in values.items()}

    def _apply(self, rule: Rule, keys: Mapping[str, Given], kind: str, strict: bool) -> dict[str, Any] | None:
        """Return the values of a rule. strict: raise its errors and show its warnings; otherwise None for an error."""
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                order = sorted(keys.items(), key=lambda item: (-item[1].rank, precedence(item[0], item[1].value)))
                settings = rule({key: given.value for key, given in order}, kind)
            for warning in caught if strict else ():
                message = warning.message
                if isinstance(message, UnusedKey):
                    self.unused[message.key] = message.reason
                else:
                    self.notes.append(str(message))
            return settings
        except ValueError as error:
            if not strict:
                return None
            places = " and ".join(dict.fromkeys(given.place for given in keys.values()))
            raise ValueError(f"{places}: {error}") from None

    # reading one source

    def read_key(self, key: str, value: Any, source: YamlFile, path: KeyPath) -> None:
        at = place_of(source, path)
        if key == "policy_env":
            try:
                if value is not None:
                    self.unused[key] = policy_env(value)
            except ValueError as error:
                raise ValueError(f"{at}: {error}") from None
        elif key in LISTS:
            self._check_entries(key, value, source, path)
            if key == "environment":
                self._drop_options(value, at)
            put(self.rules.setdefault(LISTS[key], {}), key, Given(value, self.rank, at))
        elif key in KEYS and (isinstance(value, Mapping) or value is None or key == "model"):
            self.sections.setdefault(key, at)
            if isinstance(value, str | list):
                value = {"model_name_or_path": value}
            if not isinstance(value, Mapping | None):
                raise ValueError(f"{at}: {value!r:.60} is no model: give a name, a list with one per role, or a mapping")
            if key in ALGORITHM_SECTIONS:
                self.pending.append((key, value, source, self.rank, self.is_flag))
                return
            for name, x in (value or {}).items():
                self._mrlm(key, name, x, source, (*path, name))
        elif key == "device":
            self._mrlm("model", key, value, source, path)
        else:
            super().read_key(key, value, source, path)

    def read_in_part(self, part: str, name: str, value: Any, source: YamlFile, path: KeyPath) -> None:
        if name in LISTS and part == "task":
            self.read_key(name, value, source, path)
        else:
            super().read_in_part(part, name, value, source, path)

    def _mrlm(self, section: str, key: str, value: Any, source: YamlFile, path: KeyPath) -> None:
        """Read a key of a section of MRLM. None stands for its default."""
        if section == "model" and key == "generation" and isinstance(value, Mapping):
            for name, x in value.items():
                self._mrlm("generation", name, x, source, (*path, name))
            return
        if key not in KEYS[section]:
            raise self.unknown(key, section, KEYS[section], source, path)
        entry, place = KEYS[section][key], place_of(source, path)
        if value is None:
            return
        if isinstance(entry, Refused):
            where = place if source.lines else f"{place}, {key}"
            raise ValueError(f"{where}: {entry.reason}")
        if key in GENERATION and section in ("model", "generation"):
            self.sampled[place, entry if isinstance(entry, str) else "temperature"] = f"{section}.{key}"
        if isinstance(entry, Ignored):
            if value is not False:
                self.unused[f"{section}.{key}"] = entry.reason
        elif isinstance(entry, str):
            value = value.lower() if entry == "algorithm" and isinstance(value, str) and ":" not in value else value
            value = [value] if entry == "models" and not isinstance(value, list) else value
            put(self.own, entry, Given(value, self.rank, place))
        else:
            name, given = ONE_NAME.get(key, key), self.rules.setdefault(entry, {})
            twin = next((other for other in KEYS[section] if other != key and ONE_NAME.get(other, other) == name), None)
            if twin and name in given and given[name].rank == self.rank:
                raise ValueError(f"{place}: {twin} and {key} are the same setting: give one of them")
            halves = [x for other, x in given.items() if other in HALVES and other != key and x.rank == self.rank and x.value]
            if key in HALVES and value and halves:
                raise ValueError(f"{halves[0].place} and {place} are two types: give one of them")
            put(given, name, Given(value, self.rank, place))

    def _check_entries(self, key: str, value: Any, source: YamlFile, path: KeyPath) -> None:
        """Raise an error for unknown keys of agents, whose entries have no other keys than these."""
        for i, entry in enumerate(value if isinstance(value, list) else []):
            for name in entry if isinstance(entry, Mapping) and key == "agents" else ():
                if name not in AGENT_KEYS:
                    raise self.unknown(name, key, AGENT_KEYS, source, (*path, i, name))

    def _drop_options(self, environment: Any, place: str) -> None:
        """Drop the options that an earlier source gives to another environment. Raises ValueError for those of a flag."""
        old, options = self.rules.get(LISTS["environment"], {}).get("environment"), self.own.get("options")
        if old is None or options is None or options.rank == self.rank or is_same(old.value, environment):
            return
        if options.place.startswith("--set"):
            raise ValueError(f"{place}: it replaces the environment with the options of {options.place}: give it before them")
        del self.own["options"]

    def tree(self, key: str) -> Given | None:
        given = self.own.get(key) or (self.rules.get(LISTS[key], {}).get(key) if key in LISTS else None)
        if key in MADE_BY:
            of_rule = self._outputs(MADE_BY[key], self.rules.get(MADE_BY[key], {}), "rollouts").get(key)
            given = max((x for x in (given, of_rule) if x is not None), key=lambda x: x.rank, default=None)
        return given

    def unknown(self, name: Any, where: str, known: Iterable[str], source: YamlFile, path: KeyPath) -> ValueError:
        if name in KEYS and not where:
            keys = ", ".join(KEYS[name])
            return ValueError(f"{place_of(source, path)}: it is a section with keys such as {keys:.80}: write {name}.KEY")
        return super().unknown(name, where, known, source, path)
