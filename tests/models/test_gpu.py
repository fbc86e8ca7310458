"""What is done for GPUs gives the numbers of the plain form. On a CPU, by XLA's form of the same calls."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmarl.config import Sampling
from jmarl.models import gpu, platforms
from jmarl.models.config import ModelConfig
from jmarl.models.decoder import init_params
from jmarl.models.layers import attention, token_attention
from jmarl.plan.plan import describe_team
from jmarl.sampling.choice import top_p_threshold
from jmarl.sampling.sampler import SampleInputs, sample
from tests.matrix import product

SIZES = gpu.Sizes(prompt=8, group=3, row=5)
LENGTHS = np.array([8, 3, 0], np.int32)  # a full prompt, a padded one, an empty one


def heads(seed: int) -> list[np.ndarray]:
    """Queries [P, S + G * T, K, Q, h], keys and values [P, S + G * T, K, h]."""
    rng, tokens = np.random.default_rng(seed), SIZES.prompt + SIZES.group * SIZES.row
    shapes = [(3, tokens, 2, 3, 8), (3, tokens, 2, 8), (3, tokens, 2, 8)]
    return [rng.standard_normal(shape).astype(np.float32) for shape in shapes]


def plain(q: jax.Array, k: jax.Array, v: jax.Array, lengths: jax.Array, window: int | None = None) -> jax.Array:
    """XLA's form of the attention of groups."""
    tokens, cfg = (len(q), q.shape[1]), ModelConfig("mistral", 9, 8, 8, 1, 6, 2, 8, 99, sliding_window=window)
    attend: Any = attention.group_attention(lengths, *SIZES[:3], cfg)
    flat = [x.reshape(-1, *x.shape[2:]) for x in (q, k, v)]
    out, _ = attend(*flat, slides=None if window is None else jnp.array(True))
    return out.reshape(*tokens, *q.shape[2:])


def mask_of_real() -> np.ndarray:
    """Which tokens [P, S + G * T] anything reads: those of prompts, and completions."""
    prompts = np.arange(SIZES.prompt) < LENGTHS[:, None]
    return np.concatenate([prompts, np.ones((3, SIZES.group * SIZES.row), bool)], 1)


