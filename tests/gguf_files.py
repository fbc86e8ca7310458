"""Write GGUF files as llama.cpp's converter does (its folder `conversion/`). What it does to a family:

- the classes of Llama, Mistral, SmolLM3, Granite and Ministral 3 permute rows of queries and keys; others do not
- Mistral's files say that they are Llama's, and nothing of a sliding window
- Llama 3's rotary scaling is a table of factors by which frequencies are divided; longrope's two tables are filed as they are
- norms of Gemma are filed with 1 added; its scale of attention is not filed
- Phi-3's tensors of query, key and value, and of gate and up, stay one; head_dim is not filed, nor is Granite's
- OLMo 3 is OLMo 2 with a sliding window and a list of the layers that slide
"""

import json
import math

import gguf
import numpy as np
from safetensors.numpy import load_file

ARCHITECTURES = {"mistral": "llama", "ministral3": "mistral3", "gemma3_text": "gemma3", "olmo3": "olmo2"}
PERMUTED = ("llama", "smollm3", "granite", "mistral3")
TABLES = {"short_factor": "rope_factors_short.weight", "long_factor": "rope_factors_long.weight"}


def permute(rows, heads):
    """Permute Llama's query and key rows as llama.cpp's converter does."""
    return rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def write_gguf(path, directory, quantization="F32", change=lambda fields, tensors: None):
    """Write the model of a Hugging Face directory as llama.cpp's converter does, after `change(fields, tensors)`."""
    hf, tensors = json.loads((directory / "config.json").read_text()), load_file(directory / "model.safetensors")
    kind = hf["model_type"]
    arch = ARCHITECTURES.get(kind, kind)
    fields = {f"{arch}.{key}": value for key, value in metadata(hf).items() if value is not None}
    fields |= {"general.architecture": arch, **tokenizer_fields(directory, pre="qwen2" if "qwen" in arch else "smollm")}
    names = gguf.get_tensor_name_map({v: k for k, v in gguf.MODEL_ARCH_NAMES.items()}[arch], hf["num_hidden_layers"])
    heads = {"q_proj": hf["num_attention_heads"], "k_proj": hf["num_key_value_heads"]}
    out = rotary_tables(hf)
    for name, array in tensors.items():
        module = name.split(".")[-2]
        if arch in PERMUTED and module in heads:
            array = permute(array, heads[module])
        if "gemma" in arch and name.endswith("norm.weight"):
            array = array + 1
        out[names.get_name(name, try_suffixes=(".weight", ".bias"))] = array
    change(fields, out)
    write_file(path, fields, out, quantization)
    return path


def ropes(hf):
    """Return the rotary parameters of full and of sliding layers."""
    rope = hf.get("rope_parameters") or {"rope_theta": 10000.0}
    return rope.get("full_attention", rope), rope.get("sliding_attention", {})


def metadata(hf):
    """Return the metadata of a config.json, without the name of the architecture. None: not written."""
    kind, (rope, sliding), scaling = hf["model_type"], ropes(hf), "rope.scaling."
    fields = {
        "block_count": hf["num_hidden_layers"],
        "context_length": hf["max_position_embeddings"],
        "embedding_length": hf["hidden_size"],
        "feed_forward_length": hf["intermediate_size"],
        "attention.head_count": hf["num_attention_heads"],
        "attention.head_count_kv": hf["num_key_value_heads"],
        "attention.key_length": None if kind in ("phi3", "granite") else hf["head_dim"],
        "attention.layer_norm_rms_epsilon": hf["rms_norm_eps"],
        "rope.freq_base": None if kind == "gemma2" else rope["rope_theta"],
        "rope.freq_base_swa": sliding.get("rope_theta"),
    }
    if ARCHITECTURES.get(kind, kind) in PERMUTED:
        fields |= {"vocab_size": hf["vocab_size"], "rope.dimension_count": hf["head_dim"]}
    if rope.get("rope_type") in ("linear", "yarn"):
        fields |= {scaling + "type": rope["rope_type"], scaling + "factor": rope["factor"]}
    if rope.get("rope_type") == "yarn":
        fields |= {scaling + "original_context_length": rope["original_max_position_embeddings"]}
        fields |= {f"{scaling}yarn_{key}": rope.get(key) for key in ("beta_fast", "beta_slow")}
        fields |= {scaling + "yarn_attn_factor": rope.get("attention_factor")}
    return fields | EXTRA.get(kind, lambda hf, rope: {})(hf, rope)


