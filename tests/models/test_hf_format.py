"""Read configs in both spellings of rope; errors name what is wrong with a config or a directory."""

import contextlib
import json
import math
import os
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jmarl.models.config import RopeScaling
from jmarl.models.families import FAMILIES
from jmarl.models.hub import agents as weights

LLAMA3_ROPE = dict(
    rope_type="llama3", rope_theta=10000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=32,
)  # fmt: skip

# --- configs -----------------------------------------------------------------------------------------------------------

BASE = dict(
    model_type="llama", vocab_size=320, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=128, rms_norm_eps=1e-5,
)  # fmt: skip
QWEN = dict(model_type="qwen3_5_text", linear_num_key_heads=2, linear_num_value_heads=4, full_attention_interval=2)


def test_both_spellings_of_rope_are_read():
    scaling = RopeScaling("llama3", 8.0, 32, 1.0, 4.0)
    old = weights.config_from_hf(
        BASE | {"rope_theta": 5e5, "rope_scaling": {k: v for k, v in LLAMA3_ROPE.items() if k != "rope_theta"}}
    )
    new = weights.config_from_hf(BASE | {"rope_parameters": LLAMA3_ROPE | {"rope_theta": 5e5}})
    assert old == new and new.rope_theta == 5e5 and new.rope_scaling == scaling
    assert weights.config_from_hf(BASE | {"rope_scaling": {"type": "default"}}).rope_scaling is None
    assert weights.config_from_hf(BASE).rope_theta == 10000.0
    assert weights.config_from_hf(BASE | {"rope_theta": None}).rope_theta == 10000.0


def test_families_differ_in_biases_and_norms():
    def switches(family, **fields):
        cfg = weights.config_from_hf(BASE | {"model_type": family} | fields)
        return cfg.qkv_bias, cfg.out_bias, cfg.qk_norm, cfg.head_dim

    assert switches("llama") == (False, False, False, 8)
    assert switches("llama", attention_bias=True, head_dim=16) == (True, True, False, 16)
    assert switches("qwen2") == (True, False, False, 8)
    assert switches("qwen3") == (False, False, True, 128)
    assert switches("qwen3", attention_bias=True) == (True, True, True, 128)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_type": "mixtral"}, "unknown architecture 'mixtral'.*llama, qwen2, qwen3"),
        ({"model_type": None}, "unknown architecture None"),
        ({"model_type": "mistral", "mlp_bias": True}, "mistral checkpoint has mlp_bias=True"),
        ({"model_type": "gemma4"}, "unknown architecture 'gemma4'.*the nearest is gemma"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"rope_scaling": {"type": "proportional"}}, "rope type 'proportional'.*'default', 'linear', 'dynamic', 'llama3'"),
        ({"rope_parameters": {"rope_type": "linear"}}, "no 'factor'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 4.0}}, "no 'low_freq_factor'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ({"sliding_window": 8, "layer_types": ["full_attention", "sliding_attention"]}, "llama checkpoint has sliding layers"),
        ({"model_type": "qwen2", "layer_types": ["full_attention", "chunked"]}, "layer_types has ..chunked"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"hidden_size": None}, "no 'hidden_size'"),
        ({"num_key_value_heads": 3}, "num_heads=4 is not a multiple of num_kv_heads=3"),
        (QWEN | {"linear_num_value_heads": 3}, "delta.heads=3 is not a multiple of delta.key_heads=2"),
        (QWEN | {"layer_types": ["linear_attention"] * 2}, "all 2 layers are recurrent: at least one must attend"),
        (QWEN | {"layer_types": ["full_attention"] * 3}, "layer_types has 3 layers, and num_hidden_layers is 2"),
        (QWEN | {"attn_output_gate": False}, "qwen3_5_text checkpoint has attn_output_gate=false"),
    ],
)
def test_errors_name_unsupported_features(fields, message):
    with pytest.raises(ValueError, match=message):
        weights.config_from_hf(BASE | fields)


SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")
BROKEN = [
    *({name: value} for name in SIZES for value in (0, "4", 1.5, True)), {"num_hidden_layers": 10**9}, {"hidden_size": 10**400},
    {"rms_norm_eps": math.nan}, {"rope_theta": "x"}, {"rope_parameters": {"rope_theta": -1}}, {"model_type": []},
    {"hidden_act": [1], "hidden_activation": [1]}, {"rope_parameters": {"rope_type": []}}, {"rope_parameters": 5},
    {"rope_parameters": {"rope_type": "linear", "factor": "x"}}, {"rope_scaling": 5},
]  # fmt: skip
OF_FAMILIES = {
    "qwen3_5_text": [{"full_attention_interval": 0}, {"linear_num_key_heads": 0}, {"head_dim": None}, {"layer_types": 5}],
    "qwen3_moe": [{"decoder_sparse_step": 0}, {"mlp_only_layers": 5}, {"num_experts": -1}],
    "gemma2": [{"query_pre_attn_scalar": None}, {"num_key_value_heads": "x"}, {"attn_logit_softcapping": -1}],
    "gemma3_text": [{"sliding_window_pattern": 0}, {"query_pre_attn_scalar": 0}, {"rope_parameters": {"full_attention": 5}}],
    "smollm3": [{"no_rope_layer_interval": 0}, {"no_rope_layers": 5}], "mistral": [{"sliding_window": x} for x in (-1, 0, 1.5)],
    "qwen2": [{"use_sliding_window": True, "max_window_layers": 0, "sliding_window": -1}], "granite": [{"logits_scaling": 0}],
    "llama": [{"num_attention_heads": 100}, {"rope_scaling": {"rope_type": "longrope", "short_factor": 1}}],
}  # fmt: skip
UNUSED = {"use_sliding_window": False, "head_dim": 0, "attn_logit_softcapping": 0, "final_logit_softcapping": 0.0}  # of all
UNUSED_OF_FAMILIES = {"sliding_window_pattern": 0, "num_experts": -1, "linear_num_key_heads": 0, "logits_scaling": 0}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_broken_config_is_a_sentence_for_every_family(family):
    base = {**BASE, "model_type": family, "full_attention_interval": 2}
    cfg = weights.config_from_hf(base | UNUSED)
    assert cfg.head_dim == cfg.hidden_size // cfg.num_heads and cfg.attention_cap is None is cfg.logit_cap
    if family in ("llama", "qwen2", "qwen3", "smollm3", "olmo2"):
        for window in (0, -1):
            unused = {**UNUSED, **UNUSED_OF_FAMILIES, "sliding_window": window}
            assert weights.config_from_hf(base | unused) == cfg
    for fields in [*BROKEN, *OF_FAMILIES.get(family, ())]:
        with pytest.raises(ValueError, match=r"^(config\.json has|this \w+ checkpoint has|unknown architecture).{,350}$"):
            weights.config_from_hf(base | fields)
    for name in base:  # null: the family has a default, or it is missing
        with contextlib.suppress(ValueError):
            weights.config_from_hf(base | {name: None})


def test_a_sliding_window_that_is_not_in_use_is_fine():
    qwen = BASE | {"model_type": "qwen2", "sliding_window": 8}
    for unused in ({"use_sliding_window": False}, {"use_sliding_window": True, "max_window_layers": 2}):
        assert weights.config_from_hf(qwen | unused).family == "qwen2"


GEMMA = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, sliding_window=16)  # all that a published file has


def test_fields_that_published_files_leave_out_have_the_values_of_transformers():
    outer = {"model_type": "gemma3", "text_config": GEMMA | {"model_type": "gemma3_text"}}
    with pytest.warns(UserWarning, match="images are left out"):
        cfg = weights.config_from_hf(outer)
    assert (cfg.vocab_size, cfg.num_heads, cfg.num_kv_heads, cfg.head_dim, cfg.max_positions) == (262_208, 8, 4, 256, 131_072)
    with pytest.raises(ValueError, match="quantization_config"):
        weights.config_from_hf({**outer, "quantization_config": {"bits": 8}})
    small = {key: value for key, value in BASE.items() if key not in ("num_key_value_heads", "rms_norm_eps")}
    cfg = weights.config_from_hf(small | {"model_type": "ministral3", "num_attention_heads": 8})
    assert (cfg.rms_eps, cfg.num_kv_heads, cfg.rope_theta, cfg.rope_scaling.query_beta) == (1e-5, 8, 1e6, 0.1)
    plain = BASE | {"model_type": "gemma2", "attn_logit_softcapping": None, "final_logit_softcapping": None}
    assert weights.config_from_hf(plain).attention_cap is None, "null is not left out"


