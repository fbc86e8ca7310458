"""Optimize for XLA's CUDA compiler; `platforms.py` decides where this applies.

Nothing here has been timed on a GPU yet. Figures were counted by XLA and `jmarl.plan.hlo` in programs that were compiled for an
H100 (jax 0.10.2, two Qwen2.5-0.5B in bfloat16): experiments/README.md, "Compiled for an H100". tests/plan bounds the programs.

======================  ==================================================================================================
`matmul_precision`      for equal numbers, not for speed: float32 products in full, so that learner and sampler agree
`attend_rows`           no scores [query, key] in memory: 1.3 GiB instead of 56 for one attention of 64 rows of 2,560 tokens
                        and 14 heads, forward and backward
`attend_token`          16 kernels a layer and token instead of 23, and each key and value is read once: 365 kernels a token
                        of 24 layers instead of 580, together with the other lines
`steps_per_look`        a decode loop of a known number of steps: one command buffer for 16 tokens, and the GPU is asked once
                        in 16 tokens, not at each, whether all rows have ended
`top_p_threshold`       8 passes over the vocabulary instead of a loop of 31, which is one kernel launch for each trip
`sum_by_token`          for equal numbers when a run is repeated: a scatter adds repeated ids in any order, and XLA's own remedy
                        sorts every number of [N, D]. The gradient of cuDNN's attention still has no fixed order
`COMPILER_OPTIONS`      no merged products, which would join `gate` and `up` again at every token: 2.4 GB read and written for
                        a token of 8 rows instead of 4.0
======================  ==================================================================================================
"""

from __future__ import annotations

import functools
import importlib.util
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jmarl.hardware import has_old_gpu

COMPILER_OPTIONS: dict[str, Any] = {"xla_gpu_dot_merger_threshold_mb": 0}

STEPS_PER_LOOK = 16  # decode steps between two looks at which rows have ended
TOKENS_PER_SUM = 1024  # whose sums are one product

MAX_HEAD_DIM = 128  # of cuDNN's kernels on all GPUs since Ampere
PLUGINS = ("jax_cuda12_plugin", "jax_cuda13_plugin")


def matmul_precision(x: Float[Array, "..."]) -> lax.Precision | None:
    """Return the precision of matrix products with x: full for float32 arrays, on GPUs too.

    By default jax would round float32 to 10 bits there (TF32), and the learner's probabilities would differ from the sampler's.
    JAX_DEFAULT_MATMUL_PRECISION=tensorfloat32 overrides this.
    """
    if x.dtype != jnp.float32 or jax.default_matmul_precision.value is not None:
        return None
    return lax.Precision.HIGHEST


