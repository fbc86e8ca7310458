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

SIZES = gpu.Sizes(prompt=8, group=3, row=5)
LENGTHS = jnp.array([8, 3, 0])  # a full prompt, a padded one, an empty one


def heads(key: int, dtype: jax.typing.DTypeLike = jnp.float32) -> list[jax.Array]:
    """Queries [P, S + G * T, K, Q, h], keys and values [P, S + G * T, K, h]."""
    tokens = SIZES.prompt + SIZES.group * SIZES.row
    shapes = [(3, tokens, 2, 3, 8), (3, tokens, 2, 8), (3, tokens, 2, 8)]
    keys = jax.random.split(jax.random.key(key), 3)
    return [jax.random.normal(k, shape, dtype) for k, shape in zip(keys, shapes, strict=True)]


def plain(q: jax.Array, k: jax.Array, v: jax.Array, lengths: jax.Array, window: int | None = None) -> jax.Array:
    """XLA's form of the attention of groups."""
    tokens, cfg = (len(q), q.shape[1]), ModelConfig("mistral", 9, 8, 8, 1, 6, 2, 8, 99, sliding_window=window)
    attend: Any = attention.group_attention(lengths, *SIZES[:3], cfg)
    flat = [x.reshape(-1, *x.shape[2:]) for x in (q, k, v)]
    out, _ = attend(*flat, slides=None if window is None else jnp.array(True))
    return out.reshape(*tokens, *q.shape[2:])


def real(x: jax.Array) -> np.ndarray:
    """The parts of [P, S + G * T, ...] that anything reads: tokens of prompts, and completions."""
    inside = jnp.concatenate([jnp.arange(SIZES.prompt) < LENGTHS[:, None], jnp.ones((3, SIZES.group * SIZES.row), bool)], 1)
    return np.asarray(x)[np.asarray(inside)]


@pytest.mark.long
@pytest.mark.parametrize("window", [None, 4])
def test_rows_without_a_gap_give_the_attention_of_groups(window: int | None) -> None:
    q, k, v = heads(0)
    got = gpu.attend_rows(SIZES._replace(window=window), q, k, v, LENGTHS, "xla")
    np.testing.assert_allclose(real(got), real(plain(q, k, v, LENGTHS, window)), rtol=1e-5, atol=1e-6)


@pytest.mark.long
@pytest.mark.parametrize("window", [None, 4])
def test_rows_without_a_gap_give_the_gradient_of_groups(window: int | None) -> None:
    """Also of the prompt's heads, which only the first completion's row returns."""
    q, k, v = heads(1)
    d_out = heads(2)[0] * (real_mask := jnp.asarray(mask_of_real()))[..., None, None, None]
    expected = jax.vjp(lambda q, k, v: plain(q, k, v, LENGTHS, window), q, k, v)[1](d_out)
    got = gpu.attend_rows_backward(SIZES._replace(window=window), q, k, v, LENGTHS, d_out, "xla")
    assert real_mask.any()
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(real(a), real(b), rtol=1e-4, atol=1e-5)


def mask_of_real() -> np.ndarray:
    """Which tokens [P, S + G * T] are real."""
    prompts = np.arange(SIZES.prompt) < np.asarray(LENGTHS)[:, None]
    return np.concatenate([prompts, np.ones((3, SIZES.group * SIZES.row), bool)], 1)


@pytest.mark.parametrize("vocab, count", [(7, 30), (5000, 3000)])
def test_sums_by_token_are_those_of_a_scatter(vocab: int, count: int) -> None:
    """Within one product, over several, with ids that do not occur."""
    tokens = jax.random.randint(jax.random.key(0), (count,), 0, vocab)
    x = jax.random.normal(jax.random.key(1), (count, 4))
    expected = np.zeros((vocab, 4))
    np.add.at(expected, np.asarray(tokens), np.asarray(x, np.float64))
    np.testing.assert_allclose(jax.jit(functools.partial(gpu.sum_by_token, vocab=vocab))(tokens, x), expected, atol=1e-4)
    np.testing.assert_allclose(platforms.sum_by_token(tokens, x, vocab), expected, atol=1e-4)


def test_agents_are_merged_into_one_call() -> None:
    """Each agent gets its own part, also of an argument that the agents share; the function sees one axis."""
    seen = []

    def add(x: jax.Array, y: jax.Array) -> jax.Array:
        seen.append(x.shape)
        return x + y

    x, y = jnp.arange(12.0).reshape(3, 2, 2), jnp.arange(4.0).reshape(2, 2)
    got = jax.vmap(platforms.merge_agents(add), (0, None))(x, y)
    np.testing.assert_array_equal(got, x + y)
    assert seen[-1] == (6, 2)


