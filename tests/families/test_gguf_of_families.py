"""GGUF files of every family hold the model that they were made of. `tests.gguf_files` says what the converter changes."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmarl.models import decoder
from jmarl.models.families import FAMILIES
from jmarl.models.hub import agents
from tests.families.test_families import LONGROPE, MINISTRAL, MIXED, WINDOW, YARN, nightly_but
from tests.gguf_files import write_gguf

TOKENS = np.random.default_rng(0).integers(3, 320, 24)
LLAMA3 = dict(low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)
SHORT_LONGROPE = LONGROPE | {"original_max_position_embeddings": 64}
OTHER_MIXED = MIXED | {"sliding_attention": {"rope_type": "default", "rope_theta": 2e4}}
CASES = {
    "llama": dict(rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, **LLAMA3}, mlp_bias=True),
    "qwen2": dict(rope_parameters=YARN | {"attention_factor": 1.25}),
    "qwen3": dict(rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0}),
    "mistral": dict(sliding_window=None, tie_word_embeddings=False),
    "ministral3": dict(rope_parameters=YARN | MINISTRAL, num_hidden_layers=2),
    "gemma2": dict(sliding_window=WINDOW, query_pre_attn_scalar=16),
    "gemma3_text": dict(sliding_window=WINDOW, query_pre_attn_scalar=16, rope_parameters=OTHER_MIXED, num_hidden_layers=6),
    "phi3": dict(rope_parameters=SHORT_LONGROPE, hidden_size=64, sliding_window=WINDOW, tie_word_embeddings=False),
    "smollm3": dict(rope_parameters={"rope_type": "default", "rope_theta": 1e6}, num_hidden_layers=4),
    "olmo2": dict(tie_word_embeddings=False),
    "olmo3": dict(sliding_window=WINDOW, rope_parameters=dict(OTHER_MIXED, full_attention=YARN), num_hidden_layers=4),
    "granite": dict(
        hidden_size=64, embedding_multiplier=6.0, residual_multiplier=0.22, attention_multiplier=0.1, logits_scaling=5.0
    ),
}
AS_LLAMA = {"mistral", "ministral"}  # nothing in a GGUF file says which it is
forward = jax.jit(decoder.forward, static_argnums=1)


@pytest.fixture(scope="module")
def files(tiny_dir, tmp_path_factory):
    """`files(family)`: the directory of a tiny random model, and the GGUF file of it."""
    folder, made = tmp_path_factory.mktemp("gguf"), {}

    def make(family):
        if family not in made:
            directory = tiny_dir(family, **dict(attention_dropout=0.0) | CASES[family])
            made[family] = directory, write_gguf(folder / f"{family}.gguf", directory)
        return made[family]

    return make


def torch_logits(directory, **options):
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager", **options)
    with torch.no_grad():
        return model.eval()(torch.as_tensor(TOKENS)[None]).logits[0].numpy()


def test_every_family_has_a_gguf_file():
    assert {*CASES} | AS_LLAMA | {"qwen3_moe", "qwen3_5_text"} == {*FAMILIES}  # which are refused by name


@pytest.mark.parametrize("family", CASES)
def test_a_gguf_file_holds_the_same_model(family, files):
    directory, path = files(family)
    agent, expected = agents.load_agent(path), agents.load_agent(directory)
    same = {"family": "llama"} if family in AS_LLAMA else {}
    assert agent.config == dataclasses.replace(expected.config, **same)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-6), agent.params, expected.params)


# Others have the config and the weights of a directory, by the test above, and a rotation that `test_families` or `test_agents`
# compares. These have one of their own: a factor of attention with YaRN, and longrope with a window.
@pytest.mark.parametrize("family", nightly_but("qwen2", "phi3", of=CASES))
def test_logits_of_a_gguf_file_equal_those_of_transformers(family, files):
    directory, path = files(family)
    agent, expected = agents.load_agent(path), torch_logits(directory)
    assert np.abs(expected).max() > 0.3
    np.testing.assert_allclose(forward(agent.params, agent.config, jnp.asarray(TOKENS)), expected, atol=1e-4)


@pytest.mark.long
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3", "gemma2", "gemma3_text", "phi3"])
def test_transformers_reads_the_same_files(family, files):
    """Its loader knows these families, but not their rotary scaling and scales of attention: it is given the config.json."""
    from transformers import AutoConfig

    directory, path = files(family)
    config = {} if family in AS_LLAMA else {"config": AutoConfig.from_pretrained(directory)}
    np.testing.assert_allclose(torch_logits(path.parent, gguf_file=path.name, **config), torch_logits(directory), atol=1e-4)


# --- what files do not say ---------------------------------------------------------------------------------------------


@pytest.fixture
def config_of(files, tmp_path):
    """`config_of(family, change)`: what is read from the GGUF file of a model after `change(fields, tensors)`."""

    def read(family, change):
        return agents.load_agent(write_gguf(tmp_path / f"{family}.gguf", files(family)[0], change=change)).config

    return read


def test_mistral_small_3_is_mistral(config_of):
    """Its files have the architecture of Ministral 3, without YaRN."""

    def change(fields, tensors):
        for key in [key for key in fields if "scaling" in key or "temperature" in key]:
            del fields[key]

    config = config_of("ministral3", change)
    assert (config.family, config.rope_scaling, config.sliding_layers) == ("mistral", None, ())


@pytest.mark.parametrize(("layers", "scalar"), [(26, 16), (46, 8), (62, 8)])
def test_gemmas_of_27_billion_weights_scale_attention_by_the_width(layers, scalar):
    """Of heads times hidden size, whatever the size of a head: as llama.cpp, which knows them by the number of layers."""
    meta = {"attention.head_count": 4, "embedding_length": 32, "block_count": layers, "attention.key_length": 16}
    for name in ("gemma2", "gemma3_text"):
        assert FAMILIES[name].read_gguf(meta)["query_pre_attn_scalar"] == scalar


def test_gemma2_slides_where_a_file_does_not_say_how_far(config_of):
    config = config_of("gemma2", lambda fields, _: fields.pop("gemma2.attention.sliding_window"))
    assert (config.sliding_window, config.sliding_layers) == (4096, (True, False))


@pytest.mark.parametrize(("period", "sliding"), [(3, (True, True, False, True)), (1, ()), (0, (True,) * 4)])
def test_a_pattern_of_sliding_layers_may_be_a_period(period, sliding, config_of):
    config = config_of("olmo3", lambda fields, _: fields.update({"olmo2.attention.sliding_window_pattern": period}))
    assert config.sliding_layers == sliding


def test_granite_that_does_not_rotate_or_lacks_a_scale_is_refused(config_of):
    with pytest.raises(ValueError, match="granite.gguf: .*has position_embedding_type='nope'"):
        config_of("granite", lambda fields, _: fields.update({"granite.rope.scaling.finetuned": False}))
    for key in ("attention.scale", "embedding_scale", "residual_scale", "logit_scale"):
        with pytest.raises(ValueError, match=f"the metadata has no granite.{key}"):
            config_of("granite", lambda fields, _, key=key: fields.pop(f"granite.{key}"))
