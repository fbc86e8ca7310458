"""Tokenizers with a padding token, at CoMLRL's module path. Agents do not need one here: they bring their tokenizers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any


def ensure_pad_token(tokenizer: Any) -> Any:
    """Give a tokenizer without a padding token its end token as one, and return it."""
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    if tokenizer.pad_token_id is None:
        raise ValueError("the tokenizer has neither a padding token nor an end token: set tokenizer.pad_token")
    return tokenizer


def ensure_tokenizer(model: Any, tokenizer: Any) -> Any:
    """Return a tokenizer, or that of the model of this name, with a padding token."""
    if tokenizer is None:
        if not isinstance(model, str):
            raise ValueError(f"the tokenizer of a {type(model).__name__} is not known: give tokenizer=, or a model's name")
        tokenizer = _load(model)
    return ensure_pad_token(tokenizer)


def resolve_tokenizers(model: Any, tokenizer: Any, agents: Sequence[Any] | None) -> Any:
    """Return one tokenizer for all agents, or a list of one per agent, each with a padding token."""
    if isinstance(tokenizer, list | tuple):
        if agents is not None and len(tokenizer) != len(agents):
            raise ValueError(f"{len(tokenizer)} tokenizers for {len(agents)} agents: give one for all, or one per agent")
        return [ensure_pad_token(one) for one in tokenizer]
    if tokenizer is None and agents is not None:
        return [ensure_tokenizer(agent, None) for agent in agents]
    return ensure_tokenizer(model, tokenizer)


def apply_tokenizer_specials(tokenizer: Any, models: Iterable[Any]) -> None:
    """Write the padding and end tokens of a tokenizer into the configurations of models of transformers."""
    ensure_pad_token(tokenizer)
    for model in models:
        if model is not None:
            model.config.pad_token_id = tokenizer.pad_token_id
            model.config.eos_token_id = tokenizer.eos_token_id or tokenizer.pad_token_id


def _load(name: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(name)
