"""Choose optimizations for the compiler of one platform. No other module does.

Choices inside a program are made when it is lowered (`jax.lax.platform_dependent`). Choices that change its arguments are made
before, by the argument `platform`: a name as in `jax.Device.platform`, such as cpu or gpu. So programs can also be compiled for
platforms that are not present. The optimizations are in `cpu.py` and `gpu.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from jmarl.hardware import GPU
from jmarl.models import cpu, gpu
from jmarl.models.config import ModelConfig
from jmarl.models.stack import is_placed

# Options for all platforms; each compiler reads those with its own prefix.
COMPILER_OPTIONS: dict[str, Any] = cpu.COMPILER_OPTIONS | gpu.COMPILER_OPTIONS


def platform_of(tree: Any) -> str:
    """Return the platform of a pytree of arrays or `jax.ShapeDtypeStruct` with shardings; for host arrays, and while a function
    is traced, jax's default."""
    for leaf in jax.tree.leaves(tree):
        if (is_placed(leaf) or isinstance(leaf, jax.ShapeDtypeStruct)) and leaf.sharding is not None:
            return next(iter(leaf.sharding.device_set)).platform
    return jax.default_backend()


def use_panels(platform: str, rows: int, dtype: str, own_core: bool) -> bool:
    """Return whether decoding reads its weights cut into panels.

    Args:
      rows: number of rows per agent.
      dtype: compute dtype.
      own_core: whether each agent has its own device. A single device uses all cores and gains nothing.
    """
    return platform == "cpu" and own_core and rows <= cpu.MAX_PANEL_ROWS and dtype == "float32"


def fuses_decoding(platform: str, dtype: str, model: ModelConfig, tokens: int | None = None) -> bool:
    """Return whether one token attends by cuDNN's kernel, see `gpu.attend_token`, which has no windows and no caps.

    tokens: of a prompt and its completion at most, which a window may hold. None: not known.
    """
    sees_all = not any(model.sliding_layers) or (tokens is not None and tokens <= (model.sliding_window or 0))
    is_plain = model.attention_cap is None and sees_all
    return platform in GPU and is_plain and gpu.fuses_attention(dtype, model.head_dim)


def steps_per_look(platform: str, new_tokens: int) -> int:
    """Return how many tokens a decode loop adds before it looks whether all rows have ended."""
    return gpu.steps_per_look(new_tokens) if platform in GPU else 1


def steps_per_chunk(platform: str) -> int:
    """Return how many tokens rows in slots add before they may move, and before new rows may take the slots of those that have
    ended."""
    return gpu.STEPS_PER_LOOK if platform in GPU else 8


def gradient_memory(platform: str, params: Any) -> Any:
    """Return arrays whose memory the gradients of the next update take, or None on platforms that do not reuse it."""
    return cpu.keep_gradients(params) if platform == "cpu" else None


def layer_numbers(num_layers: int, lengths: Int[Array, "..."]) -> list[Int[Array, ""]]:
    """Return 0 to num_layers - 1, by which decoding slices the stacked layers. lengths: any numbers of at least 1."""

    def constants(lengths: Int[Array, "..."]) -> list[Int[Array, ""]]:
        return [jnp.int32(i) for i in range(num_layers)]

    return lax.platform_dependent(lengths, cpu=functools.partial(cpu.traced_layer_numbers, num_layers), default=constants)


def optimizer_step(update: Callable, grads: Any, opt_state: Any, params: Any, ok: Bool[Array, ""]) -> tuple[Any, Any]:
    """Return parameters and optimizer state of one agent after one step, or unchanged if not `ok`.

    update: the `update` of an `optax.GradientTransformation`.
    """
    in_place, plain = functools.partial(cpu.step_in_place, update), functools.partial(_step, update)
    return lax.platform_dependent(grads, opt_state, params, ok, cpu=in_place, default=plain)


def _step(update: Callable, grads: Any, opt_state: Any, params: Any, ok: Bool[Array, ""]) -> tuple[Any, Any]:
    changes, new_state = update(grads, opt_state, params)
    return cpu.select(ok, optax.apply_updates(params, changes), params), cpu.select(ok, new_state, opt_state)


