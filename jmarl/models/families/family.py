"""What a model family says of itself, and what most families have in common."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from jmarl.models.config import ModelConfig

Fields = Mapping[str, Any]  # of a config.json

MODULES = {  # of `models.weights` -> their names in most families' files; those of layers follow ``model.layers.N.``
    "embed": "model.embed_tokens",
    "final_norm": "model.norm",
    "lm_head": "lm_head",
    "attn_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    **{name: f"self_attn.{name}_proj" for name in ("q", "k", "v", "o")},
    **{name: f"self_attn.{name}" for name in ("q_norm", "k_norm")},
    **{name: f"mlp.{name}_proj" for name in ("gate", "up", "down")},
    "router": "mlp.gate",
    **{f"expert_{name}": f"mlp.experts.*.{name}_proj" for name in ("gate", "up", "down")},  # * is the number of the expert
}


def _nothing(fields: Any) -> dict[str, Any]:
    return {}


class Family(NamedTuple):
    """How the models of one `model_type` differ from Llama. `hub.hf_format` reads and writes what all have."""

    architecture: str  # transformers' class
    read: Callable[[Fields], dict[str, Any]] = _nothing
    """Return fields of `ModelConfig`, from those of a config.json. Fields that are null are left out of it."""
    write: Callable[[ModelConfig], dict[str, Any]] = _nothing
    """Return fields of a config.json."""
    refuses: Callable[[Fields], dict[str, Any]] = _nothing
    """Return features that the decoder does not compute -> whether a config.json has them."""
    defaults: Fields = {}
    """Values of fields of a config.json that it leaves out."""
    modules: Mapping[str, str] = {}
    """Names that differ from `MODULES`. Modules of one name are one tensor in the files, row above row."""
    ignores: tuple[str, ...] = ()
    """How names of tensors begin that are not of the text model."""
    gguf: str = ""
    """llama.cpp's name of the architecture. Empty: no GGUF file has this one."""
    neighbors_in_gguf: bool = False
    """In GGUF rotary pairs of queries and keys are neighbors."""
    read_gguf: Callable[[Fields], dict[str, Any]] = _nothing
    """Return fields of a config.json that only this family has, from the metadata of a GGUF file (without the architecture's
    name). They go before those that `hub.gguf` reads, `model_type`, too."""

    def module(self, name: str) -> str:
        """Return the name of a module in files."""
        return self.modules.get(name, MODULES.get(name, name))


# --- sliding layers ----------------------------------------------------------------------------------------------------


def read_sliding(hf: Fields, slides: Callable[[int], bool]) -> dict[str, Any]:
    """Return the fields of sliding layers. slides: from the number of a layer, where the file has no `layer_types`."""
    count, window = hf["num_hidden_layers"], hf.get("sliding_window")
    kinds = hf.get("layer_types") or ["sliding_attention" if slides(n) else "full_attention" for n in range(count)]
    if len(kinds) != count:
        raise ValueError(f"layer_types has {len(kinds)} layers, and num_hidden_layers is {count}")
    if unknown := {*kinds} - {"sliding_attention", "full_attention"}:
        raise ValueError(f"layer_types has {sorted(unknown)}: jmarl knows sliding_attention and full_attention")
    sliding = tuple(kind == "sliding_attention" for kind in kinds)
    if window is None or not any(sliding):
        return {}
    if type(window) is not int or window < 1:
        raise ValueError(f"config.json has sliding_window={window!r:.40}: it is a whole number from 1")
    return {"sliding_window": window, "sliding_layers": sliding}


def write_sliding(cfg: ModelConfig) -> dict[str, Any]:
    """Return the fields of a config.json that `read_sliding` reads."""
    sliding = cfg.sliding_layers or (False,) * cfg.num_layers
    kinds = ["sliding_attention" if x else "full_attention" for x in sliding]
    return {"sliding_window": cfg.sliding_window, "layer_types": kinds}


def read_qwen_sliding(hf: Fields) -> dict[str, Any]:
    """Return `read_sliding` of Qwen2 and Qwen3, whose last layers may slide."""
    if not hf.get("use_sliding_window"):
        hf = {**hf, "sliding_window": None}
    return read_sliding(hf, lambda n: n >= hf.get("max_window_layers", 28))


def write_qwen_sliding(cfg: ModelConfig) -> dict[str, Any]:
    """Return the fields of a config.json that `read_qwen_sliding` reads."""
    if not any(cfg.sliding_layers):
        return {"use_sliding_window": False}
    return {"use_sliding_window": True, **write_sliding(cfg)}
