"""Exported weights have the names that vLLM and transformers know: both fail for others, or leave weights at random values."""

from __future__ import annotations

import re

import jax
import numpy as np
import pytest

from jmarl.cli.export import no_vllm
from jmarl.models import decoder
from jmarl.models.families import FAMILIES
from jmarl.models.hub import agents, hf_format

AROUND = {"model.embed_tokens.weight", "model.norm.weight"}
MLP = [f"mlp.{x}_proj" for x in ("gate", "up", "down")]
ATTENTION = [f"self_attn.{x}_proj" for x in "qkvo"]
LLAMA = [f"{x}.weight" for x in (*ATTENTION, *MLP, "input_layernorm", "post_attention_layernorm")]
GEMMA = [*LLAMA, "pre_feedforward_layernorm.weight", "post_feedforward_layernorm.weight"]
QK_NORM = ["self_attn.q_norm.weight", "self_attn.k_norm.weight"]
EXPERTS = ["mlp.gate.weight", *(f"mlp.experts.{n}.{x}_proj.weight" for n in range(4) for x in ("gate", "up", "down"))]
ATTENTION_BIASES, MLP_BIASES = ([f"{x}.bias" for x in modules] for modules in (ATTENTION, MLP))
RECURRENT = [f"linear_attn.{x}.weight" for x in ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "conv1d", "norm")]
RECURRENT += [f"linear_attn.{x}" for x in ("A_log", "dt_bias", "out_proj.weight")]
# The weights of a layer in vLLM 0.33.0's models/{llama,qwen2,qwen3,qwen3_moe,mistral,gemma2,gemma3,phi3,granite}.py, and in
# models/qwen3_5.py of a version between 0.20 and 0.28.
VLLM = {
    "llama": [*LLAMA, *ATTENTION_BIASES, *MLP_BIASES],
    "granite": [*LLAMA, *ATTENTION_BIASES, *MLP_BIASES],
    "mistral": LLAMA,
    "ministral3": LLAMA,
    "qwen2": [*LLAMA, *ATTENTION_BIASES[:3]],
    "qwen3": [*LLAMA, *ATTENTION_BIASES[:3], *QK_NORM],
    "qwen3_moe": [x for x in (*LLAMA, *ATTENTION_BIASES[:3], *QK_NORM, *EXPERTS) if not x.startswith(tuple(MLP))],
    "qwen3_5_text": [*LLAMA, *QK_NORM, *RECURRENT],
    "gemma2": [*GEMMA, *ATTENTION_BIASES],
    "gemma3_text": [*GEMMA, *ATTENTION_BIASES, *QK_NORM],
    "phi3": [x for x in LLAMA if x[:11] not in ("self_attn.q", "self_attn.k", "self_attn.v", "mlp.gate_pr", "mlp.up_proj")]
    + ["self_attn.qkv_proj.weight", "mlp.gate_up_proj.weight"],
}
# Those that it runs by transformers' own class, its `TransformersForCausalLM`.
BY_TRANSFORMERS = ("ministral", "smollm3", "olmo2", "olmo3")
MLP_BIAS = ("llama", "granite")  # families that may have biases in the feed-forward layer
CONFIG = dict(
    vocab_size=320, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    head_dim=16, max_position_embeddings=128, pad_token_id=0,
)  # fmt: skip


def has_biases(family: str) -> bool:
    from transformers import AutoConfig

    return hasattr(AutoConfig.for_model(family), "attention_bias")


def config_of(family: str, biases: bool):
    own = dict(rope_theta=1e4, head_dim=8, original_max_position_embeddings=128) if family == "phi3" else {}
    own |= {"tie_word_embeddings": family == "gemma2"}  # of which vLLM knows no other
    own |= dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16) if family == "qwen3_moe" else {}
    own |= {"layer_types": ["linear_attention", "full_attention"]} if family == "qwen3_5_text" else {}
    fields = CONFIG | own | {"model_type": family, "attention_bias": biases, "mlp_bias": biases and family in MLP_BIAS}
    return agents.config_from_hf(fields)


def exported(family: str, biases: bool) -> set[str]:
    """The names of the exported tensors, those of layers without their numbers."""
    return {re.sub(r"layers\.\d\.", "", name) for name in hf_format.filed_tensors(config_of(family, biases))}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_weight_is_one_of_vllm(family):
    """Biases after the attention of Qwen3 are none, nor any of Qwen3.5: `jmarl export` says so."""
    if family in BY_TRANSFORMERS:
        return
    head = set() if family == "gemma2" else {"lm_head.weight"}
    known = AROUND | head | {f"model.{name}" for name in VLLM[family]}
    none = {f"model.{x}.bias" for x in (ATTENTION if family == "qwen3_5_text" else ATTENTION[3:])}
    for biases in (False, True) if has_biases(family) else (False,):
        assert exported(family, biases) - known == (none if no_vllm(config_of(family, biases)) else set())
    assert {name for name in known if not name.endswith(".bias")} <= exported(family, False)


def test_every_family_is_one_of_vllm():
    assert {*VLLM, *BY_TRANSFORMERS} == {*FAMILIES}
    architectures = {FAMILIES[family].architecture.removesuffix("ForCausalLM") for family in VLLM}
    names = "Llama Granite Mistral Ministral3 Qwen2 Qwen3 Qwen3Moe Qwen3_5 Gemma2 Gemma3 Phi3"
    assert architectures == {*names.split()}


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_finds_every_weight_and_no_other(family, tmp_path):
    """With biases, if a family may have them: `test_families` saves models without."""
    from transformers import AutoModelForCausalLM

    biases = has_biases(family)
    cfg = config_of(family, biases)
    shapes = jax.eval_shape(lambda: decoder.init_params(cfg, jax.random.key(0)))
    agents.save_pretrained(tmp_path, cfg, jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes))
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert type(model).__name__ == FAMILIES[family].architecture
    assert not any(info.values()), info
    assert any(name.endswith("o_proj.bias") for name, _ in model.named_parameters()) == (biases and cfg.out_bias)
