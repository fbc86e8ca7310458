"""Whether a tokenizer belongs to a model: each of its tokens needs a row in the model's embeddings.

Some tokenizers have special tokens that their model does not have: that of Gemma 3 1B, which reads no images, has one for
images. Such tokens are taken out of the tokenizer, so that their spelling is text as any other, and no prompt has them.
"""

from __future__ import annotations

import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import Any

from jmarl.models.config import ModelConfig
from jmarl.models.hub.weight_files import read_json, write_json

ROLES = ("bos_token", "eos_token", "unk_token", "pad_token")


def tokenizer_for(config: ModelConfig, tokenizer: Any, where: str) -> Any:
    """Return the tokenizer, without the special tokens that the model does not have.

    Raises ValueError if it needs one of them, or has other tokens that the model does not have. where: begins the message."""
    beyond = check_vocabulary(config, tokenizer, where)
    return without_tokens(tokenizer, beyond) if beyond else tokenizer


def check_vocabulary(config: ModelConfig, tokenizer: Any, where: str) -> set[str]:
    """Return the special tokens that the model does not have. Raises ValueError as `tokenizer_for`."""
    vocabulary, added = tokenizer.get_vocab(), tokenizer.added_tokens_decoder
    beyond = {token: i for token, i in vocabulary.items() if i >= config.vocab_size}
    roles, template = {getattr(tokenizer, role) for role in ROLES}, str(tokenizer.chat_template or "")
    if any(i not in added or not added[i].special or token in roles or token in template for token, i in beyond.items()):
        size = max(vocabulary.values()) + 1
        raise ValueError(f"{where}: the tokenizer has {size} tokens but the model's vocabulary only {config.vocab_size}")
    return {*beyond}


def without_tokens(tokenizer: Any, tokens: Collection[str]) -> Any:
    """Return a copy of a tokenizer that does not have some special tokens, whatever its files call them."""
    from transformers import PreTrainedTokenizerFast

    with tempfile.TemporaryDirectory() as directory:
        tokenizer.save_pretrained(directory)
        for path in Path(directory).glob("*.json"):
            write_json(path, _without(read_json(path), tokens))
        return PreTrainedTokenizerFast.from_pretrained(directory)


def _without(value: Any, tokens: Collection[str]) -> Any:
    """Return a JSON value without the tokens: keys, texts, dicts whose content is one, and pairs of one and its score."""

    def is_one(x: Any) -> bool:
        if isinstance(x, list) and len(x) == 2:
            return is_one(x[0]) and isinstance(x[1], float)
        return is_one(x.get("content")) if isinstance(x, dict) else isinstance(x, str) and x in tokens

    if isinstance(value, dict):
        return {key: _without(x, tokens) for key, x in value.items() if key not in tokens and not is_one(x)}
    return [_without(x, tokens) for x in value if not is_one(x)] if isinstance(value, list) else value
