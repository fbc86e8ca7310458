"""MRLM's loaded models, and answers of a model of torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jmarl.envs.messages import Message
from jmarl.models.hub.agents import load_agent
from jmarl.mrlm.core.llm_environment import LLMEnvironment, check_device
from jmarl.mrlm.names import refusing

__getattr__ = refusing(__name__)


class HFModelWrapper:
    """A model and its tokenizer, loaded by name.

    Args:
        model_name_or_path: what `jmarl.load_agent` loads.
        device: the platform of JAX, which chooses the device; another one is an error.
    """

    def __init__(self, model_name_or_path: str, device: Any = None):
        check_device(device)
        self.model = load_agent(model_name_or_path)
        self.tokenizer = self.model.tokenizer


def generate_response(
    model: Any, tokenizer: Any, messages: Sequence[Message], generation_config: Any = None, device: Any = None
) -> str:
    """Return an answer of a model to a conversation. An `LLMEnvironment` keeps what is loaded from call to call."""
    policy = LLMEnvironment(model, tokenizer, generation_config=generation_config, device=device)
    return policy.answer(messages)
