"""A language model as a policy."""

from __future__ import annotations

from typing import Any

from jmarl.comlrl.arguments import Model, load_agents
from jmarl.envs.messages import EnvironmentMode


class LLMEnvironment:
    """A language model as a policy.

    Args:
        model: a loaded agent, or a name or path to load.
        tokenizer: accepted and checked. Each agent has its own; this must have the same vocabulary.
        mode: SERVER is trained, CLIENT is frozen.
    """

    def __init__(self, model: Model, tokenizer: Any = None, mode: EnvironmentMode = EnvironmentMode.SERVER):
        self.agent, self.mode = load_agents(None, model, 1, tokenizer)[0], EnvironmentMode(mode)
