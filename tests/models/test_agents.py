"""Loading and saving weights does not change a model: parity with transformers."""

import json
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from jmarl.models import decoder, decoding
from jmarl.models.hub import agents as weights
from jmarl.models.hub.peft import save_adapter
from jmarl.models.hub.weight_files import open_tensors
from jmarl.models.layers import token_attention
from jmarl.models.weights import num_params

FAMILIES = ["llama", "qwen2", "qwen3"]
TOKENS = np.random.default_rng(0).integers(0, 320, 48)
LLAMA3_ROPE = dict(
    rope_type="llama3", rope_theta=10000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=32,
)  # fmt: skip
FLAGS = {  # every switch of the decoder, as Hugging Face spells it
    "llama": ("llama", {}),
    "llama untied": ("llama", {"tie_word_embeddings": False}),
    "llama biases": ("llama", {"attention_bias": True}),
    "llama3 rope": ("llama", {"rope_parameters": LLAMA3_ROPE}),
    "llama one head each": ("llama", {"num_key_value_heads": 4, "head_dim": 8}),
    "llama one key-value head": ("llama", {"num_key_value_heads": 1, "rms_norm_eps": 1e-2}),
    "qwen2": ("qwen2", {}),
    "qwen2 untied": (
        "qwen2",
        {"tie_word_embeddings": False, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    ),
    "qwen3": ("qwen3", {}),
    "qwen3 biases untied": ("qwen3", {"attention_bias": True, "tie_word_embeddings": False}),
}
EVERY_SWITCH = ("llama3 rope", "llama one head each", "llama one key-value head", "qwen2 untied", "qwen3 biases untied")


def nightly_but(*names, of):
    """Return cases of which all but these are nightly."""
    return [pytest.param(case, marks=[] if case in names else pytest.mark.nightly) for case in of]


forward = jax.jit(decoder.forward, static_argnums=1)


def hf_logits(directory, tokens=TOKENS):
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(torch.as_tensor(np.array(tokens))[None]).logits[0].numpy()


def random_params(cfg):
    """Return parameters as JAX arrays, made without a compiled program."""
    rng, shapes = np.random.default_rng(0), jax.eval_shape(lambda: decoder.init_params(cfg, jax.random.key(0)))
    return jax.tree.map(lambda x: jnp.asarray(rng.standard_normal(x.shape).astype(x.dtype)), shapes)


def our_logits(agent, tokens=TOKENS):
    return np.asarray(forward(agent.params, agent.config, jnp.asarray(tokens)))


# --- files -------------------------------------------------------------------------------------------------------------


@pytest.fixture(params=[0o022, 0o027])
def umask(request):
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def modes(directory) -> dict[str, int]:
    return {path.name: path.stat().st_mode & 0o777 for path in directory.iterdir()}


def test_files_have_the_permissions_of_other_new_files(umask, tiny_config, tiny_tokenizer, random_agent, tmp_path):
    """Also weights and adapters, which safetensors writes as 0600."""
    agent = random_agent(tiny_config(), tiny_tokenizer, 0)
    weights.save_pretrained(tmp_path / "model", agent.config, agent.params, tiny_tokenizer)
    pair = {"a": np.zeros((2, 32, 4)), "b": np.zeros((2, 4, 64))}
    save_adapter(tmp_path / "adapter", agent.config, {"layers": {"gate_proj": pair}}, alpha=8.0)
    for directory, file in (("model", "model.safetensors"), ("adapter", "adapter_model.safetensors")):
        permissions = modes(tmp_path / directory)
        assert file in permissions and set(permissions.values()) == {0o666 & ~umask}


def test_the_converted_model_has_the_permissions_of_other_new_directories(umask, tiny_dir, tmp_path, monkeypatch):
    agent = weights.load_agent(tiny_dir("llama"))
    monkeypatch.setenv("JMARL_CACHE", str(tmp_path))
    monkeypatch.setattr(weights, "_smollm2_gguf", lambda: Path("unused.gguf"))
    monkeypatch.setattr(weights, "_open_file", lambda *args: (agent, open_tensors(tiny_dir("llama"))))
    weights.load_agent()
    assert modes(tmp_path) == {"smollm2-135m-instruct.v1": 0o777 & ~umask}


# --- parity ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", nightly_but(*EVERY_SWITCH, of=FLAGS))
def test_logits_equal_transformers_after_loading_and_after_saving(case, tiny_dir, tmp_path):
    family, flags = FLAGS[case]
    directory = tiny_dir(family, **flags)
    agent = weights.load_agent(directory)
    expected = hf_logits(directory)
    assert np.abs(expected).max() > 1
    np.testing.assert_allclose(our_logits(agent), expected, atol=1e-4)
    assert all(a.dtype == np.float32 for a in jax.tree.leaves(agent.params))

    weights.save_pretrained(tmp_path / "out", agent.config, agent.params, agent.tokenizer)
    np.testing.assert_array_equal(hf_logits(tmp_path / "out"), expected)
    before, after = load_file(directory / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    assert {k: v.tobytes() for k, v in before.items()} == {k: v.tobytes() for k, v in after.items()}


def test_logits_depend_on_every_flag(tiny_dir):
    """A wrong flag moves logits far beyond the tolerance of the parity test, which would notice."""
    for case, change in {
        "llama3 rope": {"rope_scaling": None},
        "qwen2 untied": {"rope_theta": 10000.0},
        "llama one key-value head": {"rms_eps": 1e-6},
    }.items():
        family, flags = FLAGS[case]
        agent = weights.load_agent(tiny_dir(family, **flags))
        other = agent._replace(config=agent.config.__class__(**vars(agent.config) | change))
        assert np.abs(our_logits(agent) - our_logits(other)).max() > 0.01, case
    for leaf in ("qkv_bias", "out_bias", "q_norm", "k_norm"):
        agent = weights.load_agent(tiny_dir("qwen3", **FLAGS["qwen3 biases untied"][1]))
        expected = our_logits(agent)
        agent.params["layers"][leaf] = np.zeros_like(agent.params["layers"][leaf])
        assert np.abs(our_logits(agent) - expected).max() > 0.01, leaf


def test_a_large_model_is_written_in_shards_that_transformers_loads(tiny_config, tiny_tokenizer, random_agent, tmp_path):
    from transformers import AutoModelForCausalLM

    agent = random_agent(tiny_config(tie_embeddings=False), tiny_tokenizer, 0)
    older, whole = (tmp_path / "model", agent.config, jax.tree.map(np.zeros_like, agent.params)), tmp_path / "whole"
    weights.save_pretrained(*older)
    weights.save_pretrained(*older, max_shard_size="60KB")
    weights.save_pretrained(tmp_path / "model", agent.config, agent.params, agent.tokenizer, max_shard_size="40KB")
    weights.save_pretrained(whole, agent.config, agent.params)
    expected = load_file(whole / "model.safetensors")
    files = sorted((tmp_path / "model").glob("model*"))
    index = json.loads(files.pop().read_text())
    assert index["metadata"] == {"total_size": sum(x.nbytes for x in expected.values())}
    assert [x.name for x in files] == sorted(set(index["weight_map"].values()))  # none of the older models is left
    assert [x.name for x in files] == [f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))]
    assert all(x.stat().st_size < 45_000 or len(load_file(x)) == 1 for x in files) and len(files) > 3
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "model").state_dict()
    assert {name: x.numpy().tobytes() for name, x in theirs.items()} == {name: x.tobytes() for name, x in expected.items()}
    jax.tree.map(np.testing.assert_array_equal, weights.load_agent(tmp_path / "model").params, agent.params)
    weights.save_pretrained(tmp_path / "model", agent.config, agent.params)
    assert [x.name for x in (tmp_path / "model").glob("model*")] == ["model.safetensors"]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_files_load_as_their_exact_values(dtype, tiny_dir):
    directory = tiny_dir("qwen2", dtype=dtype)
    agent = weights.load_agent(directory)
    assert load_file(directory / "model.safetensors")["model.norm.weight"].dtype.name == dtype
    assert agent.params["embed"].dtype == np.float32
    np.testing.assert_allclose(our_logits(agent), hf_logits(directory), atol=1e-4)


