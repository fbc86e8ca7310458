"""Settings with the places where they were given, and those that follow from several of MRLM's keys together."""

from __future__ import annotations

from typing import Any, NamedTuple

from jmarl.config.mrlm_rules import Rollouts, Steps


class Given(NamedTuple):
    """A value and where it was given."""

    value: Any
    rank: int  # number of the source: higher ones override
    place: str  # for messages


def put(settings: dict[str, Given], name: str, given: Given) -> None:
    """Set a value that overrides those of earlier sources. Raises ValueError for two different values of one source."""
    old = settings.get(name)
    if old is not None and old.rank == given.rank and old.value != given.value:
        raise ValueError(f"{old.place} and {given.place} both set {name}: give one of them")
    if old is None or old.rank <= given.rank:
        settings[name] = given


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
    size = settings["num_generations"].value if algorithm == "grpo" and "num_generations" in settings else 1
    if given.value.number % size:
        raise ValueError(
            f"{given.place}: {given.value.number} episodes are not groups of {size}: give a multiple of group_size"
        )
    settings["num_prompts"] = given._replace(value=given.value.number // size)


def count_warmup(settings: dict[str, Given]) -> None:
    """Replace optimizer steps of the warm-up by updates, of which each makes num_epochs * num_minibatches steps. Rounds up."""
    given = settings.get("warmup_updates")
    if given is None or not isinstance(given.value, Steps):
        return
    per_update = 1
    for name in ("num_epochs", "num_minibatches"):
        per_update *= settings[name].value if name in settings else 1
    settings["warmup_updates"] = given._replace(value=-(-given.value.number // per_update))
