"""CoMLRL's `model_config=`: how models are loaded there, and what of it changes a run here."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from jmarl.comlrl.settings.base import LINEAR_HEAD
from jmarl.comlrl.settings.rollouts import RolloutConfig

# Type of the weights in CoMLRL -> compute_dtype. The weights themselves are float32 in training.
DTYPES = {
    **dict.fromkeys(("bfloat16", "bf16"), "bfloat16"),
    **dict.fromkeys(("float32", "fp32", "float"), "float32"),
    "auto": "auto",
}
NESTED = ("model_kwargs", "critic_model_kwargs")


class ModelSettings(NamedTuple):
    """What a `model_config` sets."""

    compute_dtype: str = "auto"
    special_tokens: Mapping[str, Any] = {}
    without_effect: tuple[str, ...] = ()


def read_model_config(model_config: Mapping[str, Any] | None, args: RolloutConfig) -> ModelSettings:
    """Return what a `model_config` sets. Raises ValueError where the run would be another one.

    torch_dtype or dtype, also in model_kwargs and critic_model_kwargs, is compute_dtype. special_tokens are given to the
    tokenizers. Other settings, such as attn_implementation, have no effect."""
    if model_config is None:
        return ModelSettings(args.compute_dtype)
    if not isinstance(model_config, Mapping):
        raise TypeError(f"model_config= is a dict such as {{'torch_dtype': 'bfloat16'}}, got {type(model_config).__name__}")
    if hidden := model_config.get("critic_value_head_hidden_dim"):
        raise ValueError(f"critic_value_head_hidden_dim={hidden!r} in model_config= is not allowed: {LINEAR_HEAD}")
    parts = {"": model_config} | {f"{name}.": model_config[name] or {} for name in NESTED if name in model_config}
    known = {"special_tokens", "critic_value_head_hidden_dim", *NESTED}
    given = {f"{prefix}{name}": x for prefix, part in parts.items() for name, x in part.items() if x is not None}
    dtypes = {path: compute_dtype(path, x) for path, x in given.items() if path.split(".")[-1] in ("torch_dtype", "dtype")}
    others = [f"model_config['{path}']" for path in given if path not in dtypes and path.split(".")[-1] not in known]
    different = set(dtypes.values()) | ({args.compute_dtype} - {"auto"})
    if len(different - {"auto"}) > 1:
        given = ", ".join(f"{name}={value}" for name, value in dtypes.items())
        raise ValueError(
            f"model_config= gives different types ({given}; compute_dtype={args.compute_dtype}): agents and critics compute in "
            "one, give it once"
        )
    dtype = next(iter(different - {"auto"}), "auto")
    return ModelSettings(dtype, model_config.get("special_tokens") or {}, tuple(others))


def compute_dtype(name: str, value: Any) -> str:
    """Return the compute_dtype of a type of torch or its name."""
    text = str(value).removeprefix("torch.")
    if text not in DTYPES:
        raise ValueError(
            f"{name}={text!r} in model_config= is not allowed: use 'bfloat16' (weights stay in float32), 'float32' or 'auto'"
        )
    return DTYPES[text]


def add_special_tokens(tokenizer: Any, special_tokens: Mapping[str, Any]) -> None:
    """Give a tokenizer its special tokens. Raises ValueError for tokens that the model has no embeddings of."""
    if not special_tokens or tokenizer is None:
        return
    before = len(tokenizer)
    if tokenizer.add_special_tokens(dict(special_tokens)) and len(tokenizer) > before:
        raise ValueError(
            f"special_tokens={dict(special_tokens)!r} in model_config= adds tokens that the model has no embeddings of: add "
            "them to the model's directory, with trained embeddings"
        )
