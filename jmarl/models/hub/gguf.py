"""Open GGUF files (llama.cpp's format): config, dequantized tensors, tokenizer.

The `gguf` package reads tensors, dequantizes them and names them as llama.cpp's converter does. This module makes a config.json
of the metadata, and undoes what the converter does to weights: of some architectures it permutes rows of queries and keys, so
that rotary pairs are neighbors (ours are the two halves of a head; with wrong rows text still looks half sensible, so a test
measures it), and Gemma's norms are filed with the 1 that they add. Files do not tell Mistral from Llama: it is loaded as that,
and its layers do not slide, as in llama.cpp. The tokenizer is rebuilt from the metadata with `tokenizers`. Left out (an error
names each): split files, mixtures of experts, tables of rotary factors but Llama 3's and longrope's, and tokenizers that are
neither byte-pair encodings of SentencePiece nor in `PRE_TOKENIZERS`. transformers also reads GGUF, but needs torch for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jmarl.models.config import ModelConfig
from jmarl.models.families import FAMILIES, Family
from jmarl.models.hub.config_json import config_from_hf, refuse
from jmarl.models.hub.hf_format import HEAD, filed_tensors
from jmarl.models.hub.weight_files import Tensor

GGUF = {family.gguf: name for name, family in FAMILIES.items() if family.gguf}  # llama.cpp's name -> ours
SCALING = {  # keys of `rope_scaling` in a config.json -> in the metadata
    "factor": "rope.scaling.factor",
    "original_max_position_embeddings": "rope.scaling.original_context_length",
    "beta_fast": "rope.scaling.yarn_beta_fast",
    "beta_slow": "rope.scaling.yarn_beta_slow",
    "mscale_all_dim": "rope.scaling.yarn_log_multiplier",
    "llama_4_scaling_beta": "attention.temperature_scale",
}
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}  # 3.1, 3.2 and 3.3
UNREAD = "jmarl does not read from GGUF"
LONG, SHORT, TABLE = "rope_factors_long.weight", "rope_factors_short.weight", "rope_freqs.weight"  # tensors of rotary factors


class Metadata(dict[str, Any]):
    """Metadata, that of the architecture without its name. A key that is missing is an error that names it."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self.arch = str(fields.get("general.architecture"))
        super().__init__({name.removeprefix(f"{self.arch}."): _decimal(value) for name, value in fields.items()})

    def __missing__(self, key: str) -> Any:
        raise ValueError(f"the metadata has no {key if key.startswith('tokenizer.') else f'{self.arch}.{key}'}")


def _decimal(value: Any) -> Any:
    """Return the decimal that a float was before it became one of 32 bits: 1e-05, not 9.99...e-06."""
    return float(str(np.float32(value))) if isinstance(value, float) else value


class PreTokenizer(NamedTuple):
    """How text is split before byte-pair merging."""

    regex: str | None = None  # None: GPT-2's
    splits_digits: bool = False
    normalizes: bool = False  # to Unicode NFC
    whole: bool = False  # words that are tokens are not merged; where the metadata does not say it, texts begin with bos


def _regex(words: str, digits: str, ends: str) -> str:
    return rf"{words}|\p{{N}}{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n{ends}]*|\s*[\r\n]+|\s+(?!\S)|\s+"