@pytest.mark.long
@pytest.mark.parametrize("window", [None, 4])
def test_rows_without_a_gap_give_the_attention_of_groups_and_its_gradient(window: int | None) -> None:
    """Also of the prompt's heads, which only the first completion's row returns."""
    is_real, sizes = mask_of_real(), SIZES._replace(window=window)
    heads_and_gradient = *heads(0), heads(1)[0] * is_real[..., None, None, None]

    @jax.jit
    def by_rows(q, k, v, d_out):
        out = gpu.attend_rows(sizes, q, k, v, jnp.asarray(LENGTHS), "xla")
        return out, *gpu.attend_rows_backward(sizes, q, k, v, jnp.asarray(LENGTHS), d_out, "xla")

    @jax.jit
    def by_groups(q, k, v, d_out):
        out, pull = jax.vjp(lambda q, k, v: plain(q, k, v, jnp.asarray(LENGTHS), window), q, k, v)
        return out, *pull(d_out)

    got, expected = ([np.asarray(x)[is_real] for x in f(*heads_and_gradient)] for f in (by_rows, by_groups))
    np.testing.assert_allclose(got[0], expected[0], rtol=1e-5, atol=1e-6)
    for a, b in zip(got[1:], expected[1:], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("vocab, count", [(7, 30), (5000, 3000)])
def test_sums_by_token_are_those_of_a_scatter(vocab: int, count: int) -> None:
    """Within one product, over several, with ids that do not occur."""
    rng, expected = np.random.default_rng(0), np.zeros((vocab, 4))
    tokens, x = rng.integers(0, vocab, count).astype(np.int32), rng.standard_normal((count, 4)).astype(np.float32)
    np.add.at(expected, tokens, x.astype(np.float64))
    for got in jax.jit(lambda *arrays: [f(*arrays, vocab) for f in (gpu.sum_by_token, platforms.sum_by_token)])(tokens, x):
        np.testing.assert_allclose(got, expected, atol=1e-4)


def test_agents_are_merged_into_one_call() -> None:
    """Each agent gets its own part, also of an argument that the agents share; the function sees one axis."""
    seen = []

    def add(x: jax.Array, y: jax.Array) -> jax.Array:
        seen.append(x.shape)
        return x + y

    x, y = np.arange(12.0).reshape(3, 2, 2), np.arange(4.0).reshape(2, 2)
    np.testing.assert_array_equal(jax.jit(jax.vmap(platforms.merge_agents(add), (0, None)))(x, y), x + y)
    assert seen[-1] == (6, 2)


@pytest.mark.long
def test_the_choice_by_platform_has_the_gradient_of_the_plain_form() -> None:
    """Alone and mapped over agents; cuDNN is not traced here, so the choice has one form."""
    choice, x = functools.partial(platforms._attend_groups, plain_of_arrays, SIZES), heads(3)

    def gradients(f, agent, agents):
        def total(*x):
            return jnp.sum(f(*x, jnp.asarray(LENGTHS)) ** 2 * mask_of_real()[..., None, None, None])

        gradient = jax.grad(total, (0, 1, 2))
        return gradient(*agent), jax.vmap(gradient)(*agents)

    if gpu.has_cuda():
        pytest.skip("the wheels for CUDA are installed: float32 cannot be traced for cuDNN")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu, "attend_rows", functools.partial(gpu.attend_rows, implementation="xla"))
        patch.setattr(gpu, "attend_rows_backward", functools.partial(gpu.attend_rows_backward, implementation="xla"))
        got, expected = (jax.jit(gradients, static_argnums=0)(f, x, [np.stack([y, 2 * y]) for y in x]) for f in (choice, plain))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), got, expected)


def plain_of_arrays(q: jax.Array, k: jax.Array, v: jax.Array, lengths: jax.Array) -> jax.Array:
    """`plain`, which keeps no array of its own."""
    return plain(q, k, v, lengths)


@pytest.mark.long
@pytest.mark.parametrize("agents, keep_cache", product([1, 2], [False, True]))
def test_one_kernel_and_several_steps_sample_the_same(tiny_config, monkeypatch, agents: int, keep_cache: bool) -> None:
    """Tokens, log-probabilities and the cache that later prompts continue from; one prompt is a single token."""
    cfg, settings, rng = tiny_config("qwen2"), Sampling(max_new_tokens=10, top_p=0.9), np.random.default_rng(0)
    init = jax.jit(jax.vmap(functools.partial(init_params, cfg)))
    params = init(jax.random.split(jax.random.key(0), agents))
    prompts, lengths = rng.integers(3, 300, (agents, 3, 8), np.int32), np.array([[8, 1, 5]] * agents, np.int32)
    rows = jax.random.split(jax.random.key(4), (agents, 3, 4))
    inputs = SampleInputs(*map(jnp.asarray, (prompts, lengths)), rows, jnp.arange(7, cfg.vocab_size, 16))
    by_xla = platforms.merge_agents(lambda *arrays: gpu.attend_token(*arrays, implementation="xla"))
    monkeypatch.setattr(token_attention, "attend_token", by_xla)

    @functools.partial(jax.jit, static_argnames=("fused", "steps"))
    def run(params, fused: bool, steps: int):
        return sample(params, cfg, settings, inputs, fused=fused, steps=steps, keep_cache=keep_cache)

    plain, fused = run(params, fused=False, steps=1), run(params, fused=True, steps=5)
    np.testing.assert_array_equal(fused.tokens, plain.tokens)
    np.testing.assert_array_equal(fused.action_mask, plain.action_mask)
    np.testing.assert_allclose(fused.logprobs, plain.logprobs, atol=1e-5)
    assert plain.action_mask.sum(-1).min() < 10, "no row has ended early"
    if keep_cache:
        assert jax.tree.map(jnp.shape, fused.cache) == jax.tree.map(jnp.shape, plain.cache)
        inside = (np.arange(10) < np.asarray(plain.cache.lengths)[..., None])[:, None, None, :, :, None]  # [A, L, K, R, T, h]
        for got, want in zip(fused.cache.rows, plain.cache.rows, strict=True):
            got, want = (np.moveaxis(np.asarray(x), x.shape.index(10), 4) for x in (got, want))
            np.testing.assert_allclose(np.where(inside, got, 0), np.where(inside, want, 0), atol=1e-5)


