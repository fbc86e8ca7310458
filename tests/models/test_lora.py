"""LoRA: adapters over one frozen base, in the decoder, the sampler and the update."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmarl.algorithms import resolve
from jmarl.config import LORA_TARGETS, LoRA, Sampling, TrainConfig
from jmarl.learning.optimizer import init_stack
from jmarl.learning.program import update_keys
from jmarl.models import decoder, lora
from jmarl.models.config import DeltaSizes
from jmarl.models.hub.peft import merge
from jmarl.models.stack import share_params, stack_params, unstack
from jmarl.sampling import scoring
from jmarl.sampling.sampler import RowIds, SampleInputs
from jmarl.sampling.stack_program import SampleProgram, sample_stack
from tests.batches import loss_inputs, loss_of_inputs, rollouts, stack_program, update_stack

A, P, G, T, S = 2, 2, 4, 6, 16
LENGTHS = np.array([5, 9])
CONFIG = TrainConfig.of(algorithm="magrpo", learning_rate=1e-2, adam_eps=1e-4, lora_rank=3, lora_alpha=5.0)
KL = CONFIG.replace(kl_coef=0.2, old_logprobs="rescored")


@pytest.fixture(scope="module")
def make_agent(tiny_config, tiny_tokenizer, random_agent):
    """`make_agent(family)` returns a random agent, also with random biases and norms."""

    @functools.cache
    def make(family, **overrides):
        agent = random_agent(tiny_config(family, **overrides), tiny_tokenizer, 0)
        rng = np.random.default_rng(1)
        params = jax.tree.map(lambda x: np.asarray(x + 0.05 * rng.normal(size=x.shape), np.float32), agent.params)
        return agent._replace(params=params)

    return make


def model_of(agent, cfg=CONFIG, agents=A):
    return lora.init_models([share_params([agent.params])], [(agent.config, agents)], cfg.lora, seed=3)[0]


def with_noise(model, size=0.3):
    """Add noise to the adapters of a model, as if it was trained."""
    base, trained = lora.split(model)
    leaves, structure = jax.tree.flatten(trained)
    keys = jax.random.split(jax.random.key(7), len(leaves))
    noise = [x + size * jax.random.normal(key, x.shape) for x, key in zip(leaves, keys, strict=True)]
    return lora.join(base, structure.unflatten(noise))


def merged(agent, model):
    """Return plain parameters [A, ...] of the same agents."""
    return stack_params([merge(agent.config, jax.device_get(unstack(model, a))) for a in range(A)])


@pytest.fixture(scope="module")
def llama(make_agent):
    return make_agent("llama")


@pytest.fixture(scope="module")
def batch():
    """Completions of lengths 1 to T, with random log-probabilities and rewards."""
    rng = np.random.default_rng(0)
    prompts, tokens = (jnp.asarray(rng.integers(1, 320, shape)) for shape in ((A, P, S), (A, P, G, T)))
    mask = jnp.asarray(np.arange(T) < rng.integers(1, T + 1, (A, P, G, 1)))
    rewards = jnp.asarray(rng.normal(size=(A, P, G)), jnp.float32)
    old = jnp.where(mask, jnp.asarray(rng.normal(size=mask.shape), jnp.float32) - 6, 0)
    groups = jnp.broadcast_to(jnp.arange(P)[:, None], (A, P, G))
    return rollouts(prompts, jnp.tile(LENGTHS, (A, 1)), tokens, mask, old, jnp.ones((A, P, G), bool), rewards, groups)


def step(model, batch, agent, cfg=CONFIG, steps=1, keys=None):
    """Return the state after some updates, and the metrics of the last, on the host. The model is not donated. keys: of dropout
    and of the order of minibatches."""
    base, trained = lora.split(model)
    algorithm = resolve(cfg)
    state = init_stack(lora.join(base, jax.tree.map(jnp.copy, trained)), algorithm)
    for _ in range(steps):
        state, metrics = update_stack(state, batch, model=agent.config, algorithm=algorithm, keys=keys)
    return jax.device_get((state, metrics))


def distance(got, expected):
    """The largest relative distance between the arrays of two trees."""
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True)
    return max(float(np.linalg.norm(a - b) / (np.linalg.norm(b) + 1e-8)) for a, b in pairs)


def assert_equal_trees(got, expected):
    jax.tree.map(np.testing.assert_array_equal, got, expected)


# --- the decoder and the sampler -----------------------------------------------------------------------------------------


def test_adapters_are_initialized_as_in_peft():
    """b = 0, a uniform in +- 1 / sqrt(inputs): its std is that bound over sqrt(3). No two agents, targets, layers are equal."""
    from jmarl.models.config import ModelConfig

    cfg = ModelConfig("llama", 320, 64, 96, 2, 4, 2, 16, 128)
    base = share_params([decoder.init_params(cfg, jax.random.key(0))])
    _, trained = lora.split(lora.init_models([base], [(cfg, 2)], CONFIG.replace(lora_rank=32).lora, 0)[0])
    seen = []
    for name, (inputs, outputs) in lora.target_shapes(cfg).items():
        a, b = trained["layers"][name]["a"], trained["layers"][name]["b"]
        assert a.shape == (2, 2, inputs, 32) and b.shape == (2, 2, 32, outputs) and not b.any()
        assert np.abs(a).max() <= inputs**-0.5 and np.std(a) == pytest.approx((3 * inputs) ** -0.5, rel=0.03)
        seen += [float(x) for x in a[:, :, 0, 0].reshape(-1)]
    assert len(trained["layers"]) == 7 and len(set(seen)) == 7 * 2 * 2


@pytest.mark.parametrize("family, tied", [("llama", True), ("llama", False), ("qwen2", True), ("qwen3", True)])
def test_base_and_adapters_equal_the_merged_weights(make_agent, family, tied):
    """Logits of base and adapters equal those of W + alpha / rank * a b, and differ from those of the base."""
    agent = make_agent(family, tie_embeddings=tied)
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 320, 24))
    model, forward = with_noise(model_of(agent)), jax.jit(decoder.forward, static_argnums=1)
    plain = merged(agent, model)
    for a in range(A):
        got, expected = (forward(unstack(params, a), agent.config, tokens) for params in (model, plain))
        assert distance(got, expected) < 1e-5
        assert distance(got, forward(agent.params, agent.config, tokens)) > 0.1


@pytest.mark.parametrize("name", LORA_TARGETS)
def test_an_adapter_changes_only_its_own_weight(llama, name):
    """After merging, only the weight of that name differs from the base, by alpha / rank * a b."""
    from jmarl.models.hub.hf_format import tensors_from_params

    model = with_noise(model_of(llama, CONFIG.replace(lora_targets=name)))
    before, after = (tensors_from_params(llama.config, p) for p in (llama.params, unstack(merged(llama, model), 1)))
    changed = [tensor for tensor in before if (before[tensor] != after[tensor]).any()]
    assert len(changed) == llama.config.num_layers and all(f".{name}." in tensor for tensor in changed)
    pair = jax.tree.map(lambda x: np.asarray(x[1]), model["layers"][name])
    for layer, tensor in enumerate(changed):
        change = 5 / 3 * (pair["a"][layer] @ pair["b"][layer]).T
        np.testing.assert_allclose(after[tensor] - before[tensor], change, atol=1e-5)


def sampled(params, agent, **settings):
    rng = np.random.default_rng(2)
    prompts = jnp.asarray(rng.integers(1, 320, (A, P, S)))
    keys = RowIds(seed=0, step=0, purpose=0, stack=0, agents=jnp.arange(A)[:, None], prompt_ids=jnp.arange(P))
    program = SampleProgram(agent.config, Sampling(max_new_tokens=T, **settings), roles=1, group=G, platform="cpu")
    lengths = jnp.tile(LENGTHS, (A, 1))
    return jax.device_get(sample_stack(params, (prompts, lengths), keys, jnp.array([2]), program=program))


@pytest.mark.long
@pytest.mark.parametrize("fresh", [True, False])
def test_the_sampler_draws_the_tokens_of_plain_weights(llama, fresh):
    """New adapters: the base's tokens. Trained ones: those of the merged weights; log-probabilities up to rounding."""
    model = model_of(llama) if fresh else with_noise(model_of(llama))
    plain = stack_params([llama.params] * A) if fresh else merged(llama, model)
    got, expected = sampled(model, llama), sampled(plain, llama)
    np.testing.assert_array_equal(got.tokens, expected.tokens)
    np.testing.assert_allclose(got.logprobs, expected.logprobs, atol=1e-4)
    if fresh:
        np.testing.assert_array_equal(sampled(share_params([llama.params]), llama).tokens, expected.tokens)
    else:
        assert (got.tokens != sampled(stack_params([llama.params] * A), llama).tokens).any()


