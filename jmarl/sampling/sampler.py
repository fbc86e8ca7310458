"""Sample completions for all agents of a stack in one program.

The prompt is prefilled once and its keys and values are shared by the group; a `while_loop` decodes one token for every row
of every agent and stops when all have ended. Each row draws from its own key, so what it writes depends on neither its
neighbours, the batch size nor its place in the group. Logits are processed in Hugging Face's order: repetition penalty,
minimum length, temperature, top-k, top-p, min-p.

One uniform number a token and the inverse of the cumulative distribution choose it: on a CPU this is twenty times faster
than adding Gumbel noise to the whole vocabulary, and no sort of the vocabulary is needed.

Left out: beam search, contrastive and speculative decoding (none is a sample of the policy that is trained).
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from jmarl.config import Sampling
from jmarl.models import decoding
from jmarl.models.config import ModelConfig
from jmarl.models.platforms import layer_numbers
from jmarl.models.stack import is_shared, own_leaves
from jmarl.types import Completions

BLOCK = 256  # the vocabulary is summed in blocks of this size when a token is looked up
TOP_K_BLOCK = 64  # and searched for its largest logits in blocks of this size


def top_p_threshold(weights: jax.Array, top_p: float) -> jax.Array:
    """The largest weight w such that those above w hold less than `top_p` of the mass: weights [V] >= it are kept.

    Found by bisection on the bits of the float (non-negative floats are ordered as their bits are): exact, without a sort.
    """
    bits = lax.bitcast_convert_type(weights, jnp.int32)
    goal = top_p * weights.sum()

    def halve(_, bounds):
        low, high = bounds  # mass strictly above `low` >= goal > mass strictly above `high`
        middle = low + (high - low) // 2
        enough = jnp.sum(jnp.where(bits > middle, weights, 0)) >= goal
        return jnp.where(enough, middle, low), jnp.where(enough, high, middle)

    _, high = lax.fori_loop(0, 31, halve, (jnp.int32(-1), bits.max()))
    return lax.bitcast_convert_type(high, jnp.float32)


def lookup(weights: jax.Array, u: jax.Array) -> jax.Array:
    """Index i drawn from non-negative weights [V] by the inverse of their cumulative sum at u in [0, 1)."""
    v = weights.shape[0]
    blocks = jnp.pad(weights, (0, -v % BLOCK)).reshape(-1, BLOCK)
    sums = blocks.sum(-1)
    ends = jnp.cumsum(sums)
    goal = u * ends[-1]
    b = jnp.minimum(jnp.sum(ends <= goal), ends.shape[0] - 1)
    inside = jnp.where(b > 0, ends[jnp.maximum(b - 1, 0)], 0) + jnp.cumsum(blocks[b])
    i = jnp.minimum(b * BLOCK + jnp.sum(inside <= goal), v - 1)
    # Rounding can point one past the last positive weight; the largest weight of the heaviest block is always a valid one.
    heaviest = jnp.argmax(sums)
    return jnp.where(weights[i] > 0, i, heaviest * BLOCK + jnp.argmax(blocks[heaviest]))


def top_k(logits: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """The k largest of logits [V], sorted, and their ids; four times as fast as one `lax.top_k` over the vocabulary.

    The k largest lie in the k blocks with the largest maxima, so only those are searched.
    """
    size = TOP_K_BLOCK
    if logits.shape[0] <= k * size:
        return lax.top_k(logits, k)
    blocks = jnp.pad(logits, (0, -logits.shape[0] % size), constant_values=-jnp.inf).reshape(-1, size)
    _, best = lax.top_k(blocks.max(-1), k)
    values, i = lax.top_k(blocks[best].reshape(-1), k)
    return values, best[i // size] * size + i % size


def draw(logits: jax.Array, u: jax.Array, cfg: Sampling) -> tuple[jax.Array, jax.Array]:
    """A token from processed logits [V] (temperature applied) truncated by top-k, top-p and min-p, with u uniform in [0, 1).

    Returns the token and its log-probability in the truncated, renormalised distribution.
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
            keep &= weights >= top_p_threshold(weights, cfg.top_p)
    weights = jnp.where(keep, weights, 0)
    i = lookup(weights, u)
    return (i if ids is None else ids[i]), jnp.log(weights[i] / weights.sum())