def of_phi3(hf, rope):
    long, first = hf["max_position_embeddings"], rope.get("original_max_position_embeddings", 4096)
    amplitude = math.sqrt(1 + math.log(long / first) / math.log(first)) if long > first else 1.0
    return {
        "attention.sliding_window": hf["sliding_window"] or 0,
        "rope.scaling.original_context_length": first,
        "rope.scaling.attn_factor": amplitude if "long_factor" in rope else None,
        "rope.dimension_count": int(rope.get("partial_rotary_factor", 1) * hf["hidden_size"]) // hf["num_attention_heads"],
    }


EXTRA = {
    "gemma2": lambda hf, rope: {
        "attn_logit_softcapping": hf["attn_logit_softcapping"],
        "final_logit_softcapping": hf["final_logit_softcapping"],
        "attention.sliding_window": hf["sliding_window"],
    },
    "gemma3_text": lambda hf, rope: {"attention.sliding_window": hf["sliding_window"]},
    "phi3": of_phi3,
    "olmo3": lambda hf, rope: {
        "attention.sliding_window": hf["sliding_window"],
        "attention.sliding_window_pattern": [kind == "sliding_attention" for kind in hf["layer_types"]],
    },
    "granite": lambda hf, rope: {
        "attention.scale": hf["attention_multiplier"],
        "embedding_scale": hf["embedding_multiplier"],
        "residual_scale": hf["residual_multiplier"],
        "logit_scale": hf["logits_scaling"],
    },
    "ministral3": lambda hf, rope: {
        "rope.scaling.yarn_log_multiplier": rope["mscale_all_dim"],
        "attention.temperature_scale": rope["llama_4_scaling_beta"],
    },
}


def rotary_tables(hf):
    """Return the tensors of factors of rotary frequencies."""
    rope = ropes(hf)[0]
    if rope.get("rope_type") == "llama3":
        factors = []
        for n in range(0, hf["head_dim"], 2):
            length = 2 * math.pi * rope["rope_theta"] ** (n / hf["head_dim"])
            smooth = (8192 / length - rope["low_freq_factor"]) / (rope["high_freq_factor"] - rope["low_freq_factor"])
            factors.append(1 / ((1 - min(max(smooth, 0), 1)) / rope["factor"] + min(max(smooth, 0), 1)))
        return {"rope_freqs.weight": np.array(factors, np.float32)}
    return {name: np.array(rope[key], np.float32) for key, name in TABLES.items() if key in rope}


def tokenizer_fields(directory, pre):
    tokenizer = json.loads((directory / "tokenizer.json").read_text())
    vocab = sorted(tokenizer["model"]["vocab"], key=tokenizer["model"]["vocab"].get)
    special = {token["content"] for token in tokenizer["added_tokens"]}
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": vocab,
        "tokenizer.ggml.token_type": [3 if token in special else 1 for token in vocab],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in tokenizer["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.chat_template": (directory / "chat_template.jinja").read_text(),
    }


def write_file(path, fields, tensors, quantization):
    writer = gguf.GGUFWriter(path, fields["general.architecture"])
    adders = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
        list: writer.add_array,
    }
    for name, value in fields.items():
        if name != "general.architecture":
            adders[type(value)](name, value)
    for name, array in tensors.items():
        kind = gguf.GGMLQuantizationType["F32" if array.ndim == 1 else quantization]
        writer.add_tensor(name, gguf.quantize(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
