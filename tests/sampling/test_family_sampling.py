"""Families with windows, caps, layers without rope and scaled queries write the same rows by every path of the sampler."""

from __future__ import annotations

import itertools
from functools import partial

import jax
import numpy as np
import pytest
from scipy.special import log_softmax

from jmarl.config import Sampling
from jmarl.models import decoder, decoding
from jmarl.models.config import RopeScaling
from jmarl.models.hub.agents import load_agent
from jmarl.randomness import EVAL
from jmarl.sampling import refill, sampler
from jmarl.sampling.sampler import RowIds, SampleInputs
from jmarl.sampling.stack_program import SampleProgram, sample_stack
from jmarl.serving.rows import Joining, PoolProgram, admit, advance, empty_pool
from tests.families.test_families import CASES, WINDOW, family_of, nightly_but

SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": WINDOW}
FAMILIES = {  # of two layers, one of each kind
    "gemma3_text": SLIDING,
    "gemma2": SLIDING | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    "smollm3": {"no_rope_layers": [1, 0]},
    "ministral3": {},
    "qwen3_moe mixed": {},
    "qwen3_5_text": {"layer_types": ["linear_attention", "full_attention"]},
}
# What the families above have beside recurrent layers, in one model: a sliding layer with a rotation of its own, a layer that
# does not rotate, queries scaled by position, caps, experts.
ALL = dict(
    num_layers=3, sliding_layers=(True, False, False), sliding_window=WINDOW, sliding_rope_theta=5e3, norms_after=True,
    plain_layers=(False, False, True), rope_scaling=RopeScaling("yarn", 4.0, 8, query_beta=0.1), attention_scale=0.3,
    attention_cap=2.0, logit_cap=3.0, qk_norm=True, num_experts=4, experts_per_token=2, expert_size=16,
)  # fmt: skip
NEW, GROUP, PROMPTS, WIDTH, SLOTS = 32, 8, 2, 16, 6
STOP = np.arange(3, 35, dtype=np.int32)  # a token in ten ends its row, so lengths differ
row_keys = jax.jit(sampler.row_keys, static_argnums=1)
forward = jax.jit(jax.vmap(decoder.forward, (None, None, 0)), static_argnums=1)

pytestmark = pytest.mark.long


# Paths of the sampler read the config, whose family they do not know: two models have all that they branch on.
@pytest.fixture(scope="module", params=["all", *nightly_but("qwen3_5_text", of=FAMILIES)])
def model(request, tiny_dir, tiny_config, random_agent, tiny_tokenizer):
    """The architecture, and the parameters of two agents."""
    if request.param == "all":
        agents = [random_agent(tiny_config("qwen3_moe", **ALL), tiny_tokenizer, seed) for seed in (0, 1)]
        return agents[0].config, jax.tree.map(lambda *x: np.stack(x), *(agent.params for agent in agents))
    fields = CASES[request.param] | FAMILIES[request.param] | {"num_hidden_layers": 2}
    agents = [load_agent(tiny_dir(family_of(request.param), seed=seed, **fields)) for seed in (0, 1)]
    return agents[0].config, jax.tree.map(lambda *x: np.stack(x), *(agent.params for agent in agents))


