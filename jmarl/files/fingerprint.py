"""Compute fingerprints of the data and the reward of a run, so that a resumed run can name what has changed.

The fingerprint of a function or class of the user is a digest of its source if Python has it, else of its name. Functions and
classes that it names are included, also those of other modules of the user, and constants that it reads (see `constants`).
Left out: installed packages, files that functions read, whole numbers in objects and closures (a reward may count its calls),
and held-out items.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import json
import re
import types
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from jmarl.envs.reward_environment import RewardEnvironment
from jmarl.envs.rewards import RewardFunction
from jmarl.envs.vector import Engine
from jmarl.files.constants import codes, constants_of, functions_of, is_of_user, is_whole, named_by, options_of

PLAIN = bool | int | float | str
# In which this or an earlier version wraps what is the user's. A new version of the library is no difference.
WRAPPERS = (
    "jmarl.envs.reward_environment.bind_formatter.", "jmarl.envs.rewards.bind_completions.", "jmarl.envs.vector.InProcess",
    "jmarl.envs.pool.",
)  # fmt: skip


def of_data(items: Iterable[Any]) -> dict[str, Any]:
    """Return the number of items, and a digest of all items in order that is the same in every process."""
    digest, count = hashlib.sha256(), 0
    for item in items:
        digest.update(json.dumps(_canonical(item)).encode() + b"\n")
        count += 1
    return {"items": count, "sha256": digest.hexdigest()[:16]}


def _canonical(value: Any) -> Any:
    """Return a value as JSON types, in an order that does not depend on the process. Other types become their `repr`, without
    memory addresses."""
    if value is None or isinstance(value, PLAIN):
        return value
    if isinstance(value, Mapping):
        return {"mapping": sorted([[repr(key), _canonical(x)] for key, x in value.items()], key=lambda pair: pair[0])}
    if isinstance(value, list | tuple):
        return [_canonical(x) for x in value]
    if isinstance(value, set | frozenset):
        return {"set": sorted(map(repr, value))}
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def of_reward(env: Any) -> dict[str, str]:
    """Return a digest of the source of each function and class that computes rewards or writes prompts, by qualified name."""
    digests: dict[str, str] = {}
    _collect(env, digests, set())
    if isinstance(env, RewardEnvironment):  # a new function may call the old one, which is then in both fingerprints
        names = [_name(x) for x in (*env.formatters, env.transition) if x is not None]
        _add("formatters and transition", repr(names), digests)
        _add("reward functions", repr(env.reward.names), digests)
    return digests


def _collect(value: Any, digests: dict[str, str], visited: set[int]) -> None:
    """Add the digests of a value and of everything it refers to. visited: ids of values."""
    if id(value) in visited or isinstance(value, types.ModuleType):
        return
    visited.add(id(value))
    parts: Iterable[Any] = ()
    if isinstance(value, functools.partial):
        parts = (value.func, *value.args, *value.keywords.values())
        arguments = (*value.args, *value.keywords.items())
        constants = [x for x in arguments if isinstance(x[1] if isinstance(x, tuple) and len(x) == 2 else x, PLAIN)]
        _add(f"partial of {_name(value.func)}", repr(constants), digests)
    elif isinstance(value, list | tuple):
        parts = value
    elif isinstance(value, Mapping):
        parts = value.values()
    elif isinstance(value, types.MethodType):
        parts = (value.__func__, *getattr(value.__self__, "__dict__", {}).values())
    elif isinstance(value, types.FunctionType | types.BuiltinFunctionType | type):
        _add(_name(value), _source(value), digests)
        parts = [*_closure(value), *_of_user(value, digests)]
    elif isinstance(value, Engine):  # where calls run is no difference
        parts = (value.env,)
    elif callable(value) or callable(getattr(value, "step", None)):  # an environment, a reward, a model that is called
        # How errors are handled is not in it, because the errors advise to change that: see `error_handling`.
        settings = repr((value.weights, value.batched, "raise")) if isinstance(value, RewardFunction) else ""
        _add(_name(type(value)), _source(type(value)) + settings, digests)
        for name, option in {} if isinstance(value, RewardFunction) else options_of(value).items():
            if not is_whole(option):
                _add(f"{_name(type(value))}({name}=)", repr(_canonical(option)), digests)
        parts = (
            *_of_user(type(value), digests), getattr(value, "__wrapped__", None), *getattr(value, "__dict__", {}).values()
        )  # fmt: skip
    for part in parts:
        _collect(part, digests, visited)


def _of_user(value: Any, digests: dict[str, str]) -> list[Any]:
    """Return the functions and classes that a function or class of the user names, and add the constants that it reads."""
    if not is_of_user(getattr(value, "__module__", None)):
        return []
    functions = functions_of(value)
    for function in functions:
        for name, constant in constants_of(function).items():
            _add(f"{name} of {_name(function)}", repr(_canonical(constant)), digests)
    return [x for function in functions for x in named_by(function)]


def of_options(env: Any) -> dict[str, Any]:
    """Return the arguments of the constructors of an environment and of those inside it, as JSON values, by class and name.

    Long values are digests. Left out: rewards and formatters, which are in `of_reward`, engines (processes, time limits), and
    arguments that are no plain values.
    """
    options: dict[str, Any] = {}
    waiting, visited = [env], set()
    while waiting:
        value = waiting.pop()
        if id(value) in visited or isinstance(value, type) or not callable(getattr(value, "step", None)):
            continue
        visited.add(id(value))
        for name, option in {} if isinstance(value, Engine) else options_of(value).items():
            text = json.dumps(_canonical(option))
            short = json.loads(text) if len(text) <= 200 else hashlib.sha256(text.encode()).hexdigest()[:16]
            options.setdefault(f"{type(value).__name__}.{name}", short)
        for inner in getattr(value, "__dict__", {}).values():
            waiting += inner.values() if isinstance(inner, Mapping) else inner if isinstance(inner, list | tuple) else [inner]
    return options


def error_handling(env: Any) -> dict[str, Any]:
    """Return how the rewards of an environment handle errors. It may change when a run resumes."""
    reward = getattr(env, "reward", None)
    if not isinstance(reward, RewardFunction):
        return {}
    return {"on_error": reward.on_error, "timeout": reward.timeout, "max_error_share": reward.max_error_share}


def _closure(function: Any) -> list[Any]:
    """Return the values of a function's closure that are set."""
    contents = []
    for cell in getattr(function, "__closure__", None) or ():
        with contextlib.suppress(ValueError):  # a variable without a value yet
            contents.append(cell.cell_contents)
    return contents


