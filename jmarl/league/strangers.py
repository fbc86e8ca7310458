"""Fixed strangers: players that do not learn and are no past self, and hold a seat all the same.

A stranger is a function of the prompt, as module:function or file.py:function, such as `jmarl.envs.games.tictactoe:minimax`; or
a service with an OpenAI-compatible API, by its address, `http://localhost:8000/v1` or `http://localhost:8000/v1#NAME` of a
model there. A service is asked with the length, temperature and top_p of the agents, and with the API key that is in
STRANGER_API_KEY. Prompts of one call have one seed, but not every service reads seeds: what it writes is not repeated by a run
that resumes. In training a stranger may also be the directory of a run or of agents of the team's own architecture, which is a
slot that never changes (`frozen_params`; a run that resumes reads it again); any other is served by `jmarl serve --http` and
meets the team by its address.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jmarl.config import Sampling
from jmarl.envs import import_name
from jmarl.envs.calls.user_code import calling, excerpt
from jmarl.envs.chat_api import MAX_CONCURRENT, ChatAPI
from jmarl.evaluation.cross_play import agents_in
from jmarl.league.seats import Stranger
from jmarl.learning.setup import Setup
from jmarl.models.agent import agents_by_model, vocabulary_digest
from jmarl.models.hub.agents import open_agent
from jmarl.models.hub.messages import ChatPrompt
from jmarl.team import StackSpec, sort_into_stacks, stack_agents

KEY = "STRANGER_API_KEY"  # environment variable


def is_stranger(name: str) -> bool:
    """Return whether a name is one of `open_stranger`, and not that of a directory."""
    return ":" in name and not Path(name).exists()


def open_stranger(name: str, sampling: Sampling, chat: bool = False, seed: int = 0) -> Stranger:
    """Return the stranger of a name. Raises ValueError if there is none.

    sampling, chat: how a service is asked; chat: prompts that are texts become a user's message."""
    if name.startswith(("http://", "https://")):
        return service_at(name, sampling, chat, seed)
    function = import_name("strangers", name)
    if not callable(function):
        raise ValueError(f"strangers={name!r} is a {type(function).__name__}: give a function from a prompt to a text")

    def write(prompt: Any) -> str:
        with calling(lambda: f"stranger {name}, prompt {excerpt(prompt)}", function=function):
            text = function(prompt)
        if not isinstance(text, str):
            raise TypeError(f"stranger {name} returned {text!r:.80} for the prompt {excerpt(prompt)}: return a text")
        return text

    return lambda prompts: [write(prompt) for prompt in prompts]


def service_at(address: str, sampling: Sampling, chat: bool, seed: int) -> Stranger:
    """Return the stranger behind an address. Its prompts are sent at the same time."""
    url, _, model = address.partition("#")
    api, seeds = ChatAPI(url, model, chat, KEY, name="stranger"), itertools.count(seed)

    def write(prompt: Any, seed: int) -> str:
        messages = prompt.messages if isinstance(prompt, ChatPrompt) else prompt
        own = api if isinstance(messages, str) else dataclasses.replace(api, chat=True)
        limits = dict(max_tokens=sampling.max_new_tokens, seed=seed)
        [(text, _)] = own.complete(messages, 1, temperature=sampling.temperature, top_p=sampling.top_p, **limits)
        return text

    def write_all(prompts: Sequence[Any]) -> list[str]:
        seed = next(seeds)
        with ThreadPoolExecutor(min(MAX_CONCURRENT, len(prompts))) as threads:
            futures = [threads.submit(write, prompt, seed) for prompt in prompts]  # map would cancel the others when one fails
            return [future.result() for future in futures]

    return write_all


def check_strangers(names: Sequence[str], chat: bool | tuple[bool, ...], sampling: Sampling) -> None:
    """Raise an error if a stranger cannot be opened, before a run begins."""
    for name in names:
        if not is_stranger(name):
            agents_in(Path(name))
        elif "//" in name and np.unique(chat).size > 1:
            raise ValueError(
                f"strangers={name!r} is asked as a chat or not, alike for all seats: give one value of chat, not {chat}"
            )
        else:
            open_stranger(name, sampling)


def short_names(names: Sequence[str]) -> list[str]:
    """Return what strangers are called: functions without their module, where that tells them apart."""
    short = [name if "//" in name else name.rpartition(":")[2] for name in names]
    return [own if short.count(own) == 1 else name for own, name in zip(short, names, strict=True)]


def frozen_params(directory: str, setup: Setup, params: Sequence[Any]) -> list[Any]:
    """Return the parameters [A, ...] of the agents in a directory, in the stacks of the team. Raises ValueError unless they are
    arrays like those of the team. params: of the team."""
    team = setup.team
    agents = [open_agent(path) for path in agents_in(Path(directory))]
    agents = [agent._replace(config=agent.config.in_context(setup.cfg.run.long_context)) for agent in agents]
    shared = any(len(members) > 1 for spec in team.stacks for members in spec.members)
    stacks = sort_into_stacks(agents, shared) if not shared or len(agents_by_model(agents)) == 1 else ()
    if [*map(_kind, stacks)] == [*map(_kind, team.stacks)]:
        own = stack_agents(team.stacks, agents)
        if jax.tree.map(np.shape, own) == jax.tree.map(np.shape, [*params]):
            return own
    raise ValueError(
        f"strangers={directory!r}: its agents have other arrays or tokens than those of the team (another architecture or "
        "vocabulary, adapters or a value head): serve it with `jmarl serve --http`, and give its address instead"
    )


def _kind(spec: StackSpec) -> tuple[Any, ...]:
    """Return what two stacks have in common that sample with each other's weights."""
    return spec.config, spec.members, vocabulary_digest(spec.tokenizer), spec.stop
