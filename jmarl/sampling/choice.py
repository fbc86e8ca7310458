"""Choose a token from the logits of a row, with 64 random bits.

Logits are processed in the order of Hugging Face: repetition penalty, minimum length, temperature, top-k, top-p, min-p. A token
is drawn with Gumbel noise: first a block of the vocabulary, then a token in it. This takes a few hundred random numbers instead
of one per token of the vocabulary. They are hashed from the 64 bits in the decode loop, so they take no memory.

Programs of another shape (batch size, slots, mesh) round logits differently. Another token is drawn only where the two best
scores are within rounding: with SmolLM2-135M in float32 for one token in 250,000. The inverse of the cumulative sum over the
vocabulary takes a single number, but its boundaries move by more than small probabilities: there it was one token in 450.

Ids without a token (embeddings that only pad the vocabulary) are never drawn. Like top-p this truncates the distribution that
is drawn from, and not the one that is trained: log-probabilities of the sampler, the learner, transformers and TRL stay equal,
and an update may lower the probability of these ids, which other samplers draw. An entropy bonus counts them too, as it counts
what top-p removes.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Key, UInt32

from jmarl.config import Sampling
from jmarl.models import platforms
from jmarl.types import Vocabulary

BLOCK = 256  # block size of the vocabulary in `draw_index`
TOP_K_BLOCK = 64  # block size of the vocabulary in `top_k`

Choice = tuple[Int[Array, ""], Float[Array, ""], Float[Array, ""]]  # token, its log-probability, its truncated log-probability


class RowSampling(NamedTuple):
    """Settings that rows have of their own, in place of those of `Sampling`: one program then serves all of them."""

    temperature: Float[Array, "..."]  # 0 is greedy
    top_p: Float[Array, "..."]


def random_bits(keys: Key[Array, " row"], count: int) -> UInt32[Array, "{count} row 2"]:
    """Return the random bits with which rows choose their tokens. The keys are consumed."""
    token_of_rows = jax.vmap(lambda key, t: jax.random.bits(jax.random.fold_in(key, t), (2,), jnp.uint32), (0, None))
    return jax.vmap(token_of_rows, (None, 0))(keys, jnp.arange(count))


def exponentials(bits: UInt32[Array, " 2"], count: int) -> Float[Array, " {count}"]:
    """Return independent numbers of the exponential distribution with mean 1, hashed from random bits and their indices.

    A few operations on integers, which compilers fuse: random keys in a loop are slow on CPUs, see `sampler.prepare`.
    """
    hashed = _mix(_mix(jnp.arange(count, dtype=jnp.uint32) + bits[0]) ^ bits[1])
    # -log(1 - u) keeps the digits of small numbers, which decide. u is neither 0 nor 1.
    u = jnp.minimum((hashed.astype(jnp.float32) + 0.5) * 2.0**-32, 1 - 2.0**-24)
    return -jnp.log1p(-u)


def _mix(x: UInt32[Array, " number"]) -> UInt32[Array, " number"]:
    """Return a bijective hash of integers (lowbias32 with the constants of github.com/skeeto/hash-prospector/issues/19)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x21F0AAAD)
    x = (x ^ (x >> 15)) * jnp.uint32(0xD35A2D97)
    return x ^ (x >> 15)