@pytest.mark.parametrize("targets", [LORA_TARGETS, ("v_proj", "o_proj"), ("q_proj", "k_proj", "up_proj"), ("gate_proj",)])
def test_adapters_of_one_input_are_joined_for_decoding(llama, targets):
    """One layer gives the same numbers with one adapter for all targets of an input, in the layout of the base."""
    cfg = llama.config
    whole = unstack(with_noise(model_of(llama, CONFIG.replace(lora_targets=",".join(targets)))), 0)
    layer = jax.tree.map(lambda x: jnp.asarray(x[1]), whole["layers"])
    joined = lora.join_by_input(layer, cfg)
    assert jax.tree.structure(joined) == jax.tree.structure(lora.join_axes_by_input(jax.tree.map(lambda _: 0, layer), cfg))
    assert not {name for name in LORA_TARGETS if name not in ("o_proj", "down_proj")} & joined.keys()
    x, attention = jax.random.normal(jax.random.key(0), (5, cfg.hidden_size)), decoder.causal_attention(5)
    (angles,) = decoder.rope(cfg, jnp.arange(5)).values()
    got, expected = (decoder.Block(cfg).apply({"params": w}, x, angles, attention)[0] for w in (joined, layer))
    assert distance(got, expected) < 1e-5


def test_the_sampler_reads_base_weights_cut_into_panels(llama):
    """Panels change no token; adapters are not cut."""
    from jmarl.sampling import sampler as sampling

    model = with_noise(model_of(llama))
    prompts, lengths = jnp.asarray(np.random.default_rng(2).integers(1, 320, (A, P, S))), jnp.tile(LENGTHS, (A, 1))
    keys = jax.random.split(jax.random.key(0), (A, P, G))

    @functools.partial(jax.jit, static_argnames="panels")
    def run(model, panels):
        inputs = SampleInputs(prompts, lengths, keys, jnp.array([2]))
        return sampling.sample(model, llama.config, Sampling(max_new_tokens=T), inputs, panels=panels)

    got, expected = (run(model, panels=panels) for panels in (True, False))
    np.testing.assert_array_equal(got.tokens, expected.tokens)
    np.testing.assert_allclose(got.logprobs, expected.logprobs, atol=1e-4)


