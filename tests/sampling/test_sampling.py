"""The sampler: what it draws, that a row depends on its key alone, and the log-probabilities that it returns."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmarl.config import Sampling
from jmarl.models import cpu, decoder
from jmarl.sampling import sampler as sampling
from jmarl.sampling import scoring

ENDS = jnp.zeros(320, bool).at[3:43].set(True)
STOP = jnp.arange(3, 43)  # forty ids that end a row: about one token in eight, so rows end at different lengths
NEW, GROUP = 12, 4
LENGTHS = (5, 9, 14)

sample = jax.jit(sampling.sample, static_argnums=(1, 2))


@pytest.fixture(scope="module")
def cfg(tiny_config):
    return tiny_config(tie_embeddings=False)


@pytest.fixture(scope="module")
def params(cfg):
    """Two agents; eight times larger matrices make some tokens likely and some not, in every context others."""
    agents = jax.vmap(functools.partial(decoder.init_params, cfg))(jax.random.split(jax.random.key(0), 2))
    return jax.tree_util.tree_map_with_path(lambda path, x: x if "norm" in str(path[-1]) else 8 * x, agents)


def take(params, agents):
    return jax.tree.map(lambda x: x[jnp.array(agents)], params)


def make_prompts(cfg, agents=2, width=16):
    """Prompts [A, 3, width] of different lengths, the same for every width; their padding is not 0 but arbitrary."""
    rng = np.random.default_rng(1)
    ids = rng.integers(43, cfg.vocab_size, (agents, len(LENGTHS), 64))
    for p, n in enumerate(LENGTHS):
        ids[:, p, n:] = width  # differs from width to width: padding must not matter
    return jnp.asarray(ids[..., :width], jnp.int32), jnp.tile(jnp.array(LENGTHS), (agents, 1))


def make_keys(agents=(0, 1), prompts=(0, 1, 2), group=GROUP, seed=0):
    return sampling.row_keys(seed, 5, 0, agents, prompts, group)


@pytest.fixture(scope="module")
def base(cfg, params):
    """Two agents, three prompts of different lengths, four completions each, sampled in one call."""
    out = sample(params, cfg, Sampling(max_new_tokens=NEW), *make_prompts(cfg), make_keys(), STOP)
    return jax.device_get(out)


def assert_same_rows(got, expected):
    """Equal tokens and masks, and log-probabilities up to rounding."""
    np.testing.assert_array_equal(got.tokens, expected.tokens)
    np.testing.assert_array_equal(got.action_mask, expected.action_mask)
    np.testing.assert_allclose(got.logprobs, expected.logprobs, atol=1e-5)
    np.testing.assert_allclose(got.truncated_logprobs, expected.truncated_logprobs, atol=1e-5)


def rows(out, index):
    """The fields with the axes [A, P, G], indexed."""
    return out._replace(**{name: np.asarray(x)[index] for name, x in out._asdict().items() if name not in ("steps", "cache")})


# --- the distribution ----------------------------------------------------------------------------------------------------

SEEN = (7, 50, 51, 300)
SETTINGS = [
    Sampling(),
    Sampling(temperature=0.6),
    Sampling(top_p=0.8),
    Sampling(top_p=0.3, temperature=1.3),
    Sampling(top_k=7),
    Sampling(top_k=40, top_p=0.7, temperature=1.5),
    Sampling(min_p=0.1),
    Sampling(top_p=0.9, min_p=0.05, temperature=0.8),
    Sampling(top_k=30, min_p=0.2, top_p=0.95),
    Sampling(repetition_penalty=1.8),
    Sampling(repetition_penalty=0.6, top_k=25, top_p=0.9, temperature=1.2, min_p=0.02),
    Sampling(min_new_tokens=3, top_p=0.9),
]


def transformers_logits(logits, cfg, seen=SEEN, stop=tuple(range(3, 43))):
    """The logits as transformers' own processors leave them, in the order of its `generate`."""
    import torch
    from transformers import generation as hf

    steps = []
    if cfg.repetition_penalty != 1:
        steps.append(hf.RepetitionPenaltyLogitsProcessor(cfg.repetition_penalty))
    if cfg.min_new_tokens:
        steps.append(hf.MinNewTokensLengthLogitsProcessor(len(seen), cfg.min_new_tokens, list(stop)))
    if cfg.temperature != 1:
        steps.append(hf.TemperatureLogitsWarper(cfg.temperature))
    if cfg.top_k:
        steps.append(hf.TopKLogitsWarper(cfg.top_k))
    if cfg.top_p < 1:
        steps.append(hf.TopPLogitsWarper(cfg.top_p))
    if cfg.min_p:
        steps.append(hf.MinPLogitsWarper(cfg.min_p))
    scores = torch.tensor(np.asarray(logits, np.float32))[None]
    return hf.LogitsProcessorList(steps)(torch.tensor([list(seen)]), scores)[0].double().log_softmax(-1).numpy()


