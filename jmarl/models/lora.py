"""Train agents that differ by small adapters over one frozen base: LoRA (arXiv 2106.09685).

A weight W [D, F] of the base becomes W + alpha / rank * a b with a [D, rank] and b [rank, F], and only a and b are trained.
Adapters have Hugging Face's names (`q_proj`, ...), although the decoder has one matrix for several of them::

    base      the decoder's parameters without an agent axis, each leaf `Shared`, those of layers a tuple with an array for
              each layer, and layers.lora_alpha [L]
    adapters  {"layers": {"q_proj": {"a": [A, L, D, rank], "b": [A, L, rank, F]}, ...}}: trained and checkpointed
    model     both joined: the parameters [A, ...] that decoder, sampler, critics and exports take

A stack has one base: each extra agent costs only its adapters and activations. The decoder multiplies by base and adapters
separately, so no agent has a copy of W, and under `vmap` the tokens of all agents meet W in one product. The reference of a KL
term is the base alone.

Left out: adapters of embeddings, of the output weight, of experts and of recurrences, trained biases, different bases for
agents of one stack.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, PRNGKeyArray, UInt32

from jmarl.config import LORA_TARGETS, LoRA
from jmarl.models.config import ModelConfig
from jmarl.models.stack import is_placed, is_shared, share_params, unstack
from jmarl.models.weights import ADAPTERS, FLOAT32, LAYERS, layers_with, shape_of, sizes_of
from jmarl.types import Shared, StackState

ALPHA = "lora_alpha"  # a leaf [L] among the layers
QKV, GATE_UP = "qkv_adapter", "gate_up_adapter"  # in a decode view, see `join_by_input`
INIT, INIT_CRITICS, DROPOUT = 2**31, 2**31 + 1, 2**31 + 2  # purposes of random keys; keys of the sampler start from a step


class AdapterKind(NamedTuple):
    """What the adapters of a model have in common."""

    rank: int  # 0: the model has no adapters
    alpha: float
    targets: tuple[str, ...]


def target_shapes(cfg: ModelConfig) -> dict[str, tuple[int, int]]:
    """Return the numbers of inputs and outputs of every linear layer that can have an adapter."""
    own = {name: x for name, x in ADAPTERS.items() if num_layers(cfg, name)}
    return {name: (shape_of(cfg, x.inputs)[0], shape_of(cfg, x.outputs)[0]) for name, x in own.items()}


def num_layers(cfg: ModelConfig, name: str) -> int:
    """Return how many layers have the weight of a target."""
    return len(layers_with(cfg, LAYERS + ADAPTERS[name].leaf))


def targets_in(cfg: ModelConfig, settings: LoRA) -> tuple[str, ...]:
    """Return the names of the layers that have adapters. Raises ValueError if the model cannot have one that is named."""
    able, names = target_shapes(cfg), settings.modules
    if names == LORA_TARGETS:
        return tuple(name for name in names if name in able)
    if missing := [name for name in names if name not in able]:
        raise ValueError(
            f"lora_targets={settings.lora_targets!r} is not allowed: {','.join(missing)} of a model with experts cannot have "
            f"adapters; set all, or some of {','.join(able)}"
        )
    return names


def init_adapters(cfg: ModelConfig, settings: LoRA, key: PRNGKeyArray) -> dict[str, Any]:
    """Return new adapters of one agent, initialized as in PEFT. The key is consumed.

    a is uniform within 1 / sqrt(D) (He's initialization with a = sqrt(5)), b is 0.
    """
    layers, shapes, rank = {}, target_shapes(cfg), settings.lora_rank
    for name in targets_in(cfg, settings):
        d, f = shapes[name]
        key_a, count = jax.random.fold_in(key, LORA_TARGETS.index(name)), num_layers(cfg, name)
        a = jax.random.uniform(key_a, (count, d, rank), minval=-1.0, maxval=1.0) / math.sqrt(d)
        layers[name] = {"a": a, "b": jnp.zeros((count, rank, f))}
    return {"layers": layers}


def num_trained(cfg: ModelConfig, settings: LoRA) -> int:
    """Return the number of parameters of one agent's adapters."""
    shapes = target_shapes(cfg)
    return settings.lora_rank * sum(num_layers(cfg, name) * sum(shapes[name]) for name in targets_in(cfg, settings))


def adapt(params: Any, cfg: ModelConfig, settings: LoRA, agents: int, key: PRNGKeyArray) -> Any:
    """Return a model [A, ...] with adapters. The key is consumed.

    params: a base, or the equal parameters of all agents; a model that has adapters already is returned as it is.
    """
    base, trained = split(params)
    if base is None:
        base, trained = share_params([unstack(params, a) for a in range(agents)]), {}
    if trained:
        _check_adapters(params, cfg, settings)
        return params
    alpha = jnp.full(cfg.num_layers, settings.lora_alpha or settings.lora_rank, jnp.float32)
    base = base | {"layers": base["layers"] | {ALPHA: Shared(alpha)}}
    keys = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(agents))
    return join(base, jax.vmap(functools.partial(init_adapters, cfg, settings))(keys))