GroupAttention = Callable[..., Array]  # (q, k, v, lengths) -> heads, of P prompts, see `gpu.attend_rows`


def attend_groups(plain: GroupAttention, sizes: gpu.Sizes, q: Array, k: Array, v: Array, lengths: Array) -> Array:
    """Return the attention of P prompts and their completions by `plain`, or by cuDNN's kernel where there is one.

    Arguments as for `gpu.attend_rows`.
    """
    if not gpu.fuses_attention(q.dtype, q.shape[-1]):
        return plain(q, k, v, lengths)
    return _attend_groups(plain, sizes, q, k, v, lengths)


def _attention_of_platform(plain: GroupAttention, sizes: gpu.Sizes, *arrays: Array) -> Array:
    """Choose when the program is lowered. Forward and backward choose apart: one choice would keep what both forms save."""
    forward = functools.partial(lax.platform_dependent, cuda=functools.partial(gpu.attend_rows, sizes), default=plain)
    return checkpoint_name(merge_agents(forward)(*arrays), "attention")


_attend_groups = jax.custom_vjp(_attention_of_platform, nondiff_argnums=(0, 1))


def _attend_groups_forward(plain: GroupAttention, sizes: gpu.Sizes, *arrays: Array) -> tuple[Array, tuple[Array, ...]]:
    return _attention_of_platform(plain, sizes, *arrays), arrays


def _attend_groups_backward(plain: GroupAttention, sizes: gpu.Sizes, saved: tuple[Array, ...], d_out: Array) -> tuple[Any, ...]:
    def plain_backward(q: Array, k: Array, v: Array, lengths: Array, d_out: Array) -> tuple[Array, ...]:
        return jax.vjp(lambda *x: plain(*x, lengths), q, k, v)[1](d_out)

    fused = functools.partial(gpu.attend_rows_backward, sizes)
    backward = functools.partial(lax.platform_dependent, cuda=fused, default=plain_backward)
    return *merge_agents(backward)(*saved, d_out), None


_attend_groups.defvjp(_attend_groups_forward, _attend_groups_backward)


def sum_by_token(tokens: Int[Array, " token"], x: Float[Array, "token dim"], vocab: int) -> Float[Array, "{vocab} dim"]:
    """Return the float32 sums of the rows of each token id."""

    def scatter(tokens: Array, x: Array) -> Array:
        return jnp.zeros((vocab, x.shape[-1]), jnp.float32).at[tokens].add(x.astype(jnp.float32))

    return lax.platform_dependent(tokens, x, cuda=functools.partial(gpu.sum_by_token, vocab=vocab), default=scatter)


def top_p_threshold(
    plain: Callable[..., Array], weights: Float[Array, " vocab"], top_p: Float[Array, ""] | float
) -> Float[Array, ""]:
    """Return the smallest weight that top-p keeps, by `plain` or as on GPUs."""
    on_gpu, default = (functools.partial(f, top_p=top_p) for f in (gpu.top_p_threshold, plain))
    return lax.platform_dependent(weights, cuda=on_gpu, default=default)


def merge_agents(f: Callable[..., Any]) -> Callable[..., Any]:
    """Return f, a function of arrays [P, ...], such that vmap over agents calls it once with arrays [A * P, ...].

    jax 0.10.2 cannot map the gradient of cuDNN's attention.
    """
    merged = jax.custom_batching.custom_vmap(f)

    @merged.def_vmap
    def for_agents(num_agents: int, batched: list[bool], *arrays: Array) -> tuple[Any, Any]:
        arrays = tuple(x if is_own else jnp.repeat(x[None], num_agents, 0) for x, is_own in zip(arrays, batched, strict=True))
        out = merge_agents(f)(*(x.reshape(-1, *x.shape[2:]) for x in arrays))
        out = jax.tree.map(lambda x: x.reshape(num_agents, -1, *x.shape[1:]), out)
        return out, jax.tree.map(lambda _: True, out)

    return merged


attend_token = merge_agents(lambda *arrays: gpu.attend_token(*arrays))