@pytest.mark.parametrize("vocab, k", [(49152, 50), (1000, 3), (1001, 15), (640, 10), (300, 7)])
def test_top_k_by_blocks_is_the_top_k(vocab, k):
    """Also where the vocabulary is not a multiple of the block, or the largest logits all lie in its last block."""
    logits = jax.random.normal(jax.random.key(0), (2, vocab))
    for row in (logits[0], logits[1].at[-k:].add(10.0)):
        expected, got = jax.lax.top_k(row, k), jax.jit(sampling.top_k, static_argnums=1)(row, k)
        np.testing.assert_array_equal(got[0], expected[0])
        np.testing.assert_array_equal(got[1], expected[1])


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_next_token_frequencies_match_transformers(settings):
    """Chi-square of 40,000 draws against the distribution that transformers' processors give; no token outside it."""
    from scipy import stats

    vocab, draws = 320, 40_000
    logits = 2.0 * jax.random.normal(jax.random.key(3), (vocab,))
    seen = jnp.zeros(vocab, bool).at[jnp.array(SEEN)].set(True) if settings.repetition_penalty != 1 else None

    def one(key):
        return sampling.choose(logits, jax.random.uniform(key), jnp.int32(1), seen, ENDS, settings)

    keys = jax.random.split(jax.random.key(4), draws)
    tokens, logp, truncated = jax.device_get(jax.jit(lambda k: jax.lax.map(one, k, batch_size=2000))(keys))
    expected = transformers_logits(logits, settings)
    np.testing.assert_allclose(truncated, expected[tokens], atol=2e-5)
    np.testing.assert_allclose(logp, jax.nn.log_softmax(logits / settings.temperature)[tokens], atol=2e-5)
    counts, expected = np.bincount(tokens, minlength=vocab), draws * np.exp(expected)
    common = expected >= 5
    observed = np.append(counts[common], counts[~common].sum())
    expected = np.append(expected[common], expected[~common].sum())
    if expected[-1] < 5:  # too rare for a class of its own
        observed = np.append(observed[:-2], observed[-2:].sum())
        expected = np.append(expected[:-2], expected[-2:].sum())
    assert len(observed) > 3
    assert stats.chisquare(observed, expected, sum_check=False).pvalue > 1e-3


def test_tokens_of_a_row_are_drawn_independently():
    """One row's first and second token from a uniform distribution are equal once in V times, not always."""

    def two(u):
        return [sampling.choose(jnp.zeros(320), u[t], jnp.int32(t), None, ENDS, Sampling())[0] for t in (0, 1)]

    first, second = jax.vmap(two)(sampling.uniforms(jax.random.split(jax.random.key(9), 3200), 2).T)
    assert int((first == second).sum()) < 30  # 10 are expected
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.08