# --- the update ----------------------------------------------------------------------------------------------------------


def gradients_of(llama, batch, params, base):
    """Return the gradients of agent 1's loss by `params`, which are adapters if there is a base."""
    settings = dict(model=llama.config, algorithm=resolve(CONFIG))
    running = unstack(init_stack(stack_params([llama.params]), resolve(CONFIG)).running, 0)
    inputs, _ = loss_inputs(unstack(batch, 1), running, **settings)
    grad = jax.jit(jax.grad(lambda params, base: loss_of_inputs(params, inputs, base=base, **settings)[0]))
    return jax.device_get(grad(params, base))


@pytest.mark.long
@pytest.mark.parametrize("fresh", [True, False])
def test_gradients_of_the_adapters_are_those_of_the_weight(llama, batch, fresh):
    """By the chain rule, with the merged weight's gradient G and s = alpha / rank, they are s a^T G for b and s G b^T for a.

    At the start b is 0, and so is the gradient of a."""
    model = model_of(llama) if fresh else with_noise(model_of(llama))
    base, trained = (unstack(part, 1) for part in lora.split(model))
    got = gradients_of(llama, batch, trained, base)["layers"]
    whole = gradients_of(llama, batch, unstack(merged(llama, model), 1), None)["layers"]
    cfg, scale = llama.config, 5 / 3
    qkv = whole["qkv"].reshape(*whole["qkv"].shape[:-1], cfg.num_kv_heads, -1, cfg.head_dim)
    parts = {"q_proj": qkv[..., :-2, :], "k_proj": qkv[..., -2, :], "v_proj": qkv[..., -1, :]}
    parts = {name: x.reshape(*x.shape[:2], -1) for name, x in parts.items()}
    parts |= {f"{name}_proj": whole[name] for name in ("gate", "up", "down")} | {"o_proj": whole["out"]}
    for name in LORA_TARGETS:
        a, b = (np.asarray(trained["layers"][name][part]) for part in "ab")
        assert distance(got[name]["b"], scale * np.swapaxes(a, 1, 2) @ parts[name]) < 1e-4
        assert np.abs(got[name]["b"]).max() > 0
        if fresh:
            assert not got[name]["a"].any()
        else:
            assert distance(got[name]["a"], scale * parts[name] @ np.swapaxes(b, 1, 2)) < 1e-4


@pytest.fixture(scope="module")
def updated(llama, batch):
    model = with_noise(model_of(llama))
    return model, *step(model, batch, llama, KL)


