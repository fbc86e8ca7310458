"""An environment made of a reward function and formatters (host code, no jax).

For tasks without a simulator: formatters write the prompts of an item, a reward function scores the completions, and
`transition` writes the prompts of later turns. Each of them may be an `async def`. `train` makes one of a reward function whose
items bring their prompts.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from jmarl.config.validation import check, did_you_mean
from jmarl.envs.base import Answer, Texts
from jmarl.envs.calls.awaiting import awaited
from jmarl.envs.calls.copies import copied
from jmarl.envs.calls.user_code import calling, defined_text, excerpt
from jmarl.envs.rewards import RewardFunction
from jmarl.models.hub.messages import MEDIA, as_prompt, is_empty

Formatter = Callable[..., Any]  # (item) or (item, external_prompts) -> prompt: a text or a list of chat messages
Transition = Callable[..., Sequence[str]]  # see `RewardEnvironment`
FORMATTERS = "formatters: [module:function] in YAML, RewardEnvironment(reward, formatters) in Python"
UNREAD = ("system", "tools", "chat_template_kwargs", *MEDIA)  # columns that a prompt is read without
IN_TURNS = "in_turns: true in YAML, RewardEnvironment(reward, formatters, transition, in_turns=True) in Python"


def default_formatter(item: dict) -> Any:
    """Return the item's prompt, a text or a list of chat messages: the formatter of agents that have none."""
    if "prompt" not in item:
        raise ValueError(
            f"an item has no prompt, but {list(item)}{did_you_mean('prompt', map(str, item))}: add a column prompt, or set "
            f"functions that write the prompt of an item: {FORMATTERS}"
        )
    unread = [name for name in UNREAD if name in item and not is_empty(item[name])]
    if unread:
        raise ValueError(
            f"an item has the column {unread[0]}, and its prompt is read without it: rename the column if only rewards read "
            f"it, or set functions that write it into the prompt: {FORMATTERS}"
        )
    return item["prompt"]


def bind_formatter(formatter: Formatter, *, every_turn: bool = False) -> Callable[[dict, Any], Any]:
    """Return a function of (item, external_prompts) that calls a formatter with copies of the arguments that it takes.

    external_prompts is None in the first turn, and the agent's text of the transition later. A formatter without that parameter
    writes the first prompt only, and later the text itself is the prompt; with every_turn it writes all prompts from the item.
    """
    try:
        parameter = inspect.signature(formatter).parameters.get("external_prompts")
    except ValueError:  # some C functions have no signature
        parameter = None
    required = parameter is not None and parameter.default is parameter.empty

    def prompt(item: dict, external_prompts: Any = None) -> Any:
        if external_prompts is None and not required:
            return as_prompt(awaited(formatter(copied(item))))
        if parameter is None:
            return as_prompt(awaited(formatter(copied(item))) if every_turn else external_prompts)
        return as_prompt(awaited(formatter(copied(item), external_prompts=copied(external_prompts))))

    return prompt


class Dialogue(NamedTuple):
    """The state of one episode: an item, and the prompts and completions of each agent so far."""

    item: dict
    prompts: tuple[tuple[str, ...], ...]  # [N][turns]
    responses: tuple[tuple[str, ...], ...]  # [N][turns]