def test_lookup_is_the_inverse_of_the_cumulative_sum():
    """Index i for u in [c_i, c_i+1): across block borders, past zero weights, and up to the largest float below 1."""
    weights = np.zeros(700, np.float32)
    weights[[3, 255, 256, 600]] = [1, 2, 4, 1]
    u = np.array([0, 0.124, 0.125, 0.374, 0.375, 0.5, 0.874, 0.875, np.nextafter(np.float32(1), 0)], np.float32)
    found = jax.vmap(sampling.lookup, (None, 0))(jnp.asarray(weights), jnp.asarray(u))
    assert found.tolist() == [3, 3, 255, 255, 256, 256, 256, 600, 600]


def test_top_p_threshold_needs_no_sort():
    """The exact threshold on random weights, among them ties and zeros, against a sort."""
    rng = np.random.default_rng(0)
    for p in (1e-6, 0.1, 0.5, 0.9, 0.999):
        weights = np.round(rng.exponential(size=500).astype(np.float32), 1)
        ordered = np.sort(weights.astype(np.float64))[::-1]
        above = np.cumsum(ordered) - ordered
        smallest_kept = ordered[above < p * ordered.sum()].min()
        assert sampling.top_p_threshold(jnp.asarray(weights), p) == np.float32(smallest_kept)


# --- a row depends on its key alone --------------------------------------------------------------------------------------


def test_rows_are_different_and_end_at_different_lengths(base):
    """The tests below say something only if rows differ."""
    assert len({tuple(row) for row in base.tokens.reshape(-1, NEW)}) == 2 * 3 * GROUP
    assert len(set(base.action_mask.sum(-1).ravel())) > 4


def test_a_row_does_not_depend_on_padding(cfg, params, base):
    """The same prompts in a bucket of 32 positions instead of 16, with other padding ids."""
    out = sample(params, cfg, Sampling(max_new_tokens=NEW), *make_prompts(cfg, width=32), make_keys(), STOP)
    assert_same_rows(jax.device_get(out), base)


def test_a_row_does_not_depend_on_batch_neighbours_or_position(cfg, params, base):
    """Prompts and group reversed: every row writes the same in its new place, beside other neighbours."""
    prompts, lengths = make_prompts(cfg)
    out = sample(
        params, cfg, Sampling(max_new_tokens=NEW), prompts[:, ::-1], lengths[:, ::-1], make_keys()[:, ::-1, ::-1], STOP
    )
    assert_same_rows(rows(out, np.s_[:, ::-1, ::-1]), base)


def test_a_row_alone_is_the_row_in_the_batch(cfg, params, base):
    """One agent, one prompt, one completion: batch size 1 and an agent alone give what the stack gave."""
    prompts, lengths = make_prompts(cfg)
    settings = Sampling(max_new_tokens=NEW)
    for a, p, g in [(0, 0, 0), (1, 2, 3), (1, 1, 2)]:
        one = (prompts[a : a + 1, p : p + 1], lengths[a : a + 1, p : p + 1], make_keys()[a : a + 1, p : p + 1, g : g + 1])
        alone = sample(take(params, [a]), cfg, settings, *one, STOP)
        assert_same_rows(rows(alone, np.s_[0, 0, 0]), rows(base, np.s_[a, p, g]))


def test_agents_in_one_program_equal_agents_alone(cfg, params, base):
    prompts, lengths = make_prompts(cfg)
    for a in (0, 1):
        alone = sample(
            take(params, [a]), cfg, Sampling(max_new_tokens=NEW), prompts[a : a + 1], lengths[a : a + 1],
            make_keys()[a : a + 1], STOP,
        )  # fmt: skip
        assert_same_rows(rows(alone, np.s_[0]), rows(base, np.s_[a]))


