"""Take over a loaded `transformers` model as an agent, without a file and without importing torch.

The config and the tensors of the model's `state_dict` go through the same table as those of a directory (`hf_format`). A tensor
converts itself to numpy by its own methods, so this module needs no torch; whoever has such a model has installed it. Weights
are copied to float32; `copy_to_transformers` copies trained ones back. Left out: models in parts on several devices
(`device_map` with offloading), quantized models and `peft` models that are not merged; an error says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from jmarl.models.hub.agents import Agent, load_tokenizer, with_end_tokens
from jmarl.models.hub.config_json import config_from_hf
from jmarl.models.hub.hf_format import (
    EMBED,
    HEAD,
    params_from_tensors,
    stacked_experts,
    tensors_from_params,
    tensors_of_experts,
    text_name,
)
from jmarl.models.hub.special_tokens import tokenizer_for
from jmarl.models.hub.weight_files import Tensor

FAST = "AutoTokenizer.from_pretrained(...) of a model with a tokenizer.json"


@runtime_checkable
class TransformersModel(Protocol):
    """A `transformers.PreTrainedModel` with weights in memory, such as of `AutoModelForCausalLM.from_pretrained`."""

    config: Any
    generation_config: Any

    def state_dict(self) -> Mapping[str, Any]: ...


def is_peft_model(model: Any) -> bool:
    """Return whether an object is a model of `peft`, by the names of its classes."""
    return any(cls.__name__ == "PeftModel" for cls in type(model).__mro__)


def agent_from_transformers(model: TransformersModel, tokenizer: Any = None) -> Agent:
    """Return a loaded `transformers` model as an agent. Its name is that which the model was loaded by.

    Args:
        model: a causal language model of an architecture that `hf_format` knows.
        tokenizer: a fast tokenizer; None: that of the directory which the model was loaded from.

    Raises:
        ValueError: the architecture is unknown, weights are missing or on no device, or no tokenizer is known.
    """
    name, fields = model.config.name_or_path or type(model).__name__, model.config.to_dict()
    config = config_from_hf(fields)
    arrays = tensors_of_experts(model.state_dict())
    tensors = {key: Tensor(tuple(x.shape), partial(_to_numpy, x, f"{key} of {name}")) for key, x in arrays.items()}
    tokenizer = tokenizer_of(model) if tokenizer is None else tokenizer
    check_fast(tokenizer)
    tokenizer = tokenizer_for(config, tokenizer, name)
    generation = with_end_tokens(model.generation_config.to_diff_dict(), fields, tokenizer)
    return Agent(name, config, params_from_tensors(config, tensors, name), tokenizer, generation)


def copy_to_transformers(agent: Agent, model: TransformersModel) -> None:
    """Copy the weights of an agent into the `transformers` model that it was taken from, in the types of the model."""
    theirs, tensors = model.state_dict(), tensors_from_params(agent.config, agent.params)
    tensors |= stacked_experts(tensors, theirs)
    for name, tensor in theirs.items():
        name = text_name(name)
        source = tensors.get(name, tensors[EMBED] if name == HEAD else None)
        if source is None:  # a buffer
            continue
        tensor.detach().copy_(tensor.new_tensor(source))


def check_fast(tokenizer: Any) -> None:
    """Raise a TypeError for an object that is no fast tokenizer."""
    if not getattr(tokenizer, "is_fast", False):  # a class of transformers, or anything
        raise TypeError(f"tokenizer= is a {type(tokenizer).__name__}: give a fast tokenizer, {FAST}")


def tokenizer_of(model: TransformersModel) -> Any:
    """Return the tokenizer in the directory that a model was loaded from. Raises ValueError if there is none."""
    path = Path(model.config.name_or_path or "")
    if not (path / "tokenizer.json").is_file():
        raise ValueError(f"a {type(model).__name__} brings no tokenizer: give tokenizer=, {FAST}")
    return load_tokenizer(path)


def _to_numpy(tensor: Any, name: str) -> np.ndarray:
    """Return a tensor of torch on the host in float32 (numpy has no bfloat16). name: for errors."""
    if tensor.device.type == "meta":
        raise ValueError(f"{name} has no values here (it is offloaded): load the model without device_map=")
    if not tensor.is_floating_point():
        raise ValueError(f"{name} is {tensor.dtype}: load the model without quantization")
    return tensor.detach().to("cpu").float().numpy()
