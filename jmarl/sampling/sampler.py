"""Sample completions for all agents of a stack in one program.

Each prompt is prefilled once, and its group shares the keys and values. A `while_loop` decodes one token for every row of every
agent and stops when all rows have ended. Each row has its own random key, so its random numbers depend neither on its
neighbors, nor on the batch size, nor on its place in the batch. Logits are processed in the order of Hugging Face: repetition
penalty, minimum length, temperature, top-k, top-p, min-p.

A token is drawn with one uniform number and the inverse of the cumulative distribution. On a CPU this is twenty times faster
than adding Gumbel noise to the whole vocabulary, and it needs no sort.

Left out: beam and contrastive search, which do not sample from the policy that is trained, and speculative decoding.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Integer, Key

from jmarl.config import Sampling
from jmarl.models import decoding, platforms
from jmarl.models.config import ModelConfig
from jmarl.models.decoder import Params
from jmarl.models.stack import is_shared, own_leaves
from jmarl.types import Completions

BLOCK = 256  # block size of the vocabulary for the cumulative sum in `lookup`
TOP_K_BLOCK = 64  # block size of the vocabulary in `top_k`

Numbers = Integer[Array | np.ndarray, "..."] | int
Choice = tuple[Int[Array, ""], Float[Array, ""], Float[Array, ""]]  # token, its log-probability, its truncated log-probability


class RowIds(NamedTuple):
    """The numbers that identify the rows of a stack. Random keys follow from them. They are traced, so that one program serves
    all seeds and steps."""

    seed: Numbers  # [], or [A * R] (R roles per parameter set) if agents belong to several runs
    step: Numbers  # []
    purpose: Numbers  # [], see `jmarl.randomness`
    stack: Numbers  # [] number of the stack in its team, or [A] (with R = 1) if agents belong to several teams
    agents: Int[Array | np.ndarray, "agent role"]  # numbers of the agents in their team
    prompt_ids: Integer[Array | np.ndarray, " prompt"]
    turn: Numbers = 0  # []


class SampleInputs(NamedTuple):
    """The prompts of a stack and what else its completions depend on."""

    prompts: Int[Array, "agent prompt prompt_token"]  # padded on the right
    lengths: Int[Array, "agent prompt"]  # at least 1
    keys: Key[Array, "agent prompt group"]  # one per row, consumed
    stop: Int[Array, " stop"]  # ids that end a row
    past: tuple[Any, Int[Array, "agent prompt"]] | None = None
    """The cache that an earlier call returned, and the row of it that each prompt follows. The prompt then begins with the last
    token of that row, which was sampled but is not in the cache."""


def top_p_threshold(weights: Float[Array, " vocab"], top_p: float) -> Float[Array, ""]:
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


def lookup(weights: Float[Array, " vocab"], u: Float[Array, ""]) -> Int[Array, ""]:
    """Return the index at which the cumulative sum of non-negative weights exceeds u times their sum, u in [0, 1)."""
    v = weights.shape[0]
    blocks = jnp.pad(weights, (0, -v % BLOCK)).reshape(-1, BLOCK)
    sums = blocks.sum(-1)
    ends = jnp.cumsum(sums)
    goal = u * ends[-1]
    b = jnp.minimum(jnp.sum(ends <= goal), ends.shape[0] - 1)
    inside = jnp.where(b > 0, ends[jnp.maximum(b - 1, 0)], 0) + jnp.cumsum(blocks[b])
    i = jnp.minimum(b * BLOCK + jnp.sum(inside <= goal), v - 1)
    # Rounding can give an index after the last positive weight. The largest weight of the heaviest block is always positive.
    heaviest = jnp.argmax(sums)
    return jnp.where(weights[i] > 0, i, heaviest * BLOCK + jnp.argmax(blocks[heaviest]))


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


def draw(logits: Float[Array, " vocab"], u: Float[Array, ""], cfg: Sampling) -> tuple[Int[Array, ""], Float[Array, ""]]:
    """Draw a token from processed logits, truncated by top-k, top-p and min-p.

    Args:
        logits: logits divided by the temperature.
        u: uniform number in [0, 1).
        cfg: the sampling settings.

    Returns:
        The token and its log-probability in the truncated, renormalized distribution.
    """
    if cfg.greedy:
        return jnp.argmax(logits), jnp.zeros(())
    if 0 < cfg.top_k < logits.shape[0]:
        # Sorted, so top-p is a cumulative sum. The maximum is not `values[0]`: XLA for CPUs turns a top-k whose result is
        # sliced into a sort of the whole vocabulary (120 ms instead of 1 for 16 rows on two cores).
        values, ids = top_k(logits, cfg.top_k)
        weights = jnp.exp(values - logits.max())
        above = jnp.cumsum(weights) - weights
        keep = (above < cfg.top_p * weights.sum()) & (weights >= cfg.min_p)
    else:
        ids, weights = None, jnp.exp(logits - logits.max())
        keep = weights >= cfg.min_p
        if cfg.top_p < 1:
            keep &= weights >= platforms.top_p_threshold(top_p_threshold, weights, cfg.top_p)
    weights = jnp.where(keep, weights, 0)
    i = lookup(weights, u)
    return (i if ids is None else ids[i]), jnp.log(weights[i] / weights.sum())


def choose(
    logits: Float[Array, " vocab"],
    u: Float[Array, ""],
    t: Int[Array, ""],
    seen: Bool[Array, " vocab"] | None,
    ends: Bool[Array, " vocab"],
    cfg: Sampling,
) -> Choice:
    """Choose token t of one row.

    Args:
        logits: logits of the model.
        u: uniform number in [0, 1).
        t: index of the token in its completion.
        seen: ids in the prompt and the completion so far; None without a repetition penalty.
        ends: ids that end a row.
        cfg: the sampling settings.

    Returns:
        The token, its log-probability over the whole vocabulary at the sampling temperature, and its log-probability in the
        distribution that it was drawn from.
    """
    tempered = logits if cfg.greedy else logits / cfg.temperature
    processed = logits
    if seen is not None:
        penalized = jnp.where(logits > 0, logits / cfg.repetition_penalty, logits * cfg.repetition_penalty)
        processed = jnp.where(seen, penalized, logits)
    if cfg.min_new_tokens:
        processed = jnp.where(ends & (t < cfg.min_new_tokens), -jnp.inf, processed)
    processed = processed if cfg.greedy else processed / cfg.temperature
    token, truncated = draw(processed, u, cfg)
    return token.astype(jnp.int32), tempered[token] - jax.nn.logsumexp(tempered), truncated


class DecodeState(NamedTuple):
    """The state of the decode loop."""

    t: Int[Array, ""]  # index of the next token
    token: Int[Array, "agent prompt group"]  # last token of each row
    done: Bool[Array, "agent prompt group"]  # rows that have ended
    cache: Any  # keys and values of the tokens decoded so far
    seen: Bool[Array, "agent prompt group vocab"] | None  # ids in each row; None without a repetition penalty
    out: Completions


def sample(
    params: Params,
    cfg: ModelConfig,
    sampling: Sampling,
    inputs: SampleInputs,
    *,
    panels: bool = False,
    fused: bool = False,
    steps: int = 1,
    keep_cache: bool = False,
) -> Completions:
    """Sample the completions [A, P, G, T] of a stack.

    Args:
        params: parameters [A, ...] of the agents.
        cfg: architecture.
        sampling: the sampling settings.
        inputs: prompts, random keys and stop ids.
        panels: read the weights cut into panels, see `models.cpu`.
        fused: attend by one kernel, see `models.gpu`; not after a past.
        steps: decode steps between two looks whether all rows have ended; must divide the number of new tokens.
        keep_cache: return the cache too, for prompts that follow these completions (`SampleInputs.past`).
    """
    keys, stop, new = inputs.keys, inputs.stop, sampling.max_new_tokens
    (a, p, g), vocab = keys.shape, cfg.vocab_size
    decoder = _prepare(params, cfg, sampling, inputs, panels, fused)
    seen = _ids_in_prompts(inputs, vocab) if sampling.repetition_penalty != 1 else None
    # Computed before the loop: in the loop, XLA for CPUs would run random numbers and a scatter as loops, at every token.
    u = uniforms(keys.reshape(-1), new)
    ends = jnp.zeros(vocab, bool).at[stop].set(True)

    def choose_all(logits: Array, t: Array, seen: Array | None) -> tuple[Array, Array, Array]:
        # All rows on one axis: XLA's top-k for CPUs supports one batch axis, and sorts the whole vocabulary for more.
        logits, seen = jax.tree.map(lambda x: x.reshape(a * p * g, *x.shape[3:]), (logits, seen))
        chosen = jax.vmap(choose, (0, 0, None, 0, None, None))(logits, u[t], t, seen, ends, sampling)
        return jax.tree.map(lambda x: x.reshape(a, p, g), chosen)

    def body(state: DecodeState) -> DecodeState:
        t, _, done, cache, seen, out = state
        logits, cache = decoder.step(cache, state.token, t)
        token, logp, truncated = choose_all(logits, t, seen)
        token = jnp.where(done, stop[0], token)
        out = out._replace(
            tokens=out.tokens.at[..., t].set(token),
            action_mask=out.action_mask.at[..., t].set(~done),
            logprobs=out.logprobs.at[..., t].set(jnp.where(done, 0, logp)),
            truncated_logprobs=out.truncated_logprobs.at[..., t].set(jnp.where(done, 0, truncated)),
        )
        if seen is not None:
            seen = jax.vmap(jax.vmap(jax.vmap(lambda x, i: x.at[i].set(True))))(seen, token)
        return DecodeState(t + 1, token, done | jnp.any(token[..., None] == stop, -1), cache, seen, out)

    def several(state: DecodeState) -> DecodeState:
        return body(state) if steps == 1 else lax.fori_loop(0, steps, lambda _, state: body(state), state)

    nothing_done, empty = jnp.zeros((a, p, g), bool), empty_completions((a, p, g, new), stop)
    start = DecodeState(jnp.int32(0), decoder.first_tokens, nothing_done, decoder.cache, seen, empty)
    end = lax.while_loop(lambda state: (state.t < new) & ~jnp.all(state.done), several, start)
    out = end.out._replace(ended=end.done, steps=jnp.full(a, end.t))
    return out._replace(cache=decoder.export(end.cache, out.action_mask)) if keep_cache else out


def empty_completions(shape: tuple[int, ...], stop: Int[Array, " stop"]) -> Completions:
    """Return completions of shape [A, P, G, T] that contain no token."""
    return Completions(
        tokens=jnp.full(shape, stop[0], jnp.int32),
        action_mask=jnp.zeros(shape, bool),
        logprobs=jnp.zeros(shape),
        truncated_logprobs=jnp.zeros(shape),
        ended=jnp.zeros(shape[:3], bool),
        steps=jnp.zeros(shape[0], jnp.int32),
    )


def uniforms(keys: Key[Array, " row"], count: int) -> Float[Array, "{count} row"]:
    """Return the uniform numbers in [0, 1) with which rows choose their tokens. The keys are consumed."""
    token_of_rows = jax.vmap(lambda key, t: jax.random.uniform(jax.random.fold_in(key, t)), (0, None))
    return jax.vmap(token_of_rows, (None, 0))(keys, jnp.arange(count))


class _Decoder(NamedTuple):
    """The functions and the initial values of the decode loop."""

    step: Callable[..., tuple[Array, Any]]  # (cache, tokens [A, P, G], t) -> logits [A, P, G, V] and the cache
    export: Callable[..., Any]  # (cache, action_mask [A, P, G, T]) -> the cache that later prompts can follow
    cache: Any  # empty
    first_tokens: Int[Array, "agent prompt group"]  # the prompts' last, which are not prefilled: `step` gives all logits


def _prepare(params: Params, cfg: ModelConfig, sampling: Sampling, inputs: SampleInputs, panels: bool, fused: bool) -> _Decoder:
    """Prefill the prompts, and return the decoder of their completions."""
    prompts, lengths, keys, _, past = inputs
    (a, p, g), new, dtype = keys.shape, sampling.max_new_tokens, jnp.dtype(sampling.compute_dtype)
    # A single agent has no agent axis here: XLA drops an axis of 1 from some shapes only, and then copies the cache per token.
    drop_axis = partial(jax.tree.map, lambda x: x[0]) if a == 1 else lambda tree: tree
    over_agents = (lambda f, *_: f) if a == 1 else jax.vmap
    numbers = platforms.layer_numbers(cfg.num_layers, lengths)
    own, restore_shared = own_leaves((params, prompts, lengths, past))
    # Shared parameters stay one array in the view too; without these axes, vmap would copy them for each agent.
    axes = decoding.view_axes(jax.tree.map(lambda x: None if is_shared(x) else 0, params, is_leaf=is_shared), cfg.num_layers)

    def prefill(own: list[Any]) -> tuple[Any, Any, Any]:
        params, prompts, lengths, past = restore_shared(own)
        before = past and decoding.prefix_of_rows(*past)
        embedded = params | {"embed": params["embed"].astype(dtype)}
        prefix = decoding.prefill(embedded, cfg, prompts, lengths - 1, before)
        view = decoding.decode_view(params, cfg, dtype, prefix, new, numbers, panels, fused)
        return view, decoding.init_cache(cfg, p * g, new, dtype, fused), prefix

    view, cache, prefix = over_agents(prefill, 0, (axes, 0, 0))(drop_axis(own))
    decode = over_agents(lambda view, *rest: decoding.decode_step(view, cfg, *rest, fused=fused), (axes, 0, 0, None))

    def step(cache: Any, tokens: Array, t: Array) -> tuple[Array, Any]:
        logits, cache = decode(view, cache, drop_axis(tokens), t)
        return logits.reshape(a, p, g, -1), cache

    def export(cache: Any, action_mask: Array) -> Any:
        counts = action_mask.sum(-1).reshape(a, p * g)  # cached: the prompt's last token and the completion's but its last
        out = over_agents(partial(decoding.group_cache, fused=fused))(prefix, cache, drop_axis(counts))
        return jax.tree.map(lambda x: x[None], out) if a == 1 else out

    last = jnp.take_along_axis(prompts, lengths[..., None] - 1, -1)  # [A, P, 1]
    return _Decoder(step, export, cache, jnp.broadcast_to(last, (a, p, g)))


def _ids_in_prompts(inputs: SampleInputs, vocab: int) -> Bool[Array, "agent prompt group {vocab}"]:
    """Return which ids occur in the prompt of each row."""
    real = jnp.arange(inputs.prompts.shape[-1]) < inputs.lengths[..., None]
    seen = jax.vmap(jax.vmap(lambda ids, ok: jnp.zeros(vocab, bool).at[ids].max(ok)))(inputs.prompts, real)
    return jnp.broadcast_to(seen[:, :, None], (*inputs.keys.shape, vocab))


def row_keys(ids: RowIds, group: int) -> Key[Array, "agent prompt {group}"]:
    """Return the random key of each row.

    The key of the seed is folded with step, purpose, turn, stack, agent, prompt and index in the group. There is no running
    split, so a row's key, and with it its completion, follows from these numbers alone.

    Args:
        ids: the numbers that identify the rows. The prompt axis has all prompts of the agent's first role, then of the next.
        group: completions per prompt.
    """
    seeds, stacks, agents = jnp.broadcast_arrays(*map(jnp.asarray, (ids.seed, ids.stack, ids.agents.reshape(-1))))
    keys = jax.vmap(jax.random.key)(seeds)
    for number in (ids.step, ids.purpose, ids.turn):
        keys = jax.vmap(jax.random.fold_in, (0, None))(keys, number)
    for numbers in (stacks, agents):
        keys = jax.vmap(jax.random.fold_in)(keys, numbers)
    fold = jax.vmap(jax.random.fold_in, (None, 0))
    keys = jax.vmap(lambda k: fold(k, jnp.asarray(ids.prompt_ids)))(keys)
    keys = jax.vmap(jax.vmap(lambda k: fold(k, jnp.arange(group))))(keys)
    return keys.reshape(ids.agents.shape[0], -1, group)