def _check_adapters(model: Any, cfg: ModelConfig, settings: LoRA) -> None:
    """Raise ValueError unless the model has the adapters that the settings describe."""
    have = describe(model)
    want = AdapterKind(settings.lora_rank, settings.lora_alpha or settings.lora_rank, targets_in(cfg, settings))
    if have != want:
        raise ValueError(
            f"the parameters have adapters of rank {have.rank}, alpha {have.alpha:g} for {','.join(have.targets)}, and the "
            f"settings ask for rank {want.rank}, alpha {want.alpha:g} for {','.join(want.targets)}: set lora_rank, lora_alpha, "
            "lora_targets to theirs"
        )


def targets_of(model: Any) -> tuple[str, ...]:
    """Return the names of the adapters that a model has."""
    return tuple(name for name in LORA_TARGETS if name in model["layers"])


def describe(model: Any) -> AdapterKind:
    """Return rank, alpha and targets of a model, of a stack or of one agent."""
    layers, targets = model["layers"], targets_of(model)
    if not targets:
        return AdapterKind(0, 0.0, ())
    alpha = layers[ALPHA].value if is_shared(layers[ALPHA]) else layers[ALPHA]
    alpha = float(str(np.float32(alpha[0])))  # 0.1, not float32's 0.100000001
    return AdapterKind(layers[targets[0]]["a"].shape[-1], alpha, targets)


def join_by_input(layer: Any, cfg: ModelConfig) -> Any:
    """Return one layer's parameters with one adapter for all linear layers of one input, as decoding reads them.

    Its a has the columns of theirs side by side, its b their rows in blocks, in the order of the base's outputs. The products
    with a few tokens of a decode step take as long as their launches, and 2 do what 6 did, or 4.
    """
    layer = dict(layer)
    for joined, shapes in _outputs(cfg).items():
        adapters = {name: layer.pop(name) for name in shapes if name in layer}
        if not adapters:
            continue
        rank, dtype = next(iter(adapters.values()))["b"].shape[0], layer[ALPHA].dtype
        zeros = {name: jnp.zeros((rank, *shape), dtype) for name, shape in shapes.items()}
        rows = []
        for name, adapter in adapters.items():
            blocks = zeros | {name: adapter["b"].reshape(rank, *shapes[name])}
            rows.append(jnp.concatenate(list(blocks.values()), 2).reshape(rank, -1))
        a = jnp.concatenate([adapter["a"] for adapter in adapters.values()], -1)
        layer[joined] = {"a": a, "b": jnp.concatenate(rows), "scale": layer[ALPHA] / rank}
    return layer


def join_axes_by_input(axes: Any, cfg: ModelConfig) -> Any:
    """Return the agent axes of what `join_by_input` returns, from those of a layer's parameters."""
    axes = dict(axes)
    for joined, shapes in _outputs(cfg).items():
        adapters = [axes.pop(name) for name in shapes if name in axes]
        if adapters:
            axes[joined] = adapters[0] | {"scale": axes[ALPHA]}
    return axes


def _outputs(cfg: ModelConfig) -> dict[str, dict[str, tuple[int, int, int]]]:
    """Return the linear layers that share an input, and the shapes of their outputs, which lie side by side on axis 1."""
    k, h = cfg.num_kv_heads, cfg.head_dim
    one, wide = (k, 1, h), (1, 1, cfg.intermediate_size)
    qkv = {"q_proj": (k, sizes_of(cfg)["U"], h), "k_proj": one, "v_proj": one}
    return {QKV: qkv, GATE_UP: {"gate_proj": wide, "up_proj": wide}}


def split(model: Any) -> tuple[Any, Any]:
    """Split a model [A, ...] into its base and what is trained: adapters, and a value head if there is one.

    Without LoRA the base is None.
    """
    if not any(map(is_shared, jax.tree.leaves(model, is_leaf=is_shared))):
        return None, model

    def select(tree: dict[str, Any], shared: bool) -> dict[str, Any]:
        return {name: x for name, x in tree.items() if name != "layers" and is_shared(x) == shared}

    base, trained = select(model, True), select(model, False)
    adapters = select(model["layers"], False)
    return base | {"layers": select(model["layers"], True)}, trained | ({"layers": adapters} if adapters else {})