def _name(function: Any) -> str:
    return f"{getattr(function, '__module__', None)}.{getattr(function, '__qualname__', type(function).__qualname__)}"


def _is_of_jmarl(function: Any) -> bool:
    return (getattr(function, "__module__", None) or "").startswith("jmarl.")


def _source(function: Any) -> str:
    """Return the source and constants of a function or class of the user; for one of this library the constants of its closure,
    so that a new version of the library is no difference."""
    if _is_of_jmarl(function):
        return repr([x for x in _closure(function) if isinstance(x, PLAIN)])
    code = getattr(function, "__code__", None)  # the constants distinguish two lambdas in one line of source
    constants = repr([x for c in codes(code) for x in c.co_consts if isinstance(x, int | float)]) if code else ""
    try:
        return inspect.getsource(function) + constants
    except (OSError, TypeError):
        return constants


def _add(base: str, text: str, digests: dict[str, str]) -> None:
    """Add the digest of a text under a name, with a number appended if the name is taken."""
    if base.startswith("builtins."):
        return
    name, number = base, 2
    while name in digests:
        name, number = f"{base} {number}", number + 1
    digests[name] = hashlib.sha256(text.encode("utf-8", "backslashreplace")).hexdigest()[:16]


def difference(name: str, old: dict[str, Any], new: dict[str, Any]) -> str:
    """Describe the difference between two fingerprints in one line; empty if there is none.

    Functions that are only in the new fingerprint are no difference: an object may create them when it is first used (a pool,
    for example), and a reward that calls a new function has changed itself.
    """
    if "items" in new:
        if old == new:
            return ""
        return f"{name}: {old['items']} items -> {new['items']}" if old.get("items") != new["items"] else f"{name}: other items"
    old, new = ({key: x for key, x in digests.items() if not key.startswith(WRAPPERS)} for digests in (old, new))
    changed = [f"{key} (changed)" for key in new if key in old and old[key] != new[key]]
    gone = [f"{key} (gone)" for key in old if key not in new]
    added = [f"{key} (new)" for key in new if key not in old]
    return f"{name}: {', '.join(changed + gone + added)}" if changed or gone else ""
