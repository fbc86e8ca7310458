"""An agent as a `TextModel`, for environments that ask a model with texts alone: judges."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np

from jmarl.config import Chat, Sampling, as_chat
from jmarl.envs.chat_api import Unavailable
from jmarl.models.agent import Agent
from jmarl.randomness import Randomness
from jmarl.sampling.generate import SampleRequest, pad, sample_team, texts_of, tokenize, tokens_of
from jmarl.team import make_team

DATE = datetime.date(2024, 7, 26)  # what templates of Llama 3 write where there is no clock


class AgentModel:
    """model(prompts, num_samples, seed) -> texts [P][num_samples]. Equal seeds give equal texts.

    chat: prompts are messages of a user in the tokenizer's chat template; special tokens that they spell are always text. A
    `Chat` also has what templates read; without a date they write `DATE`, so that texts are the same on every day.
    sampling: other settings of `Sampling`. A prompt too long for the agent's context raises `Unavailable`. The model may be
    called from another thread than the one that trains; the device then runs one after the other. It holds arrays of the device
    and cannot be sent to another process: play an environment that it judges for with `LockStep(env)`, not in a `Pool`.
    """

    def __init__(
        self, agent: Agent, max_new_tokens: int = 64, temperature: float = 0.7, chat: bool | Chat = True, **sampling: Any
    ):
        own = as_chat(chat).of(0)
        self.name, self.agent, self.chat = agent.name, agent, dataclasses.replace(own, date=own.date or DATE)
        self.settings = Sampling(max_new_tokens=max_new_tokens, temperature=temperature, **sampling)
        self.team, self.params = make_team([agent])

    def __call__(self, prompts: Sequence[str], num_samples: int, seed: int) -> list[list[str]]:
        try:
            rows = tokenize(self.team, [prompts], self.settings, self.chat, special=[[()] * len(prompts)])
        except ValueError as error:
            raise Unavailable(f"{self.name} cannot read a prompt: {error}") from error
        randomness, ids = Randomness(seed % (1 << 31), step=0), np.arange(len(prompts))
        request = SampleRequest(pad(self.team, rows), self.settings, randomness, num_samples, ids)
        done = sample_team(self.team, self.params, request)
        return texts_of(self.team, tokens_of(self.team, done, len(prompts)))[0]

    def describe(self) -> dict[str, Any]:
        """Return JSON of what must not change when a run is resumed."""
        settings = {name: x for name, x in vars(self.settings).items() if x != getattr(Sampling, name)}
        settings |= {"max_new_tokens": self.settings.max_new_tokens, "temperature": self.settings.temperature}
        settings |= {"chat_template_kwargs": dict(self.chat.template_kwargs)} if self.chat.template_kwargs else {}
        return {"agent": self.name, "team": self.team.describe(), **settings, "chat": bool(self.chat)}

    def __deepcopy__(self, memo: dict) -> AgentModel:
        return self  # nothing changes it

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"the model {self.name} holds arrays of this process's device and cannot be pickled: play the environment "
            "it judges for with LockStep(env) in place of a Pool, or ask the model through a server"
        )
