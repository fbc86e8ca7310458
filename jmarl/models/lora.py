"""LoRA (arXiv 2106.09685): agents that differ by small adapters over one frozen base.

A weight W [D, F] of the base becomes W + alpha / rank * a b with a [D, rank] and b [rank, F], and only a and b are learned.
They go by Hugging Face's names (`q_proj`, ...), also where the decoder has one matrix for several of them::

    base      the decoder's parameters without an agent axis, each leaf `Shared`, and layers.lora_alpha [L]
    adapters  {"layers": {"q_proj": {"a": [A, L, D, rank], "b": [A, L, rank, F]}, ...}}: what is trained and checkpointed
    model     both joined, which is what decoder, sampler, critics and exports take for parameters [A, ...]

A stack has one base, whatever the number of its agents: one more costs its adapters and activations. The decoder multiplies by
base and adapters apart, so no copy of W is made for an agent, and under `vmap` all agents' tokens meet W in one product. The
reference of a KL term is the base alone.

Left out: adapters of embeddings and of the output weight, learned biases, other bases for agents of one stack.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jmarl.config import LORA_TARGETS, LoRA
from jmarl.models.config import ModelConfig
from jmarl.models.stack import is_shared, share_params, unstack
from jmarl.types import Shared, StackState

ALPHA = "lora_alpha"  # a leaf [L] among the layers
INIT, OF_CRITICS, DROPOUT = 2**31, 2**31 + 1, 2**31 + 2  # purposes of random keys; the sampler's begin with a step


def target_shapes(cfg: ModelConfig) -> dict[str, tuple[int, int]]:
    """Inputs and outputs of every linear layer that can have an adapter."""
    d, f, q, k = cfg.hidden_size, cfg.intermediate_size, cfg.num_heads * cfg.head_dim, cfg.num_kv_heads * cfg.head_dim
    shapes = ((d, q), (d, k), (d, k), (q, d), (d, f), (d, f), (f, d))
    return dict(zip(LORA_TARGETS, shapes, strict=True))


def init_adapters(cfg: ModelConfig, settings: LoRA, key: jax.Array) -> dict[str, Any]:
    """Adapters of one agent, as PEFT makes them: a uniform in +- 1 / sqrt(D) (He's initialisation with a = sqrt(5)), b = 0. The
    key is consumed."""
    layers, shapes, rank = {}, target_shapes(cfg), settings.lora_rank
    for name in settings.modules:
        d, f = shapes[name]
        of_a = jax.random.fold_in(key, LORA_TARGETS.index(name))
        a = jax.random.uniform(of_a, (cfg.num_layers, d, rank), minval=-1.0, maxval=1.0) / math.sqrt(d)
        layers[name] = {"a": a, "b": jnp.zeros((cfg.num_layers, rank, f))}
    return {"layers": layers}


def adapt(params: Any, cfg: ModelConfig, settings: LoRA, agents: int, key: jax.Array) -> Any:
    """The model [A, ...] that LoRA trains: a base, or the parameters of agents that are all equal, with new adapters. One that
    has adapters comes back as it is. The key is consumed."""
    base, trained = split(params)
    if base is None:
        base, trained = share_params([unstack(params, a) for a in range(agents)]), {}
    if trained:
        return _fits(params, settings)
    alpha = jnp.full(cfg.num_layers, settings.lora_alpha or settings.lora_rank, jnp.float32)
    base = base | {"layers": base["layers"] | {ALPHA: Shared(alpha)}}
    keys = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(agents))
    return join(base, jax.vmap(lambda key: init_adapters(cfg, settings, key))(keys))


def _fits(model: Any, settings: LoRA) -> Any:
    """A model that was adapted before, if it has the adapters that the settings ask for."""
    rank, alpha, targets = describe(model)
    asked = settings.lora_rank, settings.lora_alpha or settings.lora_rank, settings.modules
    if (rank, alpha, targets) != asked:
        raise ValueError(
            f"the parameters have adapters of rank {rank}, alpha {alpha:g} for {','.join(targets)}, and the settings ask for "
            f"rank {asked[0]}, alpha {asked[1]:g} for {','.join(asked[2])}: set lora_rank, lora_alpha, lora_targets to theirs"
        )
    return model


def targets_of(model: Any) -> tuple[str, ...]:
    """Names of the adapters that a model has."""
    return tuple(name for name in LORA_TARGETS if name in model["layers"])


def describe(model: Any) -> tuple[int, float, tuple[str, ...]]:
    """Rank, alpha and targets of a model, of a stack or of one agent; rank 0 where it has no adapters."""
    layers = model["layers"]
    targets = targets_of(model)
    if not targets:
        return 0, 0.0, ()
    alpha = layers[ALPHA].value if is_shared(layers[ALPHA]) else layers[ALPHA]
    return layers[targets[0]]["a"].shape[-1], float(str(np.float32(alpha[0]))), targets  # 0.1, not float32's 0.100000001


def split(model: Any) -> tuple[Any, Any]:
    """The base of a model [A, ...], and what is trained: adapters, and perhaps a value head. Without LoRA None and all."""
    if not any(map(is_shared, jax.tree.leaves(model, is_leaf=is_shared))):
        return None, model

    def part(tree, shared: bool):
        return {name: x for name, x in tree.items() if name != "layers" and is_shared(x) == shared}

    base, trained = (part(model, shared) for shared in (True, False))
    layers = [part(model["layers"], shared) for shared in (True, False)]
    return base | {"layers": layers[0]}, trained | ({"layers": layers[1]} if layers[1] else {})


def join(base: Any, trained: Any) -> Any:
    """The inverse of `split`; also of one agent, whose base has no `Shared` around its arrays."""
    return trained if base is None else base | trained | {"layers": base["layers"] | trained["layers"]}


def model_of(stack: StackState) -> Any:
    """The parameters [A, ...] of a stack's agents as decoder, sampler and exports read them."""
    return join(stack.base, stack.params)


def with_dropout(model: Any, key: jax.Array, rate: float) -> Any:
    """The model of one agent with dropout on its adapters' inputs, each layer and target by a key of its own. The key is
    consumed."""
    layers = dict(model["layers"])
    for name in targets_of(model):
        n = layers[name]["a"].shape[0]
        keys = jax.random.split(jax.random.fold_in(key, LORA_TARGETS.index(name)), n)
        layers[name] = layers[name] | {"dropout": {"key": keys, "keep_rate": jnp.full(n, 1 - rate)}}
    return model | {"layers": layers}


def models(params: Sequence[Any], shapes: Sequence[tuple[ModelConfig, int]], settings: LoRA, seed: int, purpose=INIT) -> list:
    """What is trained of each stack of so many agents of an architecture: with LoRA its model with adapters, from keys that the
    seed and the purpose give; without it the parameters as they are."""
    if not settings.lora_rank:
        for i, tree in enumerate(params):
            if split(tree)[0] is not None:
                raise ValueError(
                    f"the agents of stack {i} share one base, and lora_rank=0 trains all weights: set lora_rank, or make the "
                    "team without lora"
                )
        return list(params)
    out = []
    for i, (tree, (cfg, agents)) in enumerate(zip(params, shapes, strict=True)):
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), purpose), i)
        out.append(adapt(tree, cfg, settings, agents, key))
    return out


@jax.jit
def _sums(base: Any) -> jax.Array:
    def one(x):
        bits = jax.lax.bitcast_convert_type(x, jnp.uint32).reshape(-1)
        return jnp.sum(bits * (2 * jnp.arange(bits.size, dtype=jnp.uint32) + 1), dtype=jnp.uint32)  # odd: no bit is lost

    return jnp.stack([one(x) for x in jax.tree.leaves(base)])


def digest(base: Any) -> str:
    """A checksum of a stack's base, the same wherever it lies: what a checkpoint keeps of it. Alpha is left out, a setting."""
    frozen = base | {"layers": {name: w for name, w in base["layers"].items() if name != ALPHA}}
    return "".join(f"{x:08x}" for x in np.asarray(_sums(frozen)).tolist())
