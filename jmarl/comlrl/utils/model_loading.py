"""Names of models, at CoMLRL's module path."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jmarl.models.hub.agents import Agent


def infer_model_name(source: Any) -> str | None:
    """Return the name of a model: a name itself, that of a loaded agent, or what a model of transformers was loaded from."""
    if source is None or isinstance(source, str):
        return source
    if isinstance(source, Agent):
        return source.name
    name = getattr(getattr(source, "config", None), "_name_or_path", "")
    return str(name) if name else type(source).__name__


def resolve_model_sources(
    *,
    kind: str,
    model: Any,
    models: Sequence[Any] | None,
    expected_count: int,
    expected_label: str | None = None,
    model_label: str = "model",
) -> tuple[list[Any], str | None]:
    """Return what each of expected_count models is loaded from, and the name of the first.

    model: of all of them; models: a list of one each. Both may be given if they name the same. kind, expected_label,
    model_label: how messages call the list, its length and the one model.
    """
    label = expected_label or f"num_agents ({expected_count})"
    if model is None and models is None:
        raise ValueError(f"give {model_label}= (one name) or {kind}= (a list)")
    if models is None:
        return [model] * expected_count, infer_model_name(model)
    if isinstance(models, str | bytes) or not isinstance(models, Sequence):
        raise ValueError(f"{kind}= is a list of models or names; one is {model_label}=")
    if len(models) != expected_count or None in models:
        raise ValueError(f"{kind}= has {len(models)} entries {list(models)!r:.80}: give one for each of {label}")
    names = [infer_model_name(source) for source in models]
    if model is not None and set(names) != {infer_model_name(model)}:
        raise ValueError(f"{model_label}= {infer_model_name(model)!r} and {kind}= {names} differ: give one of them")
    return list(models), names[0]