SHORT_FORMS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
WORDS = SHORT_FORMS + r"|[^\r\n\p{L}\p{N}]?\p{L}+"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
CASED = [rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*"]  # words begin with capitals
LLAMA3_SPLIT = _regex(WORDS, "{1,3}", "")
PRE_TOKENIZERS = {  # by the metadata's tokenizer.ggml.pre; the models are examples
    "smollm": PreTokenizer(splits_digits=True),
    "refact": PreTokenizer(splits_digits=True),  # Granite 3
    "qwen2": PreTokenizer(_regex(WORDS, "", ""), normalizes=True),
    "llama-bpe": PreTokenizer(LLAMA3_SPLIT, whole=True),  # Llama 3
    "smaug-bpe": PreTokenizer(LLAMA3_SPLIT),  # SmolLM3
    "dbrx": PreTokenizer(LLAMA3_SPLIT),  # OLMo 2 and 3
    "tekken": PreTokenizer(_regex("|".join(CASED), "", "/"), whole=True),  # Mistral Nemo, Ministral
    "gpt-4o": PreTokenizer(_regex("|".join(f"{words}{SHORT_FORMS}?" for words in CASED), "{1,3}", "/")),  # Phi-4-mini
}
TOKENS = "tokenizer.ggml.tokens"
CONTROL, USER_DEFINED, UNUSED = 3, 4, 5  # token types; unused tokens only pad the vocabulary
END_IDS = ("eos", "eot", "eom")  # metadata tokenizer.ggml.X_token_id: end of sequence, of turn, of message
TURN_ENDS = ("<|end|>", "<end_of_turn>")  # of Phi-3 and Gemma: not all converters write the id of the end of a turn
KEEPS_BLANKS = ("<unk>", "<s>", "<|endoftext|>")  # Phi-3's other special tokens take the blanks after them
BLANK = "\u2581"  # how SentencePiece writes a blank


def open_gguf(path: Path) -> tuple[ModelConfig, dict[str, Tensor], Any, list[int]]:
    """Return config, tensors as in Hugging Face's files, tokenizer and end tokens of a GGUF file; no tensor is read yet."""
    gguf = _import_gguf()
    reader = _open(gguf, path)
    meta = Metadata({name: field.contents() for name, field in reader.fields.items()})
    tensors = {t.name: t for t in reader.tensors}
    architectures = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}
    if meta.arch not in GGUF:
        raise ValueError(f"{path}: unknown architecture {meta.arch!r}: jmarl knows {', '.join(GGUF)}")
    try:
        cfg = _config(meta, tensors)
        tokenizer = gguf_tokenizer(meta, cfg)
    except ValueError as e:
        raise ValueError(f"{path}: {e}") from e
    family, names = FAMILIES[GGUF[meta.arch]], gguf.get_tensor_name_map(architectures[meta.arch], cfg.num_layers)
    hf_tensors: dict[str, Tensor] = {}
    for hf_name in [*filed_tensors(cfg), HEAD]:
        name = names.get_name(hf_name, try_suffixes=(".weight", ".bias"))
        if name in tensors:
            hf_tensors[hf_name] = _tensor(gguf, tensors.pop(name), hf_name, cfg, family)
    unknown = tensors.keys() - {LONG, SHORT, TABLE}
    hf_tensors |= {name: Tensor((), lambda: np.empty(0)) for name in unknown}  # which raise an error
    ends = [meta[key] for name in END_IDS if (key := f"tokenizer.ggml.{name}_token_id") in meta]
    ends += [meta[TOKENS].index(token) for token in TURN_ENDS if token in meta[TOKENS]]
    return cfg, hf_tensors, tokenizer, ends


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
    class Reader(gguf.GGUFReader):
        """Slices a plain view of the file. Slices of `np.memmap` take three times as long, and a vocabulary is 250,000."""

        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, value.view(np.ndarray) if isinstance(value, np.memmap) else value)

    try:
        return Reader(path)
    except (ValueError, IndexError, KeyError, OverflowError, UnicodeDecodeError) as e:  # raised for truncated files
        raise ValueError(f"{path} ({path.stat().st_size} bytes) is not a complete GGUF file: {e}; get it again") from e


def _tensor(gguf: Any, tensor: Any, hf_name: str, cfg: ModelConfig, family: Family) -> Tensor:
    module = hf_name.split(".")[-2]
    heads = {"q_proj": cfg.num_heads, "k_proj": cfg.num_kv_heads}.get(module) if family.neighbors_in_gguf else None

    def read() -> np.ndarray:
        array = gguf.dequantize(tensor.data, tensor.tensor_type)
        if heads:
            return unpermute(array, heads)
        return array - 1 if cfg.norm_adds_one and module.endswith("norm") else array

    return Tensor(tuple(int(n) for n in tensor.shape[::-1]), read)


# --- config ------------------------------------------------------------------------------------------------------------


