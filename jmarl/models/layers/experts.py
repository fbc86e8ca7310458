"""Route each token to a few experts, and multiply it with their weights only: mixtures of experts (arXiv 1701.06538).

jax 0.10.2 lowers `lax.ragged_dot` densely on CPUs and CUDA: every token times every expert, masked. Here the slots (a token and
one of its experts) are sorted by expert into blocks. All rows of a block have one expert, so a block is a product of two
matrices, and operations grow with the experts of a token, not with all. Blocks are multiplied a few at a time, so that few
weights are copied at once. Each expert fills its last block in part: `block_rows` keeps that below an eighth of the slots.

A few tokens, as in a decode step, take less time with all experts, if most are chosen anyway: their weights are then read once,
and XLA copies those of each block before it reads them (`reads_all`).

Left out: a kernel that reads the weights of a block where they are.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

from jmarl.models.gpu import matmul_precision

MAX_BLOCK = 256  # rows
BLOCKS_AT_ONCE = 16
FEW_TOKENS = 256  # with fewer, a GPU waits for the weights of a product and not for its operations
BYTES_OF_BLOCKS = 3  # the weights of a block are read, written and read again


class Routes(NamedTuple):
    """Where tokens go."""

    experts: Int[Array, "token choice"]
    weights: Float[Array, "token choice"]
    probs: Float[Array, "token expert"]


class Load(NamedTuple):
    """How often the experts of one layer are chosen, for `balance`. Sums over tokens; those of several parts add up."""

    chosen: Float[Array, " expert"]  # slots
    probs: Float[Array, " expert"]
    tokens: Float[Array, ""]


class Blocks(NamedTuple):
    """Slots sorted by expert, in blocks of B rows that have one expert each."""

    place: Int[Array, " slot"]  # the row of each slot; some rows are empty
    expert: Int[Array, " block"]


def route(x: Float[Array, "token dim"], router: Float[Array, "dim expert"], choices: int, normalize: bool) -> Routes:
    """Return the experts of greatest probability, and their probabilities, divided by their sum if `normalize`."""
    logits = jnp.matmul(x, router, precision=matmul_precision(x), preferred_element_type=jnp.float32)
    probs = jax.nn.softmax(logits)
    weights, experts = lax.top_k(probs, choices)
    return Routes(experts, weights / weights.sum(-1, keepdims=True) if normalize else weights, probs)


def block_rows(slots: int, experts: int) -> int:
    """Return the rows of a block: a power of 2, of which all experts together leave at most an eighth of the slots empty."""
    return min(MAX_BLOCK, 1 << max(0, (slots // (8 * experts)).bit_length() - 1))


def reads_all(tokens: int, choices: int, experts: int) -> bool:
    """Return whether tokens are multiplied with all experts, as fewer bytes are read for it."""
    return tokens <= FEW_TOKENS and experts <= BYTES_OF_BLOCKS * num_blocks(tokens * choices, experts)


def num_blocks(slots: int, experts: int) -> int:
    """Return a number of blocks that is never too small."""
    return min(slots, slots // block_rows(slots, experts) + experts)


def make_blocks(experts: Int[Array, " slot"], num_experts: int) -> Blocks:
    """Return the blocks of slots with these experts."""
    slots = len(experts)
    size, count = block_rows(slots, num_experts), num_blocks(slots, num_experts)
    order = jnp.argsort(experts)
    ordered = experts[order]
    first = jnp.searchsorted(ordered, jnp.arange(num_experts + 1))
    ends = jnp.cumsum(-(-jnp.diff(first) // size))  # of the blocks of each expert
    begins = jnp.concatenate([jnp.zeros(1, ends.dtype), ends[:-1]])
    rows = begins[ordered] * size + jnp.arange(slots) - first[ordered]
    place = jnp.zeros(slots, rows.dtype).at[order].set(rows, unique_indices=True)
    blocks = jnp.arange(-(-count // BLOCKS_AT_ONCE) * BLOCKS_AT_ONCE if count > BLOCKS_AT_ONCE else count)
    return Blocks(place, jnp.minimum(jnp.searchsorted(ends, blocks, side="right"), num_experts - 1))


def apply_experts(
    x: Float[Array, "token dim"],
    routes: Routes,
    gate: Float[Array, "expert dim width"],
    up: Float[Array, "expert dim width"],
    down: Float[Array, "expert width dim"],
    activation: Callable[[Array], Array],
) -> Float[Array, "token dim"]:
    """Return the weighted sum of what each token's experts (SwiGLU) return."""
    (n, d), k, num_experts = x.shape, routes.experts.shape[1], len(gate)
    precision = matmul_precision(x)
    if reads_all(n, k, num_experts):
        shares = (
            jnp.zeros((n, num_experts), x.dtype).at[jnp.arange(n)[:, None], routes.experts].set(routes.weights.astype(x.dtype))
        )
        copies = jnp.broadcast_to(x, (num_experts, n, d))  # else it is one product, for which XLA transposes the weights
        gates, ups = (jnp.einsum("end,edm->enm", copies, w, precision=precision) for w in (gate, up))
        y = activation(gates) * ups * shares.T[..., None]
        return jnp.einsum("enm,emd->nd", y, down, precision=precision)
    weights = routes.weights.astype(x.dtype)
    add = over_widths(functools.partial(add_blocks, activation), gate.shape[-1])
    return add(x, routes.experts, weights, gate, up, down)