def test_descriptions_of_older_checkpoints_stay_and_all_are_json(tiny_config):
    scaling = dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=32)
    older = tiny_config("llama", rope_scaling=RopeScaling("llama3", **scaling)).describe()
    assert older["rope_scaling"] == scaling and set(older) == {
        "family", "vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim",
        "max_positions", "rope_theta", "rope_scaling", "rms_eps", "tie_embeddings", "qkv_bias", "out_bias", "qk_norm",
    }  # fmt: skip
    new = tiny_config("gemma3_text", sliding_window=8, sliding_layers=(True, False)).describe()
    assert new["sliding_layers"] == [True, False] and json.loads(json.dumps(new)) == new


def test_configs_are_equal_after_a_round_trip_or_raise_an_error(tiny_config):
    scaling = RopeScaling("llama3", 8.0, 32, 1.0, 4.0)
    for cfg in (
        tiny_config("llama", rope_scaling=scaling, rope_theta=5e5, tie_embeddings=False),
        tiny_config("llama", qkv_bias=True, out_bias=True),
        tiny_config("qwen2", rms_eps=1e-5),
        tiny_config("qwen3", max_positions=77),
    ):
        assert weights.config_from_hf(json.loads(json.dumps(weights.config_to_hf(cfg)))) == cfg
    with pytest.raises(ValueError, match="qwen2 layout cannot hold qkv_bias=False"):
        weights.config_to_hf(tiny_config("qwen2", qkv_bias=False))
    with pytest.raises(ValueError, match="llama layout cannot hold qk_norm=True"):
        weights.config_to_hf(tiny_config("llama", qk_norm=True))
    with pytest.raises(ValueError, match="family='gpt' has no Hugging Face layout"):
        weights.config_to_hf(tiny_config("gpt"))


# --- bad directories ---------------------------------------------------------------------------------------------------


def change_tensors(directory, change):
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")


K_PROJ, UP = "model.layers.1.self_attn.k_proj.weight", "model.layers.1.mlp.up_proj.weight"


def untie(t):
    t["lm_head.weight"] = t["model.embed_tokens.weight"] + 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(K_PROJ), rf"1 tensor is missing: {K_PROJ} \(expected 20, found 19\)"),
        (
            lambda t: t.update({"score.weight": np.ones(3, np.float32)}),
            "1 tensor is unknown to this architecture: score.weight",
        ),
        (lambda t: t.update({UP: t[UP].T.copy()}), rf"{UP} has shape \(32, 64\), the config asks for \(64, 32\)"),
        (lambda t: t.update({K_PROJ: t[K_PROJ][:-1]}), rf"{K_PROJ} has shape \(31, 32\), the config asks for \(32, 32\)"),
        (lambda t: t.update({K_PROJ: t[K_PROJ].astype(np.int8)}), f"{K_PROJ} is I8, jmarl reads F32, F16, BF16"),
        (untie, "tie_word_embeddings is true, but lm_head.weight differs"),
        (
            lambda t: [t.pop(k) for k in list(t) if "layers.0" in k],
            r"9 tensors are missing: (\S+, ){5}\.\.\. \(expected 20",
        ),
    ],
)
def test_errors_name_wrong_tensors(change, message, copy_dir):
    change_tensors(copy_dir, change)
    with pytest.raises(ValueError, match=message):
        weights.load_agent(copy_dir)


