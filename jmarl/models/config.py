"""Describe the architecture of a decoder by one frozen dataclass; `models.families` reads it from a ``config.json``.

Imports no jax, because the weight loader uses it, too. Every switch is a static argument of the programs: what a model does not
have costs it nothing.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any, Literal


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """How frequencies of the rotary embedding are changed for longer contexts than those of pretraining.

    llama3: low ones are divided by the factor, with a smooth transition. linear: all are divided. dynamic: none up to
    max_positions, which no row exceeds. yarn: arXiv 2309.00071. longrope: each has a factor, arXiv 2402.13753.
    """

    kind: str  # llama3 | linear | dynamic | yarn | longrope
    factor: float = 1.0
    original_max_positions: int = 0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0
    truncate: bool = True
    short_factors: tuple[float, ...] = ()  # longrope, where no row has more than original_max_positions
    long_factors: tuple[float, ...] = ()  # longrope, where one may have: see `Placement.long_context`
    amplitude: float = 1.0
    """Cosines and sines are multiplied by it (yarn and longrope)."""
    query_beta: float = 0.0
    """Queries at position t are multiplied by 1 + query_beta * log(1 + t // original_max_positions) (Ministral 3)."""

    def describe(self) -> dict[str, Any]:
        """Return what differs from the defaults, and of Llama 3's the fields that jmarl 0.1 wrote."""
        always = (
            ("factor", "original_max_positions", "low_freq_factor", "high_freq_factor") if self.kind == "llama3" else ("kind",)
        )
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        fields = {name: value for name, value in dataclasses.asdict(self).items() if name in always or value != defaults[name]}
        return {name: value for name, value in fields.items() if name != "kind" or self.kind != "llama3"}


@dataclasses.dataclass(frozen=True)
class DeltaSizes:
    """Sizes of layers that mix tokens by the gated delta rule (`models.layers.delta`)."""

    key_heads: int
    heads: int  # each key head serves neighboring ones
    key_size: int
    value_size: int
    width: int = 4  # tokens that the convolution reads

    @property
    def channels(self) -> int:
        """Number of channels of the convolution: queries, keys and values side by side."""
        return 2 * self.key_heads * self.key_size + self.heads * self.value_size


@dataclasses.dataclass(frozen=True)
class Placement:
    """How a run computes with a model: on which part of a mesh (see `models.sharding.model_on`), and in which context."""

    row_parts: int = 1
    """Devices that divide the rows of a batch."""
    splits_weights: bool = False
    """Whether each of them has a part of the hidden axis of the weights, which are gathered where they are used."""
    fused_attention: bool = True
    """Attend by a GPU's own kernel where there is one; not for arrays that are split over devices inside an agent."""
    long_context: bool = False
    """Compute with longrope's long factors, in all rows however short: one choice for a run, so that a row does not depend on
    the lengths of others. See `ModelConfig.in_context`."""


DESCRIBED = (
    "family", "vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim",
    "max_positions", "rope_theta", "rope_scaling", "rms_eps", "tie_embeddings", "qkv_bias", "out_bias", "qk_norm",
)  # fmt: skip
"""The fields of which a checkpoint has each, as jmarl 0.1 wrote them; of others it has those that are not the default."""


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Sizes and switches of a decoder. Letters: V vocabulary, D model, F feed-forward, H heads, K key-value heads."""

    family: str
    """A name in `models.families`."""
    vocab_size: int
    """V, the number of tokens that have an embedding and a logit."""
    hidden_size: int
    """D, the size of what passes from layer to layer."""
    intermediate_size: int
    """F, the size inside a feed-forward layer."""
    num_layers: int
    """L."""
    num_heads: int
    """H, heads of queries."""
    num_kv_heads: int
    """K, heads of keys and values. Each serves H / K heads of queries."""
    head_dim: int
    """h, the size of a head."""
    max_positions: int
    """The number of tokens that a prompt and its completion may have; see `context`."""
    rope_theta: float = 10000.0
    """The base of the rotary embedding's frequencies."""
    rope_scaling: RopeScaling | None = None
    """How these frequencies are changed for longer contexts. None: they are not."""
    rms_eps: float = 1e-6
    """Added to the mean square in each norm."""
    tie_embeddings: bool = True
    """Compute logits with the weights of the embedding."""
    qkv_bias: bool = False
    """Add biases to queries, keys and values."""
    out_bias: bool = False
    """Add a bias to the outputs of attention."""
    qk_norm: bool = False
    """Normalize queries and keys, each head by itself."""
    mlp_bias: bool = False
    """Add biases in feed-forward layers."""
    qk_norm_of_all: bool = False
    """Normalize all queries of a token, and all keys, together; not each head (`qk_norm`)."""
    norms_before: bool = True
    """Normalize the inputs of attention and feed-forward layer."""
    norms_after: bool = False
    """Normalize their outputs."""
    norm_adds_one: bool = False
    """Weights of norms are stored less 1."""
    activation: str = "silu"
    """Of feed-forward layers: silu or gelu_tanh."""
    rotary_dim: int | None = None
    """How many of the numbers of a head are rotated, the first ones. None: all."""
    sliding_window: int | None = None
    """How many tokens a sliding layer sees, itself included."""
    sliding_layers: tuple[bool, ...] = ()
    """Which layers slide; empty: none."""
    sliding_rope_theta: float | None = None
    """Of sliding layers, which are not scaled then. None: as of the others."""
    plain_layers: tuple[bool, ...] = ()
    """Which layers do not rotate; empty: none."""
    embed_scale: float = 1.0
    """Embeddings are multiplied by it."""
    residual_scale: float = 1.0
    """Of the outputs of attention and feed-forward layer."""
    attention_scale: float | None = None
    """Of the products of queries and keys. None: 1 / sqrt(h)."""
    attention_cap: float | None = None
    """These products x become cap * tanh(x / cap)."""
    logit_divisor: float = 1.0
    """Logits are divided by it."""
    logit_cap: float | None = None
    """Logits x become cap * tanh(x / cap)."""
    num_experts: int = 0
    """Feed-forward layers among which each token is routed to some. 0: there is one, for all tokens."""
    experts_per_token: int = 0
    """How many of them a token is routed to."""
    expert_size: int = 0
    """What F is of an expert."""
    norm_top_probs: bool = False
    """Divide the probabilities of a token's experts by their sum."""
    dense_layers: tuple[bool, ...] = ()
    """Which layers have one feed-forward layer although others have experts; empty: none."""
    attention_gate: bool = False
    """Multiply the heads of attention by the sigmoid of a gate, which the product of the queries gives too."""
    delta: DeltaSizes | None = None
    """Of recurrent layers, which mix tokens by the gated delta rule instead of attention. None: there are none."""
    delta_layers: tuple[bool, ...] = ()
    """Which layers are recurrent."""
    placement: Placement = Placement()
    """What a run adds: no part of the architecture."""

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads={self.num_heads} is not a multiple of num_kv_heads={self.num_kv_heads}: "
                "every key-value head must serve the same number of query heads"
            )
        if (d := self.delta) is not None and d.heads % d.key_heads:
            raise ValueError(
                f"delta.heads={d.heads} is not a multiple of delta.key_heads={d.key_heads}: "
                "every key head must serve the same number of heads"
            )
        if self.delta_layers and all(self.delta_layers):
            raise ValueError(f"all {self.num_layers} layers are recurrent: at least one must attend")

    @property
    def queries_per_kv(self) -> int:
        """Number of query heads per key-value head."""
        return self.num_heads // self.num_kv_heads

    def is_dense(self, layer: int) -> bool:
        """Return whether a layer has one feed-forward layer for all tokens."""
        return not self.num_experts or (bool(self.dense_layers) and self.dense_layers[layer])

    def is_recurrent(self, layer: int) -> bool:
        """Return whether a layer mixes tokens by a recurrence, not by attention."""
        return bool(self.delta_layers) and self.delta_layers[layer]

    @property
    def period(self) -> int:
        """After how many layers the kinds of layers repeat."""
        count, kinds = self.num_layers, [(self.is_dense(n), self.is_recurrent(n)) for n in range(self.num_layers)]
        return next(p for p in range(1, count + 1) if count % p == 0 and kinds == kinds[:p] * (count // p))

    @property
    def context(self) -> int:
        """Number of tokens that a prompt and its completion may have."""
        scaling, short = self.rope_scaling, self.has_two_contexts and not self.placement.long_context
        return scaling.original_max_positions if scaling and short else self.max_positions

    @property
    def has_two_contexts(self) -> bool:
        """Whether longrope has factors for short and for long contexts."""
        scaling = self.rope_scaling
        return scaling is not None and scaling.kind == "longrope" and scaling.original_max_positions < self.max_positions

    def in_context(self, long: bool | Literal["auto"]) -> ModelConfig:
        """Return the architecture with `long_context`, if it has two contexts. auto: as it is."""
        return self if long == "auto" or not self.has_two_contexts else self.placed(long_context=long)

    def placed(self, **fields: Any) -> ModelConfig:
        """Return the architecture with these fields of its placement."""
        return dataclasses.replace(self, placement=dataclasses.replace(self.placement, **fields))

    def describe(self) -> dict[str, Any]:
        """Return the architecture as JSON, for checkpoints: without its placement, and without later fields than those of jmarl
        0.1 where they change nothing, so that its checkpoints resume."""
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        fields = {
            name: value
            for name, value in dataclasses.asdict(self).items()
            if name != "placement" and (name in DESCRIBED or value != defaults[name])
        }
        if (scaling := self.rope_scaling) is not None:
            fields["rope_scaling"] = scaling.describe()
        return json.loads(json.dumps(fields))