def test_row_keys_tell_apart_what_they_are_made_of():
    """Other seed, step, stack, agent, prompt, place, purpose or turn: another key. A larger group extends a smaller."""
    make = functools.partial(sampling.row_keys, agents=[0, 1], prompts=[0, 1], group=3)
    data = jax.random.key_data
    plain = data(make(0, 0, 0))
    others = [make(1, 0, 0), make(0, 1, 0), make(0, 0, 1), make(0, 0, 0, purpose=1), make(0, 0, 0, turn=1)]
    everything = np.concatenate([plain.reshape(-1, 2), *(data(k).reshape(-1, 2) for k in others)])
    assert len(np.unique(everything, axis=0)) == len(everything) == 6 * 12
    np.testing.assert_array_equal(data(sampling.row_keys(0, 0, 0, [1], [1, 7], 5))[0, 0, :3], plain[1, 1])
    of_two_teams = data(make(0, 0, np.array([0, 4])))  # agent 0 of stack 0, agent 1 of stack 4
    np.testing.assert_array_equal(of_two_teams[0], plain[0])
    np.testing.assert_array_equal(of_two_teams[1], data(make(0, 0, 4))[1])


# --- masks and the end ---------------------------------------------------------------------------------------------------


def test_the_ending_token_is_an_action_and_nothing_after_it_is(base):
    """The mask is a prefix that ends at the first stop id, or is full; behind it there are stop ids and zeros."""
    stops = np.isin(base.tokens, STOP)
    first = np.where(stops.any(-1), stops.argmax(-1), NEW - 1)
    np.testing.assert_array_equal(base.action_mask, np.arange(NEW) <= first[..., None])
    assert (base.tokens[~base.action_mask] == STOP[0]).all()
    assert (base.logprobs[~base.action_mask] == 0).all() and (base.truncated_logprobs[~base.action_mask] == 0).all()
    assert (base.logprobs[base.action_mask] < 0).all()
    assert (~stops.any(-1)).any() and stops.any(-1).any(), "both kinds of rows should be in the sample"


def test_decoding_stops_when_every_row_has_ended(cfg, params):
    """steps is the longest row's length; with every id a stop id it is 1."""
    settings = Sampling(max_new_tokens=NEW)
    many = jnp.arange(200)  # five tokens in eight end the row
    out = sample(params, cfg, settings, *make_prompts(cfg), make_keys(), many)
    assert int(out.steps.max()) == int(out.action_mask.sum(-1).max()) < NEW
    out = sample(params, cfg, settings, *make_prompts(cfg), make_keys(), jnp.arange(cfg.vocab_size))
    assert int(out.steps.max()) == 1 and (out.action_mask.sum(-1) == 1).all()


def test_min_new_tokens(cfg, params):
    """No row ends before it, rows end right after it, and the log-probability stays the whole vocabulary's."""
    settings = Sampling(max_new_tokens=NEW, min_new_tokens=4)
    out = jax.device_get(sample(params, cfg, settings, *make_prompts(cfg), make_keys(), jnp.arange(200)))
    lengths = out.action_mask.sum(-1)
    assert lengths.min() == 5 and not np.isin(out.tokens[..., :4], np.arange(200)).any()
    # before the minimum, the distribution sampled from lacks the stop ids
    assert (out.truncated_logprobs[..., :4] > out.logprobs[..., :4] + 0.1).all()
    np.testing.assert_allclose(out.truncated_logprobs[..., 4], out.logprobs[..., 4], atol=1e-5)


# --- log-probabilities ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("top_p", [0.8, 1.0])
@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.3])
def test_sampled_logprobs_equal_rescored_ones(cfg, params, temperature, top_p):
    """What the sampler stored is what the learner computes: the ratio of the whole-vocabulary ones is 1."""
    settings = Sampling(max_new_tokens=NEW, temperature=temperature, top_p=top_p)
    prompts, lengths = make_prompts(cfg)
    out = sample(params, cfg, settings, prompts, lengths, make_keys(), STOP)
    score = jax.jit(jax.vmap(functools.partial(scoring.score, cfg=cfg, temperature=temperature)))
    scores = score(params=params, prompts=prompts, lengths=lengths, tokens=out.tokens)
    mask = np.asarray(out.action_mask)
    ratio = np.exp(scores.logprobs - out.logprobs)[mask]
    np.testing.assert_allclose(ratio, 1, atol=1e-4)
    gain = (np.asarray(out.truncated_logprobs) - out.logprobs)[mask]  # -log of the mass that was kept
    if top_p == 1:
        np.testing.assert_allclose(gain, 0, atol=1e-5)
    else:
        assert gain.min() > 0 and gain.max() < -np.log(top_p) + 1e-5


