"""Rows that move into fewer slots, and rows of the next step in free slots, get the tokens that they would get anyway."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmarl.config import Sampling
from jmarl.models import decoder
from jmarl.plan import hlo
from jmarl.sampling import choice, refill, sampler, slots
from jmarl.sampling.sampler import RowIds, SampleInputs
from jmarl.sampling.stack_program import SampleProgram, sample_stack
from jmarl.sampling.stop_texts import stop_table, token_bytes
from jmarl.types import Vocabulary

NEW, GROUP, PROMPTS = 128, 8, 2
TEXTS = ("ask", "q")
STOP = np.arange(3, 10, dtype=np.int32)  # about one token in 45 ends its row: some are ten times as long as others
sample = jax.jit(sampler.sample, static_argnames=("cfg", "sampling", "chunk"))
row_keys = jax.jit(sampler.row_keys, static_argnums=1)
forward = jax.jit(decoder.forward, static_argnums=1)


@pytest.fixture(scope="module")
def cfg(tiny_config):
    return tiny_config(tie_embeddings=False)


@pytest.fixture(scope="module")
def params(cfg, random_agent, tiny_tokenizer):
    """Two agents whose likely tokens depend on the context."""
    return jax.tree.map(lambda *x: np.stack(x), *(random_agent(cfg, tiny_tokenizer, seed).params for seed in (0, 1)))


def make_prompts(step, agents, width=16):
    rng = np.random.default_rng(step)
    lengths = rng.integers(2, width + 1, (agents, PROMPTS)).astype(np.int32)
    return rng.integers(43, 320, (agents, PROMPTS, width)).astype(np.int32), lengths


def row_ids(step, agents):
    return RowIds(0, step, 0, 0, np.arange(agents)[:, None], np.arange(PROMPTS))


def vocabulary(tokenizer, cfg, settings, texts=None):
    """What the sampler knows of the tokens. texts: in place of the stop texts of the settings, with as many beginnings."""
    return Vocabulary(stops=stop_table(tokenizer, cfg.vocab_size, settings.stop if texts is None else texts))


def stack_program(cfg, settings):
    return SampleProgram(cfg, settings, 1, GROUP, "cpu")


def empty_pending(prompts, cfg, settings, stop):
    return jax.jit(lambda: refill.empty_pending(prompts, GROUP, cfg, settings, "cpu", stop))()


def assert_same_rows(got, expected, params, cfg, settings, prompts, keys):
    """Check that rows [A, P, G, T] are equal; the first different token may be one that rounding decides: the token that is
    chosen when its logit, and those of its block of the vocabulary, are 3e-5 higher."""
    got, expected, (ids, lengths) = *jax.device_get((got, expected)), prompts
    block, vocab = np.arange(cfg.vocab_size) // choice.BLOCK, np.arange(cfg.vocab_size)
    same = (got.tokens == expected.tokens).all(-1)
    for a, p, g in np.argwhere(~same):
        row, other, n = got.tokens[a, p, g], expected.tokens[a, p, g], lengths[a, p]
        t = int((row != other).argmax())
        so_far = np.concatenate([ids[a, p, :n], other[:t]])
        padded = np.pad(so_far, (0, 2 * NEW - len(so_far)))
        logits = forward(jax.tree.map(lambda x, a=a: x[a], params), cfg, padded)[len(so_far) - 1]
        seen = jnp.asarray(np.isin(vocab, so_far)) if settings.repetition_penalty != 1 else None
        higher = logits + 3e-5 * (block == block[row[t]]) + 3e-5 * (vocab == row[t])
        bits = choice.random_bits(keys[a, p, g : g + 1], NEW)[t, 0]
        chosen, _, _ = choice.choose(higher, bits, jnp.int32(t), seen, jnp.asarray(STOP), settings)
        assert row[t] == chosen, f"row {a, p, g} differs at token {t}"
    assert same.mean() > 0.9
    np.testing.assert_array_equal(got.action_mask[same], expected.action_mask[same])
    np.testing.assert_array_equal(got.ended[same], expected.ended[same])
    np.testing.assert_allclose(got.logprobs[same], expected.logprobs[same], atol=1e-4)
    x, y = (out.truncated_logprobs[same] for out in (got, expected))
    # Rounding may also decide whether top-p keeps one more token.
    assert (np.abs(x - y) > 1e-4).mean() <= (1e-3 if settings.top_p < 1 else 0) and np.abs(x - y).max() < 0.05


def assert_cut(got, whole, tokenizer, settings):
    """Check that rows are whole ones, cut after the token that completes a stop text."""
    least, spelled, ends = settings.min_new_tokens, token_bytes(tokenizer, len(tokenizer)), []
    for index in np.ndindex(whole.ended.shape):
        size, start = int(whole.action_mask[index].sum()), 0
        for t in range(size):
            text = b"".join(spelled[i] for i in whole.tokens[index][start : t + 1])
            if any(stop.encode() in text for stop in settings.stop):
                if t >= least:
                    size = t + 1
                    break
                start = t + 1  # a text that is complete too early is not begun with
        ends.append(size < whole.action_mask[index].sum())
        np.testing.assert_array_equal(got.action_mask[index], np.arange(NEW) < size)
        assert got.ended[index] == (whole.ended[index] or ends[-1])
        for x, y in ((got.tokens, whole.tokens), (got.logprobs, whole.logprobs)):
            np.testing.assert_array_equal(x[index][:size], y[index][:size])
    assert 0 < sum(ends) < len(ends)


def test_the_numbers_of_slots():
    """A quarter of the rows at a time, down to 4; not for short completions, and not where copies of long prompts, which 8 rows
    share, would be more to read than what the rows that have ended hold."""
    assert slots.fewer_slots(64, 1024, 8, 256) == (16, 4) and slots.fewer_slots(256, 128, 32, 64) == (64, 16, 4)
    assert slots.fewer_slots(15, 1024, 2, 16) == () and slots.fewer_slots(64, 127, 8, 16) == ()
    assert slots.fewer_slots(64, 512, 8, 4096) == (4,)


SETTINGS = [
    (1, Sampling(NEW)),
    # ids that each row has seen move with it, and its place in the stop texts
    (2, Sampling(NEW, repetition_penalty=1.3, min_new_tokens=20, stop=TEXTS)),
    *(  # settings that only `choose` reads
        pytest.param(2, settings, marks=pytest.mark.nightly)
        for settings in (Sampling(NEW), Sampling(NEW, top_p=0.9, temperature=1.2))
    ),
]


@pytest.mark.long
@pytest.mark.parametrize("agents, settings", SETTINGS)
def test_rows_in_fewer_slots_get_the_same_tokens(cfg, params, tiny_tokenizer, agents, settings):
    """16 rows of each agent move to 4 slots when 4 are left, and the loops together make as many steps as the longest row.

    With stop texts, rows are those without, up to the token that completes a text after `min_new_tokens` tokens."""
    params, prompts = jax.tree.map(lambda x: x[:agents], params), make_prompts(0, agents)
    keys = row_keys(row_ids(0, agents), GROUP)
    inputs = SampleInputs(*prompts, keys, STOP, vocabulary=vocabulary(tiny_tokenizer, cfg, settings))
    dense, moved = (jax.device_get(sample(params, cfg, settings, inputs, chunk=n)) for n in (0, 8))
    lengths = dense.action_mask.sum(-1)
    assert (lengths > np.sort(lengths.reshape(agents, -1), 1)[:, -5].max()).any(), "no row is left when others have ended"
    assert_same_rows(moved, dense, params, cfg, settings, prompts, keys)
    assert dense.steps[0] <= moved.steps[0] <= min(NEW, dense.steps[0] + 8)
    if settings.stop:
        never = inputs._replace(vocabulary=vocabulary(tiny_tokenizer, cfg, settings, ("\u4f60",)))
        assert_cut(dense, jax.device_get(sample(params, cfg, settings, never, chunk=0)), tiny_tokenizer, settings)


@pytest.mark.long
def test_the_sampler_of_a_stack_moves_rows(cfg, params):
    """`sample_stack` decodes in fewer slots: its program for 16 rows has three loops over tokens, that for 8 has one."""
    params = jax.tree.map(lambda x: x[:1], params)

    def loops(group):
        program = SampleProgram(cfg, Sampling(NEW), 1, group, "cpu")
        lowered = sample_stack.lower(params, make_prompts(0, 1), row_ids(0, 1), STOP, program=program)
        return lowered.as_text().count("stablehlo.while")

    assert loops(8) == loops(4) + 2  # over chunks, and over the steps of a chunk


@pytest.mark.long
def test_moving_rows_write_their_cache_in_place(cfg, params):
    """A ring is written by slices, at one place for all rows, and is not copied at every token."""
    inputs = SampleInputs(*make_prompts(0, 2), row_keys(row_ids(0, 2), GROUP), STOP)
    lowered = sample.lower(params, cfg, SETTINGS[1][1], inputs, chunk=8)
    cache = [4, cfg.head_dim, NEW], [4, NEW, cfg.head_dim]
    bodies = []  # of each computation, the operations that write a cache of 4 rows
    for lines in hlo.parse(lowered.compile().as_text())[0].values():
        bodies.append([line.opcode for line in lines if hlo.dims_of(line.shape)[-3:] in cache])
    writing = [opcodes for opcodes in bodies if "dynamic-update-slice" in opcodes]
    assert sum(opcodes.count("dynamic-update-slice") for opcodes in writing) >= 2 * cfg.num_layers
    assert not any("scatter" in opcodes for opcodes in bodies) and not any("copy" in opcodes for opcodes in writing)


@pytest.mark.long
@pytest.mark.parametrize("agents, settings", SETTINGS)
def test_rows_that_begin_early_get_the_same_tokens(cfg, params, tiny_tokenizer, agents, settings):
    """With one set of parameters, four steps with refilled slots give the completions of four steps without. The prompts of
    the third step of one agent are wider, and most rows of later steps have begun a step early."""
    params, program = jax.tree.map(lambda x: x[:agents], params), stack_program(cfg, settings)
    prompts = [make_prompts(step, agents, 32 if (step, agents) == (2, 1) else 16) for step in range(5)]
    pending, known = empty_pending(prompts[0], cfg, settings, STOP), vocabulary(tiny_tokenizer, cfg, settings)
    begun = []
    for step in range(4):
        begun.append(int(pending.out.action_mask.sum()))
        ids = row_ids(step, agents), row_ids(step + 1, agents)
        got, pending = refill.refill_stack(params, tuple(prompts[step : step + 2]), ids, STOP, pending, known, program=program)
        expected = sample_stack(params, prompts[step], ids[0], STOP, vocabulary=known, program=program)
        assert_same_rows(got, expected, params, cfg, settings, prompts[step], row_keys(ids[0], GROUP))
        assert (np.asarray(got.steps) == np.asarray(got.action_mask).sum(-1).max((1, 2))).all()
        assert pending.slots.prompt_mask.shape[-1] == prompts[step + 1][0].shape[-1], "the width of the next step's prompts"
    assert begun[0] == 0 and min(begun[1:]) > 0
    assert (np.asarray(pending.begun) <= PROMPTS * GROUP).all()


@pytest.mark.long
def test_no_row_is_more_than_one_step_early(cfg, params):
    """A step ends when its own rows have ended: rows of the next go on where they were, and have no tokens of later steps."""
    settings = SETTINGS[1][1]
    stop = np.full(len(STOP), 319, np.int32)  # rows hardly end, so the next step has to wait for slots
    prompts = [make_prompts(step, 2) for step in range(2)]
    pending = empty_pending(prompts[0], cfg, settings, stop)
    ids = row_ids(0, 2), row_ids(1, 2)
    _, pending = refill.refill_stack(params, tuple(prompts), ids, stop, pending, program=stack_program(cfg, settings))
    live, begun = np.asarray(pending.slots.live), np.asarray(pending.begun)
    lengths = np.asarray(pending.out.action_mask).sum(-1)
    assert (lengths[0, begun[0] :] == 0).all() and (lengths[1, begun[1] :] == 0).all()
    for a in (0, 1):
        rows = np.asarray(pending.slots.row)[a][live[a]]
        assert sorted(set(rows)) == sorted(rows) and (rows < begun[a]).all()
        np.testing.assert_array_equal(np.asarray(pending.slots.t)[a][live[a]], lengths[a, rows])
