"""LoRA: adapters over one frozen base, in the decoder, the sampler and the update."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jmarl.algorithms import resolve
from jmarl.config import LORA_TARGETS, LoRA, Sampling, TrainConfig
from jmarl.learning.optimizer import init_stack
from jmarl.learning.program import update_keys
from jmarl.models import decoder, lora
from jmarl.models.config import DeltaSizes, ModelConfig
from jmarl.models.hub.hf_format import tensors_from_params
from jmarl.models.hub.peft import merge
from jmarl.models.stack import share_params, stack_params, unstack
from jmarl.sampling import scoring
from jmarl.sampling.sampler import RowIds, SampleInputs, row_keys, sample
from jmarl.sampling.stack_program import SampleProgram, sample_stack
from tests.batches import loss_inputs, loss_of_inputs, rollouts, stack_program, update_stack

A, P, G, T, S = 2, 2, 4, 6, 16
LENGTHS = np.array([5, 9])
CONFIG = TrainConfig.of(algorithm="magrpo", learning_rate=1e-2, adam_eps=1e-4, lora_rank=3, lora_alpha=5.0)
KL = CONFIG.replace(kl_coef=0.2, old_logprobs="rescored")
forward = jax.jit(decoder.forward, static_argnums=1)


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


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def init_model(base, cfg, settings, agents):
    return lora.init_models([base], [(cfg, agents)], settings, seed=3)[0]


def model_of(agent, cfg=CONFIG, agents=A):
    return jax.device_get(init_model(share_params([agent.params]), agent.config, cfg.lora, agents))


def with_noise(model, size=0.3):
    """Add noise to the adapters of a model, as if it was trained."""
    (base, trained), rng = lora.split(model), np.random.default_rng(7)
    noise = jax.tree.map(lambda x: x + np.asarray(size * rng.standard_normal(x.shape), np.float32), trained)
    return lora.join(base, noise)


def of_targets(model, names):
    """Return a model with the adapters of these targets only."""
    return model | {"layers": {name: x for name, x in model["layers"].items() if name in names or name not in LORA_TARGETS}}


def merged(agent, model):
    """Return plain parameters [A, ...] of the same agents."""
    return stack_params([merge(agent.config, unstack(model, a)) for a in range(A)])


@pytest.fixture(scope="module")
def llama(make_agent):
    return make_agent("llama")


@pytest.fixture(scope="module")
def batch():
    """Completions of lengths 1 to T, with random log-probabilities and rewards."""
    rng = np.random.default_rng(0)
    prompts, tokens = (rng.integers(1, 320, shape) for shape in ((A, P, S), (A, P, G, T)))
    mask = np.arange(T) < rng.integers(1, T + 1, (A, P, G, 1))
    rewards = rng.standard_normal((A, P, G)).astype(np.float32)
    old = np.where(mask, rng.standard_normal(mask.shape) - 6, 0).astype(np.float32)
    groups = np.broadcast_to(np.arange(P)[:, None], (A, P, G))
    ended = np.ones((A, P, G), bool)
    return jax.device_get(rollouts(prompts, np.tile(LENGTHS, (A, 1)), tokens, mask, old, ended, rewards, groups))


def step(model, batch, agent, cfg=CONFIG, steps=1, keys=None):
    """Return the state after some updates, and the metrics of the last, on the host. The model is not donated. keys: of dropout
    and of the order of minibatches."""
    base, trained = lora.split(model)
    algorithm = resolve(cfg)
    state = init_stack(lora.join(base, jax.tree.map(jnp.array, trained)), algorithm)
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
    cfg = ModelConfig("llama", 320, 64, 96, 2, 4, 2, 16, 128)
    _, trained = lora.split(jax.device_get(init_model(zeros_of(cfg), cfg, CONFIG.replace(lora_rank=32).lora, 2)))
    seen = []
    for name, (inputs, outputs) in lora.target_shapes(cfg).items():
        a, b = trained["layers"][name]["a"], trained["layers"][name]["b"]
        assert a.shape == (2, 2, inputs, 32) and b.shape == (2, 2, 32, outputs) and not b.any()
        assert np.abs(a).max() <= inputs**-0.5 and np.std(a) == pytest.approx((3 * inputs) ** -0.5, rel=0.03)
        seen += [float(x) for x in a[:, :, 0, 0].reshape(-1)]
    assert len(trained["layers"]) == 7 and len(set(seen)) == 7 * 2 * 2


def zeros_of(cfg):
    """Return a base of zeros."""
    shapes = jax.eval_shape(lambda: decoder.init_params(cfg, jax.random.key(0)))
    return share_params([jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes)])


@pytest.mark.parametrize("family, tied", [("llama", True), ("qwen2", False), ("qwen3", True)])
def test_base_and_adapters_equal_the_merged_weights(make_agent, family, tied):
    """Logits of base and adapters equal those of W + alpha / rank * a b, and differ from those of the base."""
    agent = make_agent(family, tie_embeddings=tied)
    tokens, model = np.random.default_rng(0).integers(0, 320, 24), with_noise(model_of(agent))
    for params in (unstack(model, a) for a in range(A)):
        models = params, merge(agent.config, params), agent.params
        got, expected, of_base = (np.asarray(forward(x, agent.config, tokens)) for x in models)
        assert distance(got, expected) < 1e-5 and distance(got, of_base) > 0.1


@pytest.mark.parametrize("name", LORA_TARGETS)
def test_an_adapter_changes_only_its_own_weight(llama, name):
    """After merging, only the weight of that name differs from the base, by alpha / rank * a b."""
    model = of_targets(with_noise(model_of(llama)), [name])
    before, after = (tensors_from_params(llama.config, p) for p in (llama.params, merge(llama.config, unstack(model, 1))))
    changed = [tensor for tensor in before if (before[tensor] != after[tensor]).any()]
    assert len(changed) == llama.config.num_layers and all(f".{name}." in tensor for tensor in changed)
    pair = jax.tree.map(lambda x: x[1], model["layers"][name])
    for layer, tensor in enumerate(changed):
        change = 5 / 3 * (pair["a"][layer] @ pair["b"][layer]).T
        np.testing.assert_allclose(after[tensor] - before[tensor], change, atol=1e-5)


PROMPTS = np.random.default_rng(2).integers(1, 320, (A, P, S)), np.tile(LENGTHS, (A, 1))
ROWS = RowIds(seed=0, step=0, purpose=0, stack=0, agents=np.arange(A)[:, None], prompt_ids=np.arange(P))


def sampled(params, agent):
    program = SampleProgram(agent.config, Sampling(max_new_tokens=T), roles=1, group=G, platform="cpu")
    return jax.device_get(sample_stack(params, PROMPTS, ROWS, np.array([2]), program=program))


@pytest.mark.long
def test_the_sampler_draws_the_tokens_of_plain_weights(llama):
    """New adapters: the base's tokens. Trained ones: those of the merged weights; log-probabilities up to rounding. Panels of
    base weights change no token; adapters are not cut."""
    new, trained, plain = model_of(llama), with_noise(model_of(llama)), stack_params([llama.params] * A)

    @jax.jit
    def by_panels(model):
        inputs = SampleInputs(*map(jnp.asarray, PROMPTS), row_keys(ROWS, G), jnp.array([2]))
        return sample(model, llama.config, Sampling(max_new_tokens=T), inputs, panels=True)

    of_base, of_merged = (sampled(params, llama) for params in (plain, merged(llama, trained)))
    np.testing.assert_array_equal(sampled(share_params([llama.params]), llama).tokens, of_base.tokens)
    assert (of_base.tokens != of_merged.tokens).any()
    for got, expected in (
        (sampled(new, llama), of_base),
        (sampled(trained, llama), of_merged),
        (by_panels(trained), of_merged),
    ):
        np.testing.assert_array_equal(got.tokens, expected.tokens)
        np.testing.assert_allclose(got.logprobs, expected.logprobs, atol=1e-4)


@pytest.mark.parametrize("targets", [LORA_TARGETS, ("v_proj", "o_proj"), ("q_proj", "k_proj", "up_proj"), ("gate_proj",)])
def test_adapters_of_one_input_are_joined_for_decoding(llama, targets):
    """One layer gives the same numbers with one adapter for all targets of an input, in the layout of the base."""
    cfg, model = llama.config, with_noise(model_of(llama, CONFIG.replace(lora_targets=",".join(targets))))
    assert lora.targets_of(model) == tuple(targets)
    layer = jax.tree.map(lambda x: x[1], unstack(model, 0)["layers"], is_leaf=lambda x: isinstance(x, tuple))
    x = np.random.default_rng(0).standard_normal((5, cfg.hidden_size)).astype(np.float32)

    @jax.jit
    def outputs(layer, x):
        joined, (angles,) = lora.join_by_input(layer, cfg), decoder.rope(cfg, jnp.arange(5)).values()
        assert jax.tree.structure(joined) == jax.tree.structure(lora.join_axes_by_input(jax.tree.map(lambda _: 0, layer), cfg))
        assert not {name for name in LORA_TARGETS if name not in ("o_proj", "down_proj")} & joined.keys()
        attention = decoder.causal_attention(5)
        return [decoder.Block(cfg).apply({"params": w}, x, angles, attention)[0] for w in (joined, layer)]

    assert distance(*map(np.asarray, outputs(layer, x))) < 1e-5


# --- the update ----------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_gradients_of_the_adapters_are_those_of_the_weight(llama, batch):
    """By the chain rule, with the merged weight's gradient G and s = alpha / rank, they are s a^T G for b and s G b^T for a.

    At the start b is 0, and so is the gradient of a."""
    cfg, scale, settings = llama.config, 5 / 3, dict(model=llama.config, algorithm=resolve(CONFIG))
    running = unstack(jax.device_get(init_stack(stack_params([llama.params]), resolve(CONFIG)).running), 0)

    @jax.jit
    def gradients(params, base, batch):
        inputs, _ = loss_inputs(batch, running, **settings)
        return jax.grad(lambda params: loss_of_inputs(params, inputs, base=base, **settings)[0])(params)["layers"]

    for model in (model_of(llama), with_noise(model_of(llama))):
        base, trained = (unstack(part, 1) for part in lora.split(model))
        plain = merge(cfg, unstack(model, 1))
        got, whole = (jax.device_get(gradients(*x, unstack(batch, 1))) for x in ((trained, base), (plain, None)))
        qkv = whole["qkv"].reshape(*whole["qkv"].shape[:-1], cfg.num_kv_heads, -1, cfg.head_dim)
        parts = {"q_proj": qkv[..., :-2, :], "k_proj": qkv[..., -2, :], "v_proj": qkv[..., -1, :]}
        parts = {name: x.reshape(*x.shape[:2], -1) for name, x in parts.items()}
        parts |= {f"{name}_proj": whole[name] for name in ("gate", "up", "down")} | {"o_proj": whole["out"]}
        for name in LORA_TARGETS:
            a, b = (trained["layers"][name][part] for part in "ab")
            assert distance(got[name]["b"], scale * np.swapaxes(a, 1, 2) @ parts[name]) < 1e-4
            assert np.abs(got[name]["b"]).max() > 0
            if b.any():
                assert distance(got[name]["a"], scale * parts[name] @ np.swapaxes(b, 1, 2)) < 1e-4
            else:
                assert not got[name]["a"].any()


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
    layers = {name: np.stack(x) for name, x in after["layers"].items() if name != lora.ALPHA}
    assert_equal_trees({**after, "layers": layers}, llama.params)
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


@pytest.mark.long
def test_vmap_equals_map(llama, batch):
    """Gradients of all agents at once, over micro-batches, in several steps, with dropout of its own in each of them."""
    model, keys = with_noise(model_of(llama)), update_keys(0, 0, 0, A)
    cfg = KL.replace(num_epochs=2, micro_batches=2, lora_dropout=0.3)
    runs = (step(model, batch, llama, cfg.replace(per_agent=mode), keys=keys) for mode in ("vmap", "map"))
    (state, metrics), (other, other_metrics) = runs
    assert distance(other.params, state.params) < 1e-5
    for name, value in metrics.items():
        np.testing.assert_allclose(other_metrics[name], value, rtol=1e-3, atol=1e-5, err_msg=name)
    # Of two steps at one point: gradients that are equal would be parallel to their mean, the momentum.
    state, _ = step(model, batch, llama, cfg.replace(learning_rate=1e-30), keys=keys)
    last, mean = (
        [x / np.linalg.norm(x) for x in jax.tree.leaves(unstack(tree, 0))]
        for tree in (state.grads, optax.tree_utils.tree_get(state.opt_state, "mu"))
    )
    assert distance(last, mean) > 0.1


@pytest.mark.long
def test_the_reference_is_the_base(updated, llama, batch):
    """The KL is 0 with new adapters and positive later; its reference log-probabilities are those of the base."""
    kl = [step(model_of(llama), batch, llama, KL, steps)[1]["kl"] for steps in (1, 3)]
    np.testing.assert_allclose(kl[0], 0, atol=1e-6)
    assert (kl[1] > 1e-3).all()
    model, _, metrics = updated
    score = jax.jit(functools.partial(scoring.score, cfg=llama.config))
    inputs = dict(prompts=batch.prompts[0], lengths=batch.prompt_lengths[0], tokens=batch.tokens[0])
    base, adapted = (np.asarray(score(params, **inputs).logprobs) for params in (llama.params, unstack(model, 0)))
    expected = (np.exp(base - adapted) - (base - adapted) - 1)[batch.action_mask[0]].mean()
    assert metrics["kl"][0] == pytest.approx(float(expected), rel=1e-3)


# --- memory --------------------------------------------------------------------------------------------------------------


def lowered_sampler(model, cfg, agents):
    """The program that samples two completions of a prompt for each agent."""
    prompts, lengths = np.ones((agents, 1, S), np.int32), np.ones((agents, 1), np.int32)
    keys = RowIds(0, 0, 0, 0, agents=np.arange(agents)[:, None], prompt_ids=np.arange(1))
    static = SampleProgram(cfg, Sampling(max_new_tokens=T), roles=1, group=2, platform="cpu")
    return sample_stack.lower(model, (prompts, lengths), keys, np.array([2]), program=static)


def test_the_sampler_reads_the_layers_of_a_base_where_they_lie(tiny_config):
    """Besides its arguments it holds a layer, in prefill, and no copy of all for the decode loop."""
    cfg = tiny_config(hidden_size=256, intermediate_size=1024, num_layers=6)
    model = init_model(zeros_of(cfg), cfg, CONFIG.replace(lora_rank=2, lora_targets="q_proj").lora, 2)
    memory = lowered_sampler(model, cfg, 2).compile().memory_analysis()
    size = sum(x.nbytes for x in jax.tree.leaves(lora.split(model)[0]["layers"]))
    assert size / 6 < memory.temp_size_in_bytes < size / 3


@pytest.mark.long
@pytest.mark.parametrize("program", ["map", "vmap", "sample"])
def test_no_agent_has_a_copy_of_the_base(tiny_config, program):
    """An extra agent costs far less than a large base, in the update (both modes) and in sampling: only its adapters, its rows,
    and with vmap its activations."""
    cfg = tiny_config(vocab_size=2048, hidden_size=256, intermediate_size=1024, head_dim=64)
    base, settings, used = zeros_of(cfg), CONFIG.replace(lora_rank=2), []
    for agents in (1, 4):
        model = init_model(base, cfg, settings.lora, agents)
        ones = functools.partial(np.ones, dtype=np.int32)
        prompts, lengths, shape = ones((agents, 1, S)), ones((agents, 1)), (agents, 1, 2)
        if program == "sample":
            lowered = lowered_sampler(model, cfg, agents)
        else:
            arrays = (prompts, lengths, ones((*shape, T)), np.ones((*shape, T), bool), np.zeros((*shape, T), np.float32))
            batch = rollouts(*arrays, np.ones(shape, bool), np.zeros(shape, np.float32), ones(shape))
            algorithm = resolve(settings.replace(per_agent=program))
            state = init_stack(model, algorithm)
            lowered = stack_program(state, model=cfg, algorithm=algorithm).lower(state, batch)
        m = lowered.compile().memory_analysis()
        used.append(m.argument_size_in_bytes + m.temp_size_in_bytes + m.output_size_in_bytes)
    (one, four), size = used, sum(x.nbytes for x in jax.tree.leaves(base))
    assert one >= size and (four - one) / 3 < size / 4, f"{one} and {four} bytes, the base has {size}"


def test_every_weight_of_every_layer_has_its_own_dropout(llama):
    @jax.jit
    def dropout_keys(model):
        layers = lora.with_dropout(model, jax.random.key(0), 0.4)["layers"]
        return [jax.random.key_data(layers[name]["dropout"]["key"]) for name in lora.targets_of(model)]

    keys = np.concatenate(dropout_keys(unstack(model_of(llama), 0))).tolist()
    assert len({tuple(key) for key in keys}) == len(keys) == 7 * llama.config.num_layers


def test_dropout_of_some_tokens_is_that_of_all_where_layers_are_of_several_kinds(make_agent):
    """A device of a mesh draws the noise for all tokens, and uses that of its own."""
    kinds = dict(num_experts=2, experts_per_token=1, expert_size=8, dense_layers=(True, False))
    agent = make_agent("qwen3_moe", **kinds)

    @jax.jit
    def logits(model):
        own, other = (lora.Places(jnp.arange(n, n + 6), n + 6) for n in (0, 6))
        models = [lora.with_dropout(model, jax.random.key(0), 0.4, places) for places in (None, own, other)]
        return [decoder.forward(model, agent.config, jnp.arange(3, 9)) for model in models]

    expected, own, other = map(np.asarray, logits(unstack(with_noise(model_of(agent)), 0)))
    np.testing.assert_array_equal(own, expected)
    assert np.abs(own - other).max() > 1e-3


def test_a_base_is_cast_only_if_that_loses_nothing(make_agent):
    """As that of Qwen3.5, whose files are in bfloat16, but for the rates of decays and the norms of recurrent layers. A merged
    model is then the one of the base in float32."""
    kinds = dict(delta=DeltaSizes(2, 4, 8, 12), delta_layers=(True, False), attention_gate=True)
    agent = make_agent("qwen3_5_text", **kinds)
    lossy = share_params([agent.params])
    assert lora.cast_base(lossy, jnp.bfloat16) is lossy
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(np.float32), agent.params)
    params["layers"] |= {name: agent.params["layers"][name] for name in ("delta_rate", "delta_norm")}
    model = lora.adapt(stack_params([params] * 2), agent.config, LoRA(lora_rank=2), 2, jax.random.key(0))
    stored, trained = lora.split(model)
    cast = lora.cast_base(stored, jnp.bfloat16)
    exact = {name for name, x in cast["layers"].items() if x.value[0].dtype == jnp.float32}
    assert exact == {"delta_rate", "delta_bias", "delta_norm", lora.ALPHA} and cast["embed"].value.dtype == jnp.bfloat16
    computed = decoder.cast(unstack(stored, 0), jnp.bfloat16)["layers"]
    assert {name for name, x in computed.items() if x[0].dtype == jnp.float32} == exact - {lora.ALPHA}
    assert lora.digest(cast) == lora.digest(stored)
    trained = jax.tree.map(lambda x: np.asarray(x) + np.float32(1e-4), trained)
    models = [merge(agent.config, jax.device_get(unstack(lora.join(x, trained), 0))) for x in (stored, cast)]
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, np.asarray(b, np.float32)), *models)