def test_a_bfloat16_sampler_of_qwen3_agrees_with_its_scores(tiny_config):
    """Norms on queries and keys, and bfloat16 compute from float32 weights: the stored log-probabilities are within its
    rounding of rescored ones."""
    cfg = tiny_config("qwen3")
    params = jax.vmap(functools.partial(decoder.init_params, cfg))(jax.random.split(jax.random.key(1), 2))
    prompts, lengths = make_prompts(cfg)
    out = sample(params, cfg, Sampling(NEW, compute_dtype="bfloat16"), prompts, lengths, make_keys(), STOP)
    score = jax.jit(jax.vmap(lambda w, *rows: scoring.score(decoder.cast(w, "bfloat16"), cfg, *rows)))
    scores = score(params, prompts, lengths, out.tokens)
    assert out.logprobs.dtype == jnp.float32
    mask = np.asarray(out.action_mask)
    np.testing.assert_allclose(scores.logprobs[mask], out.logprobs[mask], atol=0.05)


def test_stored_logprobs_are_those_of_transformers_distributions(cfg, params):
    """Row by row, token by token: the truncated one under the processors of transformers, the other one without them."""
    settings = Sampling(max_new_tokens=NEW, temperature=0.8, top_k=30, top_p=0.7, repetition_penalty=1.5, min_new_tokens=2)
    prompts, lengths = make_prompts(cfg)
    out = jax.device_get(sample(params, cfg, settings, prompts, lengths, make_keys(), STOP))
    forward = jax.jit(functools.partial(decoder.forward, cfg=cfg))
    for a, p, g in [(0, 0, 1), (1, 1, 0), (1, 2, 2)]:
        n, length = LENGTHS[p], int(out.action_mask[a, p, g].sum())
        prompt, new = np.asarray(prompts)[a, p, :n].tolist(), out.tokens[a, p, g].tolist()
        padded = jnp.array((prompt + new + [0] * 32)[:32])
        z = np.asarray(forward(params=take(params, a), tokens=padded))[n - 1 :]
        for t in range(length):
            # transformers counts the tokens before this one, and knows them all for the repetition penalty
            at = Sampling(**vars(settings) | {"min_new_tokens": max(settings.min_new_tokens - t, 0)})
            truncated = transformers_logits(z[t], at, seen=prompt + new[:t])
            assert out.truncated_logprobs[a, p, g, t] == pytest.approx(truncated[new[t]], abs=1e-4)
            full = jax.nn.log_softmax(z[t] / settings.temperature)
            assert out.logprobs[a, p, g, t] == pytest.approx(float(full[new[t]]), abs=1e-4)


# --- greedy --------------------------------------------------------------------------------------------------------------


def test_greedy_is_the_argmax_of_the_whole_sequences_logits(cfg, params):
    """Every token is the argmax of `decoder.forward` over prompt and completion so far; the whole group agrees."""
    prompts, lengths = make_prompts(cfg)
    settings = Sampling(max_new_tokens=NEW, temperature=0)
    out = jax.device_get(sample(params, cfg, settings, prompts, lengths, make_keys(), jnp.array([2])))
    forward = jax.jit(functools.partial(decoder.forward, cfg=cfg))
    assert (out.tokens == out.tokens[:, :, :1]).all() and (out.truncated_logprobs == 0).all()
    for a in (0, 1):
        for p, n in enumerate(LENGTHS):
            new, count = out.tokens[a, p, 0], int(out.action_mask[a, p, 0].sum())
            padded = jnp.concatenate([prompts[a, p, :n], new, jnp.zeros(32 - n - NEW, jnp.int32)])
            z = forward(params=take(params, a), tokens=padded)
            assert new[:count].tolist() == z[n - 1 : n - 1 + count].argmax(-1).tolist()
            assert len(set(new[:count])) > 1


