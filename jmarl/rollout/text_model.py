"""An agent as a `TextModel`, for what asks a model with texts alone: judges in environments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from jmarl.config import Sampling
from jmarl.envs.chat_api import Unavailable
from jmarl.models.hub.agents import Agent
from jmarl.sampling.generate import SampleRequest, pad, sample_team, texts_of, tokenize, tokens_of
from jmarl.team import make_team


class AgentModel:
    """model(prompts, num_samples, seed) -> texts [P][num_samples]: equal seeds give equal texts.

    chat: prompts are a user's messages in the tokenizer's chat template. A prompt too long for the agent's context is
    `Unavailable`. It may be called from a thread beside the one that trains; the device then does one after the other. It
    holds arrays of the device and goes to no other process: an environment that it judges for is played by `LockStep(env)`,
    not in a `Pool`.
    """

    def __init__(self, agent: Agent, max_new_tokens: int = 64, temperature: float = 0.7, chat: bool = True):
        self.name, self.chat = agent.name, chat
        self.settings = Sampling(max_new_tokens=max_new_tokens, temperature=temperature)
        self.team, self.params = make_team([agent])

    def __call__(self, prompts: Sequence[str], num_samples: int, seed: int) -> list[list[str]]:
        try:
            rows = tokenize(self.team, [prompts], self.settings, self.chat)
        except ValueError as error:
            raise Unavailable(f"{self.name} cannot read a prompt: {error}") from error
        ids = np.arange(len(prompts))
        request = SampleRequest(pad(self.team, rows), self.settings, seed % (1 << 31), 0, num_samples, ids)
        done = sample_team(self.team, self.params, request)
        return texts_of(self.team, tokens_of(self.team, done, len(prompts)))[0]

    def describe(self) -> dict[str, Any]:
        how = {"max_new_tokens": self.settings.max_new_tokens, "temperature": self.settings.temperature, "chat": self.chat}
        return {"agent": self.name, "team": self.team.describe()} | how

    def __deepcopy__(self, memo: dict) -> AgentModel:
        return self  # nothing changes it

    def __reduce__(self):
        raise TypeError(
            f"the model {self.name} holds arrays of this process's device and cannot be pickled: play the environment "
            "it judges for with LockStep(env) in place of a Pool, or ask the model through a server"
        )
