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

from jmarl.models.config import DeltaSizes
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
Delta = Callable[..., tuple[Values, Any]]
"""From channels, logarithms of decays, shares and the kernel of the convolution, of all tokens, to outputs and states. It
decides which tokens follow which; a program gives it to the layers, as it gives them an `attention.Attention`."""


def empty_state(sizes: DeltaSizes | None, dtype: jax.typing.DTypeLike) -> DeltaState:
    """Return the state before the first token. sizes: of recurrent layers. dtype: of the inputs of their convolution."""
    assert sizes is not None
    conv = jnp.zeros((sizes.width - 1, sizes.channels), dtype)
    return DeltaState(conv, jnp.zeros((sizes.heads, sizes.key_size, sizes.value_size)))


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
    # Without a barrier XLA computes one of these sums in the norm behind it, and reads the memory once more for it.
    of_key, of_query = lax.optimization_barrier((jnp.sum(faded * k[..., None], 1), jnp.sum(faded * q[..., None], 1)))
    u = beta[:, None] * (v - of_key)
    out = of_query + jnp.sum(q * k, -1, keepdims=True) * u
    return out, faded + k[..., None] * u[:, None]


@jax.custom_vjp
def inverse_below(a: Float[Array, "n n"]) -> Float[Array, "n n"]:
    """Return the inverse of I + A, where A has numbers only below the diagonal and n is a power of 2.

    Of the inverses of two blocks on the diagonal, and what stands below them, follows that of the block of both. It is as
    exact as substitution. XLA's own on CPUs, LAPACK's, waits forever if all threads solve at once (jax 0.10.2).
    """
    number, matmul = jnp.arange(len(a)), functools.partial(jnp.matmul, precision=lax.Precision.HIGHEST)
    inverse = jnp.eye(len(a))
    for i in range((len(a) - 1).bit_length()):
        block = number >> i
        below = (block[:, None] % 2 == 1) & (block == block[:, None] - 1)
        inverse = inverse - matmul(inverse, matmul(jnp.where(below, a, 0), inverse))
    return inverse


def _inverse_forward(a: Array) -> tuple[Array, Array]:
    inverse = inverse_below(a)
    return inverse, inverse


def _inverse_backward(inverse: Array, d_out: Array) -> tuple[Array]:
    matmul = functools.partial(jnp.matmul, precision=lax.Precision.HIGHEST)
    return (-jnp.tril(matmul(inverse.T, matmul(d_out, inverse.T)), -1),)


inverse_below.defvjp(_inverse_forward, _inverse_backward)


def _prepared(q: Array, k: Array, decay: Array, beta: Array, *, precision: lax.Precision | None) -> tuple[Array, Array, Array]:
    """Return G, the inverse of I + A, and the weights of u_j in o_i, of one chunk and one head, see `gated_delta`."""
    total = jnp.cumsum(decay)
    causal = jnp.tril(jnp.ones((CHUNK, CHUNK), bool))
    between = jnp.exp(jnp.where(causal, total[:, None] - total, -jnp.inf))
    a = jnp.tril(beta[:, None] * between * jnp.matmul(k, k.T, precision=precision), -1)
    return total, inverse_below(a), between * jnp.matmul(q, k.T, precision=precision)


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

    I + A is inverted block by block, for all chunks at once: a series of powers of A loses all digits if keys are equal. For
    the backward pass only the memory before each chunk is saved, and the rest of a chunk is computed again.
    """
    precision, (t, h, value_size) = matmul_precision(v), v.shape

    def chunked(x: Array) -> Array:
        """Return [token, head, size] as [chunk, head, token, size]. Behind the stream are zeros, which change no memory."""
        x = jnp.pad(x.astype(jnp.float32), [(0, -t % CHUNK)] + [(0, 0)] * (x.ndim - 1))
        return jnp.moveaxis(x.reshape(-1, CHUNK, *x.shape[1:]), 1, 2)

    # Chunks and heads are one axis, and heads do not share keys: with the axes of agents, prompts and rows there are then 7 in
    # a product. XLA's products on CPUs, YNNPACK's, write beyond their arrays if there are 8 (jax 0.10.2).
    q, k = (jnp.repeat(x, h // x.shape[1], 1) for x in (q / math.sqrt(q.shape[-1]), k))
    q, k, v, decay, beta = map(chunked, (q, k, v, decay, beta))
    flat = (x.reshape(-1, *x.shape[2:]) for x in (q, k, decay, beta))
    prepared = jax.vmap(functools.partial(_prepared, precision=precision))(*flat)
    prepared = jax.tree.map(lambda x: x.reshape(-1, h, *x.shape[1:]), prepared)

    @jax.checkpoint
    def step(state: Array, inputs: tuple[Any, ...]) -> tuple[Array, Array]:
        return jax.vmap(functools.partial(_chunk, precision=precision))(state, *inputs)

    state, out = lax.scan(step, state, (q, k, v, beta, prepared))
    return jnp.moveaxis(out, 2, 1).reshape(-1, h, value_size)[:t], state


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


# --- the tokens of programs --------------------------------------------------------------------------------------------


def causal_delta(num_tokens: int, sizes: DeltaSizes | None) -> Delta:
    """Return the recurrence of one stream."""

    def delta(x: Channels, decay: Gates, beta: Gates, kernel: Array) -> tuple[Values, None]:
        return delta_stream(x, decay, beta, kernel, empty_state(sizes, x.dtype), num_tokens)[0], None

    return delta


def prompts_delta(lengths: Int[Array, " prompt"], sizes: DeltaSizes | None) -> Delta:
    """Return the recurrence of P prompts of these lengths, which follow their `past` if there is one; and their states."""
    p = len(lengths)

    def delta(
        x: Channels, decay: Gates, beta: Gates, kernel: Array, past: DeltaState | None = None
    ) -> tuple[Values, DeltaState]:
        state, axis = (empty_state(sizes, x.dtype), None) if past is None else (past, 0)
        x, decay, beta = (array.reshape(p, -1, array.shape[1]) for array in (x, decay, beta))
        out, end = jax.vmap(delta_stream, (0, 0, 0, None, axis, 0))(x, decay, beta, kernel, state, lengths)
        return out.reshape(-1, *out.shape[2:]), end

    return delta


def groups_delta(lengths: Int[Array, " prompt"], s: int, g: int, sizes: DeltaSizes | None) -> Delta:
    """Return the recurrence of P prompts and their rows, see `group_delta`."""
    p = len(lengths)

    def delta(x: Channels, decay: Gates, beta: Gates, kernel: Array) -> tuple[Values, None]:
        x, decay, beta = (array.reshape(p, -1, array.shape[1]) for array in (x, decay, beta))
        group = functools.partial(group_delta, s=s, g=g)
        out = jax.vmap(group, (0, 0, 0, None, None, 0))(x, decay, beta, kernel, empty_state(sizes, x.dtype), lengths)
        return out.reshape(-1, *out.shape[2:]), None

    return delta


def tokens_delta(states: DeltaState, live: Bool[Array, " row"] | None) -> Delta:
    """Return the recurrence of one token of each of R rows, and their states. live: rows that have not ended; None: all."""

    def delta(x: Channels, decay: Gates, beta: Gates, kernel: Array) -> tuple[Values, DeltaState]:
        alive = jnp.ones(len(x), bool) if live is None else live
        return jax.vmap(delta_token, (0, 0, 0, None, 0, 0))(x, decay, beta, kernel, states, alive)

    return delta
