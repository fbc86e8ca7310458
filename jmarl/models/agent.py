"""A loaded agent: its architecture, weights and tokenizer, on the host. `hub.agents` loads and saves it."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from jmarl.models.config import ModelConfig
from jmarl.models.hub.tokenize import stop_ids


class Agent(NamedTuple):
    """A loaded agent, from `load_agent(name)`. `Team.of([agent, agent])` is a team of two with its weights."""

    name: str
    config: ModelConfig
    params: dict[str, Any]  # the decoder's parameters: nested dicts of numpy float32 arrays; of `open_agent`, of `StoredLeaf`
    tokenizer: Any  # a transformers fast tokenizer
    generation_config: Mapping[str, Any] = {}
    """The fields of generation_config.json, which are written again when the agent is saved. Of these jmarl reads eos_token_id,
    a list of ids that end a completion besides those of the tokenizer."""

    @property
    def stop(self) -> tuple[int, ...]:
        """Token ids that end a completion."""
        return stop_ids(self.tokenizer, self.generation_config.get("eos_token_id", ()))
