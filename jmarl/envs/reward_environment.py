"""An environment made of a reward function and formatters (host code, no jax).

For tasks without a simulator: formatters write the prompts of an item, a reward function scores the completions, and
`transition` writes the prompts of later turns.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from jmarl.envs.base import Answer, Texts
from jmarl.envs.rewards import RewardFunction

Formatter = Callable[..., str]
Transition = Callable[..., Sequence[str]]


def default_formatter(item: dict) -> str:
    """The formatter used when none is given."""
    if "prompt" not in item:
        raise ValueError(f"an item has no prompt, but {list(item)}: give it one, or formatters that write prompts of it")
    return item["prompt"]


def external_of(formatter: Formatter) -> inspect.Parameter | None:
    """A formatter's parameter `external_prompts`, if it has one."""
    try:
        return inspect.signature(formatter).parameters.get("external_prompts")
    except ValueError:  # some C functions have no signature
        return None


def first_prompt(formatter: Formatter, external: inspect.Parameter | None, item: dict) -> str:
    """A formatter's prompt of the first turn, in which `external_prompts` is None where it has to be given."""
    return formatter(item, external_prompts=None) if external and external.default is external.empty else formatter(item)


class Dialogue(NamedTuple):
    """The state of one episode of `RewardEnvironment`: an item and what was read and written so far, of each agent."""

    item: dict
    prompts: tuple[tuple[str, ...], ...]  # [N][turns]
    responses: tuple[tuple[str, ...], ...]  # [N][turns]


class RewardEnvironment:
    """A reward function on joint actions; formatters, one an agent, write the prompts, and `transition` those of later turns.

    reward: `make_reward(...)`, or a plain function, from which it is made.
    transition(prompt=, agent_completions=, num_agents=, prompt_history_per_agent=, response_history_per_agent=) -> N texts.
    It gets the item's prompt, the joint action just made (one text an agent), N, and for each agent a list of all its prompts
    and one of all its completions, this turn's included. A text goes to the agent's formatter as `external_prompts` if the
    formatter has such a parameter, and is the agent's next prompt otherwise.
    in_turns: agents act in turns: where a formatter or the transition has None for an agent, it does not act in that turn.
    Without it None is an error, since it may as well come of a row whose prompt is missing.
    """

    def __init__(
        self,
        reward: RewardFunction | Callable,
        formatters: Sequence[Formatter],
        transition: Transition | None = None,
        *,
        in_turns: bool = False,
    ):
        self.formatters, self.transition, self.in_turns = list(formatters), transition, in_turns
        made = isinstance(reward, RewardFunction)
        self.reward = reward if made else RewardFunction(reward, num_agents=len(self.formatters))
        self._external = [external_of(f) for f in self.formatters]

    def reset(self, items, rng):
        del rng
        prompts = self.first_prompts(items)
        nothing = ((),) * len(self.formatters)
        return [Dialogue(i, tuple((p,) for p in texts), nothing) for i, texts in _columns(items, prompts)], prompts

    def first_prompts(self, items: Sequence[dict]) -> list[list[Any]]:
        """What the formatters write of items, [N][P], checked; errors name an item by its place in `items`."""
        each = list(zip(self.formatters, self._external, strict=True))
        prompts = [[first_prompt(*formatter, dict(item)) for item in items] for formatter in each]
        for p, (item, *texts) in enumerate(zip(items, *prompts, strict=True)):
            self._check(texts, f"item {p}, {item!r:.120}")
        return prompts

    def _check(self, texts: Sequence[Any], where: str) -> None:
        """Refuse what is no text, and None where agents do not act in turns."""
        for n, text in enumerate(texts):
            if text is None and not self.in_turns:
                raise ValueError(
                    f"agent {n}'s prompt is None (of {where}): give the row a prompt, or let the formatter return a text. If "
                    "None is to say that the agent does not act in this turn, declare it: RewardEnvironment(reward, "
                    "formatters, transition, in_turns=True)"
                )
            if not isinstance(text, str | None):
                raise TypeError(f"agent {n}'s prompt must be a text; got {text!r:.60} of {where}")
        if all(text is None for text in texts):
            raise ValueError(f"no agent acts in a turn: all prompts are None (of {where})")

    def step(self, states, actions, rng):
        items = [state.item for state in states]
        result = self.reward(actions, [item.get("prompt") for item in items], items, rng)
        return Answer(result, np.zeros(len(states), bool), [_said(state, texts) for state, texts in _columns(states, actions)])

    def observe(self, after):
        if self.transition is None:
            raise ValueError("several turns need external_transition, which writes the prompts of the next turn")
        prompts = [self._next(state) for state in after]
        states = [
            state._replace(prompts=tuple((*old, new) for old, new in zip(state.prompts, texts, strict=True)))
            for state, texts in zip(after, prompts, strict=True)
        ]
        return states, [list(of_agent) for of_agent in zip(*prompts, strict=True)]

    def _next(self, state: Dialogue) -> list[str]:
        assert self.transition is not None
        n = len(self.formatters)
        texts = self.transition(
            prompt=state.item.get("prompt", ""),
            agent_completions=[said[-1] for said in state.responses],
            num_agents=n,
            prompt_history_per_agent=[list(read) for read in state.prompts],
            response_history_per_agent=[list(said) for said in state.responses],
        )
        if isinstance(texts, str) or not isinstance(texts, Sequence) or len(texts) != n:
            what = f"{len(texts)} texts" if isinstance(texts, list | tuple) else repr(texts)[:80]
            raise ValueError(f"external_transition returned {what} for {n} agents: return a list of {n} texts, one an agent")
        for agent, text in enumerate(texts):
            if not isinstance(text, str) and not (text is None and self.in_turns):
                raise ValueError(f"external_transition returned {text!r:.80} for agent {agent}: return a text for each agent")
        each = zip(self.formatters, texts, self._external, strict=True)
        found = [
            f(dict(state.item), external_prompts=text) if external and text is not None else text for f, text, external in each
        ]
        self._check(found, f"turn {len(state.responses[0]) + 1} of item {state.item!r:.120}")
        return found


def _columns(states: Sequence[Any], texts: Texts):
    """Pairs (state, its N texts)."""
    return zip(states, zip(*texts, strict=True), strict=True)


def _said(state: Dialogue, texts: Sequence[str]) -> Dialogue:
    return state._replace(responses=tuple((*old, new) for old, new in zip(state.responses, texts, strict=True)))