def over_widths(f: Callable[..., Array], width: int) -> Callable[..., Array]:
    """Return f such that each device of the axis `model` multiplies its part of the experts' widths, and results are added up.

    The compiler would add up each block, in which a token stands once for each of its experts; here a token is added up once.
    """
    parts = dict(jax.sharding.get_abstract_mesh().shape).get("model", 1)
    if parts == 1 or width % parts:  # weights are whole then
        return f
    columns, rows = P(None, None, "model"), P(None, "model", None)
    inputs = P(), P(), P(), columns, columns, rows

    def part(x: Array, experts: Array, weights: Array, *others: Array) -> Array:
        x, weights = lax.pcast((x, weights), "model", to="varying")  # their gradients too are added up here, not in each block
        return lax.psum(f(x, experts, weights, *others), "model")

    return jax.shard_map(part, in_specs=inputs, out_specs=P(), axis_names={"model"})


def add_blocks(
    activation: Callable[[Array], Array],
    x: Float[Array, "token dim"],
    experts: Int[Array, "token choice"],
    weights: Float[Array, "token choice"],
    gate: Float[Array, "expert dim width"],
    up: Float[Array, "expert dim width"],
    down: Float[Array, "expert width dim"],
) -> Float[Array, "token dim"]:
    """Return the weighted sum of what each token's experts return, a few blocks at a time."""
    (n, d), k, num_experts = x.shape, experts.shape[1], len(gate)
    size, precision = block_rows(n * k, num_experts), matmul_precision(x)
    blocks = make_blocks(experts.reshape(-1), num_experts)
    slots = jnp.broadcast_to(x[:, None], (n, k, d)).reshape(n * k, d)
    rows = jnp.zeros((len(blocks.expert) * size, d), x.dtype).at[blocks.place].set(slots, unique_indices=True)

    @jax.checkpoint  # else the weights of each block would be kept for the backward pass
    def multiply(rows: Float[Array, "block row dim"], expert: Int[Array, " block"]) -> Float[Array, "block row dim"]:
        def times(y: Array, w: Array) -> Array:
            return jnp.einsum("brd,bdf->brf", y, w[expert], precision=precision)

        return times(activation(times(rows, gate)) * times(rows, up), down)

    at_once = min(BLOCKS_AT_ONCE, len(blocks.expert))
    inputs = rows.reshape(-1, at_once, size, d), blocks.expert.reshape(-1, at_once)
    _, out = lax.scan(lambda _, part: (None, multiply(*part)), None, inputs)
    out = out.reshape(-1, d).at[blocks.place].get(unique_indices=True, mode="promise_in_bounds").reshape(n, k, d)
    return jnp.einsum("nkd,nk->nd", out, weights, precision=precision)


def load_of(routes: Routes, counted: Bool[Array, " token"]) -> Load:
    """Return the load by some tokens."""
    num_experts = routes.probs.shape[-1]
    slots = jnp.broadcast_to(counted[:, None], routes.experts.shape).astype(jnp.float32)
    chosen = jnp.zeros(num_experts).at[routes.experts].add(slots)
    return Load(chosen, counted.astype(jnp.float32) @ routes.probs, counted.sum().astype(jnp.float32))


def balance(load: Load) -> Float[Array, ""]:
    """Return how evenly experts are chosen: E sum_e (chosen_e / tokens) (probability_e / tokens).

    It is the number of experts of a token if all are chosen equally often, and larger otherwise (Switch Transformer, arXiv
    2101.03961, equation 4). load: of several layers [L, ...], which are counted as one.
    """
    chosen, probs, tokens = (x.sum(0) for x in load)
    tokens = jnp.maximum(tokens, 1)
    return len(chosen) * jnp.sum(lax.stop_gradient(chosen / tokens) * probs / tokens)
