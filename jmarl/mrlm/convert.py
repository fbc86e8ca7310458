"""Convert files, flags and sections in MRLM's keys to settings of jmarl, which keep their places for messages.

    conversion = KeyConversion([(1, file), (2, flag)])
    for rank, source in conversion.sources:  # in our names
        layers.add(rank, source)
    settings = conversion.finish(layers.settings(), kind)

What keys set may depend on those of other sources and on the algorithm, so some of it is known at the end. The keys may be
mixed with ours; in all spellings newer sources override older ones.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from jmarl.config.layers import TreePart, changed_tree, not_in_environment, place_of, unknown_key
from jmarl.config.yaml_file import Given, KeyPath, YamlFile, put
from jmarl.mrlm.environment_keys import ENVIRONMENTS, environments
from jmarl.mrlm.keys import AGENT_KEYS, GENERATION, KEYS, IgnoredKey, One, Only, RefusedKey, policy_env, settings_of_key
from jmarl.mrlm.rules import HALVES, Notes, OptimizerSteps, Rollouts, Rule, Weak, agents, directory, precedence, wandb

PLATFORMS = ("auto", "cpu", "gpu", "tpu", None)  # our names
PLAY_GROUPS = ("grpo",)  # algorithms of which each completion of a group is an episode
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
GROUP_SIZES = dict.fromkeys(WITH_CRITIC, 1) | {"grpo": 4}  # completions of a task in MRLM, where batch_size counts tasks


def is_foreign(source: YamlFile) -> bool:
    """Return whether a source has keys of MRLM."""
    task = source.tree.get("task")
    tree = {**(task if isinstance(task, Mapping) else {}), **source.tree}
    entries = [x for name in ENVIRONMENTS for x in (tree[name] if isinstance(tree.get(name), list) else [tree.get(name)])]
    in_its_words = any(isinstance(x, Mapping) and "name" not in x for x in entries) or tree.get("device") not in PLATFORMS
    return in_its_words or not {*KEYS, "agents", "policy_env"}.isdisjoint(tree)


class KeyConversion:
    """What sources say in keys of MRLM; `sources` is the rest of them, with what is known at once.

    `single` and `rules` hold the keys that are read alone and together, `sections` the sections with their places, and `opened`
    those of them that a file has: a flag sets its key and nothing else. `pending` are the sections of algorithms, which are
    read once the algorithm is known. `notes` is for the one warning at the end.
    """

    def __init__(self, sources: Iterable[tuple[int, YamlFile]]):
        self.single: dict[str, Given] = {}
        self.entries: dict[str, tuple[str, str | One | Only]] = {}  # of the keys in single
        self.rules: dict[Rule, dict[str, Given]] = {}
        self.environments: dict[str, Given] = {}
        self.options_rank = 0  # of the newest source of the setting options
        self.sections: dict[str, str] = {}
        self.opened: set[str] = set()
        self.pending: list[tuple[str, Mapping[str, Any] | None, YamlFile, int]] = []
        self.notes: Notes = {}
        self.sampled: dict[tuple[str, str], str] = {}  # (place, setting) of a key of sampling -> the key
        self.sources = [(rank, self._split(rank, source)) for rank, source in sources]

    @property
    def algorithm(self) -> Given | None:
        """The algorithm if nothing sets it: as in MRLM, the only section of one that a file has names it."""
        names = [name for name in ALGORITHM_SECTIONS if name in self.opened]
        return Given(names[0], 0, self.sections[names[0]]) if len(names) == 1 else None

    # splitting sources

    def _split(self, rank: int, source: YamlFile) -> YamlFile:
        """Keep the keys of MRLM of a source. Returns the rest of it."""
        converted: dict[str, Given] = {}

        def rest(tree: Mapping[str, Any], above: KeyPath) -> dict[str, Any]:
            return {
                key: rest(value, (key,)) if (key, above) == ("task", ()) and isinstance(value, Mapping) else value
                for key, value in tree.items()
                if not self._take(key, value, rank, source, (*above, key), converted)
            }

        return source._replace(tree=rest(source.tree, ()), converted=converted)

    def _take(self, key: str, value: Any, rank: int, source: YamlFile, path: KeyPath, converted: dict[str, Given]) -> bool:
        """Read a key at the top or in our part task. Returns whether nothing of it is left. converted: what it sets at once."""
        at = place_of(source, path)
        if key == "environment" and isinstance(value, TreePart) and value.path[0] == "options":
            return False
        if key in ENVIRONMENTS:
            self._read_environments(key, Given(value, rank, at))
            names = self._apply(environments, {key: self.environments[key]}, "rollouts", strict=False) or {}
            converted |= {name: Given(x, rank, at) for name, x in names.items()}
        elif key == "options":
            self.options_rank = rank
            return False
        elif key == "wandb" and isinstance(value, TreePart):  # it changes what older keys set
            converted |= self._outputs(wandb, self.rules.get(wandb, {}), "rollouts")
            return False
        elif len(path) > 1 or key not in (*KEYS, "agents", "policy_env", "device"):
            return False
        elif key == "agents":
            self._read_agents(Given(value, rank, at), source, path)
        elif key == "policy_env":
            if value is not None:
                self.notes[key] = self._at(at, policy_env, value)
        elif key == "device":
            self._read_key("model", key, value, rank, source, path, converted)
        else:
            self._read_section(key, value, rank, source, converted)
        return True

    def _read_environments(self, key: str, given: Given) -> None:
        old = self.environments.get(key)
        is_ours = old is not None and isinstance(old.value, Mapping) and "name" in old.value
        if isinstance(given.value, TreePart) and key == "environment" and [*given.value.path] == ["name"] and not is_ours:
            given = given._replace(value=given.value.value)
        if isinstance(given.value, TreePart):
            if key == "environment" and (old is None or isinstance(old.value, str) or self.options_rank > old.rank):
                raise not_in_environment(given.value.path)
            given = given._replace(value=changed_tree(old.value if old else None, key, given.value))
        put(self.environments, key, given)

    def _read_agents(self, given: Given, source: YamlFile, path: KeyPath) -> None:
        keys = self.rules.setdefault(agents, {})
        if isinstance(given.value, TreePart):
            given = given._replace(value=changed_tree(keys["agents"].value if keys else None, "agents", given.value))
        for i, entry in enumerate(given.value if isinstance(given.value, list) else []):
            for name in entry if isinstance(entry, Mapping) else ():
                if name not in AGENT_KEYS:
                    raise unknown_key(name, "agents", list(AGENT_KEYS), source, (*path, i, name))
        put(keys, "agents", given)

    def _read_section(self, section: str, value: Any, rank: int, source: YamlFile, converted: dict[str, Given]) -> None:
        at = place_of(source, (section,))
        if section == "model" and isinstance(value, str | list):
            value = {"model_name_or_path": value}
        if not isinstance(value, Mapping | None):
            if section == "model":
                raise ValueError(f"{at}: {value!r:.60} is no model: give a name, a list with one per role, or a mapping")
            raise ValueError(f"{at}: it is a section with keys such as {', '.join(KEYS[section]):.80}: write {section}.KEY")
        self.sections.setdefault(section, at)
        if not source.is_flag:
            self.opened.add(section)
        if section in ALGORITHM_SECTIONS:
            self.pending.append((section, value, source, rank))
            return
        for key, x in (value or {}).items():
            self._read_key(section, key, x, rank, source, (section, key), converted)

    def _read_key(
        self, section: str, key: str, value: Any, rank: int, source: YamlFile, path: KeyPath, converted: dict[str, Given]
    ) -> None:
        """Read a key of a section. None stands for its default."""
        if section == "model" and key == "generation" and isinstance(value, Mapping):
            for name, x in value.items():
                self._read_key("generation", name, x, rank, source, (*path, name), converted)
            return
        if key not in KEYS[section]:
            raise unknown_key(key, section, list(KEYS[section]), source, path)
        entry, place = KEYS[section][key], place_of(source, path)
        if value is None:
            return
        if isinstance(entry, RefusedKey):
            raise ValueError(f"{place if source.lines else f'{place}, {key}'}: {entry.reason}")
        if key in GENERATION and section in ("model", "generation"):
            self.sampled[place, entry if isinstance(entry, str) else "temperature"] = f"{section}.{key}"
        if isinstance(entry, IgnoredKey):
            if value is not False:
                self.notes[f"{section}.{key}"] = entry.reason
            return
        name = ONE_NAME.get(key, key)
        given = self.single if isinstance(entry, str | One | Only) else self.rules.setdefault(entry, {})
        twin = next((other for other in KEYS[section] if other != key and ONE_NAME.get(other, other) == name), None)
        if twin and name in given and given[name].rank == rank:
            raise ValueError(f"{place}: {twin} and {key} are the same setting: give one of them")
        halves = [x for other, x in given.items() if other in HALVES and other != key and x.rank == rank and x.value]
        if key in HALVES and value and halves:
            raise ValueError(f"{halves[0].place} and {place} are two types: give one of them")
        put(given, name, Given(value, rank, place))
        if isinstance(entry, str | One | Only):
            self.entries[name] = (key, entry)
            values: dict[str, Any] = {}
            with contextlib.suppress(ValueError):  # a newer source may set it; see `finish`
                values = settings_of_key(key, entry, value)
            for setting, x in values.items():
                put(converted, setting, Given(x, rank, place))

    # applying the table

    @staticmethod
    def _at(place: str, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function, whose ValueError says where a value was given."""
        try:
            return function(*arguments)
        except ValueError as error:
            raise ValueError(f"{place}: {error}") from None

    def finish(self, own: Mapping[str, Given], kind: str) -> dict[str, Given]:
        """Return all settings. own: those in our names; kind: what the algorithm learns from: rollouts, pairs or texts.

        Warns once of all keys that change nothing."""
        algorithm, chosen = (own["algorithm"].value, own["algorithm"].rank > 0) if "algorithm" in own else ("magrpo", False)
        pending = self._read_pending(algorithm, kind, chosen)
        result, weak = dict(own), dict[str, Given]()
        if "training" in self.opened and algorithm in GROUP_SIZES:
            weak["num_generations"] = Given(GROUP_SIZES[algorithm], 0, self.sections["training"])
        for name, given in [*pending.items(), *self._outputs_of_rules(kind)]:
            if isinstance(given.value, Weak):
                weak.setdefault(name, given._replace(value=given.value.value))
            elif name == "wandb" and name in result and result[name].value and result[name].rank < given.rank:
                result[name] = given._replace(value=self._more_wandb(result[name]))
            elif name == "output_dir" and name in result and result[name].rank == given.rank:  # of a file that has both
                if result[name].value != given.value:
                    self.notes["output_dir"] = f"everything is in {next(iter(self.rules[directory]))}"
                result[name] = given
            else:
                put(result, name, given)
        if "temperature" in weak.keys() & result.keys() and weak["temperature"].value != result["temperature"].value:
            self.notes["grpo.temperature"] = "the model has a temperature"
        result = weak | result
        self._drop_sampling(result, algorithm, kind)
        check_tokenizer(result)
        count_tasks(result, algorithm)
        count_warmup(result)
        self._warn()
        return result

    def _read_pending(self, algorithm: str, kind: str, chosen: bool) -> dict[str, Given]:
        """Return what sections of algorithms set. chosen: whether the algorithm is set, so that those of others are ignored."""
        converted: dict[str, Given] = {}
        for section, values, source, rank in self.pending:
            if ALGORITHM_SECTIONS[section](algorithm, kind):
                for key, x in (values or {}).items():
                    self._read_key(section, key, x, rank, source, (section, key), converted)
            elif chosen and not source.is_flag:
                if values is not None:
                    self.notes[section] = f"the algorithm is {algorithm}"
            else:
                place = place_of(source, (section, *(values or {})))
                raise ValueError(f"{place}: the section {section} has no effect for algorithm={algorithm!r}: remove it")
        self.pending = []
        return converted

    def _outputs_of_rules(self, kind: str) -> list[tuple[str, Given]]:
        """Return what keys set together. Raises ValueError also for what keys alone set."""
        for name, given in self.single.items():
            self._at(given.place, settings_of_key, *self.entries[name], given.value)
        for key, given in self.environments.items():
            self._apply(environments, {key: given}, kind, strict=True)
        return [item for rule, keys in self.rules.items() for item in self._outputs(rule, keys, kind).items()]

    def _outputs(self, rule: Rule, keys: Mapping[str, Given], kind: str) -> dict[str, Given]:
        """Return what a rule sets. Each setting has the rank of the newest source that sets or changes it.

        So a key of a new source does not lift settings that come from keys of older ones."""
        values: dict[str, Any] = {}
        origin: dict[str, tuple[int, str]] = {}
        for rank in (ranks := sorted({given.rank for given in keys.values()})):
            newest = {key: given for key, given in keys.items() if given.rank == rank}
            older = {key: given for key, given in keys.items() if given.rank <= rank}
            new = self._apply(rule, older, kind, strict=rank == ranks[-1])
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
        """Return the values of a rule. strict: raise its errors and keep its notes; otherwise None for an error."""
        order = sorted(keys.items(), key=lambda item: (-item[1].rank, precedence(item[0], item[1].value)))
        values, notes = {key: given.value for key, given in order}, self.notes if strict else {}
        try:
            return self._at(" and ".join(dict.fromkeys(given.place for given in keys.values())), rule, values, kind, notes)
        except ValueError:
            if strict:
                raise
            return None

    def _more_wandb(self, older: Given) -> dict[str, Any]:
        """Return arguments of `wandb.init` with those of newer keys of MRLM, each of which sets one of them."""
        newer = {key: given.value for key, given in self.rules[wandb].items() if given.rank > older.rank}
        on = newer.pop("use_wandb", True)
        return {**older.value, **(wandb(newer, "rollouts", {})["wandb"] if newer else {})} if on else {}

    def _drop_sampling(self, settings: dict[str, Given], algorithm: str, kind: str) -> None:
        """Drop what keys of sampling set where nothing is sampled."""
        given_pairs = "reward" not in settings and ("data" in settings or not settings.keys() & {"environment", "train_envs"})
        if kind == "texts" or (kind == "pairs" and given_pairs):
            for name in [name for name, given in settings.items() if (given.place, name) in self.sampled]:
                self.notes[self.sampled[settings.pop(name).place, name]] = f"{algorithm} samples nothing"

    def _warn(self) -> None:
        """Show one warning of all that changes nothing or is done in another way."""
        keys = ", ".join(f"{key} ({reason})" for key, reason in self.notes.items() if reason)
        sentences = [sentence for sentence, reason in self.notes.items() if not reason]
        if parts := [*sentences, *([f"keys that change nothing here: {keys}"] if keys else [])]:
            warnings.warn("; ".join(parts), stacklevel=3)