def join(base: Any, trained: Any) -> Any:
    """Join what `split` returned; also of one agent, whose base has arrays in place of `Shared`."""
    return trained if base is None else base | trained | {"layers": base["layers"] | trained["layers"]}


def model_of(stack: StackState) -> Any:
    """Return the parameters [A, ...] of a stack's agents, as decoder, sampler and exports take them."""
    return join(stack.base, stack.params)


class Places(NamedTuple):
    """Which tokens of a batch a device of a mesh computes."""

    tokens: Int[Array, " token"]
    total: int  # of all tokens


def with_dropout(model: Any, key: PRNGKeyArray, rate: float, places: Places | None = None) -> Any:
    """Add dropout on the inputs of adapters to the model of one agent. The key is consumed.

    Each layer and target gets its own key. places: the noise is drawn for all tokens, and used for these; None: all.
    """
    layers = dict(model["layers"])
    for name in targets_of(model):
        n = layers[name]["a"].shape[0]
        keys = jax.random.split(jax.random.fold_in(key, LORA_TARGETS.index(name)), n)
        dropout = {"key": keys, "keep_rate": jnp.full(n, 1 - rate)}
        if places is not None:  # an empty array has the number of all tokens in its shape, which a scan over layers keeps
            tokens = jnp.broadcast_to(places.tokens, (n, len(places.tokens)))
            dropout |= {"tokens": tokens, "whole": jnp.zeros((n, places.total, 0))}
        layers[name] = layers[name] | {"dropout": dropout}
    return model | {"layers": layers}


def init_models(
    params: Sequence[Any], shapes: Sequence[tuple[ModelConfig, int]], settings: LoRA, seed: int, purpose: int = INIT
) -> list[Any]:
    """Return the model [A, ...] of each stack that training starts from; without LoRA, `params` unchanged.

    Args:
      params: parameters of each stack, see `adapt`.
      shapes: architecture and number of agents of each stack.
      seed, purpose: what the random keys follow from.
    """
    if settings.lora_rank:
        key = jax.random.fold_in(jax.random.key(seed), purpose)
        stacks = enumerate(zip(params, shapes, strict=True))
        return [adapt(tree, cfg, settings, agents, jax.random.fold_in(key, i)) for i, (tree, (cfg, agents)) in stacks]
    for i, tree in enumerate(params):
        if split(tree)[0] is not None:
            raise ValueError(
                f"the agents of stack {i} share one base, and lora_rank=0 trains all weights: set lora_rank, or make the "
                "team without lora"
            )
    return list(params)


def cast_base(base: Any, dtype: jax.typing.DTypeLike) -> Any:
    """Return a base in the compute dtype if that loses nothing, as for models that are stored in it; else unchanged.

    While a function is traced (for a plan), it counts as such a model. alpha and `FLOAT32` stay as they are.
    """
    if jnp.dtype(dtype) == jnp.float32:
        return base

    def cast(path: tuple[Any, ...], x: Shared) -> Shared:
        return x if path[-1].key in (ALPHA, *FLOAT32) else Shared(jax.tree.map(lambda w: w.astype(dtype), x.value))

    new = jax.tree_util.tree_map_with_path(cast, base, is_leaf=is_shared)
    pairs = zip(jax.tree.leaves(base), jax.tree.leaves(new), strict=True)
    exact = all(not is_placed(x) or bool(jnp.all(x == y.astype(x.dtype))) for x, y in pairs)
    return new if exact else base


@jax.jit
def _checksum(x: Array, first: UInt32[Array, ""]) -> UInt32[Array, ""]:
    """Return the checksum of a part of a leaf. first: the place of its first number in the leaf."""
    bits = jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32).reshape(-1)
    places = first + jnp.arange(bits.size, dtype=jnp.uint32)
    return jnp.sum(bits * (2 * places + 1), dtype=jnp.uint32)  # odd: no bit is lost


def digest(base: Any) -> str:
    """Return a checksum of a stack's base, for checkpoints; it does not depend on devices or on alpha, a setting.

    A leaf counts as one array [L, ...], however its layers are filed."""
    frozen = base | {"layers": {name: w for name, w in base["layers"].items() if name != ALPHA}}
    leaves = [jax.tree.leaves(leaf) for leaf in jax.tree.leaves(frozen, is_leaf=is_shared)]  # one array or one for each layer
    sums = [sum(int(_checksum(x, np.uint32(n * x.size % 2**32))) for n, x in enumerate(layers)) for layers in leaves]
    return "".join(f"{x % 2**32:08x}" for x in sums)