@pytest.mark.parametrize("case", nightly_but("qwen3 biases untied", of=["llama3 rope", "qwen2", "qwen3 biases untied"]))
def test_prefix_and_decode_paths_give_the_logits_of_forward(case, tiny_dir):
    family, flags = FLAGS[case]
    _, cfg, params, *_ = weights.load_agent(tiny_dir(family, **flags))
    expected, n = np.asarray(forward(params, cfg, TOKENS)), 30
    padded = np.concatenate([TOKENS[:n], np.full(7, 5)])[None]  # padding after the prompt must change nothing

    @jax.jit
    def scored(params):
        hidden, _ = decoder.completion_states(
            params, cfg, jnp.asarray(padded), jnp.array([n]), jnp.asarray(TOKENS[n:])[None, None]
        )
        return decoder.logits(params, hidden[0, 0])

    @jax.jit
    def decoded(params):
        rest = jnp.asarray(TOKENS[n:])
        prefix = decoding.prefill(params, cfg, jnp.asarray(padded), jnp.array([n]))
        view = decoding.decode_view(params, cfg, jnp.float32, prefix, len(rest) + 3, range(cfg.num_layers))

        def step(cache, inputs):
            t, token = inputs
            out, cache = decoding.decode_step(view, cfg, cache, token[None, None], t)
            return cache, out[0, 0]

        cache = decoding.init_cache(cfg, prefix, 1, len(rest) + 3, jnp.float32)
        return jax.lax.scan(step, cache, (jnp.arange(len(rest)), rest))[1]

    for path in (scored, decoded):
        np.testing.assert_allclose(path(params), expected[n:], atol=1e-4)


