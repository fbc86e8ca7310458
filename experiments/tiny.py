"""Agents of random weights that read and write a few pieces of text, for tasks that are learned from nothing in minutes. No
experiment itself."""

from __future__ import annotations

import re
from typing import Any

import jax

from jmarl.models.config import ModelConfig
from jmarl.models.decoder import init_params
from jmarl.models.hub.agents import Agent

STOP = "<stop>"


def tokenizer(pieces: tuple[str, ...], spaced: bool = False) -> Any:
    """A piece a token; all other text of a prompt is left out. spaced: put a space between the pieces that an agent writes."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.WordLevel({piece: i for i, piece in enumerate((*pieces, STOP))}, unk_token=STOP))
    longest = "|".join(re.escape(piece) for piece in sorted(pieces, key=len, reverse=True))
    made.pre_tokenizer = pre_tokenizers.Split(Regex(longest), "removed", invert=True)
    if not spaced:
        made.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token=STOP)


def random_agents(name: str, words: Any, count: int, seed: int, width: int = 64) -> list[Agent]:
    """So many, of two layers. words: their tokenizer."""
    model = ModelConfig("llama", len(words), width, 2 * width, 2, 4, 4, width // 4, 256)
    keys = jax.random.split(jax.random.key(seed), count)
    return [Agent(f"{name}-{i}", model, jax.device_get(init_params(model, key)), words) for i, key in enumerate(keys)]