def test_four_bits_at_a_time_find_the_threshold_of_top_p() -> None:
    """Of random weights, of equal ones, and where one holds all."""
    tops = np.array([0.05, 0.5, 0.9, 0.999], np.float32)
    random = np.random.default_rng(0).random((5, 1000), np.float32) ** 8

    @jax.jit
    def thresholds(weights):
        of_tops = [jax.vmap(f, (None, 0)) for f in (gpu.top_p_threshold, top_p_threshold)]
        return [jax.vmap(f, (0, None))(weights, tops) for f in of_tops]

    for weights in (random, np.full((1, 64), 0.25, np.float32), np.eye(50, dtype=np.float32)[7:8]):
        np.testing.assert_array_equal(*thresholds(weights))


@pytest.mark.long
def test_one_kernel_joins_its_parts_in_float32() -> None:
    """In bfloat16, with large scores of both parts (34 and up): logarithms rounded to bfloat16 would be off by a quarter."""
    rng = np.random.default_rng(0)
    shapes = (6, 1, 2, 8), (2, 5, 1, 8), (6, 4, 1, 8)
    q, prompt_keys, keys = (
        mean + scale * rng.standard_normal(x) for x, mean, scale in zip(shapes, (6, 2, 2), (0.3, 0.1, 0.1), strict=True)
    )
    arrays = q, prompt_keys, np.ones_like(prompt_keys), keys, -np.ones_like(keys)
    rounded = [x.astype(jnp.bfloat16) for x in arrays]
    q, prompt_keys, prompt_values, keys, values = (x.astype(np.float32) for x in rounded)
    lengths, written = np.array([5, 3], np.int32), np.array([4, 1, 2, 3, 4, 2], np.int32)

    def attend_row(row: int) -> np.ndarray:
        p, n = row // 3, lengths[row // 3]
        k = np.concatenate([prompt_keys[p, :n, 0], keys[row, : written[row], 0]])
        v = np.concatenate([prompt_values[p, :n, 0], values[row, : written[row], 0]])
        weights = np.exp(q[row, 0] @ k.T / np.sqrt(8) - 40)
        return weights / weights.sum(-1, keepdims=True) @ v

    a, b, c, d, e = rounded
    got = jax.jit(functools.partial(gpu.attend_token, implementation="xla"))(a, b, c, lengths, d, e, written)
    expected = np.stack([attend_row(row) for row in range(6)])[:, None]
    np.testing.assert_allclose(np.asarray(got, np.float32), expected, atol=0.01)


def test_how_attention_is_computed_is_no_part_of_what_must_be_equal_on_resume(tiny_config, tiny_tokenizer) -> None:
    """Checkpoints of runs before there was a choice stay readable."""
    (described,) = describe_team([("a", tiny_config(), tiny_tokenizer)] * 2, shared_weights=False).describe()
    assert "hidden_size" in described["config"] and "placement" not in described["config"]


def test_steps_divide_the_new_tokens() -> None:
    assert [gpu.steps_per_look(n) for n in (1, 7, 30, 64, 100, 97)] == [1, 7, 15, 16, 10, 1]
    assert platforms.steps_per_look("cpu", 64) == 1 and platforms.steps_per_look("cuda", 64) == 16