def test_parameters_have_the_decoders_shapes(tiny_config, tiny_dir):
    for family, flags in FLAGS.values():
        agent = weights.load_agent(tiny_dir(family, **flags))
        ours = jax.eval_shape(lambda cfg=agent.config: decoder.init_params(cfg, jax.random.key(0)))
        assert jax.tree.map(lambda x: x.shape, ours) == jax.tree.map(lambda x: x.shape, agent.params)
        assert num_params(agent.config) == sum(x.size for x in jax.tree.leaves(agent.params))
    for family in FAMILIES:
        assert weights.load_agent(tiny_dir(family)).config == tiny_config(family)


# --- saving ------------------------------------------------------------------------------------------------------------


def test_jax_parameters_of_any_dtype_are_saved_in_float32(tiny_config, tiny_tokenizer, tmp_path):
    cfg = tiny_config("qwen3", tie_embeddings=False)
    params = jax.tree.map(lambda x: jnp.asarray(np.asarray(x).astype(jnp.bfloat16)), random_params(cfg))
    weights.save_pretrained(tmp_path, cfg, params, tiny_tokenizer)
    agent = weights.load_agent(tmp_path)
    assert agent.config == cfg
    jax.tree.map(np.testing.assert_array_equal, agent.params, jax.tree.map(lambda x: np.asarray(x, np.float32), params))


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_reads_our_tokenizer_and_ids(family, tiny_config, tiny_tokenizer, tmp_path):
    from transformers import AutoConfig, AutoTokenizer

    cfg = tiny_config(family)
    weights.save_pretrained(tmp_path, cfg, random_params(cfg), tiny_tokenizer)
    text = "The farmer's 1234 pears — 日本\n\tx = 1<|im_end|>"
    theirs, ours = AutoTokenizer.from_pretrained(tmp_path), weights.load_agent(tmp_path).tokenizer
    assert theirs.encode(text) == ours.encode(text) == tiny_tokenizer.encode(text)
    assert theirs.chat_template == ours.chat_template == tiny_tokenizer.chat_template
    hf = AutoConfig.from_pretrained(tmp_path)
    assert (hf.bos_token_id, hf.eos_token_id, hf.pad_token_id) == (1, [2, 0], 0)  # <|endoftext|> ends completions, too


def test_saving_a_stack_or_wrong_leaves_is_an_error(tiny_config, tmp_path):
    cfg = tiny_config()
    params = random_params(cfg)
    with pytest.raises(ValueError, match=r"shape \(3, 320, 32\), the config asks for \(320, 32\) .*one agent at a time"):
        weights.save_pretrained(tmp_path / "a", cfg, jax.tree.map(lambda x: np.stack([x] * 3), params))
    with pytest.raises(ValueError, match="1 tensor is unknown to this architecture: lora"):
        weights.save_pretrained(tmp_path / "b", cfg, {**params, "lora": params["embed"]})
    with pytest.raises(ValueError, match="1 tensor is missing: lm_head"):
        weights.save_pretrained(tmp_path / "c", tiny_config(tie_embeddings=False), params)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_smollm2_exports_to_transformers_with_the_same_logits(smollm2, tmp_path):
    from transformers import AutoTokenizer

    weights.save_pretrained(tmp_path, smollm2.config, smollm2.params, smollm2.tokenizer)
    text = "<|im_start|>user\nWhat is 17 + 25? — naïve café 日本 🙂<|im_end|>\n\tdef f(x):\n        return x"
    tokens = smollm2.tokenizer.encode(text)
    assert AutoTokenizer.from_pretrained(tmp_path).encode(text) == tokens
    ours, theirs = our_logits(smollm2, tokens), hf_logits(tmp_path, tokens)
    np.testing.assert_allclose(ours, theirs, atol=1e-3)
    np.testing.assert_array_equal(ours.argmax(-1), theirs.argmax(-1))


def test_writing_the_cache_at_different_indices_is_an_error():
    """It would be a scatter, which copies the cache at every token."""
    cache, new = np.zeros((2, 3, 4, 8), np.float32), np.ones((2, 3, 4, 1), np.float32)
    together = jax.jit(jax.vmap(token_attention._write, (0, 0, None)))(cache, new, 5)
    np.testing.assert_array_equal(together, np.broadcast_to(np.arange(8) == 5, cache.shape))
    with pytest.raises(NotImplementedError, match="at one index t"):
        jax.jit(jax.vmap(token_attention._write))(cache, new, np.array([5, 6]))