def make_prompts(seed, agents=2, width=WIDTH):
    """Prompts longer than the window, and shorter."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(4, width + 1, (agents, PROMPTS)).astype(np.int32)
    return rng.integers(35, 320, (agents, PROMPTS, width)).astype(np.int32), lengths


def make_ids(step, prompt_ids=(0, 1), purpose=0):
    return RowIds(0, step, purpose, 0, np.arange(2)[:, None], np.array(prompt_ids))


def program_of(cfg):
    return SampleProgram(cfg, Sampling(NEW, compute_dtype="float32"), 1, GROUP, "cpu")


def assert_same_rows(got, expected):
    for name in ("tokens", "action_mask", "ended"):
        np.testing.assert_array_equal(getattr(got, name), getattr(expected, name), err_msg=name)
    np.testing.assert_allclose(got.logprobs, expected.logprobs, rtol=1e-5, atol=1e-5)


# --- several turns -------------------------------------------------------------------------------------------------------


@partial(jax.jit, static_argnums=1)
def sample_turn(params, cfg, inputs, rows=None):
    """A turn of two rows of each prompt; rows: of the turn before, which the prompts follow."""
    if rows is not None:
        inputs = inputs._replace(before=jax.vmap(decoding.prefix_of_rows)(inputs.before, rows))
    return sampler.sample(params, cfg, Sampling(12), inputs, keep_cache=True)


def test_turns_that_follow_rows_have_the_log_probabilities_of_the_whole_text(model):
    """The rows that prompts follow end at different lengths, so that the cache has gaps between them."""
    cfg, params = model
    params, cache, rows, rng = jax.tree.map(lambda x: x[:1], params), None, None, np.random.default_rng(3)
    texts = [[]] * 3
    for turn, new_tokens in enumerate([(11, 5, 8), (3, 9, 1)]):
        prompts, lengths = np.zeros((1, 3, 12), np.int32), np.zeros((1, 3), np.int32)
        for p, n in enumerate(new_tokens):
            text = [*texts[p][-1:], *rng.integers(35, 320, n)]  # the last token of a row is not in its cache
            prompts[0, p, : len(text)], lengths[0, p] = text, len(text)
            texts[p] = [*texts[p], *text[-n:]]
        keys = row_keys(RowIds(0, 0, 0, 0, np.zeros((1, 1), int), np.arange(3), turn), 2)
        inputs = SampleInputs(prompts, lengths, keys, STOP, cache)
        out = sample_turn(params, cfg, inputs, rows)
        cache, out = out.cache, jax.device_get(out._replace(cache=None))
        written = [[[*out.tokens[0, p, g][out.action_mask[0, p, g]]] for g in range(2)] for p in range(3)]
        whole = [(p, [*texts[p], *row], out.logprobs[0, p, g]) for p in range(3) for g, row in enumerate(written[p])]
        padded = np.zeros((6, 48), np.int32)
        for i, (_, text, _) in enumerate(whole):
            padded[i, : len(text)] = text
        logs = log_softmax(forward(jax.tree.map(lambda x: x[0], params), cfg, padded), axis=-1)
        for i, (p, text, logprobs) in enumerate(whole):
            at = np.arange(len(texts[p]), len(text))
            np.testing.assert_allclose(logprobs[: len(at)], logs[i, at - 1, padded[i, at]], atol=1e-5)
        followed = [(2, 1), (0, 0), (0, 1)]  # the prompt and the number of the row that each of the next prompts follows
        rows = np.array([[2 * p + g for p, g in followed]])
        texts = [[*texts[p], *written[p][g]] for p, g in followed]
    assert len({*map(len, texts)}) == 3 and min(map(len, texts)) >= 2 * WINDOW


# --- rows that begin and end at different times ----------------------------------------------------------------------------


def test_rows_of_refilled_slots_are_those_of_the_sampler(model):
    """Rows of three steps; those of later steps begin in the slots of rows that have ended."""
    cfg, params = model
    prompts, early = [make_prompts(step) for step in range(4)], []
    pending = jax.jit(lambda: refill.empty_pending(prompts[0], GROUP, cfg, Sampling(NEW), "cpu", STOP))()
    for step in range(3):
        early.append(int(pending.out.action_mask.sum()))
        ids = make_ids(step), make_ids(step + 1)
        got, pending = refill.refill_stack(params, (*prompts[step : step + 2],), ids, STOP, pending, program=program_of(cfg))
        expected = sample_stack(params, prompts[step], ids[0], STOP, program=program_of(cfg))
        assert_same_rows(*jax.device_get((got, expected)))
    assert early[0] == 0 and sum(early) > 100


def test_rows_of_a_server_are_those_of_the_sampler(model):
    """Two prompts of each agent take slots at different times; the second one after rows that have left them."""
    cfg, params = model
    ids, lengths = make_prompts(5)
    sample = program_of(cfg)
    expected = jax.device_get(sample_stack(params, (ids, lengths), make_ids(0, (0, 0), EVAL), STOP, program=sample))
    program = PoolProgram(sample._replace(group=1), 0, SLOTS, WIDTH)
    pool = jax.jit(empty_pool, static_argnums=(0, 1, 2))(2, len(STOP), program)
    turns = [(0, [0, 1]), (1, [2, 3]), None, None, (0, [0, 1, 4]), None, (1, [0, 2, 5]), *[None] * 4]
    rows, count = {}, 0  # slot -> the row of `expected` in it
    for joining in turns:
        if joining is not None:
            p, taken = joining
            count += compare(pool, expected, {slot: row for slot, row in rows.items() if slot in taken})
            rows |= {slot: (p, choice) for choice, slot in enumerate(taken)}
            pool = admit(params, pool, joining_of(ids[:, p : p + 1], lengths[:, p : p + 1], taken), program=program)
        pool = advance(params, pool, np.zeros((2, SLOTS), bool), program=program)
    assert count + compare(pool, expected, rows) > 150


def joining_of(ids, lengths, taken):
    """A prompt of each agent, whose rows take some slots."""
    takes, choice = np.zeros((2, SLOTS), bool), np.zeros((2, SLOTS), np.int32)
    takes[:, taken], choice[:, taken] = True, range(len(taken))
    stop, ones = np.broadcast_to(STOP, (2, 1, len(STOP))), np.ones(2, np.float32)
    return Joining(ids, lengths, takes, choice, np.zeros(2, np.uint32), np.arange(2), stop, ones, ones)


def compare(pool, expected, rows):
    """Compare rows, in slots, with the expected ones, as far as they are. Returns the number of their tokens."""
    out, count = jax.device_get(pool.out), 0
    for a, slot in itertools.product(range(2), rows):
        row = rows[slot]
        mask = out.action_mask[a, slot]
        assert (mask <= expected.action_mask[a][row]).all()
        np.testing.assert_array_equal(out.tokens[a, slot][mask], expected.tokens[a][row][mask])
        np.testing.assert_allclose(out.logprobs[a, slot][mask], expected.logprobs[a][row][mask], atol=1e-5)
        count += int(mask.sum())
    return count