@pytest.mark.long
def test_the_choice_by_platform_has_the_gradient_of_the_plain_form() -> None:
    """Alone and mapped over agents; cuDNN is not traced here, so the choice has one form."""
    q, k, v = heads(3)
    choice = functools.partial(platforms._attend_groups, plain_of_arrays, SIZES)

    def total(f, *x):
        return jnp.sum(f(*x, LENGTHS) ** 2 * mask_of_real()[..., None, None, None])

    if gpu.has_cuda():
        pytest.skip("the wheels for CUDA are installed: float32 cannot be traced for cuDNN")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu, "attend_rows", functools.partial(gpu.attend_rows, implementation="xla"))
        patch.setattr(gpu, "attend_rows_backward", functools.partial(gpu.attend_rows_backward, implementation="xla"))
        for lifted in (lambda f: f, lambda f: lambda *x: jax.vmap(f)(*(jnp.stack([y, 2 * y]) for y in x))):
            got = lifted(jax.grad(functools.partial(total, choice), (0, 1, 2)))(q, k, v)
            expected = lifted(jax.grad(functools.partial(total, plain), (0, 1, 2)))(q, k, v)
            jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), got, expected)


def plain_of_arrays(q: jax.Array, k: jax.Array, v: jax.Array, lengths: jax.Array) -> jax.Array:
    """`plain`, which keeps no array of its own."""
    return plain(q, k, v, lengths)


@pytest.mark.long
@pytest.mark.parametrize("agents", [1, 2])
@pytest.mark.parametrize("keep_cache", [False, True])
def test_one_kernel_and_several_steps_sample_the_same(tiny_config, monkeypatch, agents: int, keep_cache: bool) -> None:
    """Tokens, log-probabilities and the cache that later prompts continue from; one prompt is a single token."""
    cfg, settings = tiny_config("qwen2"), Sampling(max_new_tokens=10, top_p=0.9)
    keys = jax.random.split(jax.random.key(0), agents)
    params = jax.vmap(functools.partial(init_params, cfg))(keys)
    prompts = jax.random.randint(jax.random.key(1), (agents, 3, 8), 3, 300)
    lengths = jnp.array([[8, 1, 5]] * agents)
    rows = jax.random.split(jax.random.key(4), (agents, 3, 4))
    inputs = SampleInputs(prompts, lengths, rows, jnp.array([7, 11]))
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
        inside = (jnp.arange(10) < plain.cache.lengths[..., None])[:, None, None, :, :, None]  # [A, L, K, R, T, h]
        for got, want in zip(fused.cache.rows, plain.cache.rows, strict=True):
            got, want = (jnp.moveaxis(x, x.shape.index(10), 4) for x in (got, want))
            np.testing.assert_allclose(jnp.where(inside, got, 0), jnp.where(inside, want, 0), atol=1e-5)


@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.9, 0.999])
def test_four_bits_at_a_time_find_the_threshold_of_top_p(top_p: float) -> None:
    """Of random weights, of equal ones, and where one holds all."""
    random = jax.random.uniform(jax.random.key(0), (5, 1000)) ** 8
    for weights in (*random, jnp.full(64, 0.25), jnp.zeros(50).at[7].set(1.0)):
        assert gpu.top_p_threshold(weights, top_p) == top_p_threshold(weights, top_p)


@pytest.mark.long
def test_one_kernel_joins_its_parts_in_float32() -> None:
    """In bfloat16, with large scores of both parts (34 and up): logarithms rounded to bfloat16 would be off by a quarter."""
    q = 6 + 0.3 * jax.random.normal(jax.random.key(0), (6, 1, 2, 8))
    prompt_keys = 2 + 0.1 * jax.random.normal(jax.random.key(1), (2, 5, 1, 8))
    keys = 2 + 0.1 * jax.random.normal(jax.random.key(2), (6, 4, 1, 8))
    prompt_values, values = jnp.ones_like(prompt_keys), -jnp.ones_like(keys)
    lengths, written = jnp.array([5, 3]), jnp.array([4, 1, 2, 3, 4, 2])
    rounded = [x.astype(jnp.bfloat16) for x in (q, prompt_keys, prompt_values, keys, values)]
    q, prompt_keys, prompt_values, keys, values = (x.astype(jnp.float32) for x in rounded)

    def attend_row(row: int) -> jax.Array:
        p, n = row // 3, lengths[row // 3]
        k = jnp.concatenate([prompt_keys[p, :n, 0], keys[row, : written[row], 0]])
        v = jnp.concatenate([prompt_values[p, :n, 0], values[row, : written[row], 0]])
        return jax.nn.softmax(q[row, 0] @ k.T / np.sqrt(8), -1) @ v

    a, b, c, d, e = rounded
    got = gpu.attend_token(a, b, c, lengths, d, e, written, "xla").astype(jnp.float32)
    np.testing.assert_allclose(got, jnp.stack([attend_row(row) for row in range(6)])[:, None], atol=0.01)


def test_how_attention_is_computed_is_no_part_of_what_must_be_equal_on_resume(tiny_config, tiny_tokenizer) -> None:
    """Checkpoints of runs before there was a choice stay readable."""
    (described,) = describe_team([("a", tiny_config(), tiny_tokenizer)] * 2, shared_weights=False).describe()
    assert "hidden_size" in described["config"] and "fused_attention" not in described["config"]


def test_steps_divide_the_new_tokens() -> None:
    assert [gpu.steps_per_look(n) for n in (1, 7, 30, 64, 100, 97)] == [1, 7, 15, 16, 10, 1]
    assert platforms.steps_per_look("cpu", 64) == 1 and platforms.steps_per_look("cuda", 64) == 16
