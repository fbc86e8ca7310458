"""Every family computes, saves and trains what transformers does. A family is a line of `CASES` with its own flags.

Logits and files of every line are compared in each run. Decoding, gradients and adapters read the config that these have shown
to be right: they are compared for the families whose own code is in them, for the others under `-m nightly`.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jmarl.config import Sampling
from jmarl.models import decoder
from jmarl.models.families import FAMILIES
from jmarl.models.hub import agents
from jmarl.models.hub.hf_format import stacked_experts, tensors_from_params
from jmarl.models.hub.peft import merge, save_adapter
from jmarl.models.hub.transformers_model import agent_from_transformers, copy_to_transformers
from jmarl.models.lora import num_layers, target_shapes
from jmarl.models.weights import num_params
from jmarl.sampling import sampler, scoring

LAYERS, WINDOW, NEW, VOCAB = 6, 7, 40, 320
FULL = dict(num_hidden_layers=LAYERS, attention_dropout=0.0)
YARN = dict(rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=32)
MINISTRAL = dict(original_max_position_embeddings=8, mscale=1.0, mscale_all_dim=1.0, llama_4_scaling_beta=0.1)
LONGROPE = dict(
    rope_type="longrope", rope_theta=1e4, short_factor=[1.0, 1.5, 2.0, 2.5, 3.0, 3.5], long_factor=[2.0] * 6,
    original_max_position_embeddings=128, partial_rotary_factor=0.75,
)  # fmt: skip
MIXED = dict(
    sliding_attention={"rope_type": "default", "rope_theta": 1e4},
    full_attention={"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
)
QWEN_ROPE = dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.25)
DELTA = dict(linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=12)
CASES = {
    "llama": dict(attention_bias=True, mlp_bias=True),
    "llama linear": dict(rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0}),
    "llama dynamic": dict(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 3.0}),
    "qwen2": dict(use_sliding_window=True, sliding_window=WINDOW, max_window_layers=3),
    "qwen3": dict(rope_parameters=YARN),
    "qwen3_moe": dict(num_experts=6, num_experts_per_tok=2, moe_intermediate_size=48, norm_topk_prob=True),
    "qwen3_moe mixed": dict(
        num_experts=4, num_experts_per_tok=3, moe_intermediate_size=32, decoder_sparse_step=2, tie_word_embeddings=False
    ),
    "qwen3_moe irregular": dict(
        num_experts=4, num_experts_per_tok=1, moe_intermediate_size=32, mlp_only_layers=[0], num_hidden_layers=3
    ),
    "qwen3_5_text": DELTA | {"num_hidden_layers": 4},
    "qwen3_5_text periods": DELTA
    | dict(full_attention_interval=3, linear_conv_kernel_dim=3, attention_bias=True, tie_word_embeddings=False),
    "qwen3_5_text full": DELTA | dict(layer_types=["full_attention"] * LAYERS),
    "mistral": dict(sliding_window=WINDOW, tie_word_embeddings=False),
    "ministral": dict(
        sliding_window=WINDOW, layer_types=["full_attention", *["sliding_attention"] * 3] + ["full_attention"] * 2
    ),
    "ministral3": dict(rope_parameters=YARN | MINISTRAL),
    "gemma2": dict(sliding_window=WINDOW, query_pre_attn_scalar=24),
    "gemma3_text": dict(sliding_window=WINDOW, query_pre_attn_scalar=16, rope_parameters=MIXED),
    "phi3": dict(rope_parameters=LONGROPE, hidden_size=64, tie_word_embeddings=False),
    "smollm3": dict(rope_parameters={"rope_type": "default", "rope_theta": 1e6}),
    "olmo2": dict(tie_word_embeddings=False),
    "olmo3": dict(sliding_window=WINDOW, rope_parameters=dict(MIXED, full_attention=YARN)),
    "granite": dict(embedding_multiplier=6.0, residual_multiplier=0.3, attention_multiplier=0.1, logits_scaling=5.0),
}
FAMILY_CASES = [case for case in CASES if " " not in case]  # one of each family
TOKENS = np.random.default_rng(0).integers(3, 320, (2, 24))
LENGTHS = np.array([24, 15])  # both longer than the window
forward = jax.jit(decoder.forward, static_argnums=1)
sample = jax.jit(sampler.sample, static_argnums=(1, 2))


def family_of(case: str) -> str:
    return case.split()[0]


def nightly_but(*names: str, of: Iterable[str] = FAMILY_CASES) -> list[Any]:
    """Return cases of which all but these are nightly."""
    return [pytest.param(case, marks=[] if case in names else pytest.mark.nightly) for case in of]


class Pair(NamedTuple):
    """A tiny random model, as a directory, here, and in transformers, with its logits of `TOKENS` there."""

    directory: Path
    agent: agents.Agent
    model: Any
    logits: np.ndarray


@pytest.fixture(scope="module")
def pair_of(tiny_dir):
    """`pair_of(case) -> Pair`, loaded once."""
    import torch
    from transformers import AutoModelForCausalLM

    pairs = {}

    def pair(case):
        if case not in pairs:
            directory = tiny_dir(family_of(case), **FULL | CASES[case])
            model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()
            pairs[case] = Pair(directory, agents.load_agent(directory), model, torch_logits(model))
        return pairs[case]

    return pair


def torch_logits(model, tokens=TOKENS):
    import torch

    with torch.no_grad():
        return model(torch.as_tensor(tokens)).logits.numpy()


def test_every_family_is_compared():
    assert {family_of(case) for case in CASES} == {*FAMILIES}


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_logits_equal_those_of_transformers_and_saving_gives_back_every_bit(case, pair_of, tmp_path):
    from transformers import AutoModelForCausalLM

    directory, agent, model, expected = pair_of(case)
    assert np.abs(expected).max() > 0.3
    for tokens, logits in zip(TOKENS, expected, strict=True):
        np.testing.assert_allclose(forward(agent.params, agent.config, jnp.asarray(tokens)), logits, atol=1e-4)
    assert num_params(agent.config) == sum(x.numel() for x in model.parameters())

    agents.save_pretrained(tmp_path, agent.config, agent.params, agent.tokenizer)
    before, after = load_file(directory / "model.safetensors"), load_file(tmp_path / "model.safetensors")
    assert {name: x.tobytes() for name, x in before.items()} == {name: x.tobytes() for name, x in after.items()}
    assert agents.load_agent(tmp_path).config == agent.config
    saved = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    assert type(saved) is type(model)
    np.testing.assert_array_equal(torch_logits(saved), expected)


# Phi-3 joins modules, and else it is read as the others.
@pytest.mark.long
@pytest.mark.parametrize("case", nightly_but("phi3", of=("gemma3_text", "phi3", "olmo3")))
def test_shards_in_bfloat16_are_saved_exactly_in_float32(case, tiny_dir, tmp_path):
    """Also where a tied head is stored a second time. Modules of one tensor, as of Phi-3, are joined again."""
    fields = FULL | CASES[case] | {"num_hidden_layers": 2, "layer_types": None, "tie_word_embeddings": True}
    filed = tiny_dir(family_of(case), dtype="bfloat16", max_shard_size="24KB", **fields)
    directory = Path(shutil.copytree(filed, tmp_path / "filed"))
    shards = sorted(directory.glob("*.safetensors"))
    tensors = {name: x for shard in shards for name, x in load_file(shard).items()}
    save_file({**load_file(shards[-1]), "lm_head.weight": tensors["model.embed_tokens.weight"]}, shards[-1])
    index = json.loads((path := directory / "model.safetensors.index.json").read_text())
    index["weight_map"]["lm_head.weight"] = shards[-1].name
    path.write_text(json.dumps(index))
    agent = agents.load_agent(directory)
    agents.save_pretrained(tmp_path / "saved", agent.config, agent.params, agent.tokenizer)
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert len(shards) > 2 and {x.dtype.name for x in tensors.values()} == {"bfloat16"}
    assert saved.keys() == tensors.keys() and {x.dtype.name for x in saved.values()} == {"float32"}
    for name, x in tensors.items():
        np.testing.assert_array_equal(saved[name], x.astype(np.float32))


# Llama: biases everywhere. Gemma 2: windows and caps, of which decoding has forms of its own. Phi-3: some numbers of a head are
# rotated, modules are joined, and the head is not the embedding. The experts and recurrences of Qwen.
@pytest.mark.long
@pytest.mark.parametrize("case", nightly_but("llama", "gemma2", "phi3", "qwen3_moe", "qwen3_5_text"))
def test_greedy_completions_and_gradients_equal_those_of_torch(case, pair_of):
    """Log-probabilities of the sampler are those that the tokens get afterwards. Gradients are those of a weighted sum of the
    log-probabilities of these completions and of random ones, with respect to every tensor."""
    import torch

    _, agent, model, _ = pair_of(case)
    rows = sampler.RowIds(seed=0, step=0, purpose=0, stack=0, agents=np.zeros((1, 1), int), prompt_ids=np.arange(2))
    inputs = sampler.SampleInputs(TOKENS[None], LENGTHS[None], sampler.row_keys(rows, 1), np.array([VOCAB]))
    params = jax.tree.map(lambda x: np.asarray(x)[None], agent.params)
    greedy = jax.device_get(sample(params, agent.config, Sampling(max_new_tokens=NEW, temperature=0), inputs))
    rng = np.random.default_rng(1)
    new = np.concatenate([greedy.tokens[0], rng.integers(3, VOCAB, (2, 1, NEW))], 1)
    weights = rng.normal(size=new.shape).astype(np.float32)

    def total(params):
        logprobs = scoring.score(params, agent.config, TOKENS, LENGTHS, new).logprobs
        return (weights * logprobs).sum(), logprobs

    (value, logprobs), grads = jax.device_get(jax.jit(jax.value_and_grad(total, has_aux=True))(agent.params))
    np.testing.assert_allclose(greedy.logprobs[0], logprobs[:, :1], rtol=1e-5, atol=1e-5)
    model.zero_grad()
    model.get_input_embeddings().padding_idx = None  # which has no gradient
    expected = torch.zeros(())
    for p, n in enumerate(LENGTHS):
        for g in range(2):
            row = torch.as_tensor(np.concatenate([TOKENS[p, :n], new[p, g]]))[None]
            logs = model(row).logits[0, n - 1 : -1].log_softmax(-1)
            expected = expected + (torch.as_tensor(weights[p, g]) * logs[range(NEW), new[p, g]]).sum()
            assert g or logs.argmax(-1).tolist() == new[p, g].tolist()
    expected.backward()
    assert float(value) == pytest.approx(expected.item(), rel=1e-4)
    theirs = {name: w.grad.numpy() for name, w in model.named_parameters()}
    ours = tensors_from_params(agent.config, grads)
    stacks = stacked_experts(ours, theirs)
    ours = {name: x for name, x in ours.items() if ".experts." not in name} | stacks
    assert ours.keys() == theirs.keys()
    for name, gradient in theirs.items():
        assert np.linalg.norm(ours[name] - gradient) <= 1e-4 * np.linalg.norm(gradient), name


@pytest.mark.long
@pytest.mark.parametrize("case", ["gemma3_text", "mistral", "ministral3", "qwen3_5_text"])
def test_the_text_part_of_a_model_of_text_and_images_is_loaded(case, pair_of, tiny_tokenizer, tmp_path):
    """In the names that transformers gives its tensors now, and in those of older files."""
    directory, agent, *_ = pair_of(case)
    text, tensors = json.loads((directory / "config.json").read_text()), load_file(directory / "model.safetensors")
    outer = {
        "model_type": {"gemma3_text": "gemma3", "qwen3_5_text": "qwen3_5"}.get(case, "mistral3"),
        "tie_word_embeddings": text["tie_word_embeddings"],
    }
    (tmp_path / "config.json").write_text(json.dumps({**outer, "text_config": text, "vision_config": {}}))
    tiny_tokenizer.save_pretrained(tmp_path)
    for begin in (
        {"model.": "model.language_model."},
        {"model.": "language_model.model.", "lm_head.": "language_model.lm_head."},
    ):
        named = {}
        for name, x in tensors.items():
            first = next((old for old in begin if name.startswith(old)), "")
            named[begin.get(first, "") + name.removeprefix(first)] = x
        named |= {name: np.zeros((2, 2), np.float32) for name in ("vision_tower.encoder.weight", "mtp.fc.weight")}
        save_file(named, tmp_path / "model.safetensors")
        with pytest.warns(UserWarning, match="only the text part is loaded, images are left out"):
            part = agents.load_agent(tmp_path)
        assert part.config == agent.config
        jax.tree.map(np.testing.assert_array_equal, part.params, agent.params)


WITH_IMAGES = {  # fields of the model of text and images, and of its text part
    "gemma3": dict(
        vision_config=dict(
            hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=14
        ),
        mm_tokens_per_image=4,
        text={},
    ),
    "qwen3_5": dict(
        vision_config=dict(depth=1, hidden_size=16, intermediate_size=16, num_heads=2, out_hidden_size=32),
        text={"rope_parameters": dict(QWEN_ROPE, mrope_section=[1, 1, 0], mrope_interleaved=True)},
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("outer", WITH_IMAGES)
def test_the_text_part_of_a_loaded_model_is_taken_and_copied_back(outer, pair_of, tiny_tokenizer):
    """Positions of Qwen3.5 are of time, height and width, which are equal for text."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    directory, agent, _, logits = pair_of(f"{outer}_text")
    text = json.loads((directory / "config.json").read_text())
    fields = {**WITH_IMAGES[outer], "text_config": text | WITH_IMAGES[outer]["text"]}
    config = AutoConfig.for_model(outer, tie_word_embeddings=True, **{x: fields[x] for x in fields if x != "text"})
    model = AutoModelForImageTextToText.from_config(config).eval()
    copy_to_transformers(agent, model)
    np.testing.assert_allclose(torch_logits(model), logits, atol=1e-4)
    with pytest.warns(UserWarning, match="images are left out"):
        taken = agent_from_transformers(model, tiny_tokenizer)
    assert taken.config == agent.config
    jax.tree.map(np.testing.assert_array_equal, taken.params, agent.params)


