"""A loaded model of transformers becomes an agent: the same weights and logits as of its directory, without a file."""

from __future__ import annotations

import copy

import jax
import numpy as np
import pytest

from jmarl.comlrl.arguments import load_agents, load_critic, load_single
from jmarl.models.hub.agents import load_agent
from jmarl.models.hub.transformers_model import agent_from_transformers, copy_to_transformers


def load(directory, dtype="float32"):
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, dtype)).eval()


@pytest.fixture(scope="module")
def model(tiny_dir):
    return load(tiny_dir("qwen2"))


@pytest.mark.parametrize(
    ("family", "dtype", "options"),
    [
        ("llama", "float32", {"tie_word_embeddings": False}),
        ("qwen2", "bfloat16", {}),
        ("qwen3", "float16", {"attention_bias": True}),
    ],
)
def test_the_agent_equals_that_of_the_directory(tiny_dir, family, dtype, options):
    directory = tiny_dir(family, dtype, **options)
    ours, read = agent_from_transformers(load(directory, dtype)), load_agent(directory)
    assert {x.dtype for x in jax.tree.leaves(ours.params)} == {np.dtype(np.float32)}
    assert ours.config == read.config and ours.tokenizer.get_vocab() == read.tokenizer.get_vocab()
    jax.tree.map(np.testing.assert_array_equal, ours.params, read.params)


def test_training_weights_are_a_copy(tiny_dir, tiny_tokenizer):
    model = load(tiny_dir("qwen2"))
    agent = agent_from_transformers(model, tiny_tokenizer)
    before = agent.params["embed"].copy()
    model.get_input_embeddings().weight.data.zero_()
    np.testing.assert_array_equal(agent.params["embed"], before)


def test_each_model_is_read_once_and_keeps_its_weights(model, tiny_dir, tiny_tokenizer):
    other = load(tiny_dir("qwen2", seed=1))
    first, again, second = load_agents([model, model, other], None, 3, tiny_tokenizer)
    assert again is first and first.config == second.config
    assert (first.params["embed"] != second.params["embed"]).any()
    assert first.tokenizer is second.tokenizer is tiny_tokenizer


def test_the_given_tokenizer_is_used(tiny_dir, make_tokenizer):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{{ 'mine' }}"
    (agent,) = load_agents([str(tiny_dir("qwen2"))], None, 1, tokenizer)
    assert agent.tokenizer is tokenizer


def test_what_cannot_be_taken_over_raises(model, tiny_dir, tiny_tokenizer):
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    nameless = AutoModelForCausalLM.from_config(copy.deepcopy(model.config))
    nameless.config.name_or_path = ""
    with pytest.raises(ValueError, match="brings no tokenizer: give tokenizer="):
        agent_from_transformers(nameless)
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(model.config)
    with pytest.raises(ValueError, match="has no values here"):
        agent_from_transformers(empty, tiny_tokenizer)
    gpt2 = AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt2", n_layer=1, n_embd=8, n_head=1, vocab_size=320))
    with pytest.raises(ValueError, match="unknown architecture 'gpt2'"):
        agent_from_transformers(gpt2, tiny_tokenizer)
    with pytest.raises(TypeError, match="agent 0 is a Linear: load it with"):
        load_agents([torch.nn.Linear(1, 1)], None, 1)
    with pytest.raises(TypeError, match="tokenizer= is a str: give a fast tokenizer"):
        load_agents([model], None, 1, "a name")


def test_end_tokens_of_the_model_end_completions(tiny_dir):
    """Those of its generation_config, whose other fields are kept, and special ones of its config."""
    model = load(tiny_dir("qwen2"))
    model.generation_config.update(eos_token_id=[2, 301], temperature=0.6)
    model.config.eos_token_id = [1]
    agent = agent_from_transformers(model)
    assert agent.stop == (2, 301, 1, 0) and agent.generation_config["temperature"] == 0.6


def test_weights_that_are_not_finite_are_named(tiny_dir):
    model = load(tiny_dir("qwen2", seed=1), "bfloat16")
    model.model.norm.weight.data[3] = float("inf")
    with pytest.raises(ValueError, match=r"model.norm.weight has 1 of 32 weights that are NaN or infinite"):
        agent_from_transformers(model)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_peft_model_says_to_merge(model):
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(load(model.config.name_or_path), peft.LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(TypeError, match=r"give model.merge_and_unload\(\)"):
        load_agents([adapted], None, 1)


def test_critics_and_reward_models_use_the_given_tokenizer(model, tiny_tokenizer):
    assert load_critic(model, None, tiny_tokenizer).tokenizer is tiny_tokenizer
    assert load_critic(None, [model, model], [tiny_tokenizer] * 2).tokenizer is not tiny_tokenizer  # that of its directory
    assert load_single(model, tiny_tokenizer).tokenizer is tiny_tokenizer


@pytest.mark.parametrize(("dtype", "options"), [("float32", {}), ("bfloat16", {"tie_word_embeddings": False})])
def test_weights_are_copied_back_to_the_model(tiny_dir, tiny_tokenizer, dtype, options):
    model = load(tiny_dir("llama", dtype, **options), dtype)
    agent = agent_from_transformers(model, tiny_tokenizer)
    changed = agent._replace(params=jax.tree.map(lambda x: x + np.float32(0.5), agent.params))
    copy_to_transformers(changed, model)
    assert {x.dtype for x in model.parameters()} == {model.dtype}
    again = agent_from_transformers(model, tiny_tokenizer)
    tolerance = 0 if dtype == "float32" else 0.01
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=tolerance), again.params, changed.params)