class RewardEnvironment:
    """An `Environment` that scores joint actions with a reward function. Its episodes never end before the run's `num_turns`.

        RewardEnvironment(reward, [lambda item: f"Set up {item['topic']}.", lambda item: f"Tell {item['topic']}."])

    Args:
        reward: from `make_reward`, or a plain function.
        formatters: item -> first prompt; one per agent, or a function for all agents of the team.
        transition: transition(prompt=, agent_completions=, num_agents=, prompt_history_per_agent=,
            response_history_per_agent=) -> N texts. It gets the item's prompt, the last joint action [N], N, and for each agent
            the list of all its prompts and of all its completions, this turn's included. A text goes to the agent's formatter
            as `external_prompts` if the formatter has that parameter; otherwise it is the agent's next prompt.
        in_turns: allow None in place of a prompt, for an agent that does not act in that turn. By default None is an error,
            because it may come from an item whose prompt is missing.
    """

    def __init__(
        self,
        reward: RewardFunction | Callable,
        formatters: Sequence[Formatter] | Formatter,
        transition: Transition | None = None,
        *,
        in_turns: bool = False,
    ):
        self.transition, self.in_turns = transition, in_turns
        self._for_all: tuple[Callable, Formatter] | None = None  # a reward and a formatter, until the team is known
        check("formatters", formatters, not isinstance(formatters, str), "a function, or a list with one for each agent")
        if callable(formatters):
            if not isinstance(reward, RewardFunction):
                self._for_all = (reward, formatters)
                return
            formatters = [formatters] * reward.num_agents
        self.formatters = list(formatters)
        self.reward = reward if isinstance(reward, RewardFunction) else RewardFunction(reward, num_agents=self.num_agents)
        self._bound_formatters = [bind_formatter(formatter) for formatter in self.formatters]

    @property
    def num_agents(self) -> int:
        """The number of agents. Raises ValueError if it is not known."""
        if self._for_all is not None:
            raise ValueError(
                "the number of agents is not known here: give one formatter per agent, [formatter] * 2, or the reward as "
                "make_reward(function, num_agents=2)"
            )
        return len(self.formatters)

    def close(self) -> None:
        """End what the reward has started."""
        if self._for_all is None:
            self.reward.close()

    def for_agents(self, num_agents: int) -> RewardEnvironment:
        """Return this environment; one with a single formatter and a plain reward as that of a team of so many agents."""
        if self._for_all is None:
            return self
        reward, formatter = self._for_all
        return RewardEnvironment(reward, [formatter] * num_agents, self.transition, in_turns=self.in_turns)

    def reset(self, items: Sequence[dict], rng: np.random.Generator) -> tuple[list[Dialogue], list[list[Any]]]:
        del rng
        prompts = self.first_prompts(items)
        no_responses = ((),) * self.num_agents
        states = [
            Dialogue(item, tuple((text,) for text in texts), no_responses)
            for item, texts in zip(items, zip(*prompts, strict=True), strict=True)
        ]
        return states, prompts

    def first_prompts(self, items: Sequence[dict]) -> list[list[Any]]:
        """Return the prompts [N][P] of the first turn. Errors name an item by its index.

        Raises a ValueError too if the items lack a column that the reward needs.
        """
        self.num_agents  # noqa: B018  raises if it is not known
        self.reward.check_items(items)
        prompts: list[list[Any]] = [[] for _ in self.formatters]
        for agent, formatter in enumerate(self._bound_formatters):
            own = prompts[agent]  # the next prompt is that of item len(own)
            with calling(f"the formatter of agent {agent}", lambda own=own: f"item {len(own)}, {excerpt(items[len(own)])}"):
                for item in items:
                    own.append(formatter(dict(item), None))
        for index, (item, *texts) in enumerate(zip(items, *prompts, strict=True)):
            self._check_prompts(texts, lambda index=index, item=item: f"item {index}, {item!r:.120}")
        return prompts

    def step(self, states: Sequence[Dialogue], actions: Texts, rng: np.random.Generator) -> Answer:
        items = [state.item for state in states]
        result = self.reward(actions, self.reward_prompts(states), items, rng)
        after = [
            state._replace(responses=append(state.responses, texts))
            for state, texts in zip(states, zip(*actions, strict=True), strict=True)
        ]
        return Answer(result, np.zeros(len(states), bool), after)

    def reward_prompts(self, states: Sequence[Dialogue]) -> list[Any]:
        """Return what rewards get as `prompts`, one entry per joint action: the item's prompt."""
        return [state.item.get("prompt") for state in states]

    def observe(self, after: Sequence[Dialogue]) -> tuple[list[Dialogue], list[list[Any]]]:
        prompts = [self._next_prompts(state) for state in after]
        states = [state._replace(prompts=append(state.prompts, texts)) for state, texts in zip(after, prompts, strict=True)]
        return states, [list(column) for column in zip(*prompts, strict=True)]

    def _next_prompts(self, state: Dialogue) -> list[Any]:
        """Return the prompts [N] of the next turn of one episode."""
        with calling("the transition", lambda: f"item {excerpt(state.item)}", function=self.transition):
            texts = self._transition_texts(state, self.in_turns)
        prompts = []
        for agent, (formatter, text) in enumerate(zip(self._bound_formatters, texts, strict=True)):
            with calling(f"the formatter of agent {agent}", lambda: f"item {excerpt(state.item)}"):
                prompts.append(None if text is None else formatter(dict(state.item), text))
        self._check_next(prompts, state)
        return prompts

    def _transition_texts(self, state: Dialogue, allow_none: bool) -> list[Any]:
        """Return what the transition writes for the next turn of one episode: texts [N], or None where that is allowed."""
        if self.transition is None:
            raise ValueError("several turns need a transition, which writes the prompts of the next turn")
        texts = awaited(
            self.transition(
                prompt=copied(state.item.get("prompt", "")),
                agent_completions=[responses[-1] for responses in state.responses],
                num_agents=self.num_agents,
                prompt_history_per_agent=[list(prompts) for prompts in state.prompts],
                response_history_per_agent=[list(responses) for responses in state.responses],
            )
        )
        n = self.num_agents
        if isinstance(texts, str) or not isinstance(texts, Sequence) or len(texts) != n:
            returned = f"{len(texts)} texts" if isinstance(texts, list | tuple) else repr(texts)[:80]
            raise ValueError(f"the transition returned {returned} for {n} agents: return a list of {n} texts, one per agent")
        for agent, text in enumerate(texts):
            if not isinstance(as_prompt(text), str) and not (text is None and allow_none):
                hint = f"; if None means that the agent does not act in this turn, allow it: {IN_TURNS}" if text is None else ""
                raise ValueError(f"the transition returned {text!r:.80} for agent {agent}: return a text for each agent{hint}")
        return list(texts)

    def _check_next(self, prompts: Sequence[Any], state: Dialogue) -> None:
        """Check the prompts [N] of the next turn of one episode."""
        self._check_prompts(prompts, lambda: f"turn {len(state.responses[0])} of item {state.item!r:.120}")

    def _check_prompts(self, prompts: Sequence[Any], where: Callable[[], str]) -> None:
        """Raise if a prompt is no text (None is allowed with in_turns), or if no agent has one. where: returns the place."""
        for agent, text in enumerate(prompts):
            if isinstance(text, str):
                continue
            place = defined_text(self.formatters[agent])
            if text is None and not self.in_turns:
                raise ValueError(
                    f"agent {agent}'s prompt is None (of {where()}): give the row a prompt, or let the formatter return a text"
                    f"{place}. If None means that the agent does not act in this turn, allow it: {IN_TURNS}"
                )
            if text is not None:
                raise TypeError(
                    f"agent {agent}'s prompt must be a text or a list of chat messages; got {text!r:.60} of {where()}{place}"
                )
        if all(text is None for text in prompts):
            raise ValueError(f"no agent acts in a turn: all prompts are None (of {where()})")


def append(history: Iterable[tuple[str, ...]], texts: Iterable[Any]) -> tuple[tuple[str, ...], ...]:
    """Append one text to the history of each agent."""
    return tuple((*old, new) for old, new in zip(history, texts, strict=True))