class Sizes(NamedTuple):
    """Sizes of groups of completions: tokens of a prompt, completions per prompt, tokens of a completion."""

    prompt: int
    group: int
    row: int
    window: int | None = None  # how many tokens a token sees, itself included; None: all before it

    @property
    def width(self) -> int:
        """Tokens of a prompt with a completion, padded: cuDNN's gradient wants an even number."""
        return -(-(self.prompt + self.row) // 8) * 8


Heads = Float[Array, "prompt token kv_head query head_dim"]  # S prompt tokens, then G rows of T
KeyHeads = Float[Array, "prompt token kv_head head_dim"]  # also values


@functools.cache
def has_cuda() -> bool:
    """Return whether JAX's wheels for CUDA are installed, without which cuDNN's attention cannot even be traced."""
    return any(importlib.util.find_spec(name) is not None for name in PLUGINS)


def fuses_attention(dtype: jax.typing.DTypeLike, head_dim: int) -> bool:
    """Return whether cuDNN has an attention for these arrays."""
    fits = jnp.dtype(dtype) == jnp.bfloat16 and head_dim % 8 == 0 and head_dim <= MAX_HEAD_DIM
    return fits and has_cuda() and not has_old_gpu()


def attend_rows(
    sizes: Sizes, q: Heads, k: KeyHeads, v: KeyHeads, lengths: Int[Array, " prompt"], implementation: Any = "cudnn"
) -> Heads:
    """Return the attention of prompts, and of each completion to its prompt and itself (FlashAttention-2, arXiv 2307.08691).

    Every completion becomes one row without a gap: its prompt, itself, padding. So neither a mask is needed nor a merge of two
    softmaxes. Only here a prompt is computed once for each completion: with long prompts, short completions and large groups
    that is up to G times the attention of the plain form.

    Args:
      lengths: number of tokens of each prompt.
      implementation: cudnn, or xla for tests without a GPU.
    """
    out = _attend(sizes, lengths, implementation, *(_join(sizes, x, lengths) for x in (q, k, v)))
    rows = _split(sizes, out.reshape(-1, sizes.group, *out.shape[1:]), lengths)
    return jnp.concatenate([out[:: sizes.group, : sizes.prompt], rows], 1).reshape(q.shape)


def attend_rows_backward(
    sizes: Sizes,
    q: Heads,
    k: KeyHeads,
    v: KeyHeads,
    lengths: Int[Array, " prompt"],
    d_out: Heads,
    implementation: Any = "cudnn",
) -> tuple[Heads, KeyHeads, KeyHeads]:
    """Return the gradients of `attend_rows`. The parts of a prompt, which all its completions read, are added in float32."""
    joined = [_join(sizes, x, lengths) for x in (q, k, v)]
    _, pull = jax.vjp(functools.partial(_attend, sizes, lengths, implementation), *joined)
    # Only the first completion's row returns the prompt's heads.
    first = (jnp.arange(sizes.group) == 0)[:, None] | (jnp.arange(sizes.width) >= lengths[:, None, None])
    cotangent = _join(sizes, d_out, lengths).reshape(*first.shape, *d_out.shape[2:])
    cotangent = jnp.where(first.reshape(*first.shape, *[1] * (d_out.ndim - 2)), cotangent, 0)
    gradients = pull(cotangent.reshape(-1, *cotangent.shape[2:]).reshape(joined[0].shape))

    def separate(gradient: Array, like: Array) -> Array:
        gradient = gradient.reshape(-1, sizes.group, *gradient.shape[1:2], *like.shape[2:])
        of_prompt = jnp.sum(gradient[:, :, : sizes.prompt], 1, dtype=jnp.float32).astype(like.dtype)
        inside = jnp.arange(sizes.prompt) < lengths[:, None]
        of_prompt = jnp.where(inside.reshape(*inside.shape, *[1] * (like.ndim - 2)), of_prompt, 0)
        return jnp.concatenate([of_prompt, _split(sizes, gradient, lengths)], 1)

    dq, dk, dv = (separate(gradient, like) for gradient, like in zip(gradients, (q, k, v), strict=True))
    return dq, dk, dv


def _attend(sizes: Sizes, lengths: Array, implementation: Any, q: Array, k: Array, v: Array) -> Array:
    """Return causal attention of rows [R, width, ...] of which a prompt's length and T tokens are real."""
    tokens = jnp.repeat(lengths + sizes.row, sizes.group).astype(jnp.int32)
    window = None if sizes.window is None else (sizes.window - 1, 0)
    shape, q = q.shape, q.reshape(*q.shape[:2], -1, q.shape[-1])
    out = jax.nn.dot_product_attention(
        q,
        k,
        v,
        is_causal=True,
        query_seq_lengths=tokens,
        key_value_seq_lengths=tokens,
        local_window_size=window,
        implementation=implementation,
    )
    return out.reshape(shape)


def _join(sizes: Sizes, x: Array, lengths: Array) -> Array:
    """Return rows [P * G, width, ...] without a gap of arrays [P, S + G * T, ...]: prompt, completion, padding."""
    s, g, t, _ = sizes
    position, length = jnp.arange(sizes.width), lengths[:, None, None]
    of_row = s + t * jnp.arange(g)[:, None] + jnp.clip(position - length, 0, t - 1)  # [P, G, width]
    index = jnp.where(position < length, position, of_row)
    return jax.vmap(lambda x, i: x[i])(x, index).reshape(-1, sizes.width, *x.shape[2:])


def _split(sizes: Sizes, x: Array, lengths: Array) -> Array:
    """Return completions [P, G * T, ...] of rows [P, G, width, ...]."""
    index = lengths[:, None] + jnp.arange(sizes.row)
    rows = jax.vmap(lambda x, i: x[:, i])(x, index)
    return rows.reshape(x.shape[0], -1, *x.shape[3:])


def attend_token(
    q: Float[Array, "row kv_head query head_dim"],
    prompt_keys: KeyHeads,
    prompt_values: KeyHeads,
    lengths: Int[Array, " prompt"],
    keys: Float[Array, "row row_token kv_head head_dim"],
    values: Float[Array, "row row_token kv_head head_dim"],
    written: Int[Array, " row"],
    implementation: Any = "cudnn",
) -> Float[Array, "row kv_head query head_dim"]:
    """Return the attention of one token of each of R = P * G rows to its prompt and its row.

    The rows of a prompt are queries of one call. Both parts are joined by the logarithms of their sums of weights. Never
    differentiate this: cuDNN's gradient drops that of the logarithms.

    Args:
      lengths: number of tokens of each prompt; may be 0.
      written: number of tokens of each row, the new one included.
    """
    rows, prompts = q.shape[0], prompt_keys.shape[0]
    flat = q.reshape(rows, -1, q.shape[-1])
    attend = functools.partial(_attend_with_logs, implementation)
    by_prompt, length = flat.reshape(prompts, -1, *flat.shape[1:]), jnp.maximum(lengths, 1)
    of_prompt, prompt_logs = attend(by_prompt, prompt_keys, prompt_values, length.astype(jnp.int32))
    of_row, row_logs = attend(flat[:, None], keys, values, written.astype(jnp.int32))
    has_prompt = jnp.repeat(lengths > 0, rows // prompts)[:, None]
    prompt_logs = jnp.swapaxes(prompt_logs, 1, 2).reshape(rows, -1)
    share = jax.nn.sigmoid(prompt_logs - row_logs.reshape(rows, -1))  # the prompt's part of all weights
    share = jnp.where(has_prompt, share, 0)[..., None]
    joined = jnp.where(has_prompt[..., None], of_prompt.reshape(flat.shape), 0) * share + of_row[:, 0] * (1 - share)
    return joined.astype(q.dtype).reshape(q.shape)


def _attend_with_logs(
    implementation: Any,
    q: Float[Array, "batch token head head_dim"],
    keys: Float[Array, "batch key kv_head head_dim"],
    values: Float[Array, "batch key kv_head head_dim"],
    lengths: Int[Array, " batch"],
) -> tuple[Float[Array, "batch token head head_dim"], Float[Array, "batch head token"]]:
    """Return the attention to the first keys, and the logarithm of the sum of the weights, in float32.

    `jax.nn.dot_product_attention` has the logarithm too, but rounded to the dtype of the heads: 1 in 128 then is lost.
    """
    scale = 1 / math.sqrt(q.shape[-1])
    if implementation == "cudnn":
        from jax._src.cudnn import fused_attention_stablehlo as cudnn

        queries, padding = jnp.full(q.shape[0], q.shape[1], jnp.int32), cudnn.MaskType.PADDING
        settings: dict[str, Any] = dict(scale=scale, mask_type=padding, return_residual=True)
        out: Any = cudnn.dot_product_attention(q, keys, values, q_seqlen=queries, kv_seqlen=lengths, **settings)
        return out
    grouped = q.reshape(*q.shape[:2], keys.shape[2], -1, q.shape[-1])
    scores = scale * jnp.einsum("btkqh,bskh->bkqts", grouped, keys, preferred_element_type=jnp.float32)
    scores = jnp.where(jnp.arange(keys.shape[1]) < lengths[:, None, None, None, None], scores, -jnp.inf)
    logs = jax.nn.logsumexp(scores, -1)
    weights = jnp.exp(scores - logs[..., None]).astype(q.dtype)
    out = jnp.einsum("bkqts,bskh->btkqh", weights, values, preferred_element_type=jnp.float32)
    return out.reshape(q.shape).astype(q.dtype), logs.reshape(q.shape[0], -1, q.shape[1])


def top_p_threshold(weights: Float[Array, " vocab"], top_p: Float[Array, ""] | float) -> Float[Array, ""]:
    """Return `choice.top_p_threshold`: finds 4 bits of the float in one pass, by the sums above 15 numbers."""
    bits, goal = lax.bitcast_convert_type(weights, jnp.int32), top_p * weights.sum()
    threshold = jnp.int32(0)
    for shift in range(28, -1, -4):
        below = threshold + (jnp.arange(1, 16 if shift < 28 else 8, dtype=jnp.int32) << shift) - 1
        enough = jnp.sum(jnp.where(bits > below[:, None], weights, 0), -1) >= goal  # then the threshold is above `below`
        threshold += jnp.sum(enough, dtype=jnp.int32) << shift
    return lax.bitcast_convert_type(threshold, jnp.float32)


def steps_per_look(new_tokens: int) -> int:
    """Return a number of decode steps that divides the number of new tokens, the largest up to `STEPS_PER_LOOK`."""
    return max(n for n in range(1, STEPS_PER_LOOK + 1) if new_tokens % n == 0)


def sum_by_token(tokens: Int[Array, " token"], x: Float[Array, "token dim"], vocab: int) -> Float[Array, "{vocab} dim"]:
    """Return the float32 sums of the rows of each token id.

    Some tokens at a time: rows of equal ids are added by a product, and then each id is written once.
    """
    size = min(TOKENS_PER_SUM, tokens.shape[0])
    padding = -tokens.shape[0] % size
    tokens = jnp.pad(tokens, (0, padding), constant_values=vocab).reshape(-1, size)
    x = jnp.pad(x, ((0, padding), (0, 0))).reshape(-1, size, x.shape[-1])

    def add(total: Array, part: tuple[Array, Array]) -> tuple[Array, None]:
        ids, rows = part
        equal = ids[:, None] == ids
        is_first = equal.argmax(-1) == jnp.arange(size)
        equal = equal.astype(rows.dtype)
        sums = jnp.matmul(equal, rows, precision=matmul_precision(rows), preferred_element_type=jnp.float32)
        index = jnp.where(is_first, ids, vocab + jnp.arange(size))  # out of range: dropped
        return total.at[index].add(sums, mode="drop", unique_indices=True), None

    return lax.scan(add, jnp.zeros((vocab, x.shape[-1]), jnp.float32), (tokens, x))[0]
