"""Load GGUF files (llama.cpp's format) of Llama, Qwen2 and Qwen3 models: config, dequantized parameters, tokenizer.

The `gguf` package reads and dequantizes tensors. In GGUF, Llama's query and key rows are permuted (rotary pairs are neighbors,
ours are the two halves of a head); this module inverts the permutation. Without it text still looks half sensible, so a test
measures it. The tokenizer is rebuilt from the metadata with `tokenizers`. Left out (an error names each): split files, mixtures
of experts, rotary scalings (a GGUF holds Llama 3's only as a table of factors), SentencePiece vocabularies. transformers also
reads GGUF, but needs torch for it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jmarl.models.config import ModelConfig
from jmarl.models.families import FAMILIES
from jmarl.models.hub.config_json import config_from_hf, refuse
from jmarl.models.hub.hf_format import HEAD, Tensor, filed_tensors, params_from_tensors

GGUF = {family.gguf: name for name, family in FAMILIES.items() if family.gguf}  # llama.cpp's name -> ours


class PreTokenizer(NamedTuple):
    """How text is split before byte-pair merging."""

    regex: str | None  # None: GPT-2's
    splits_digits: bool
    normalizes: bool  # to Unicode NFC


QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# By the metadata's tokenizer.ggml.pre.
PRE_TOKENIZERS = {"smollm": PreTokenizer(None, True, False), "qwen2": PreTokenizer(QWEN2_SPLIT, False, True)}
CONTROL, USER_DEFINED, UNUSED = 3, 4, 5  # token types; unused tokens only pad the vocabulary


END_IDS = ("eos", "eot", "eom")  # metadata tokenizer.ggml.X_token_id: end of sequence, of turn, of message


def load_gguf(path: Path) -> tuple[ModelConfig, dict[str, Any], Any, list[int]]:
    """Return config, float32 parameters, tokenizer and end tokens of a GGUF file."""
    gguf = _import_gguf()
    reader = _open(gguf, path)
    meta = {name: field.contents() for name, field in reader.fields.items()}
    cfg, tensors = _config(meta, reader, path), {t.name: t for t in reader.tensors}
    architectures = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(architectures[FAMILIES[cfg.family].gguf], cfg.num_layers)
    hf_tensors: dict[str, Tensor] = {}
    for hf_name in [*filed_tensors(cfg), HEAD]:
        name = names.get_name(hf_name, try_suffixes=(".weight", ".bias"))
        if name in tensors:
            hf_tensors[hf_name] = _tensor(gguf, tensors.pop(name), hf_name, cfg)
    hf_tensors |= {name: Tensor((), lambda: np.empty(0)) for name in tensors}  # unknown tensors, which raise an error
    ends = [meta[key] for name in END_IDS if (key := f"tokenizer.ggml.{name}_token_id") in meta]
    return cfg, params_from_tensors(cfg, hf_tensors, str(path)), gguf_tokenizer(meta, cfg, path), ends


def unpermute(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Permute a Llama query or key matrix [heads*h, D] (or bias) from GGUF's row order to Hugging Face's."""
    return rows.reshape(num_heads, -1, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def _import_gguf() -> Any:
    try:
        import gguf
    except ImportError as e:
        raise ImportError("reading .gguf files needs the gguf package: pip install 'jmarl[gguf]'") from e
    return gguf


def _open(gguf: Any, path: Path) -> Any:
    try:
        return gguf.GGUFReader(path)
    except (ValueError, IndexError, KeyError, OverflowError, UnicodeDecodeError) as e:  # raised for truncated files
        raise ValueError(f"{path} ({path.stat().st_size} bytes) is not a complete GGUF file: {e}; get it again") from e


def _tensor(gguf: Any, tensor: Any, hf_name: str, cfg: ModelConfig) -> Tensor:
    heads = {"q_proj": cfg.num_heads, "k_proj": cfg.num_kv_heads}.get(hf_name.split(".")[-2])

    def read() -> np.ndarray:
        array = gguf.dequantize(tensor.data, tensor.tensor_type)
        return unpermute(array, heads) if heads and FAMILIES[cfg.family].neighbors_in_gguf else array

    return Tensor(tuple(int(n) for n in tensor.shape[::-1]), read)


def _config(meta: dict[str, Any], reader: Any, path: Path) -> ModelConfig:
    arch = meta.get("general.architecture")
    if arch not in GGUF:
        raise ValueError(f"{path}: unknown architecture {arch!r}: jmarl knows {', '.join(GGUF)}")

    def need(key: str) -> Any:
        if f"{arch}.{key}" not in meta:
            raise ValueError(f"{path}: the metadata has no {arch}.{key}")
        return meta[f"{arch}.{key}"]

    tensors = {t.name: t for t in reader.tensors}
    heads, hidden = need("attention.head_count"), need("embedding_length")
    head_dim = meta.get(f"{arch}.attention.key_length", hidden // heads)
    _refuse_unsupported(meta, arch, head_dim, tensors, path)
    return config_from_hf({
        "model_type": GGUF[arch],
        "vocab_size": int(tensors["token_embd.weight"].shape[1]),
        "hidden_size": hidden,
        "intermediate_size": need("feed_forward_length"),
        "num_hidden_layers": need("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": meta.get(f"{arch}.attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": need("context_length"),
        "rope_theta": meta.get(f"{arch}.rope.freq_base", 10000.0),
        "rms_norm_eps": float(str(np.float32(need("attention.layer_norm_rms_epsilon")))),  # 1e-05, not 9.99...e-06
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": "blk.0.attn_output.bias" in tensors,
    })  # fmt: skip


def _refuse_unsupported(meta: dict[str, Any], arch: str, head_dim: int, tensors: dict[str, Any], path: Path) -> None:
    unsupported = {
        "rotary scaling (rope_freqs.weight); load the safetensors checkpoint": "rope_freqs.weight" in tensors,
        "rotary scaling": meta.get(f"{arch}.rope.scaling.type", "none") != "none",
        "rotary embedding on part of the head": meta.get(f"{arch}.rope.dimension_count", head_dim) != head_dim,
        "experts": meta.get(f"{arch}.expert_count", 0) > 0,
        "a sliding window": meta.get(f"{arch}.attention.sliding_window", 0) > 0,
        "its tensors split over several files": meta.get("split.count", 1) > 1,
    }
    refuse(unsupported, str(path), "jmarl does not read from GGUF")
    if "token_embd.weight" not in tensors:
        raise ValueError(f"{path}: 1 tensor is missing: token_embd.weight")


def gguf_tokenizer(meta: dict[str, Any], cfg: ModelConfig, path: Path) -> Any:
    """Return the byte-level BPE tokenizer of a GGUF file, as a transformers fast tokenizer."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, processors
    from transformers import PreTrainedTokenizerFast

    model, pre = meta.get("tokenizer.ggml.model"), meta.get("tokenizer.ggml.pre")
    if model != "gpt2" or pre not in PRE_TOKENIZERS:
        known = ", ".join(PRE_TOKENIZERS)
        raise ValueError(f"{path}: tokenizer {model!r} with pre-tokenizer {pre!r} is unknown: jmarl reads 'gpt2' with {known}")
    for key in ("tokens", "token_type", "merges"):
        if f"tokenizer.ggml.{key}" not in meta:
            raise ValueError(f"{path}: the metadata has no tokenizer.ggml.{key}")
    tokens, types = meta["tokenizer.ggml.tokens"], meta["tokenizer.ggml.token_type"]
    vocab = {token: i for i, (token, t) in enumerate(zip(tokens, types, strict=True)) if t != UNUSED}
    tokenizer = Tokenizer(models.BPE(vocab, [tuple(m.split(" ")) for m in meta["tokenizer.ggml.merges"]]))
    tokenizer.normalizer, tokenizer.pre_tokenizer = _splitters(PRE_TOKENIZERS[pre])
    tokenizer.decoder = decoders.ByteLevel()
    for kind, add in ((CONTROL, tokenizer.add_special_tokens), (USER_DEFINED, tokenizer.add_tokens)):
        added = [token for token, t in zip(tokens, types, strict=True) if t == kind]
        add([AddedToken(token, special=kind == CONTROL, normalized=False) for token in added])
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids = {role: meta.get(f"tokenizer.ggml.{name}_token_id") for role, name in names.items()}
    special = {role: tokens[i] for role, i in ids.items() if i is not None}
    if meta.get("tokenizer.ggml.add_bos_token", False):
        if "bos_token" not in special:
            raise ValueError(f"{path}: tokenizer.ggml.add_bos_token is set, but there is no tokenizer.ggml.bos_token_id")
        bos = special["bos_token"]
        tokenizer.post_processor = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, ids["bos_token"])])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        chat_template=meta.get("tokenizer.chat_template"),
        model_max_length=cfg.max_positions,
        clean_up_tokenization_spaces=False,
        **special,
    )


def _splitters(pre: PreTokenizer) -> tuple[Any, Any]:
    """Return the normalizer, if any, and the pre-tokenizer of the `tokenizers` package."""
    from tokenizers import Regex, normalizers, pre_tokenizers

    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if pre.splits_digits else []
    if pre.regex:
        steps.append(pre_tokenizers.Split(Regex(pre.regex), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre.regex is None))
    return normalizers.NFC() if pre.normalizes else None, pre_tokenizers.Sequence(steps)