def choose(logits: jax.Array, u: jax.Array, t: jax.Array, seen: jax.Array | None, ends: jax.Array, cfg: Sampling):
    """Token t of one row. logits [V]; u uniform in [0, 1); seen [V] bool (None without a repetition penalty); ends [V] bool:
    ids that end a row.

    Returns the token, its log-probability over the whole vocabulary at the sampling temperature, and the truncated one.
    """
    tempered = logits if cfg.greedy else logits / cfg.temperature
    processed = logits
    if seen is not None:
        punished = jnp.where(logits > 0, logits / cfg.repetition_penalty, logits * cfg.repetition_penalty)
        processed = jnp.where(seen, punished, logits)
    if cfg.min_new_tokens:
        processed = jnp.where(ends & (t < cfg.min_new_tokens), -jnp.inf, processed)
    processed = processed if cfg.greedy else processed / cfg.temperature
    token, truncated = draw(processed, u, cfg)
    return token.astype(jnp.int32), tempered[token] - jax.nn.logsumexp(tempered), truncated


def sample(
    params,
    cfg: ModelConfig,
    sampling: Sampling,
    prompts,
    lengths,
    keys,
    stop,
    *,
    cut: bool = False,
    past=None,
    keep: bool = False,
) -> Completions:
    """Completions of a stack. cut: read weights cut into panels; keep: return the `GroupCache` [A, ...] for later prompts.

    params: pytree [A, ...]; prompts: [A, P, S] int32 padded on the right; lengths: [A, P] (at least 1); keys: [A, P, G]
    typed PRNG keys, one a row, consumed; stop: [n] int32 ids that end a row.

    past: what an earlier call kept, and the row [A, P] of it that each prompt follows. The prompt then begins with the row's
    last token, which was sampled but never computed.
    """
    (a, p, _), g, new = prompts.shape, keys.shape[2], sampling.max_new_tokens
    step, cache, token, kept = _prepare(params, cfg, sampling, prompts, lengths, g, cut, past)
    seen = _seen_in_prompts(prompts, lengths, g, cfg.vocab_size) if sampling.repetition_penalty != 1 else None
    # Random numbers and what a scatter makes are made once: in the loop XLA for CPUs makes loops of them, at every token.
    u = uniforms(keys.reshape(-1), new)
    ends = jnp.zeros(cfg.vocab_size, bool).at[stop].set(True)

    def choose_all(logits, t, seen):
        # All rows on one axis: XLA's top-k for CPUs knows one batch axis, and sorts the whole vocabulary for more.
        logits, seen = jax.tree.map(lambda x: x.reshape(a * p * g, *x.shape[3:]), (logits, seen))
        chosen = jax.vmap(choose, (0, 0, None, 0, None, None))(logits, u[t], t, seen, ends, sampling)
        return jax.tree.map(lambda x: x.reshape(a, p, g), chosen)

    def body(carry):
        t, token, done, cache, seen, out = carry
        logits, cache = step(cache, token, t)
        chosen, logp, truncated = choose_all(logits, t, seen)
        chosen = jnp.where(done, stop[0], chosen)
        out = out._replace(
            tokens=out.tokens.at[..., t].set(chosen),
            action_mask=out.action_mask.at[..., t].set(~done),
            logprobs=out.logprobs.at[..., t].set(jnp.where(done, 0, logp)),
            truncated_logprobs=out.truncated_logprobs.at[..., t].set(jnp.where(done, 0, truncated)),
        )
        if seen is not None:
            seen = jax.vmap(jax.vmap(jax.vmap(lambda x, i: x.at[i].set(True))))(seen, chosen)
        return t + 1, chosen, done | jnp.any(chosen[..., None] == stop, -1), cache, seen, out

    start = (jnp.int32(0), token, jnp.zeros((a, p, g), bool), cache, seen, unwritten(a, p, g, new, stop))
    steps, _, ended, cache, _, out = lax.while_loop(lambda c: (c[0] < new) & ~jnp.all(c[2]), body, start)
    return out._replace(ended=ended, steps=jnp.full(a, steps), cache=kept(cache, out.action_mask) if keep else None)


def unwritten(a: int, p: int, g: int, new: int, stop: jax.Array) -> Completions:
    """Completions [A, P, G, T] without a token."""
    return Completions(
        tokens=jnp.full((a, p, g, new), stop[0], jnp.int32),
        action_mask=jnp.zeros((a, p, g, new), bool),
        logprobs=jnp.zeros((a, p, g, new)),
        truncated_logprobs=jnp.zeros((a, p, g, new)),
        ended=jnp.zeros((a, p, g), bool),
        steps=jnp.zeros(a, jnp.int32),
    )