@pytest.mark.long
def test_tensors_that_predict_further_tokens_are_left_out(pair_of, tmp_path):
    """They lie beside the model in files of Qwen3.5."""
    filed, expected, *_ = pair_of("qwen3_5_text")
    directory = Path(shutil.copytree(filed, tmp_path / "filed"))
    tensors = load_file(directory / "model.safetensors") | {"mtp.fc.weight": np.zeros((2, 2), np.float32)}
    save_file(tensors, directory / "model.safetensors")
    with pytest.warns(UserWarning, match="tensors such as mtp.fc.weight are left out: jmarl has no such part"):
        agent = agents.load_agent(directory)
    jax.tree.map(np.testing.assert_array_equal, agent.params, expected.params)


def with_adapters(agent, targets):
    """Return an agent's parameters with random adapters of rank 3, alpha 6."""
    rng, layers = np.random.default_rng(2), dict(agent.params["layers"])
    for name, (inputs, outputs) in target_shapes(agent.config).items():
        if name in targets:
            count = num_layers(agent.config, name)
            a, b = rng.normal(size=(count, inputs, 3)), rng.normal(size=(count, 3, outputs))
            layers[name] = {"a": 0.2 * a.astype(np.float32), "b": 0.2 * b.astype(np.float32)}
    return {**agent.params, "layers": {**layers, "lora_alpha": np.full(agent.config.num_layers, 6, np.float32)}}


# Llama: every module is a tensor. Phi-3: some share one. Qwen: layers with experts, or recurrent ones, have fewer.
@pytest.mark.long
@pytest.mark.filterwarnings("ignore")  # of peft itself
@pytest.mark.parametrize("case", nightly_but("llama", "phi3", "qwen3_moe", "qwen3_5_text"))
def test_adapters_equal_merged_weights_and_those_of_peft(case, pair_of, tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    directory, agent, _, logits = pair_of(case)
    able = target_shapes(agent.config)
    for n, targets in enumerate((able, [name for name in ("k_proj", "up_proj") if name in able])):
        params = with_adapters(agent, targets)
        merged = np.asarray(forward(merge(agent.config, params), agent.config, jnp.asarray(TOKENS[0])))
        if n == 0:
            np.testing.assert_allclose(forward(params, agent.config, jnp.asarray(TOKENS[0])), merged, atol=2e-4)
        save_adapter(tmp_path / str(n), agent.config, params, 6)
        base = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager")
        model = PeftModel.from_pretrained(base, tmp_path / str(n)).eval()
        np.testing.assert_allclose(torch_logits(model, TOKENS[:1])[0], merged, atol=2e-4)
        assert np.abs(logits[0] - merged).max() > 0.01