def _config(meta: Metadata, tensors: Mapping[str, Any]) -> ModelConfig:
    """Make a config.json of the metadata, and read it."""
    experts, files = meta.get("expert_count", 0) > 0, meta.get("split.count", 1) > 1
    refuse({"experts": experts, "its tensors split over several files": files}, "this file", UNREAD)
    if "token_embd.weight" not in tensors:
        raise ValueError("1 tensor is missing: token_embd.weight")
    heads, hidden, arch = meta["attention.head_count"], meta["embedding_length"], meta.arch
    head_dim = meta.get("attention.key_length", hidden // heads)
    window, types = meta.get("attention.sliding_window") or None, _layer_types(meta)
    cfg = config_from_hf({
        "model_type": GGUF[arch],
        "vocab_size": int(tensors["token_embd.weight"].shape[1]),
        "hidden_size": hidden,
        "intermediate_size": meta["feed_forward_length"],
        "num_hidden_layers": meta["block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": meta.get("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": meta["context_length"],
        "rope_parameters": _rope(meta, tensors),
        "partial_rotary_factor": meta.get("rope.dimension_count", head_dim) / head_dim,
        "rms_norm_eps": meta["attention.layer_norm_rms_epsilon"],
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": "blk.0.attn_output.bias" in tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in tensors,
        "sliding_window": window,
        "layer_types": types,
        **FAMILIES[GGUF[arch]].read_gguf(meta),
    })  # fmt: skip
    scale = "attention.temperature_scale" in meta and not (cfg.rope_scaling and cfg.rope_scaling.query_beta)
    unsupported = {
        "a sliding window": bool(window) and not types and not cfg.sliding_layers,
        "attention.temperature_scale": scale,
    }
    refuse(unsupported, f"this {arch} file", UNREAD)
    return cfg


def _rope(meta: Metadata, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Return `rope_parameters` of a config.json."""
    theta = meta.get("rope.freq_base", 10000.0)
    rope = {ours: meta[theirs] for ours, theirs in SCALING.items() if theirs in meta}
    kind = meta.get("rope.scaling.type", "linear" if "factor" in rope else "none")
    if SHORT in tensors:
        kind = "longrope"
        rope |= {key: [_decimal(float(x)) for x in tensors[name].data]
                 for key, name in (("short_factor", SHORT), ("long_factor", LONG)) if name in tensors}  # fmt: skip
    elif TABLE in tensors:
        kind, rope = "llama3", _llama3(tensors[TABLE].data, theta)
    factor = "rope.scaling.yarn_attn_factor" if kind == "yarn" else "rope.scaling.attn_factor"
    rope |= {"rope_type": "default" if kind == "none" else kind, "rope_theta": theta, "mscale": 1.0}
    rope |= {"attention_factor": meta[factor]} if factor in meta else {}
    sliding = meta.get("rope.freq_base_swa")
    return rope if sliding is None else {"full_attention": rope, "sliding_attention": {"rope_theta": sliding}}


def _llama3(table: np.ndarray, theta: float) -> dict[str, Any]:
    """Return the fields of Llama 3's scaling, whose factors of frequencies a file has."""
    low, high = LLAMA3["low_freq_factor"], LLAMA3["high_freq_factor"]
    turns = LLAMA3["original_max_position_embeddings"] / theta ** (np.arange(len(table)) / len(table)) / (2 * np.pi)
    smooth, factor = np.clip((turns - low) / (high - low), 0, 1), float(table.max())
    if not np.allclose(table, 1 / (smooth + (1 - smooth) / factor), rtol=1e-3):
        raise ValueError(f"{TABLE} has factors of rotary scaling that are not Llama 3's; load the safetensors checkpoint")
    return {"factor": factor, **LLAMA3}


def _layer_types(meta: Metadata) -> list[str] | None:
    """Return the field of a config.json; None: the family knows which layers slide."""
    pattern = meta.get("attention.sliding_window_pattern")
    if pattern is None:
        return None
    if isinstance(pattern, int):  # of so many layers the last one does not slide; 0: all do
        pattern = [not pattern or n % pattern < pattern - 1 for n in range(meta["block_count"])]
    return ["sliding_attention" if slides else "full_attention" for slides in pattern]


# --- tokenizer ---------------------------------------------------------------------------------------------------------


def gguf_tokenizer(meta: Metadata, cfg: ModelConfig) -> Any:
    """Return the tokenizer of a GGUF file, as a transformers fast tokenizer."""
    from tokenizers import AddedToken, processors
    from transformers import PreTrainedTokenizerFast

    model, pre = meta.get("tokenizer.ggml.model"), meta.get("tokenizer.ggml.pre", "")
    if model != "llama" and (model != "gpt2" or pre not in PRE_TOKENIZERS):
        known = f"'llama' and 'gpt2' with {', '.join(PRE_TOKENIZERS)}"
        raise ValueError(f"tokenizer {model!r} with pre-tokenizer {pre!r} is unknown: jmarl reads {known}")
    tokens, types = meta[TOKENS], meta["tokenizer.ggml.token_type"]
    tokenizer = _sentencepiece(meta) if model == "llama" else _byte_level(meta, PRE_TOKENIZERS[pre])
    vocab, strips = tokenizer.get_vocab(), model == "llama" and meta.arch == "phi3"
    for kind, add in ((CONTROL, tokenizer.add_special_tokens), (USER_DEFINED, tokenizer.add_tokens)):
        options = {"special": kind == CONTROL, "normalized": False}
        added = [token for token, t in zip(tokens, types, strict=True) if t == kind and token in vocab]
        rstrips = [strips and token not in KEEPS_BLANKS and not token.isspace() for token in added]
        add([AddedToken(token, rstrip=rstrip, **options) for token, rstrip in zip(added, rstrips, strict=True)])
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids = {role: meta.get(f"tokenizer.ggml.{name}_token_id") for role, name in names.items()}
    special = {role: tokens[i] for role, i in ids.items() if i is not None}
    begins = "bos_token" in special and (model == "llama" or PRE_TOKENIZERS[pre].whole)  # unless the metadata says it
    if meta.get("tokenizer.ggml.add_bos_token", begins):
        if "bos_token" not in special:
            raise ValueError("tokenizer.ggml.add_bos_token is set, but there is no tokenizer.ggml.bos_token_id")
        bos = special["bos_token"]
        tokenizer.post_processor = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, ids["bos_token"])])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        chat_template=meta.get("tokenizer.chat_template"),
        model_max_length=cfg.max_positions,
        clean_up_tokenization_spaces=False,
        **special,
    )


