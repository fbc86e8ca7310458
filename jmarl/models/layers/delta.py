"""Mix tokens by a recurrence: the gated delta rule (Gated Delta Networks, arXiv 2412.06464), with its convolution and its norm.

A head has a memory S [key, value], a matrix that maps keys to values. A token lets it fade by exp(g), g <= 0, and moves what
it returns for the token's key k towards the token's value v, by a share b of the difference; then the query q reads it::

    u_t = b_t (v_t - exp(g_t) S_{t-1}^T k_t)    S_t = exp(g_t) S_{t-1} + k_t u_t^T    o_t = S_t^T q_t / sqrt(size of a key)

`gated_delta` computes this for a stream, chunk by chunk, `gated_delta_token` for one token. Before it, a causal convolution
mixes each channel of queries, keys and values with its last inputs. `delta_stream`, `delta_token` and `group_delta` do both.

All functions are of one stream; vmap adds axes. A token with g = 0 and b = 0 leaves the memory as it is, to the last bit: so
padding does not count, and a row that has ended does not change. Memories are float32, and so is what is computed with them.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jmarl.models.gpu import matmul_precision

CHUNK = 64  # tokens that are computed at once


class DeltaState(NamedTuple):
    """What a layer remembers of a stream."""

    conv: Array  # [3, channel]: the last inputs of the convolution, whose kernel has 4
    memory: Array  # [head, key, value] float32


Keys = Float[Array, "token key_head key"]  # also queries; a key head serves neighboring heads
Values = Float[Array, "token head value"]
Gates = Float[Array, "token head"]  # logarithms of decays, and shares b
Memory = Float[Array, "head key value"]
Channels = Float[Array, "token channel"]  # queries, keys and values side by side, each head by head


def empty_state(
    kernel: Float[Array, "width channel"], heads: int, key_size: int, value_size: int, dtype: jax.typing.DTypeLike
) -> DeltaState:
    """Return the state before the first token. dtype: of the inputs of the convolution."""
    width, channels = kernel.shape
    return DeltaState(jnp.zeros((width - 1, channels), dtype), jnp.zeros((heads, key_size, value_size)))


# --- the parts of a layer ----------------------------------------------------------------------------------------------


def log_decay(a: Gates, log_rate: Float[Array, " head"], bias: Float[Array, " head"]) -> Gates:
    """Return g = -exp(log_rate) softplus(a + bias), in float32."""
    a, log_rate, bias = (x.astype(jnp.float32) for x in (a, log_rate, bias))
    return -jnp.exp(log_rate) * jax.nn.softplus(a + bias)


def unit(x: Float[Array, "*batch key"]) -> Float[Array, "*batch key"]:
    """Return vectors of length 1, in float32."""
    x = x.astype(jnp.float32)
    return x * lax.rsqrt(jnp.sum(x * x, -1, keepdims=True) + 1e-6)


def gated_norm(
    x: Float[Array, "*batch value"], gate: Float[Array, "*batch value"], weight: Float[Array, " value"], eps: float
) -> Float[Array, "*batch value"]:
    """Return the RMSNorm of x (arXiv 1910.07467), times silu(gate). The weight is as it is filed, not less 1."""
    y = x.astype(jnp.float32)
    y = (y * lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + eps)).astype(x.dtype)
    return ((weight * y).astype(jnp.float32) * jax.nn.silu(gate.astype(jnp.float32))).astype(x.dtype)


def causal_conv(
    x: Channels,
    kernel: Float[Array, "width channel"],
    state: Float[Array, "past channel"],
    length: Int[Array, ""] | int,
) -> tuple[Channels, Float[Array, "past channel"]]:
    """Return silu(sum_i kernel_i x_{t - width + 1 + i}) of each channel, and the last inputs of the stream.

    Args:
      state: the inputs before the first token.
      length: number of tokens of the stream; those behind them are padding.
    """
    past, t = state.shape[0], x.shape[0]
    inputs = jnp.concatenate([state.astype(x.dtype), x])
    taps = [kernel[i].astype(jnp.float32) * lax.slice_in_dim(inputs, i, i + t).astype(jnp.float32) for i in range(past + 1)]
    return jax.nn.silu(sum(taps[1:], taps[0])).astype(x.dtype), lax.dynamic_slice_in_dim(inputs, length, past)


def split_heads(x: Channels, memory: Memory) -> tuple[Keys, Keys, Values]:
    """Return queries and keys of length 1, and values."""
    (t, channels), (heads, key_size, value_size) = x.shape, memory.shape
    keys = (channels - heads * value_size) // 2
    q, k, v = jnp.split(x, (keys, 2 * keys), 1)
    return unit(q.reshape(t, -1, key_size)), unit(k.reshape(t, -1, key_size)), v.reshape(t, heads, value_size)


# --- the recurrence ----------------------------------------------------------------------------------------------------


def gated_delta_token(
    q: Float[Array, "key_head key"],
    k: Float[Array, "key_head key"],
    v: Float[Array, "head value"],
    decay: Float[Array, " head"],
    beta: Float[Array, " head"],
    state: Memory,
) -> tuple[Float[Array, "head value"], Memory]:
    """Return the output o_t of one token, in float32, and the memory S_t. decay: g_t. beta: b_t. state: S_{t-1}.

    o_t is computed as exp(g_t) S_{t-1}^T q_t + (q_t . k_t) u_t: so one pass over S_{t-1} serves query and key.
    """
    q, k, v, decay, beta = (x.astype(jnp.float32) for x in (q, k, v, decay, beta))
    q, k = (jnp.repeat(x, v.shape[0] // x.shape[0], 0) for x in (q / math.sqrt(q.shape[-1]), k))
    faded = jnp.exp(decay)[:, None, None] * state
    u = beta[:, None] * (v - jnp.sum(faded * k[..., None], 1))
    out = jnp.sum(faded * q[..., None], 1) + jnp.sum(q * k, -1, keepdims=True) * u
    return out, faded + k[..., None] * u[:, None]


def _prepared(q: Array, k: Array, decay: Array, beta: Array, precision: lax.Precision | None) -> tuple[Array, Array, Array]:
    """Return G, the inverse of I + A, and the weights of u_j in o_i, of one chunk and one head, see `gated_delta`."""
    total = jnp.cumsum(decay)
    causal = jnp.tril(jnp.ones((CHUNK, CHUNK), bool))
    between = jnp.exp(jnp.where(causal, total[:, None] - total, -jnp.inf))
    a = jnp.tril(beta[:, None] * between * jnp.matmul(k, k.T, precision=precision), -1)
    inverse = lax.linalg.triangular_solve(a, jnp.eye(CHUNK), left_side=True, lower=True, unit_diagonal=True)
    return total, inverse, between * jnp.matmul(q, k.T, precision=precision)


def _chunk(
    state: Array, q: Array, k: Array, v: Array, beta: Array, prepared: tuple[Array, ...], precision: lax.Precision | None
) -> tuple[Array, Array]:
    """Return the memory after one chunk of one head, and the outputs. prepared: see `_prepared`."""
    matmul, (total, inverse, weights) = functools.partial(jnp.matmul, precision=precision), prepared
    faded, left = jnp.exp(total)[:, None], jnp.exp(total[-1] - total)[:, None]
    u = matmul(inverse, beta[:, None] * (v - faded * matmul(k, state)))
    return jnp.exp(total[-1]) * state + matmul((left * k).T, u), faded * matmul(q, state) + matmul(weights, u)


def gated_delta(q: Keys, k: Keys, v: Values, decay: Gates, beta: Gates, state: Memory) -> tuple[Values, Memory]:
    """Return the outputs of a stream, in float32, and its last memory. decay: g. beta: b. state: S before the first token.

    With G_i the sum of g up to token i of a chunk, and S before the chunk, the rows of U are u_i and (arXiv 2406.06484)::

        (I + A) U = diag(b) (V - diag(exp(G)) K S)      A_ij = b_i exp(G_i - G_j) k_i . k_j  for j < i, else 0
        o_i = exp(G_i) S^T q_i + sum_{j <= i} exp(G_i - G_j) (q_i . k_j) u_j

    I + A is inverted by substitution, for all chunks at once: a series of powers of A loses all digits if keys are equal. For
    the backward pass only the memory before each chunk is saved, and the rest of a chunk is computed again.
    """
    precision, (t, n, _), (h, value_size) = matmul_precision(v), k.shape, v.shape[1:]

    def chunked(x: Array) -> Array:
        """Return [token, ..., size] as [chunk, ..., token, size]. Behind the stream are zeros, which change no memory."""
        x = jnp.pad(x.astype(jnp.float32), [(0, -t % CHUNK)] + [(0, 0)] * (x.ndim - 1))
        return jnp.moveaxis(x.reshape(-1, CHUNK, *x.shape[1:]), 1, -2)

    def over_heads(f: Callable, *axes: int | None) -> Callable:
        """Return f over key heads, then over the heads that each serves, which share its queries and keys."""
        return jax.vmap(jax.vmap(functools.partial(f, precision=precision), axes))

    q, k, v = (chunked(x) for x in (q / math.sqrt(q.shape[-1]), k, v.reshape(t, n, h // n, value_size)))
    decay, beta = (chunked(x.reshape(t, n, h // n, 1)).squeeze(-1) for x in (decay, beta))
    prepared = jax.vmap(over_heads(_prepared, None, None, 0, 0))(q, k, decay, beta)

    @jax.checkpoint
    def step(state: Array, inputs: tuple[Any, ...]) -> tuple[Array, Array]:
        return over_heads(_chunk, 0, None, None, 0, 0, 0)(state, *inputs)

    state, out = lax.scan(step, state.reshape(n, h // n, *state.shape[1:]), (q, k, v, beta, prepared))
    return jnp.moveaxis(out, -2, 1).reshape(-1, h, value_size)[:t], state.reshape(h, *state.shape[2:])


# --- convolution and recurrence ----------------------------------------------------------------------------------------


def delta_stream(
    x: Channels,
    decay: Gates,
    beta: Gates,
    kernel: Float[Array, "width channel"],
    state: DeltaState,
    length: Int[Array, ""] | int,
) -> tuple[Values, DeltaState]:
    """Return the outputs of a stream that follows a state, and the state after its last token.

    length: number of tokens of the stream; those behind them are padding, whose outputs are finite and mean nothing.
    """
    is_token = (jnp.arange(x.shape[0]) < length)[:, None]
    y, conv = causal_conv(x, kernel, state.conv, length)
    q, k, v = split_heads(y, state.memory)
    decay, beta = (jnp.where(is_token, gate, 0) for gate in (decay, beta))
    out, memory = gated_delta(q, k, v, decay, beta, state.memory)
    return out.astype(x.dtype), DeltaState(conv, memory)


def delta_token(
    x: Float[Array, " channel"],
    decay: Float[Array, " head"],
    beta: Float[Array, " head"],
    kernel: Float[Array, "width channel"],
    state: DeltaState,
    live: Bool[Array, ""] | bool = True,
) -> tuple[Float[Array, "head value"], DeltaState]:
    """Return the output of one token that follows a state, and the state after it. live: False: the state stays as it is."""
    y, conv = causal_conv(x[None], kernel, state.conv, 1)
    q, k, v = (part[0] for part in split_heads(y, state.memory))
    decay, beta = (jnp.where(live, gate, 0) for gate in (decay, beta))
    out, memory = gated_delta_token(q, k, v, decay, beta, state.memory)
    return out.astype(x.dtype), DeltaState(jnp.where(live, conv, state.conv), memory)


def group_delta(
    x: Channels,
    decay: Gates,
    beta: Gates,
    kernel: Float[Array, "width channel"],
    state: DeltaState,
    length: Int[Array, ""],
    s: int,
    g: int,
) -> Values:
    """Return the outputs of the S tokens of a prompt and of its G rows, which lie behind it, as in `decoder.completion_states`.

    Rows follow the state after the prompt's last token: the prompt is computed once, also in the backward pass.

    Args:
      state: what stands before the prompt.
      length: number of tokens of the prompt.
    """
    out, end = delta_stream(x[:s], decay[:s], beta[:s], kernel, state, length)

    def follow(x: Channels, decay: Gates, beta: Gates) -> Values:
        return delta_stream(x, decay, beta, kernel, end, x.shape[0])[0]

    row_out = jax.vmap(follow)(*(array[s:].reshape(g, -1, array.shape[1]) for array in (x, decay, beta)))
    return jnp.concatenate([out, row_out.reshape(-1, *out.shape[1:])])