def test_redundant_tensors_are_accepted(copy_dir, tiny_dir):
    def add(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(8, np.float32)

    change_tensors(copy_dir, add)
    params = weights.load_agent(copy_dir).params
    jax.tree.map(np.testing.assert_array_equal, params, weights.load_agent(tiny_dir("llama")).params)


@pytest.mark.parametrize("size", [0, 5, 300, 20_000])
def test_a_truncated_file_is_named_with_its_size(size, copy_dir):
    file = copy_dir / "model.safetensors"
    file.write_bytes(file.read_bytes()[:size])
    with pytest.raises(ValueError, match=rf"model.safetensors \({size} bytes\) is not a complete safetensors file"):
        weights.load_agent(copy_dir)


def test_missing_files_are_named(copy_dir, tiny_dir, tmp_path):
    sharded = Path(shutil.copytree(tiny_dir("llama", max_shard_size="40KB"), tmp_path / "sharded"))
    shard = sorted(sharded.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(FileNotFoundError, match=f"{shard.name} is named by the index"):
        weights.load_agent(sharded)
    (copy_dir / "model.safetensors").rename(copy_dir / "pytorch_model.bin")
    with pytest.raises(FileNotFoundError, match="neither model.safetensors nor .*; it has .*pytorch_model.bin"):
        weights.load_agent(copy_dir)
    (copy_dir / "tokenizer.json").unlink()
    with pytest.raises(FileNotFoundError, match="has no tokenizer.json"):
        weights.load_agent(copy_dir)
    (copy_dir / "config.json").write_text("{")
    with pytest.raises(ValueError, match="config.json is damaged: "):
        weights.load_agent(copy_dir)
    (copy_dir / "config.json").unlink()
    (copy_dir / "adapter_config.json").write_text("{}")
    with pytest.raises(FileNotFoundError, match="has no config.json, so it holds the adapters of a model: merge it"):
        weights.load_agent(copy_dir)
    (copy_dir / "adapter_config.json").unlink()
    with pytest.raises(FileNotFoundError, match="has no config.json, so it is no Hugging Face model directory"):
        weights.load_agent(copy_dir)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"])
def test_files_that_are_pipes_or_too_large_or_too_deep_are_refused(copy_dir, name):
    file = copy_dir / name
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(ValueError, match=f"{name} is a pipe, not a file"):
        weights.open_agent(copy_dir)
    file.unlink()
    file.touch()
    os.truncate(file, 1 << 40)
    with pytest.raises(ValueError, match=f"{name} has {1 << 40} bytes, and at most .* are read"):
        weights.open_agent(copy_dir)
    if not name.startswith("tokenizer"):  # transformers reads those
        file.unlink()
        file.write_text('{"a":' * 150 + "1" + "}" * 150)
        with pytest.raises(ValueError, match=f"{name} is damaged: it is nested deeper than 100"):
            weights.open_agent(copy_dir)


def test_a_vocabulary_smaller_than_the_tokenizers_is_an_error(copy_dir, make_tokenizer, tmp_path):
    agent, tokenizer = weights.load_agent(copy_dir), make_tokenizer()
    tokenizer.add_tokens(["<one_more>"])
    tokenizer.save_pretrained(copy_dir)
    with pytest.raises(ValueError, match="tokenizer has 321 tokens but the model's vocabulary only 320"):
        weights.load_agent(copy_dir)
    with pytest.raises(ValueError, match="tokenizer has 321 tokens"):
        weights.save_pretrained(tmp_path / "out", agent.config, agent.params, tokenizer)


def test_paths_that_do_not_exist_are_errors(copy_dir, tmp_path):
    for name in (tmp_path / "nowhere", "nowhere", "./nowhere", "nowhere/model.gguf", "a/b/c"):
        with pytest.raises(FileNotFoundError, match="does not exist here and is no hub id"):
            weights.load_agent(name)
    with pytest.raises(ValueError, match="is a file but not a .gguf"):
        weights.load_agent(copy_dir / "model.safetensors")
    with pytest.raises(ValueError, match="revision='main' is for hub ids"):
        weights.load_agent(copy_dir, revision="main")