def top_p_threshold(weights: Float[Array, " vocab"], top_p: Float[Array, ""] | float) -> Float[Array, ""]:
    """Return the smallest weight that top-p keeps: the largest w such that all weights above w hold less than top_p of the sum.

    Bisects the bits of the float, because non-negative floats have the order of their bits. This is exact, without a sort.
    """
    bits = lax.bitcast_convert_type(weights, jnp.int32)
    goal = top_p * weights.sum()

    def halve(_: Int[Array, ""], bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds  # the sum of weights above `low` is at least the goal, of those above `high` it is less
        middle = low + (high - low) // 2
        enough = jnp.sum(jnp.where(bits > middle, weights, 0)) >= goal
        return jnp.where(enough, middle, low), jnp.where(enough, high, middle)

    _, high = lax.fori_loop(0, 31, halve, (jnp.int32(-1), bits.max()))
    return lax.bitcast_convert_type(high, jnp.float32)


def draw_index(weights: Float[Array, " vocab"], bits: UInt32[Array, " 2"]) -> Int[Array, ""]:
    """Return index i with probability w_i / sum_j w_j, for non-negative weights w.

    With independent exponential numbers E, the largest w_i / E_i has this probability. Its logarithm is log w_i plus Gumbel
    noise. So a block is drawn by the sum of its weights, and then an index in the block. Indices of weight 0 are never drawn.
    """
    size = min(BLOCK, weights.shape[0])
    blocks = jnp.pad(weights, (0, -weights.shape[0] % size)).reshape(-1, size)
    count = len(blocks)
    noise = exponentials(bits, count + size)
    b = jnp.argmax(blocks.sum(-1) / noise[:count])
    return b * size + jnp.argmax(blocks[b] / noise[count:])


def top_k(logits: Float[Array, " vocab"], k: int) -> tuple[Float[Array, " k"], Int[Array, " k"]]:
    """Return the k largest logits in descending order, and their ids.

    They lie in the k blocks with the largest maxima, and only those are searched: four times as fast as `lax.top_k` on the
    whole vocabulary.
    """
    size = TOP_K_BLOCK
    if logits.shape[0] <= k * size:
        values, ids = lax.top_k(logits, k)
        return values, ids
    blocks = jnp.pad(logits, (0, -logits.shape[0] % size), constant_values=-jnp.inf).reshape(-1, size)
    _, best = lax.top_k(blocks.max(-1), k)
    values, i = lax.top_k(blocks[best].reshape(-1), k)
    return values, best[i // size] * size + i % size


def draw(
    logits: Float[Array, " vocab"],
    bits: UInt32[Array, " 2"],
    cfg: Sampling,
    own: RowSampling | None = None,
    own_top_p: bool = True,
) -> tuple[Int[Array, ""], Float[Array, ""]]:
    """Draw a token from processed logits, truncated by top-k, top-p and min-p.

    Args:
        logits: logits divided by the temperature.
        bits: random bits.
        cfg: the sampling settings.
        own: temperature and top-p of this row; None: those of `cfg`.
        own_top_p: False: its top-p is 1.

    Returns:
        The token and its log-probability in the truncated, renormalized distribution.
    """
    if own is not None:
        i, logp = _draw(logits, bits, cfg, own.top_p if own_top_p else 1.0)
        greedy = own.temperature == 0
        return jnp.where(greedy, jnp.argmax(logits), i), jnp.where(greedy, 0, logp)
    if cfg.greedy:
        return jnp.argmax(logits), jnp.zeros(())
    return _draw(logits, bits, cfg, cfg.top_p)


def _draw(
    logits: Float[Array, " vocab"], bits: UInt32[Array, " 2"], cfg: Sampling, top_p: Float[Array, ""] | float
) -> tuple[Int[Array, ""], Float[Array, ""]]:
    """Return `draw` of a row that is not greedy."""
    if 0 < cfg.top_k < logits.shape[0]:
        # Sorted, so top-p is a cumulative sum. The maximum is not `values[0]`: XLA for CPUs turns a top-k whose result is
        # sliced into a sort of the whole vocabulary (120 ms instead of 1 for 16 rows on two cores).
        values, ids = top_k(logits, cfg.top_k)
        weights = jnp.exp(values - logits.max())
        above = jnp.cumsum(weights) - weights
        keep = (above < top_p * weights.sum()) & (weights >= cfg.min_p)
    else:
        ids, weights = None, jnp.exp(logits - logits.max())
        keep = weights >= cfg.min_p
        if isinstance(top_p, Array):
            keep &= weights >= jnp.where(top_p < 1, platforms.top_p_threshold(top_p_threshold, weights, top_p), 0)
        elif top_p < 1:
            keep &= weights >= platforms.top_p_threshold(top_p_threshold, weights, top_p)
    weights = jnp.where(keep, weights, 0)
    i = draw_index(weights, bits)
    return (i if ids is None else ids[i]), jnp.log(weights[i] / weights.sum())


def choose(
    logits: Float[Array, " vocab"],
    bits: UInt32[Array, " 2"],
    t: Int[Array, ""],
    seen: Bool[Array, " vocab"] | None,
    stop: Int[Array, " stop"],
    cfg: Sampling,
    allowed: Bool[Array, " vocab"] | None = None,
    own: RowSampling | None = None,
    own_top_p: bool = True,
) -> Choice:
    """Choose token t of one row.

    Args:
        logits: logits of the model.
        bits: random bits of this token.
        t: index of the token in its completion.
        seen: ids in the prompt and the completion so far; None without a repetition penalty.
        stop: ids that end the row.
        cfg: the sampling settings.
        allowed: ids that may be drawn; None: all.
        own: temperature and top-p of this row; None: those of `cfg`.
        own_top_p: False: its top-p is 1.

    Returns:
        The token, its log-probability over the whole vocabulary at the sampling temperature, and its log-probability in the
        distribution that it was drawn from.
    """
    greedy = cfg.greedy and own is None
    temperature = cfg.temperature if own is None else jnp.where(own.temperature == 0, 1, own.temperature)
    tempered = logits if greedy else logits / temperature
    processed = logits
    if seen is not None:
        penalized = jnp.where(logits > 0, logits / cfg.repetition_penalty, logits * cfg.repetition_penalty)
        processed = jnp.where(seen, penalized, logits)
    if cfg.min_new_tokens:
        ends = jnp.any(jnp.arange(len(logits)) == stop[:, None], 0)
        processed = jnp.where(ends & (t < cfg.min_new_tokens), -jnp.inf, processed)
    if allowed is not None:
        processed = jnp.where(allowed, processed, -jnp.inf)
    processed = processed if greedy else processed / temperature
    token, truncated = draw(processed, bits, cfg, own, own_top_p)
    return token.astype(jnp.int32), tempered[token] - jax.nn.logsumexp(tempered), truncated


def next_token(
    logits: Float[Array, "*rows vocab"],
    bits: UInt32[Array, "*rows 2"],
    t: Int[Array, "..."],
    seen: Bool[Array, "*rows vocab"] | None,
    text: Int[Array, "*rows"] | None,
    stop: Int[Array, "*rows stop"],
    cfg: Sampling,
    vocabulary: Vocabulary,
    own: RowSampling | None = None,
) -> tuple[tuple[Int[Array, "*rows"], Float[Array, "*rows"], Float[Array, "*rows"]], Bool[Array, "*rows"], Any, Any]:
    """Choose token t of each row: the step of every decode loop.

    Arguments as of `choose_for_rows` and `find_end`. Returns the result of `choose_for_rows`, which rows end with it, and their
    new `seen` and `text`.
    """
    chosen = choose_for_rows(logits, bits, t, seen, stop, cfg, vocabulary.allowed, own)
    if seen is not None:
        add = jax.vmap(lambda ids, token: ids.at[token].set(True))
        seen = add(seen.reshape(-1, seen.shape[-1]), chosen[0].reshape(-1)).reshape(seen.shape)
    ended, text = find_end(chosen[0], t, text, stop, vocabulary.stops, cfg)
    return chosen, ended, seen, text


def find_end(
    token: Int[Array, "*rows"],
    t: Int[Array, "..."],
    text: Int[Array, "*rows"] | None,
    stop: Int[Array, "*rows stop"],
    stops: Int[Array, "state vocab"] | None,
    cfg: Sampling,
) -> tuple[Bool[Array, "*rows"], Int[Array, "*rows"] | None]:
    """Return which rows end with their token t, and the next state of the automaton of stop texts in each row.

    Args:
        token: the last token of each row.
        t: its index, in all rows or in each.
        text: the state of each row; None without stop texts.
        stop: ids that end the row.
        stops: the automaton, see `sampling.stop_texts`.
        cfg: the sampling settings. A text that is complete before `min_new_tokens` ends no row.
    """
    ended = jnp.any(token[..., None] == stop, -1)
    if stops is None or text is None:
        return ended, text
    following = stops[text, token].astype(jnp.int32)
    complete = following == len(stops) - 1
    return ended | (complete & (t >= cfg.min_new_tokens)), jnp.where(complete, 0, following)


def choose_for_rows(
    logits: Float[Array, "*rows vocab"],
    bits: UInt32[Array, "*rows 2"],
    t: Int[Array, "..."],
    seen: Bool[Array, "*rows vocab"] | None,
    stop: Int[Array, "*rows stop"],
    cfg: Sampling,
    allowed: Bool[Array, " vocab"] | None = None,
    own: RowSampling | None = None,
) -> tuple[Int[Array, "*rows"], Float[Array, "*rows"], Float[Array, "*rows"]]:
    """Return `choose` of each row. t: index of the token, in all rows or in each. own: [*rows] of each row."""
    shape = bits.shape[:-1]
    # All rows on one axis: XLA's top-k for CPUs supports one batch axis, and sorts the whole vocabulary for more.
    logits, bits, seen, stop = jax.tree.map(lambda x: x.reshape(-1, x.shape[-1]), (logits, bits, seen, stop))
    arguments = logits, bits, t.reshape(-1) if t.ndim else t, seen, stop, cfg, allowed
    axes = (0, 0, 0 if t.ndim else None, 0, 0, None, None, 0, None)

    def choose_all(own: RowSampling | None, own_top_p: bool) -> tuple[Array, Array, Array]:
        return jax.vmap(choose, axes)(*arguments, own, own_top_p)

    if own is None:
        rows = choose_all(None, False)
    else:  # without the search for the threshold of top-p where no row has one
        with_top_p, without = partial(choose_all, own_top_p=True), partial(choose_all, own_top_p=False)
        rows = lax.cond(jnp.any(own.top_p < 1), with_top_p, without, RowSampling(*(x.reshape(-1) for x in own)))
    return jax.tree.map(lambda x: x.reshape(shape), rows)