@pytest.mark.long
def test_only_adapters_are_trained(updated, llama):
    """Every adapter changes, the base stays bit-equal to the loaded weights, and the state has only adapters."""
    model, state, _ = updated
    base, trained = lora.split(model)
    assert jax.tree.structure(state.params) == jax.tree.structure(trained) == jax.tree.structure(state.grads)
    assert all(np.abs(x - y).max() > 1e-4 for x, y in zip(*map(jax.tree.leaves, (state.params, trained)), strict=True))
    after = unstack(state.base, 0)
    assert_equal_trees({**after, "layers": {k: x for k, x in after["layers"].items() if k != lora.ALPHA}}, llama.params)
    assert state.reference is None


@pytest.mark.long
def test_agents_of_a_stack_equal_agents_trained_alone(updated, llama, batch):
    model, state, metrics = updated
    for a in range(A):
        base, trained = lora.split(model)
        alone = lora.join(base, jax.tree.map(lambda x, a=a: x[a : a + 1], trained))
        got, metrics_alone = step(alone, jax.tree.map(lambda x, a=a: x[a : a + 1], batch), llama, KL)
        assert distance(unstack(got.params, 0), unstack(state.params, a)) < 1e-5
        assert metrics_alone["loss"][0] == pytest.approx(metrics["loss"][a], rel=1e-5)


SEVERAL = dict(num_minibatches=2, micro_batches=2, lora_dropout=0.3, kl_coef=0.0, old_logprobs="sampler")


@pytest.mark.long
@pytest.mark.parametrize("changes", [{}, SEVERAL], ids=["one step", "several"])
def test_vmap_equals_map(llama, batch, changes):
    """Gradients of all agents at once; also over micro-batches and several steps, with dropout."""
    cfg, model = KL.replace(**changes), with_noise(model_of(llama))
    keys = update_keys(0, 0, 0, A) if changes else None
    state, metrics = step(model, batch, llama, cfg, keys=keys)
    other, other_metrics = step(model, batch, llama, cfg.replace(per_agent="vmap"), keys=keys)
    assert distance(other.params, state.params) < 1e-5
    for name, value in metrics.items():
        np.testing.assert_allclose(other_metrics[name], value, rtol=1e-3, atol=1e-5, err_msg=name)


@pytest.mark.long
def test_every_pass_over_a_batch_has_its_own_dropout(llama, batch):
    """With a learning rate of almost 0, the gradients of the second and third pass still differ."""
    cfg, model = CONFIG.replace(lora_dropout=0.3, learning_rate=1e-30), with_noise(model_of(llama))
    keys = update_keys(0, 0, 0, A)
    second, third = (step(model, batch, llama, cfg.replace(num_epochs=n), keys=keys)[0].grads for n in (2, 3))
    assert distance(third, second) > 0.1


@pytest.mark.long
def test_the_reference_is_the_base(llama, batch):
    """The KL is 0 with new adapters and positive later; its reference log-probabilities are those of the base."""
    kl = [step(model_of(llama), batch, llama, KL.replace(per_agent="vmap"), steps)[1]["kl"] for steps in (1, 3)]
    np.testing.assert_allclose(kl[0], 0, atol=1e-6)
    assert (kl[1] > 1e-3).all()
    model = with_noise(model_of(llama))
    score = jax.jit(functools.partial(scoring.score, cfg=llama.config))
    inputs = dict(prompts=batch.prompts[0], lengths=batch.prompt_lengths[0], tokens=batch.tokens[0])
    d = score(llama.params, **inputs).logprobs - score(unstack(model, 0), **inputs).logprobs
    expected = (jnp.exp(d) - d - 1)[batch.action_mask[0]].mean()
    assert step(model, batch, llama, KL)[1]["kl"][0] == pytest.approx(float(expected), rel=1e-3)


# --- memory --------------------------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("program", ["map", "vmap", "sample"])
def test_no_agent_has_a_copy_of_the_base(tiny_config, program):
    """An extra agent costs far less than a large base, in the update (both modes) and in sampling: only its adapters, its rows,
    and with vmap its activations."""
    cfg = tiny_config(vocab_size=2048, hidden_size=256, intermediate_size=1024, head_dim=64)
    base = share_params([decoder.init_params(cfg, jax.random.key(0))])
    settings, used = CONFIG.replace(lora_rank=2), []
    for agents in (1, 4):
        model = lora.init_models([base], [(cfg, agents)], settings.lora, 0)[0]
        ones = functools.partial(jnp.ones, dtype=jnp.int32)
        prompts, lengths, shape = ones((agents, 1, S)), ones((agents, 1)), (agents, 1, 2)
        if program == "sample":
            keys = RowIds(0, 0, 0, 0, agents=jnp.arange(agents)[:, None], prompt_ids=jnp.arange(1))
            static = SampleProgram(cfg, Sampling(max_new_tokens=T), roles=1, group=2, platform="cpu")
            lowered = sample_stack.lower(model, (prompts, lengths), keys, jnp.array([2]), program=static)
        else:
            arrays = (prompts, lengths, ones((*shape, T)), jnp.ones((*shape, T), bool), jnp.zeros((*shape, T)))
            batch = rollouts(*arrays, jnp.ones(shape, bool), jnp.zeros(shape), ones(shape))
            algorithm = resolve(settings.replace(per_agent=program))
            state = init_stack(model, algorithm)
            lowered = stack_program(state, model=cfg, algorithm=algorithm).lower(state, batch)
        m = lowered.compile().memory_analysis()
        used.append(m.argument_size_in_bytes + m.temp_size_in_bytes + m.output_size_in_bytes)
    (one, four), size = used, sum(x.nbytes for x in jax.tree.leaves(base))
    assert one >= size and (four - one) / 3 < size / 4, f"{one} and {four} bytes, the base has {size}"


