"""MRLM's settings of sampling; `jmarl.mrlm.keys` has what each means here."""

from __future__ import annotations

import dataclasses
from typing import Any

from jmarl.config.validation import with_known_names


@with_known_names
@dataclasses.dataclass
class GenerationConfig:
    """Settings of sampling. A setting that is None has the default of `jmarl.config.Sampling`."""

    max_new_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    do_sample: bool | None = None
    """False: the temperature is 0."""
    repetition_penalty: float | None = None
    min_new_tokens: int | None = None
    num_beams: int | None = None
    """1, since completions are sampled."""
    num_return_sequences: int | None = None
    """1: the group of a prompt is `group_size` of GRPO."""
    length_penalty: float | None = None
    """Without effect: it is for beam search."""
    eos_token_id: int | None = None
    """Refused, unless it is None: a completion ends with the end tokens of its model."""
    pad_token_id: int | None = None
    """Without effect: padding is masked."""
    max_length: int | None = None
    """Refused, unless it is None: set max_new_tokens."""

    def to_dict(self) -> dict[str, Any]:
        """Return the settings that are given."""
        return {name: value for name, value in vars(self).items() if value is not None}

    def to_generation_config(self) -> dict[str, Any]:
        """Return what `LLMEnvironment(generation_config=)` takes: the settings that are given."""
        return self.to_dict()