def uniforms(keys: jax.Array, count: int) -> jax.Array:
    """The numbers [T, R] in [0, 1) by which rows with keys [R] choose their tokens."""
    of_rows = jax.vmap(lambda key, t: jax.random.uniform(jax.random.fold_in(key, t)), (0, None))
    return jax.vmap(of_rows, (None, 0))(keys, jnp.arange(count))


def _prepare(params, cfg: ModelConfig, sampling: Sampling, prompts, lengths, g: int, cut: bool, past):
    """What the decode loop starts from: `step(cache, tokens [A, P, G], t)`, which returns logits [A, P, G, V] and the cache,
    an empty cache, and the first tokens. Those are the prompts' last ones, so that all logits come from the decode step. Also
    `kept(cache, action_mask)`, which makes of the last cache what later prompts can follow."""
    (a, p, _), new, dtype = prompts.shape, sampling.max_new_tokens, jnp.dtype(sampling.compute_dtype)
    # The axis of a single agent is taken off: XLA drops it from some shapes only, and then copies the cache at every token.
    drop_axis = partial(jax.tree.map, lambda x: x[0]) if a == 1 else lambda tree: tree
    each_agent = (lambda f, *_: f) if a == 1 else jax.vmap
    numbers = layer_numbers(cfg.num_layers, lengths)
    own, whole = own_leaves((params, prompts, lengths, past))
    # What agents share stays one array in the view too, which a plain vmap would copy for each of them.
    of_view = decoding.view_axes(jax.tree.map(lambda x: None if is_shared(x) else 0, params, is_leaf=is_shared), cfg.num_layers)

    def ready(own):
        params, prompts, lengths, past = whole(own)
        before = past and decoding.prefix_of_rows(*past)
        embedded = params | {"embed": params["embed"].astype(dtype)}
        prefix = decoding.prefill(embedded, cfg, prompts, lengths - 1, before)
        view = decoding.decode_view(params, cfg, dtype, prefix, new, numbers, cut)
        return view, decoding.init_cache(cfg, p * g, new, dtype), prefix

    view, cache, prefix = each_agent(ready, 0, (of_view, 0, 0))(drop_axis(own))
    decode = each_agent(lambda view, *rest: decoding.decode_step(view, cfg, *rest), (of_view, 0, 0, None))

    def step(cache, tokens, t):
        logits, cache = decode(view, cache, drop_axis(tokens), t)
        return logits.reshape(a, p, g, -1), cache

    def kept(cache, action_mask):
        counts = action_mask.sum(-1).reshape(a, p * g)  # the last token is not in the cache, but its prompt's last one is
        out = each_agent(decoding.group_cache)(prefix, cache, drop_axis(counts))
        return jax.tree.map(lambda x: x[None], out) if a == 1 else out

    last = jnp.take_along_axis(prompts, lengths[..., None] - 1, -1)  # [A, P, 1]
    return step, cache, jnp.broadcast_to(last, (a, p, g)), kept


def _seen_in_prompts(prompts, lengths, g: int, vocab: int) -> jax.Array:
    """Which ids [A, P, G, V] occur in each row's prompt."""
    real = jnp.arange(prompts.shape[-1]) < lengths[..., None]
    seen = jax.vmap(jax.vmap(lambda ids, ok: jnp.zeros(vocab, bool).at[ids].max(ok)))(prompts, real)
    return jnp.broadcast_to(seen[:, :, None], (*seen.shape[:2], g, vocab))


def row_keys(seed, step, stack, agents, prompts, group: int, purpose: int = 0, turn: int = 0) -> jax.Array:
    """Keys [A, P, G] for agents [A] and prompts [P] (integer ids): `fold_in` of step, purpose, turn, stack, agent, prompt and
    g, never a running split; so a row's key, and with it what the row writes, can be made again from the step alone. seed,
    stack: one number, or [A] of each agent where they come from several runs or teams."""
    seeds, stacks, agents = jnp.broadcast_arrays(*map(jnp.asarray, (seed, stack, agents)))
    keys = jax.vmap(jax.random.key)(seeds)
    for number in (step, purpose, turn):
        keys = jax.vmap(jax.random.fold_in, (0, None))(keys, number)
    for numbers in (stacks, agents):
        keys = jax.vmap(jax.random.fold_in)(keys, numbers)
    fold = jax.vmap(jax.random.fold_in, (None, 0))
    keys = jax.vmap(lambda k: fold(k, jnp.asarray(prompts)))(keys)
    return jax.vmap(jax.vmap(lambda k: fold(k, jnp.arange(group))))(keys)
