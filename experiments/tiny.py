"""Tiny agents of random weights that read and write a few words, for tasks that are learned from scratch in minutes. Not an
experiment."""

from __future__ import annotations

import re
from typing import Any

import jax

from jmarl.models.config import ModelConfig
from jmarl.models.decoder import init_params
from jmarl.models.hub.agents import Agent

STOP = "<stop>"


def tokenizer(pieces: tuple[str, ...], spaced: bool = False) -> Any:
    """Return a tokenizer with one token per piece; it skips all other text.

    spaced: put spaces between the decoded pieces."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({piece: i for i, piece in enumerate((*pieces, STOP))}, unk_token=STOP))
    longest_first = "|".join(re.escape(piece) for piece in sorted(pieces, key=len, reverse=True))
    words.pre_tokenizer = pre_tokenizers.Split(Regex(longest_first), "removed", invert=True)
    if not spaced:
        words.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token=STOP)


def random_agents(
    name: str, words: Any, count: int, seed: int, width: int = 64, model: ModelConfig | None = None
) -> list[Agent]:
    """Return agents with different random weights. words: their tokenizer. model: None for two layers of `width`."""
    model = model or ModelConfig("llama", len(words), width, 2 * width, 2, 4, 4, width // 4, 256)
    keys = jax.random.split(jax.random.key(seed), count)
    return [Agent(f"{name}-{i}", model, jax.device_get(init_params(model, key)), words) for i, key in enumerate(keys)]