def _vocabulary(meta: Metadata) -> dict[str, int]:
    types = zip(meta[TOKENS], meta["tokenizer.ggml.token_type"], strict=True)
    return {token: i for i, (token, t) in enumerate(types) if t != UNUSED}


def _byte_level(meta: Metadata, pre: PreTokenizer) -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    merges = [tuple(m.split(" ")) for m in meta["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(_vocabulary(meta), merges, ignore_merges=pre.whole))
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if pre.splits_digits else []
    if pre.regex:
        steps.append(pre_tokenizers.Split(Regex(pre.regex), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre.regex is None))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    if pre.normalizes:
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def _sentencepiece(meta: Metadata) -> Any:
    """Return a byte-pair tokenizer that merges as SentencePiece does. What a file does not say is as in transformers: where a
    blank is put before a text, that Gemma merges in the order of its tokens, and that its tokens of blanks are merged, too."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
    from transformers.tokenization_utils_base import generate_merges

    vocab, scores = _vocabulary(meta), meta["tokenizer.ggml.scores"]
    if meta.arch.startswith("gemma"):
        vocab = {token if token.strip(" ") else BLANK * len(token): i for token, i in vocab.items()}
        scores = [-i for i in range(len(scores))]
    merges = generate_merges(vocab, {token: scores[i] for token, i in vocab.items()})
    unknown, prefix = meta.get("tokenizer.ggml.unknown_token_id"), meta.get("tokenizer.ggml.add_space_prefix", True)
    unk = None if unknown is None else meta[TOKENS][unknown]
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token=unk, fuse_unk=True, byte_fallback=True))
    if prefix and meta.arch != "phi3":
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(BLANK, prepend_scheme="first", split=False)
    else:
        first = [normalizers.Prepend(BLANK)] if prefix else []
        tokenizer.normalizer = normalizers.Sequence([*first, normalizers.Replace(" ", BLANK)])
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    tokenizer.decoder = decoders.Sequence([decoders.Replace(BLANK, " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    return tokenizer
