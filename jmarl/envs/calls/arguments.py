"""Which arguments a reward function gets (host code, no jax).

Every parameter gets the first of these that there is:

    1. the value that a `functools.partial` has set
    2. by its name: `batch_items` (the items, dicts), `prompts` (their prompts), `rng` (the random numbers of this step); with
       one agent also `completions`
    3. in order, the first N parameters without a default: the completions of agent 0, 1, ... (`*args` takes the rest of them)
    4. by its name: a column, that is the values of this name in all items
    5. its default

`**kwargs` gets what stands under 2 and all columns except `prompt`, unless another parameter has them.

Rows and prompts are copies of the joint action's own (`copies`): what a call does to them no other call sees.

A name with two meanings is an error, never a choice: a column with a name of 2 that the function would get; a column with the
name of a parameter that is a completion list by its position; completion lists that are numbered in another order than the
agents.

With one agent, functions in the form that TRL calls, with `completions` and `**kwargs`, get what TRL gives them: where the
prompt of an item is a list of messages, its completion is one too, `[{"role": "assistant", "content": text}]`. All other
functions get texts.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jmarl.config.validation import did_you_mean
from jmarl.envs.calls.copies import copies
from jmarl.envs.calls.user_code import defined_text

BY_NAME = ("batch_items", "prompts", "rng")
COMPLETIONS = "completions"
NOT_IN_KWARGS = "prompt"  # TRL gives it as `prompts` only
ONLY_IN_TRL = ("completion_ids", "trainer_state", "log_extra", "log_metric", "environments")
Parameter = inspect.Parameter


class BoundReward:
    """A reward function whose parameters are filled as the module docstring says.

    Raises:
        TypeError: the signature does not take N completion lists, or numbers them in another order than the agents.
    """

    def __init__(self, func: Callable, name: str, num_agents: int):
        try:
            signature = inspect.signature(func)
        except (TypeError, ValueError) as error:
            raise TypeError(f"reward {name!r} has no signature: give a function, or wrap it in a lambda") from error
        self.func, self.text, self.fixed = func, f"{name}{signature}", _set_by_partial(func)
        kinds = [p.kind for p in signature.parameters.values()]
        self.variadic, self.any_name = Parameter.VAR_POSITIONAL in kinds, Parameter.VAR_KEYWORD in kinds
        starred = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
        params = [p for p in signature.parameters.values() if p.kind not in starred and p.name not in self.fixed]
        self.defaults = {p.name: p.default for p in params if p.default is not p.empty}
        self.names = [p.name for p in params]
        free = [p for p in params if p.default is p.empty and p.name not in BY_NAME]
        one_named = num_agents == 1 and COMPLETIONS in self.names
        in_order = [p.name for p in free if p.kind is not p.KEYWORD_ONLY][:num_agents]
        self.lists = [COMPLETIONS] if one_named else in_order
        self.required = [p.name for p in free if p.name not in self.lists]  # columns
        self.as_messages = one_named and self.any_name
        self._check_lists(num_agents)
        last = max((i for i, p in enumerate(params) if p.name in self.lists or p.kind is p.POSITIONAL_ONLY), default=-1)
        placed = [p for i, p in enumerate(params) if self.variadic or i <= last]
        self.by_position = [p.name for p in placed if p.kind is not p.KEYWORD_ONLY]

    def __call__(self, completions: Sequence[list], optional: Mapping[str, Any]) -> Any:
        """Call the function with completions [N][J] and the values of BY_NAME."""
        optional = {**optional, **{name: copies(optional[name]) for name in ("batch_items", "prompts")}}
        if self.as_messages:
            completions = [_as_messages(completions[0], optional["prompts"])]
        columns = columns_of(optional["batch_items"])
        values: dict[str, Any] = self.defaults | {name: columns[name] for name in self.names if name in columns}
        values |= {**optional, **dict(zip(self.lists, completions, strict=False))}
        args = [values[name] for name in self.by_position]
        names = set(self.names)
        if self.any_name:
            names |= {*BY_NAME, *columns} - {NOT_IN_KWARGS, *self.fixed}
        keywords = {name: values.get(name, columns.get(name)) for name in sorted(names - {*self.by_position})}
        return self.func(*args, *completions[len(self.lists) :], **keywords)

    def check(self, items: Sequence[Any]) -> None:
        """Raise a ValueError if a parameter has no column, or if a name of the items has two meanings."""
        names = {name for item in items if isinstance(item, Mapping) for name in item if isinstance(name, str)}
        for name in self.required:
            missing = next((j for j, item in enumerate(items) if not isinstance(item, Mapping) or name not in item), None)
            if missing is not None and name in ONLY_IN_TRL:
                raise ValueError(
                    f"reward {self.text} needs a column {name!r}, which TRL gives to rewards and jmarl does not: remove the "
                    f"parameter or give it a default, such as functools.partial({self.text.partition('(')[0]}, {name}=None)"
                )
            if missing is not None:
                raise ValueError(
                    f"reward {self.text} needs a column {name!r}, and item {missing} has none, of the columns "
                    f"{sorted(names)}{did_you_mean(name, names - {name})}: the first {len(self.lists)} parameters without a "
                    f"default get the completions of the agents, those named {', '.join(BY_NAME)} get these, and all others a "
                    f"column of the items; add the column or a default{defined_text(self.func)}"
                )
        for name in [name for name in (*BY_NAME, COMPLETIONS) if name in names and name not in self.fixed]:
            if name in self.names or self.any_name:
                raise ValueError(
                    f"reward {self.text}: {name!r} has two meanings, a column of the items and what every reward gets under "
                    "this name: rename the column"
                )
        for agent, name in enumerate(self.lists):
            if name in names:
                raise ValueError(
                    f"reward {self.text}: {name!r} has two meanings, the completions of agent {agent} by its place and a "
                    "column of the items by its name: rename one of them, or read the column from batch_items"
                )

    def _check_lists(self, num_agents: int) -> None:
        """Raise a TypeError unless there are N completion lists in the order of the agents."""
        if len(self.lists) < num_agents and not self.variadic:
            requires = f" and requires {self.required}" * bool(self.required)
            raise TypeError(
                f"reward {self.text} takes {len(self.lists)} completion lists{requires}; needed: {num_agents} positional "
                "parameters without a default, one for each agent, or *completions; only "
                f"{BY_NAME} and columns of the items are passed by name{defined_text(self.func)}"
            )
        numbered = [re.fullmatch(r"(\D*)(\d+)(\D*)", name) for name in self.lists]
        if len({match and (match[1], match[3]) for match in numbered}) == 1 and numbered[0]:
            numbers = [int(match[2]) for match in numbered if match]
            if numbers != sorted(numbers):
                raise TypeError(
                    f"reward {self.text}: {', '.join(self.lists)} have two meanings, their numbers and their places: the first "
                    "gets the completions of agent 0, the next those of agent 1; write them in this order"
                )


def columns_of(items: Sequence[Any]) -> dict[str, list]:
    """Return the values of each name in the items; None where an item lacks it."""
    names = dict.fromkeys(name for item in items if isinstance(item, Mapping) for name in item if isinstance(name, str))
    return {name: [item.get(name) if isinstance(item, Mapping) else None for item in items] for name in names}


def _as_messages(texts: Sequence[str], prompts: Sequence[Any]) -> list[Any]:
    """Return completions as messages where their prompt is a list of messages."""
    return [
        [{"role": "assistant", "content": text}] if isinstance(prompt, list | tuple) else text
        for text, prompt in zip(texts, prompts, strict=True)
    ]


def _set_by_partial(func: Callable) -> set[str]:
    """Return the names of the parameters that a partial has set."""
    if not isinstance(func, functools.partial):
        return set()
    return {*func.keywords, *inspect.signature(func.func).bind_partial(*func.args).arguments}


def unique_names(funcs: Sequence[Callable]) -> list[str]:
    """Name reward functions for the log: f, g, f_2. A partial has the name of its function, an object that of its class, and a
    lambda is `lambda`."""
    names: list[str] = []
    for func in funcs:
        inner = func.func if isinstance(func, functools.partial) else func
        name = getattr(inner, "__name__", type(inner).__name__).strip("<>")
        numbered_names = itertools.chain([name], (f"{name}_{n}" for n in itertools.count(2)))
        names.append(next(candidate for candidate in numbered_names if candidate not in names))
    return names