@pytest.mark.parametrize("rows, columns", [(1, 64), (8, 192), (3, 100)])
def test_a_product_of_panels_is_the_product(rows, columns):
    x, w = (jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate([(rows, 48), (48, columns)]))
    cut = cpu.cut_panels(w)
    if columns % 64:
        assert cut is w
    else:
        (part,) = cut.parts
        assert part.shape == (columns // 64, 48, 64)
        np.testing.assert_array_equal(part[0], w[:, :64])
    np.testing.assert_allclose(decoder.product(x, cut), x @ w, atol=1e-5)
    broken = decoder.product(x.at[0, 0].set(jnp.inf).at[0, 1].set(-jnp.inf), cut)
    assert not np.isfinite(broken[0]).all()
    np.testing.assert_allclose(broken[1:], (x @ w)[1:], atol=1e-5)  # one row's overflow is no other's


@pytest.mark.parametrize("number, sizes", [(5, [5]), (64, [32, 32]), (71, [32, 32, 7])])
def test_the_parts_of_a_wide_weight_give_its_product(number, sizes):
    """Parts of at most 32 panels, in their order."""
    x, w = (jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate([(8, 16), (16, number * 64)]))
    panels = cpu.split_panels(cpu.cut_panels(w))
    assert [part.shape for part in panels.parts] == [(size, 16, 64) for size in sizes]
    np.testing.assert_allclose(decoder.product(x, panels), x @ w, atol=1e-5)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("agents, vocab", [((0,), 320), ((0, 1), 320), ((0, 1), 2176), ((0, 1), 300)])
def test_panels_of_weights_change_nothing(tiny_config, agents, vocab, tied):
    """Vocabularies of 5 panels, of 34 in two parts, and one that panels do not divide."""
    cfg = tiny_config("qwen3", hidden_size=64, intermediate_size=128, vocab_size=vocab, tie_embeddings=tied, qkv_bias=True)
    init = functools.partial(decoder.init_params, cfg)
    params = take(jax.tree.map(lambda x: 4 * x, jax.vmap(init)(jax.random.split(jax.random.key(0), 2))), agents)
    prompts, lengths = (x[jnp.array(agents)] for x in make_prompts(cfg))
    run = functools.partial(sampling.sample, cfg=cfg, sampling=Sampling(max_new_tokens=NEW), stop=STOP)
    arguments = dict(prompts=prompts, lengths=lengths, keys=make_keys(agents))
    plain, cut = (jax.jit(functools.partial(run, cut=how))(params, **arguments) for how in (False, True))
    np.testing.assert_array_equal(cut.tokens, plain.tokens)
    np.testing.assert_allclose(cut.logprobs, plain.logprobs, atol=1e-4)


@pytest.mark.parametrize("agents, prompts", [(1, 1), (2, 1), (1, 3), (2, 3)])
def test_no_token_copies_the_cache(cfg, params, agents, prompts):
    """XLA copies a buffer that it cannot write in place. Empty keys and values are copied once each, before the loop."""
    weights = take(params, range(agents))
    ids, lengths = (x[:agents, :prompts] for x in make_prompts(cfg))
    keys = make_keys(range(agents), range(prompts))
    text = sample.lower(weights, cfg, Sampling(max_new_tokens=NEW), ids, lengths, keys, STOP).compile().as_text()
    h, rows = cfg.head_dim, prompts * GROUP
    of_cache = rf"= f32\[(\d+,)*{rows},({h},{NEW}|{NEW},{h})\]\S* "
    assert len(re.findall(of_cache + r"dynamic-update-slice\(", text)) >= 2 * cfg.num_layers
    assert not re.search(of_cache + r"scatter\(", text)
    loop, begin = text.split("\nENTRY")
    assert not re.findall(of_cache + r"copy\(.*", loop)
    assert len(re.findall(of_cache + r"copy\(", begin)) <= 2 * cfg.num_layers