def test_every_weight_of_every_layer_has_its_own_start_and_dropout(tiny_config):
    cfg = tiny_config()
    base = decoder.init_params(cfg, jax.random.key(0))
    model = unstack(lora.init_models([share_params([base])], [(cfg, 1)], LoRA(lora_rank=2), 0)[0], 0)
    layers = lora.with_dropout(model, jax.random.key(0), 0.4)["layers"]
    keys = [tuple(k) for name in lora.targets_of(model) for k in jax.random.key_data(layers[name]["dropout"]["key"]).tolist()]
    assert len(set(keys)) == len(keys) == 7 * cfg.num_layers
    signs = [np.sign(layers[name]["a"][i, :, 0]) for name in lora.targets_of(model) for i in range(cfg.num_layers)]
    assert len({tuple(sign[:32].tolist()) for sign in signs}) == len(signs)


def test_dropout_of_some_tokens_is_that_of_all_where_layers_are_of_several_kinds(make_agent):
    """A device of a mesh draws the noise for all tokens, and uses that of its own."""
    kinds = dict(num_experts=2, experts_per_token=1, expert_size=8, dense_layers=(True, False))
    agent, tokens = make_agent("qwen3_moe", **kinds), jnp.arange(3, 9)
    model = unstack(with_noise(model_of(agent)), 0)

    def logits(places):
        return decoder.forward(lora.with_dropout(model, jax.random.key(0), 0.4, places), agent.config, tokens)

    own = logits(lora.Places(jnp.arange(6), 6))
    np.testing.assert_array_equal(own, logits(None))
    assert np.abs(own - logits(lora.Places(jnp.arange(6, 12), 12))).max() > 1e-3


def test_a_base_is_cast_only_if_that_loses_nothing(llama):
    """Then a merged model is the one of the base in float32, with the adapters of query, key and value."""
    base, trained = lora.split(
        lora.adapt(stack_params([llama.params] * 2), llama.config, LoRA(lora_rank=2), 2, jax.random.key(0))
    )
    assert lora.cast_base(base, jnp.bfloat16) is base
    stored = jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), base)
    cast = lora.cast_base(stored, jnp.bfloat16)
    assert cast["embed"].value.dtype == jnp.bfloat16 and cast["layers"][lora.ALPHA].value.dtype == jnp.float32
    assert lora.digest(cast) == lora.digest(stored)
    trained = jax.tree.map(lambda x: x + 1e-4, trained)
    models = [merge(llama.config, jax.device_get(unstack(lora.join(x, trained), 0))) for x in (stored, cast)]
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, np.asarray(b, np.float32)), *models)


def test_a_base_is_cast_where_its_recurrent_layers_have_weights_in_float32(make_agent):
    """The files of Qwen3.5 are in bfloat16, but for the rates of decays and the norms of these layers."""
    kinds = dict(delta=DeltaSizes(2, 4, 8, 12), delta_layers=(True, False), attention_gate=True)
    params = make_agent("qwen3_5_text", **kinds).params
    stored = jax.tree.map(lambda x: np.asarray(jnp.asarray(x, jnp.bfloat16), np.float32), params)
    stored["layers"] |= {name: params["layers"][name] for name in ("delta_rate", "delta_norm")}
    cast = lora.cast_base(share_params([stored]), jnp.bfloat16)
    exact = {name for name, x in cast["layers"].items() if x.value.dtype == jnp.float32}
    assert exact == {"delta_rate", "delta_bias", "delta_norm"} and cast["embed"].value.dtype == jnp.bfloat16
    for name in ("delta_rate", "delta_norm"):
        np.testing.assert_array_equal(cast["layers"][name].value, params["layers"][name])
