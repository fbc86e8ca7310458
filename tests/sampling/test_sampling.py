"""The sampler: the distribution of its tokens, the independence of rows, and the log-probabilities that it returns."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import log_softmax

from jmarl.config import Sampling
from jmarl.models import cpu, decoder
from jmarl.models.layers.products import product
from jmarl.plan import hlo
from jmarl.sampling import choice, sampler, scoring
from jmarl.sampling.sampler import RowIds, SampleInputs
from jmarl.types import Vocabulary
from tests.matrix import product as cases

STOP = np.arange(3, 43)  # 40 stop ids: about one token in eight ends its row, so rows have different lengths
NEW, GROUP = 12, 4
LENGTHS = (5, 9, 14)

sample = jax.jit(sampler.sample, static_argnums=(1, 2))
forward = jax.jit(decoder.forward, static_argnums=1)
row_keys = jax.jit(sampler.row_keys, static_argnums=1)


@pytest.fixture(scope="module")
def cfg(tiny_config):
    return tiny_config(tie_embeddings=False)


@pytest.fixture(scope="module")
def params(cfg, random_agent, tiny_tokenizer):
    """Two agents whose likely tokens depend on the context."""
    return jax.tree.map(lambda *x: np.stack(x), *(random_agent(cfg, tiny_tokenizer, seed).params for seed in (0, 1)))


def take(params, agents):
    return jax.tree.map(lambda x: x[agents], params)


def make_prompts(cfg, agents=2, width=16):
    """Return prompts [A, 3, width] of different lengths and their lengths. The padding differs from width to width."""
    rng = np.random.default_rng(1)
    ids = rng.integers(43, cfg.vocab_size, (agents, len(LENGTHS), 64), np.int32)
    for p, n in enumerate(LENGTHS):
        ids[:, p, n:] = width
    return ids[..., :width], np.tile(np.array(LENGTHS, np.int32), (agents, 1))


def make_keys(agents=(0, 1), prompts=(0, 1, 2)):
    ids = RowIds(seed=0, step=5, purpose=0, stack=0, agents=np.array(agents)[:, None], prompt_ids=np.array(prompts))
    return row_keys(ids, GROUP)


def make_inputs(cfg, width=16, stop=STOP):
    return SampleInputs(*make_prompts(cfg, width=width), make_keys(), stop)


@pytest.fixture(scope="module")
def base(cfg, params):
    """Two agents, three prompts of different lengths, four completions each, sampled in one call."""
    return jax.device_get(sample(params, cfg, Sampling(max_new_tokens=NEW), make_inputs(cfg)))


def assert_same_rows(got, expected):
    """Check that tokens and masks are equal, and log-probabilities up to rounding."""
    np.testing.assert_array_equal(got.tokens, expected.tokens)
    np.testing.assert_array_equal(got.action_mask, expected.action_mask)
    np.testing.assert_allclose(got.logprobs, expected.logprobs, atol=1e-5)
    np.testing.assert_allclose(got.truncated_logprobs, expected.truncated_logprobs, atol=1e-5)


def rows(out, index):
    """Index all fields with the axes [A, P, G]."""
    return out._replace(**{name: np.asarray(x)[index] for name, x in out._asdict().items() if name not in ("steps", "cache")})


# --- the distribution ----------------------------------------------------------------------------------------------------

SEEN = (7, 50, 51, 300)  # ids of the prompt
SETTINGS = [
    Sampling(),
    Sampling(top_p=0.3, temperature=1.3),
    Sampling(top_k=40, top_p=0.7, temperature=1.5),
    Sampling(top_p=0.9, min_p=0.05, temperature=0.8),
    Sampling(top_k=30, min_p=0.2, top_p=0.95),
    Sampling(repetition_penalty=0.6, top_k=25, top_p=0.9, temperature=1.2, min_p=0.02),
    Sampling(min_new_tokens=3, top_p=0.9),
]
ALONE = [  # what those above combine
    Sampling(temperature=0.6),
    Sampling(top_p=0.8),
    Sampling(top_k=7),
    Sampling(min_p=0.1),
    Sampling(repetition_penalty=1.8),
]


def transformers_logits(logits, cfg, seen=SEEN, stop=tuple(range(3, 43))):
    """Return the log-probabilities after the logits processors of transformers, in the order of its `generate`."""
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


def make_bits(seed, count):
    return np.random.default_rng(seed).integers(0, 1 << 32, (count, 2), np.uint32)


@pytest.mark.parametrize("vocab, k", [(49152, 50), (1000, 3), (1001, 15), (640, 10), (300, 7)])
def test_top_k_by_blocks_equals_lax_top_k(vocab, k):
    """The block may not divide the vocabulary, and all of the largest logits may lie in the last block."""
    logits = np.random.default_rng(0).normal(size=(2, vocab)).astype(np.float32)
    logits[1, -k:] += 10
    both = jax.jit(lambda row: (jax.lax.top_k(row, k), choice.top_k(row, k)))
    for row in logits:
        for expected, got in zip(*both(row), strict=True):
            np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("settings", [*SETTINGS, *(pytest.param(x, marks=pytest.mark.nightly) for x in ALONE)], ids=str)
def test_next_token_frequencies_match_transformers(settings):
    """Chi-square test of 40,000 draws against the distribution after the logits processors of transformers."""
    from scipy import stats

    vocab, draws = 320, 40_000
    logits = np.random.default_rng(8).normal(0, 2, vocab).astype(np.float32)
    seen = np.isin(np.arange(vocab), SEEN)

    @jax.jit
    def choose_all(logits, bits, seen, stop):
        own = seen if settings.repetition_penalty != 1 else None
        choose = functools.partial(choice.choose, t=jnp.int32(1), seen=own, stop=stop, cfg=settings)
        return jax.lax.map(functools.partial(choose, logits), bits, batch_size=2000)

    tokens, logp, truncated = jax.device_get(choose_all(logits, make_bits(4, draws), seen, STOP))
    expected = transformers_logits(logits, settings)
    np.testing.assert_allclose(truncated, expected[tokens], atol=2e-5)
    np.testing.assert_allclose(logp, log_softmax(logits / settings.temperature)[tokens], atol=2e-5)
    counts, expected = np.bincount(tokens, minlength=vocab), draws * np.exp(expected)
    common = expected >= 5
    observed = np.append(counts[common], counts[~common].sum())
    expected = np.append(expected[common], expected[~common].sum())
    if expected[-1] < 5:  # too rare for a class of its own
        observed = np.append(observed[:-2], observed[-2:].sum())
        expected = np.append(expected[:-2], expected[-2:].sum())
    assert len(observed) > 3
    assert stats.chisquare(observed, expected, sum_check=False).pvalue > 1e-3


def test_tokens_of_a_row_are_independent():
    """The first two tokens of a row from a uniform distribution are equal with probability 1 / V."""

    @jax.jit
    @functools.partial(jax.vmap, in_axes=1)
    def choose_two(bits):
        return [choice.choose(jnp.zeros(320), bits[t], jnp.int32(t), None, jnp.asarray(STOP), Sampling())[0] for t in (0, 1)]

    bits = jax.jit(lambda: choice.random_bits(jax.random.split(jax.random.key(9), 3200), 2))()
    first, second = map(np.asarray, choose_two(bits))
    assert (first == second).sum() < 30  # 10 are expected
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.08


draw_all = jax.jit(jax.vmap(choice.draw_index, (None, 0)))


def test_an_index_is_drawn_in_proportion_to_its_weight():
    """Across block borders, with blocks and indices of weight 0, and independent of the block in which it lies."""
    from scipy import stats

    weights = np.zeros(700, np.float32)
    weights[[0, 255, 256, 600]] = [1, 2, 4, 1]
    counts = np.bincount(draw_all(weights, make_bits(0, 40_000)), minlength=700)
    assert counts[weights == 0].sum() == 0
    assert stats.chisquare(counts[weights > 0], 40_000 * weights[weights > 0] / 8).pvalue > 1e-3


def test_rounding_of_logits_hardly_changes_tokens():
    """Logits that differ by 1e-5 change one token in 100,000. A boundary of the cumulative sum would lie between one in 100."""
    logits, noise = np.random.default_rng(0).normal(size=(2, 16384))
    weights = np.exp(2 * logits + 1e-5 * noise * np.arange(2)[:, None]).astype(np.float32)
    x, y = (np.asarray(draw_all(row, make_bits(1, 8192))) for row in weights)
    assert (x != y).sum() <= 2 and len(set(x)) > 1000


def test_noise_is_exponential_and_independent():
    """Chi-square tests of the numbers of all indices, and of pairs: neighbors, indices far apart, and one index of two tokens
    whose bits are random, or follow each other, or differ in one bit of the second word."""
    from scipy import stats

    count, tokens, plain = 448, 4096, make_bits(0, 4096)
    counted = np.stack([np.arange(tokens, dtype=np.uint32)] * 2, 1)
    one_bit_apart = np.repeat(plain[::2], 2, 0) ^ np.tile(np.array([[0, 0], [0, 1]], np.uint32), (tokens // 2, 1))
    noise_of = jax.jit(jax.vmap(functools.partial(choice.exponentials, count=count)))
    for words in (plain, counted, one_bit_apart):
        noise = np.asarray(noise_of(words))
        assert noise.min() > 0 and np.isfinite(noise).all()
        bins = np.floor(-np.expm1(-noise) * 32).astype(int).clip(0, 31)
        assert stats.chisquare(np.bincount(bins.ravel(), minlength=32)).pvalue > 1e-4
        pairs = [(bins[:, :-1], bins[:, 1:]), (bins[:, :224], bins[:, 224:]), (bins[::2], bins[1::2])]
        for first, second in pairs:
            assert stats.chisquare(np.bincount((first * 32 + second).ravel(), minlength=1024)).pvalue > 1e-4


def test_top_p_threshold_equals_a_sort():
    """The threshold is exact on random weights with ties and zeros."""
    rng, threshold = np.random.default_rng(0), jax.jit(choice.top_p_threshold)
    for p in (1e-6, 0.1, 0.5, 0.9, 0.999):
        weights = np.round(rng.exponential(size=500).astype(np.float32), 1)
        ordered = np.sort(weights.astype(np.float64))[::-1]
        above = np.cumsum(ordered) - ordered
        smallest = ordered[above < p * ordered.sum()].min()
        assert threshold(weights, p) == np.float32(smallest)


# --- rows are independent ------------------------------------------------------------------------------------------------


def test_rows_are_different_and_end_at_different_lengths(base):
    """The tests below are meaningful only if rows differ."""
    assert len({tuple(row) for row in base.tokens.reshape(-1, NEW)}) == 2 * 3 * GROUP
    assert len(set(base.action_mask.sum(-1).ravel())) > 4


def test_a_row_does_not_depend_on_padding(cfg, params, base):
    """The prompts are padded to 32 positions instead of 16, with other ids."""
    out = sample(params, cfg, Sampling(max_new_tokens=NEW), make_inputs(cfg, width=32))
    assert_same_rows(jax.device_get(out), base)


def test_a_row_does_not_depend_on_its_neighbors_or_position(cfg, params, base):
    """Reversing prompts and group reverses the completions."""
    prompts, lengths = make_prompts(cfg)
    inputs = SampleInputs(prompts[:, ::-1], lengths[:, ::-1], make_keys()[:, ::-1, ::-1], STOP)
    out = sample(params, cfg, Sampling(max_new_tokens=NEW), inputs)
    assert_same_rows(rows(out, np.s_[:, ::-1, ::-1]), base)


def test_a_row_alone_equals_the_row_in_the_batch(cfg, params, base):
    """Sampling one completion of one prompt by one agent gives the same row as sampling the stack."""
    prompts, lengths = make_prompts(cfg)
    settings = Sampling(max_new_tokens=NEW)
    for a, p, g in [(0, 0, 0), (1, 2, 3), (1, 1, 2)]:
        row = np.s_[a : a + 1, p : p + 1]
        inputs = SampleInputs(prompts[row], lengths[row], make_keys()[row][..., g : g + 1], STOP)
        alone = sample(take(params, [a]), cfg, settings, inputs)
        assert_same_rows(rows(alone, np.s_[0, 0, 0]), rows(base, np.s_[a, p, g]))


def test_row_keys_depend_on_every_number():
    """All rows of other seeds, steps, stacks, purposes or turns have other keys. A larger group extends a smaller one."""
    ids = RowIds(seed=0, step=0, purpose=0, stack=0, agents=np.array([[0], [1]]), prompt_ids=np.array([0, 1]))

    def data(group=3, **changes):
        return np.asarray(jax.random.key_data(row_keys(ids._replace(**changes), group)))

    plain = data()
    others = [data(**{name: 1}) for name in ("seed", "step", "stack", "purpose", "turn")]
    everything = np.concatenate([x.reshape(-1, 2) for x in (plain, *others)])
    assert len(np.unique(everything, axis=0)) == len(everything) == 6 * 12
    larger = data(group=5, agents=np.array([[1]]), prompt_ids=np.array([1, 7]))
    np.testing.assert_array_equal(larger[0, 0, :3], plain[1, 1])
    two_teams = data(stack=np.array([0, 4]))  # agent 0 of stack 0, agent 1 of stack 4
    np.testing.assert_array_equal(two_teams[0], plain[0])
    np.testing.assert_array_equal(two_teams[1], data(stack=4)[1])


# --- masks and the end ---------------------------------------------------------------------------------------------------


def test_the_action_mask_ends_with_the_stop_id(base):
    """The mask includes the first stop id, or is full. After it tokens are the stop id and log-probabilities 0."""
    stops = np.isin(base.tokens, STOP)
    first = np.where(stops.any(-1), stops.argmax(-1), NEW - 1)
    np.testing.assert_array_equal(base.action_mask, np.arange(NEW) <= first[..., None])
    assert (base.tokens[~base.action_mask] == STOP[0]).all()
    assert (base.logprobs[~base.action_mask] == 0).all() and (base.truncated_logprobs[~base.action_mask] == 0).all()
    assert (base.logprobs[base.action_mask] < 0).all()
    assert (~stops.any(-1)).any() and stops.any(-1).any(), "the sample must have rows with and without a stop id"


def test_decoding_stops_when_every_row_has_ended(cfg, params):
    """The number of steps is the length of the longest row; it is 1 if all ids are stop ids."""

    def run(stop):
        inputs = make_inputs(cfg, stop=np.resize(stop, cfg.vocab_size))
        return jax.device_get(sample(params, cfg, Sampling(max_new_tokens=NEW), inputs))

    out = run(np.arange(200))  # five tokens in eight end the row
    assert out.steps.max() == out.action_mask.sum(-1).max() < NEW
    out = run(np.arange(cfg.vocab_size))
    assert out.steps.max() == 1 and (out.action_mask.sum(-1) == 1).all()


def test_min_new_tokens(cfg, params):
    """No row ends before the minimum, some end right after it, and logprobs are those of the whole vocabulary."""
    settings = Sampling(max_new_tokens=NEW, min_new_tokens=4)
    out = jax.device_get(sample(params, cfg, settings, make_inputs(cfg, stop=np.arange(200))))
    lengths = out.action_mask.sum(-1)
    assert lengths.min() == 5 and not np.isin(out.tokens[..., :4], np.arange(200)).any()
    # Before the minimum, the stop ids are removed from the distribution.
    assert (out.truncated_logprobs[..., :4] > out.logprobs[..., :4] + 0.1).all()
    np.testing.assert_allclose(out.truncated_logprobs[..., 4], out.logprobs[..., 4], atol=1e-5)


@pytest.mark.parametrize("settings", [Sampling(temperature=0), SETTINGS[0], SETTINGS[3], SETTINGS[5]])
def test_ids_that_are_not_allowed_are_never_chosen(settings):
    """Their probability is spread over the others, in the distribution that is drawn from; over the whole vocabulary, as the
    learner scores, log-probabilities are those of all ids."""
    logits = np.random.default_rng(0).normal(0, 3, 320).astype(np.float32)
    seen, allowed = np.isin(np.arange(320), SEEN), logits < np.sort(logits)[250]

    @jax.jit
    @functools.partial(jax.vmap, in_axes=(None, 0, None))
    def choose_all(logits, bits, allowed):
        return choice.choose(logits, bits, jnp.int32(1), jnp.asarray(seen), jnp.asarray(STOP), settings, allowed)

    bits = make_bits(1, 200)
    token, logp, truncated = jax.device_get(choose_all(logits, bits, allowed))
    assert allowed[token].all() and not allowed[np.argmax(logits)]
    over_all = log_softmax(logits / (settings.temperature or 1))
    np.testing.assert_allclose(logp, over_all[token], atol=1e-5)
    without = choose_all(np.where(allowed, logits, np.float32(-1e9)), bits, np.ones(320, bool))
    np.testing.assert_array_equal(token, without[0])
    np.testing.assert_allclose(truncated, without[2], atol=1e-5)
    if settings == Sampling():
        np.testing.assert_allclose(truncated - logp, np.full(200, -np.log(np.exp(over_all[allowed]).sum())), atol=1e-5)


def test_each_row_ends_with_its_own_stop_ids_and_has_allowed_ids_only(cfg, params, base):
    """One program serves all agents: where every id is allowed, rows with the stop ids of `base` are those of `base`."""
    stop = np.tile(STOP, (2, 3, 1))
    stop[1, 2] = np.resize([50, 51], 40)  # the last prompt of agent 1

    def run(allowed):
        inputs = make_inputs(cfg)._replace(stop=stop, vocabulary=Vocabulary(allowed))
        return jax.device_get(sample(params, cfg, Sampling(max_new_tokens=NEW), inputs))

    out = run(np.ones(320, bool))
    for index in ((0,), (1, slice(2))):
        assert_same_rows(rows(out, index), rows(base, index))
    last = rows(out, (1, 2))
    assert (last.tokens[~last.action_mask] == 50).all() and last.action_mask.sum() > rows(base, (1, 2)).action_mask.sum()
    assert not np.isin(last.tokens[:, :-1][last.action_mask[:, 1:]], [50, 51]).any(), "a row ends at its stop id"
    allowed = np.arange(320) % 3 > 0
    out = run(allowed)
    assert allowed[out.tokens[out.action_mask]].all()
    first = (out.truncated_logprobs - out.logprobs)[..., 0]
    assert (first > 0.01).all(), "the probability of other ids is spread over the allowed ones"
    np.testing.assert_allclose(first, np.broadcast_to(first[..., :1], first.shape), atol=1e-5)  # all rows of a prompt


# --- log-probabilities ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature, top_p", cases([1.0, 0.6, 1.3], [1.0, 0.8]))
def test_sampled_logprobs_equal_scores(cfg, params, temperature, top_p):
    """The ratio of the learner's to the sampler's probabilities is 1."""
    settings = Sampling(max_new_tokens=NEW, temperature=temperature, top_p=top_p)
    inputs = make_inputs(cfg)
    out = jax.device_get(sample(params, cfg, settings, inputs))
    score = jax.jit(jax.vmap(functools.partial(scoring.score, cfg=cfg, temperature=temperature)))
    scores = score(params=params, prompts=inputs.prompts, lengths=inputs.lengths, tokens=out.tokens)
    ratio = np.exp(np.asarray(scores.logprobs) - out.logprobs)[out.action_mask]
    np.testing.assert_allclose(ratio, 1, atol=1e-4)
    gain = (out.truncated_logprobs - out.logprobs)[out.action_mask]  # -log of the remaining probability
    if top_p == 1:
        np.testing.assert_allclose(gain, 0, atol=1e-5)
    else:
        assert gain.min() > 0 and gain.max() < -np.log(top_p) + 1e-5


def init_two(cfg):
    """Return the initial parameters of two agents."""
    init = functools.partial(decoder.init_params, cfg)
    return jax.device_get(jax.jit(lambda: jax.vmap(init)(jax.random.split(jax.random.key(0), 2)))())


@pytest.mark.long
def test_a_bfloat16_sampler_of_qwen3_agrees_with_its_scores(tiny_config):
    """Sampled log-probabilities equal scores up to the rounding of bfloat16, also with norms on queries and keys."""
    cfg = tiny_config("qwen3")
    params, inputs = init_two(cfg), make_inputs(cfg)
    out = jax.device_get(sample(params, cfg, Sampling(NEW, compute_dtype="bfloat16"), inputs))
    score = jax.jit(jax.vmap(lambda w, *rows: scoring.score(decoder.cast(w, "bfloat16"), cfg, *rows)))
    scores = jax.device_get(score(params, inputs.prompts, inputs.lengths, out.tokens))
    assert out.logprobs.dtype == jnp.float32
    np.testing.assert_allclose(scores.logprobs[out.action_mask], out.logprobs[out.action_mask], atol=0.05)


def test_sampled_logprobs_equal_those_of_transformers(cfg, params):
    """Truncated log-probabilities are those after the logits processors of transformers, the others those without them."""
    settings = Sampling(max_new_tokens=NEW, temperature=0.8, top_k=30, top_p=0.7, repetition_penalty=1.5, min_new_tokens=2)
    inputs = make_inputs(cfg)
    out = jax.device_get(sample(params, cfg, settings, inputs))
    for a, p, g in [(0, 0, 1), (1, 1, 0), (1, 2, 2)]:
        n, length = LENGTHS[p], int(out.action_mask[a, p, g].sum())
        prompt, new = inputs.prompts[a, p, :n].tolist(), out.tokens[a, p, g].tolist()
        padded = np.array((prompt + new + [0] * 32)[:32])
        z = np.asarray(forward(take(params, a), cfg, padded))[n - 1 :]
        for t in range(length):
            # min_new_tokens of transformers counts from here; its repetition penalty reads all tokens so far.
            at = Sampling(**vars(settings) | {"min_new_tokens": max(settings.min_new_tokens - t, 0)})
            truncated = transformers_logits(z[t], at, seen=prompt + new[:t])
            assert out.truncated_logprobs[a, p, g, t] == pytest.approx(truncated[new[t]], abs=1e-4)
            full = log_softmax(z[t] / settings.temperature)
            assert out.logprobs[a, p, g, t] == pytest.approx(float(full[new[t]]), abs=1e-4)


# --- greedy --------------------------------------------------------------------------------------------------------------


def test_greedy_tokens_are_the_argmax_of_the_decoder(cfg, params):
    """Every token is the argmax of `decoder.forward` over prompt and completion so far, for the whole group."""
    inputs = make_inputs(cfg, stop=np.array([2]))
    out = jax.device_get(sample(params, cfg, Sampling(max_new_tokens=NEW, temperature=0), inputs))
    assert (out.tokens == out.tokens[:, :, :1]).all() and (out.truncated_logprobs == 0).all()
    for a in (0, 1):
        for p, n in enumerate(LENGTHS):
            new, count = out.tokens[a, p, 0], int(out.action_mask[a, p, 0].sum())
            padded = np.concatenate([inputs.prompts[a, p, :n], new, np.zeros(32 - n - NEW, np.int32)])
            z = np.asarray(forward(take(params, a), cfg, padded))
            assert new[:count].tolist() == z[n - 1 : n - 1 + count].argmax(-1).tolist()
            assert len(set(new[:count])) > 1


@pytest.mark.parametrize("rows, columns", [(1, 64), (8, 192), (3, 100)])
def test_a_product_with_panels_equals_the_product(rows, columns):
    rng = np.random.default_rng(0)
    x, w = (rng.normal(size=shape).astype(np.float32) for shape in ((rows, 48), (48, columns)))
    broken = x.copy()
    broken[0, :2] = np.inf, -np.inf

    @jax.jit
    def products(x, broken, w):
        cut = cpu.cut_panels(w)
        return product(x, cut), product(broken, cut), () if cut is w else cut.parts

    got, overflown, parts = products(x, broken, w)
    assert [part.shape for part in parts] == ([(columns // 64, 48, 64)] if columns % 64 == 0 else [])
    for part in parts:
        np.testing.assert_array_equal(part[0], w[:, :64])
    np.testing.assert_allclose(got, x @ w, atol=1e-5)
    assert not np.isfinite(overflown[0]).all()
    np.testing.assert_allclose(overflown[1:], (x @ w)[1:], atol=1e-5)  # an overflow stays in its row


@pytest.mark.parametrize("number, sizes", [(5, [5]), (64, [32, 32]), (71, [32, 32, 7])])
def test_a_product_with_split_panels_equals_the_product(number, sizes):
    """Parts have at most 32 panels, in order."""
    rng = np.random.default_rng(0)
    x, w = (rng.normal(size=shape).astype(np.float32) for shape in ((8, 16), (16, number * 64)))

    @jax.jit
    def split(x, w):
        panels = cpu.split_panels(cpu.cut_panels(w))
        return product(x, panels), panels.parts

    got, parts = split(x, w)
    assert [part.shape for part in parts] == [(size, 16, 64) for size in sizes]
    np.testing.assert_allclose(got, x @ w, atol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("numbers, tied", cases([((0,), 320), ((0, 1), 2176), ((0, 1), 300)], [True, False]))
def test_panels_do_not_change_completions(tiny_config, numbers, tied):
    """The vocabularies are 5 panels, 34 panels in two parts, and one that 64 does not divide."""
    agents, vocab = numbers
    cfg = tiny_config("qwen3", hidden_size=64, intermediate_size=128, vocab_size=vocab, tie_embeddings=tied, qkv_bias=True)
    params = take(jax.tree.map(lambda x: 4 * x, init_two(cfg)), list(agents))
    prompts, lengths = (x[list(agents)] for x in make_prompts(cfg))
    run = functools.partial(sampler.sample, cfg=cfg, sampling=Sampling(max_new_tokens=NEW))
    inputs = SampleInputs(prompts, lengths, make_keys(agents), STOP)
    plain, cut = (jax.jit(functools.partial(run, panels=panels))(params, inputs=inputs) for panels in (False, True))
    np.testing.assert_array_equal(cut.tokens, plain.tokens)
    np.testing.assert_allclose(cut.logprobs, plain.logprobs, atol=1e-4)


@pytest.mark.parametrize("agents, prompts", cases([1, 2], [1, 3]))
def test_the_cache_is_updated_in_place(cfg, params, agents, prompts):
    """The compiled loop has no copy of the cache. Empty keys and values are copied once each, before the loop."""
    weights = take(params, slice(agents))
    ids, lengths = (x[:agents, :prompts] for x in make_prompts(cfg))
    inputs = SampleInputs(ids, lengths, make_keys(range(agents), range(prompts)), STOP)
    program = hlo.Program(sample.lower(weights, cfg, Sampling(max_new_tokens=NEW), inputs).compile().as_text())
    h, rows = cfg.head_dim, prompts * GROUP
    cache = [rows, h, NEW], [rows, NEW, h]

    def count(opcode, begin):
        """Count instructions that write a cache, at the beginning of the program or in what it calls, such as the loop."""
        parts = [lines for name, lines in program.computations.items() if (name == program.entry) == begin]
        written = [hlo.dims_of(line.shape)[-3:] for lines in parts for line in lines if line.opcode == opcode]
        return sum(shape in cache for shape in written)

    assert count("dynamic-update-slice", begin=False) >= 2 * cfg.num_layers
    assert count("scatter", begin=False) == count("scatter", begin=True) == count("copy", begin=False) == 0
    assert count("copy", begin=True) <= 2 * cfg.num_layers
