"""The gated delta rule: chunks, single tokens and transformers agree, padding changes nothing, a prompt is computed once."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jmarl.models.config import DeltaSizes
from jmarl.models.layers.delta import (
    CHUNK,
    DeltaState,
    delta_stream,
    delta_token,
    empty_state,
    gated_delta,
    gated_delta_token,
    gated_norm,
    group_delta,
    log_decay,
    unit,
)

KEY_HEADS, HEADS, KEY, VALUE = 2, 4, 16, 8
CHANNELS = 2 * KEY_HEADS * KEY + HEADS * VALUE
T = 2 * CHUNK + 22


def numbers(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def gates(seed, t):
    """Decays from almost none to almost all, and shares."""
    softplus = np.log1p(np.exp(3 * numbers(seed, t, HEADS) - 2 + numbers(seed + 2, HEADS)))
    return -np.exp(numbers(seed + 1, HEADS)) * softplus, 1 / (1 + np.exp(-2 * numbers(seed + 3, t, HEADS)))


def normed(x):
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def delta_inputs(t, seed=0):
    """q, k, v, decay, beta of a stream, and a state before it."""
    q, k = (normed(numbers(seed + i, t, KEY_HEADS, KEY)) for i in range(2))
    return (q, k, numbers(seed + 2, t, HEADS, VALUE), *gates(seed + 3, t)), numbers(seed + 7, HEADS, KEY, VALUE)


def stream_inputs(t, seed=0):
    """Channels, decay and beta of a stream; the kernel; a state before it."""
    state = DeltaState(numbers(seed + 5, 3, CHANNELS), numbers(seed + 6, HEADS, KEY, VALUE))
    return (numbers(seed, t, CHANNELS), *gates(seed + 1, t)), numbers(seed + 9, 4, CHANNELS) / 2, state


@jax.jit
def token_by_token(state, *inputs):
    def step(state, token):
        out, state = gated_delta_token(*token, state)
        return state, out

    state, out = lax.scan(step, state, inputs)
    return out, state


chunked = jax.jit(lambda state, *inputs: gated_delta(*inputs, state))
stream, token = jax.jit(delta_stream), jax.jit(delta_token)


@pytest.mark.parametrize("t", [pytest.param(1, marks=pytest.mark.nightly), CHUNK, T])
def test_chunks_equal_single_tokens_and_transformers(t):
    import torch
    from transformers.models.qwen3_5 import modeling_qwen3_5 as theirs

    inputs, state = delta_inputs(t)
    out, last = chunked(state, *inputs)
    ours = token_by_token(state, *inputs)
    batch = [torch.tensor(np.array(x))[None] for x in (*inputs, state)]
    for rule in (theirs.torch_chunk_gated_delta_rule, theirs.torch_recurrent_gated_delta_rule):
        other_out, other_last = rule(*batch[:3], g=batch[3], beta=batch[4], initial_state=batch[5], output_final_state=True)
        np.testing.assert_allclose(out, other_out[0].numpy(), atol=1e-5)
        np.testing.assert_allclose(last, other_last[0].numpy(), atol=1e-5)
    np.testing.assert_allclose(out, ours[0], atol=1e-5)
    np.testing.assert_allclose(last, ours[1], atol=1e-5)


def test_equal_keys_that_never_fade_keep_their_digits():
    """The hardest case of the inverse: all keys are equal, each value replaces the one before it."""
    (q, k, v, decay, beta), state = delta_inputs(T)
    k = np.broadcast_to(k[:1], k.shape)
    _, last = chunked(state, q, k, v, np.zeros_like(decay), np.ones_like(beta))
    read = np.einsum("hkv,hk->hv", last, np.repeat(k[0], HEADS // KEY_HEADS, 0))
    np.testing.assert_allclose(read, v[-1], atol=1e-5)


def test_gradients_of_chunks_equal_those_of_single_tokens():
    inputs, state = delta_inputs(CHUNK + 20)
    out_weight, state_weight = numbers(20, CHUNK + 20, HEADS, VALUE), numbers(21, HEADS, KEY, VALUE)

    def gradients(f):
        def loss(arguments):
            out, last = f(*arguments)
            return jnp.sum(out * out_weight) + jnp.sum(last * state_weight)

        return jax.jit(jax.grad(loss))((state, *inputs))

    for x, y in zip(gradients(chunked), gradients(token_by_token), strict=True):
        assert np.abs(y).max() > 0.1
        np.testing.assert_allclose(x, y, atol=1e-5 * max(1, np.abs(y).max()))


@pytest.mark.parametrize("length", [0, 2, CHUNK + 1, *(pytest.param(n, marks=pytest.mark.nightly) for n in (1, 50))])
def test_padding_leaves_the_state_as_it_is(length):
    """Bit-equal whatever the padding says; up to the rounding of another program however far it goes."""
    x, kernel, state = stream_inputs(T)
    other, _, _ = stream_inputs(T, seed=40)
    padded = [np.concatenate([a[:length], b[length:]]) for a, b in zip(x, other, strict=True)]
    out, last = stream(*x, kernel, state, length)
    other_out, other_last = stream(*padded, kernel, state, length)
    jax.tree.map(np.testing.assert_array_equal, last, other_last)
    np.testing.assert_array_equal(np.asarray(out)[:length], np.asarray(other_out)[:length])
    assert np.isfinite(out).all()
    if length == 0:
        jax.tree.map(np.testing.assert_array_equal, last, state)
    else:
        _, short = stream(*(a[:length] for a in x), kernel, state, length)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), last, short)


def test_a_stream_equals_its_tokens_and_goes_on_from_its_state():
    x, kernel, state = stream_inputs(20)
    out, last = stream(*x, kernel, state, 20)

    @jax.jit
    def by_token(state, x, kernel):
        def step(state, inputs):
            out, state = delta_token(*inputs, kernel, state)
            return state, out

        return lax.scan(step, state, x)

    token_state, token_out = by_token(state, x, kernel)
    np.testing.assert_allclose(token_out, out, atol=1e-5)
    np.testing.assert_array_equal(token_state.conv, last.conv)
    np.testing.assert_allclose(token_state.memory, last.memory, atol=1e-5)
    for cut in (1, 2, 3, 11):
        _, middle = stream(*x, kernel, state, cut)
        rest = [np.concatenate([a[cut:], a[:cut]]) for a in x]  # with padding behind: of one shape
        rest_out, end = stream(*rest, kernel, middle, 20 - cut)
        np.testing.assert_allclose(np.asarray(rest_out)[: 20 - cut], np.asarray(out)[cut:], atol=1e-5)
        np.testing.assert_array_equal(end.conv, last.conv)
        np.testing.assert_allclose(end.memory, last.memory, atol=1e-5)


def test_memories_are_float32_in_bfloat16_compute():
    x, kernel, state = stream_inputs(20)
    x, kernel = jax.tree.map(lambda array: array.astype(jnp.bfloat16), (x, kernel))
    exact, _ = stream(*(array.astype(np.float32) for array in x), kernel.astype(np.float32), state, 20)
    state = state._replace(conv=state.conv.astype(jnp.bfloat16))
    out, last = stream(*x, kernel, state, 20)
    token_out, after = token(*(array[0] for array in x), kernel, state)
    assert out.dtype == token_out.dtype == jnp.bfloat16
    for new in (last, after):
        assert jax.tree.map(lambda array: array.dtype, new) == jax.tree.map(lambda array: array.dtype, state)
    np.testing.assert_allclose(np.asarray(out, np.float32), exact, atol=0.02 * np.abs(exact).max())


def test_a_token_of_a_row_that_has_ended_changes_nothing():
    x, kernel, state = stream_inputs(2)
    _, after = jax.jit(jax.vmap(delta_token, (0, 0, 0, None, None, 0)))(*x, kernel, state, np.array([True, False]))
    _, alone = token(*(a[0] for a in x), kernel, state)
    for new, one, old in zip(*map(jax.device_get, (after, alone, state)), strict=True):
        np.testing.assert_array_equal(new[1], old)
        np.testing.assert_allclose(new[0], one, atol=1e-6)
        assert np.abs(new[0] - old).max() > 0.1


def test_short_vectors_are_normed_as_in_transformers():
    import torch
    from transformers.models.qwen3_5 import modeling_qwen3_5 as theirs

    x = 1e-3 * numbers(0, 5, 3, VALUE)
    np.testing.assert_allclose(jax.jit(unit)(x), theirs.l2norm(torch.tensor(x)).numpy(), atol=1e-6)


def test_a_whole_layer_equals_that_of_transformers():
    """From the hidden states of the layer to its outputs, by the weights as they are filed."""
    import torch
    from transformers.models.qwen3_5 import modeling_qwen3_5 as theirs
    from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig

    sizes = dict(linear_num_key_heads=KEY_HEADS, linear_num_value_heads=HEADS, linear_key_head_dim=KEY)
    fields = dict(hidden_size=24, linear_value_head_dim=VALUE, num_hidden_layers=4, rms_norm_eps=1e-5)
    torch.manual_seed(0)
    layer = theirs.Qwen3_5GatedDeltaNet(Qwen3_5TextConfig(**sizes, **fields), 0)
    w = {name: x.detach().numpy() for name, x in layer.named_parameters()}
    y, length = numbers(0, 30, 24), 21
    mask = (torch.arange(30) < length)[None]
    with torch.no_grad():
        expected = layer(torch.tensor(np.array(y))[None], attention_mask=mask)[0].numpy()

    @jax.jit
    def ours(y, w):
        x, gate, b, a = (y @ w[f"in_proj_{name}.weight"].T for name in ("qkv", "z", "b", "a"))
        kernel, decay = w["conv1d.weight"][:, 0].T, log_decay(a, w["A_log"], w["dt_bias"])
        state = empty_state(DeltaSizes(KEY_HEADS, HEADS, KEY, VALUE), jnp.float32)
        heads, _ = delta_stream(x, decay, jax.nn.sigmoid(b), kernel, state, length)
        out = gated_norm(heads, gate.reshape(heads.shape), w["norm.weight"], 1e-5)
        return out.reshape(30, -1) @ w["out_proj.weight"].T

    out = np.asarray(ours(y, w))
    np.testing.assert_allclose(out[:length], expected[:length], atol=1e-5)
    assert np.abs(expected).max() > 0.1


def test_rows_of_a_group_equal_each_row_alone_also_in_gradients():
    s, g, t, length = 12, 3, 10, 9
    x, kernel, state = stream_inputs(s + g * t)
    weight = numbers(20, g, t, HEADS, VALUE)

    def together(x, kernel, state):
        return group_delta(*x, kernel, state, jnp.int32(length), s, g)[s:].reshape(weight.shape)

    def alone(x, kernel, state):
        def row(own):
            inputs = (jnp.concatenate([array[:length], part]) for array, part in zip(x, own, strict=True))
            return delta_stream(*inputs, kernel, state, length + t)[0][length:]

        return jax.vmap(row)([array[s:].reshape(g, t, -1) for array in x])

    def with_gradients(f):
        gradient = jax.grad(lambda *inputs: jnp.sum(f(*inputs) * weight), (0, 1, 2))
        return jax.jit(lambda *inputs: (f(*inputs), gradient(*inputs)))(x, kernel, state)

    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), *map(with_gradients, (together, alone)))


def test_a_group_computes_its_prompt_once():
    """Counted by XLA, forward and backward, which counts loops over chunks once."""
    s, g, t = 2 * CHUNK, 8, CHUNK
    x, kernel, state = stream_inputs(s + g * t)

    def operations(f):
        gradient = jax.grad(lambda *inputs: jnp.sum(f(*inputs) ** 2), (0, 1, 2))
        return jax.jit(gradient).lower(x, kernel, state).compile().cost_analysis()["flops"]

    def together(x, kernel, state):
        return group_delta(*x, kernel, state, jnp.int32(s), s, g)

    def alone(x, kernel, state):
        def row(*row):
            inputs = (jnp.concatenate([array[:s], own]) for array, own in zip(x, row, strict=True))
            return delta_stream(*inputs, kernel, state, s + t)[0]

        return jax.vmap(row)(*(array[s:].reshape(g, t, -1) for array in x))

    assert operations(together) < 0.6 * operations(alone)
