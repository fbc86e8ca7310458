"""Describe the architecture of a decoder: one frozen dataclass for Llama (SmolLM2), Qwen2/2.5 and Qwen3.

Imports no jax, because the weight loader uses it, too. `jmarl.models.hub.hf_format` converts it from and to Hugging Face's
``config.json``.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """Llama 3's frequency scaling of the rotary embedding (``rope_type: llama3``)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Sizes and switches of a decoder. Letters: V vocabulary, D model, F feed-forward, H heads, K key-value heads."""

    family: str  # llama | qwen2 | qwen3: Hugging Face's layout of the weights
    vocab_size: int  # V
    hidden_size: int  # D
    intermediate_size: int  # F
    num_layers: int  # L
    num_heads: int  # H
    num_kv_heads: int  # K
    head_dim: int  # h
    max_positions: int
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    rms_eps: float = 1e-6
    tie_embeddings: bool = True
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: bool = False
    fused_attention: bool = True
    """Attend by a GPU's own kernel where there is one; not for arrays that are split over devices inside an agent."""
    row_parts: int = 1
    """On a mesh, see `models.sharding`: devices that divide the rows of a batch."""
    splits_weights: bool = False
    """On a mesh: whether each of them has a part of the hidden axis of the weights, which are gathered where they are used."""

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads={self.num_heads} is not a multiple of num_kv_heads={self.num_kv_heads}: "
                "every key-value head must serve the same number of query heads"
            )

    @property
    def queries_per_kv(self) -> int:
        """Number of query heads per key-value head."""
        return self.num_heads // self.num_kv_heads

    def num_params(self) -> int:
        """Return the number of parameters of one agent; a tied embedding counts once."""
        d, h, k = self.hidden_size, self.head_dim, self.num_kv_heads
        qkv = d * k * (self.queries_per_kv + 2) * h
        layer = qkv + self.num_heads * h * d + 3 * d * self.intermediate_size + 2 * d
        layer += self.qkv_bias * (self.num_heads + 2 * k) * h + self.out_bias * d + self.qk_norm * 2 * h
        head = 0 if self.tie_embeddings else d * self.vocab_size
        return self.vocab_size * d + self.num_layers * layer + d + head