def check_tokenizer(settings: dict[str, Given]) -> None:
    """Drop the name of the tokenizer. Raises ValueError unless it is that of the model."""
    given = settings.pop("tokenizer", None)
    if given is not None and ("models" not in settings or given.value not in settings["models"].value):
        raise ValueError(f"{given.place}: each model brings its own tokenizer: remove this key")


def count_tasks(settings: dict[str, Given], algorithm: str) -> None:
    """Replace a number of episodes by that of tasks: in MRLM's GRPO each completion of a group is an episode.

    Raises ValueError if the episodes are not whole groups."""
    given = settings.get("num_prompts")
    if given is None or not isinstance(given.value, Rollouts):
        return
    size = settings["num_generations"].value if algorithm in PLAY_GROUPS and "num_generations" in settings else 1
    if type(size) is not int or size < 1:
        size = 1  # `ExperimentConfig` refuses it
    if given.value.number % size:
        raise ValueError(
            f"{given.place}: {given.value.number} episodes are not groups of {size}: give a multiple of group_size"
        )
    settings["num_prompts"] = given._replace(value=given.value.number // size)


def count_warmup(settings: dict[str, Given]) -> None:
    """Replace optimizer steps of the warm-up by updates, of which each makes num_epochs * num_minibatches steps. Rounds up."""
    given = settings.get("warmup_updates")
    if given is None or not isinstance(given.value, OptimizerSteps):
        return
    counts = [settings[name].value for name in ("num_epochs", "num_minibatches") if name in settings]
    per_update = math.prod(count for count in counts if type(count) is int and count > 0)  # others are refused later
    settings["warmup_updates"] = given._replace(value=-(-given.value.number // per_update))
