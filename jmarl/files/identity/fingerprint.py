"""Compute fingerprints of the data and the reward of a run, so that a resumed run can name what has changed.

The fingerprint of a function or class of the user is a digest of its source if Python has it, else of its name. Functions,
classes and objects that it names are included, also those of other modules of the user, and constants that it reads (see
`constants`): also whole numbers, unless code writes them, as a reward that counts its calls does. Where the source of such code
cannot be seen, another whole number is a warning (`UNSEEN`). Fingerprints of earlier versions have fewer entries; an entry that
only the new one has is no difference. Left out: installed packages and their objects, and files that functions read.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import datetime
import decimal
import enum
import fractions
import functools
import hashlib
import inspect
import json
import operator
import os
import pathlib
import re
import types
import uuid
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from jmarl.envs.reward_environment import RewardEnvironment
from jmarl.envs.rewards import RewardFunction
from jmarl.envs.vector import Engine
from jmarl.files.identity.constants import (
    GENERATED,
    AttributeUse,
    attribute_use_of,
    attributes_of,
    closure_of,
    codes,
    functions_of,
    is_of_user,
    is_plain,
    is_seen,
    is_whole,
    named_by,
    options_of,
    state_of,
    values_of,
)

PLAIN = bool | int | float | str
# Types whose `repr` is their value.
VALUES = (
    bytearray, complex, range, slice, datetime.date, datetime.time, datetime.timedelta, datetime.tzinfo, decimal.Decimal,
    fractions.Fraction, pathlib.PurePath, re.Pattern, uuid.UUID,
    operator.itemgetter, operator.attrgetter, operator.methodcaller,
)  # fmt: skip
SETTINGS = ("jmarl.envs.", "jmarl.sandbox.")  # whose dataclasses are compared as a whole: code of the library reads them
NAMESPACES = (types.SimpleNamespace, argparse.Namespace)
CONTAINERS = list | tuple | set | frozenset | collections.deque
MAX_ARRAY = 2**26  # bytes; of larger arrays only the shape is compared
UNSEEN = " (the code that may write it cannot be seen)"  # ends the names of whole numbers
# In which this or an earlier version wraps what is the user's, or keeps what a run adds to a model. A new version of the
# library is no difference.
WRAPPERS = (
    "jmarl.envs.reward_environment.bind_formatter.", "jmarl.envs.rewards.bind_completions.", "jmarl.envs.vector.InProcess",
    "jmarl.envs.pool.",
    *(f"jmarl.models.config.ModelConfig({x}=)" for x in ("fused_attention", "row_parts", "splits_weights", "long_context")),
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
        pairs = [[_name_text(key) if type(key) is str else _text(key), _canonical(x)] for key, x in value.items()]
        return {"mapping": sorted(pairs, key=operator.itemgetter(0))}
    if isinstance(value, list | tuple):
        return [_canonical(x) for x in value]
    if isinstance(value, set | frozenset):
        return {"set": sorted(json.dumps(_canonical(x)) if isinstance(x, frozenset) else _text(x) for x in value)}
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    return _text(value)


def _text(value: Any) -> str:
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


_name_text = functools.lru_cache(4096)(_text)  # of the names of columns, which are those of every row


def of_reward(env: Any) -> dict[str, str]:
    """Return a digest of the source of each function and class that computes rewards or writes prompts, by qualified name."""
    first = _Walk()
    first.visit(env)
    walk = _Walk(attribute_use_of(first.functions, first.members))
    walk.visit(env)
    if isinstance(env, RewardEnvironment):  # a new function may call the old one, which is then in both fingerprints
        names = [_name(x) for x in (*env.formatters, env.transition) if x is not None]
        walk.add("formatters and transition", repr(names))
        walk.add("reward functions", repr(env.reward.names))
    return walk.digests


class _Walk:
    """A walk through a value and everything that it refers to.

    use: of attributes, by the functions that an earlier walk has found; None: find them.
    """

    def __init__(self, use: AttributeUse | None = None):
        self.use, self.digests = use, dict[str, str]()
        self.functions: list[types.FunctionType] = []  # of the user
        self.members: list[tuple[type, types.FunctionType]] = []  # of classes of the user
        self.visited: dict[int, Any] = {}  # by id, which no other value has while it is kept

    def visit(self, value: Any) -> None:
        """Add the digests of a value and of everything it refers to."""
        if id(value) in self.visited or value is None or isinstance(value, PLAIN | bytes | types.ModuleType):
            return
        self.visited[id(value)] = value
        for part in self.parts(value):
            self.visit(part)

    def parts(self, value: Any) -> Iterable[Any]:
        """Add the digests of a value, and return what it refers to."""
        if isinstance(value, functools.partial):
            arguments = (*value.args, *value.keywords.items())
            constants = [x for x in arguments if isinstance(x[1] if isinstance(x, tuple) and len(x) == 2 else x, PLAIN)]
            self.add(f"partial of {_name(value.func)}", repr(constants))
            if len(constants) < len(arguments):
                self.add_values({"arguments": arguments}, f"{{}} of partial of {_name(value.func)}", value)
            return (value.func, *value.args, *value.keywords.values())
        if isinstance(value, CONTAINERS | Mapping):
            inside = () if is_plain(value) else value.values() if isinstance(value, Mapping) else _in_order(value)
            return (type(value), *inside) if is_of_user(type(value).__module__) else inside
        if isinstance(value, types.MethodType):
            return (value.__func__, value.__self__, *getattr(value.__self__, "__dict__", {}).values())
        if isinstance(value, types.FunctionType | types.BuiltinFunctionType | type):
            return self.parts_of_code(value)
        if isinstance(value, Engine):  # where calls run is no difference
            return (value.env,)
        return self.parts_of_object(value)

    def parts_of_code(self, value: Any) -> Iterable[Any]:
        """Add the digests of a function or class. Returns what is in its closure, and what of the user it names."""
        self.add(_name(value), _source(value))
        if isinstance(value, types.BuiltinFunctionType) and isinstance(value.__self__, VALUES):  # such as a pattern's search
            self.add_values({"object": value.__self__}, f"{{}} of {value.__name__}", value)
        functions = functions_of(value) if is_of_user(getattr(value, "__module__", None)) else []
        if isinstance(value, type):
            self.members += [(value, function) for function in functions]
        else:
            self.functions += functions
        more: list[Any] = []
        for function in functions:
            constants, variables = values_of(function)
            for name, constant in constants.items():
                self.add(f"{name} of {_name(function)}", repr(_canonical(constant)))
            variables = {} if function.__name__ in GENERATED else variables
            self.add_values(variables, f"{{}} of {_name(function)}", function)
            more += variables.values()
        if is_of_user(getattr(value, "__module__", None)):
            attributes = state_of(value) if self.use is None else attributes_of(value, self.use)
            self.add_values(attributes, f"{{}} of {_name(value)}", value)
            more += attributes.values()
        bases = value.__mro__[1:] if isinstance(value, type) and is_of_user(value.__module__) else ()
        bases = [base for base in bases if is_of_user(base.__module__)]
        return [*closure_of(value).values(), *(x for function in functions for x in named_by(function)), *more, *bases]

    def parts_of_object(self, value: Any) -> Iterable[Any]:
        """Add the digests of an object: an environment, a reward, a model that is called, settings. Returns what it has."""
        cls, acts = type(value), callable(value) or callable(getattr(value, "step", None))
        if not acts and isinstance(value, enum.Enum):
            return (cls,)
        compared: dict[str, Any] = {}
        if is_of_user(cls.__module__) or isinstance(value, NAMESPACES) or (_is_of_jmarl(cls) and dataclasses.is_dataclass(cls)):
            use = None if cls.__module__.startswith(SETTINGS) else self.use
            compared = state_of(value) if use is None else attributes_of(value, use)
        elif not acts:
            return ()
        # How errors are handled is not in it, because the errors advise to change that: see `error_handling`.
        settings = repr((value.weights, value.batched, "raise")) if isinstance(value, RewardFunction) else ""
        self.add(_name(cls), _source(cls) + settings)
        options = options_of(value) if acts and not isinstance(value, RewardFunction) else {}
        for name, option in options.items():
            if not is_whole(option):
                self.add(f"{_name(cls)}({name}=)", repr(_canonical(option)))
        of_environment = options if callable(getattr(value, "step", None)) else {}  # whole numbers, see `of_options`
        known = {name for name, option in options.items() if not is_whole(option)} | of_environment.keys()
        rest = {name: x for name, x in compared.items() if name not in known}
        self.add_values(rest, f"{_name(cls)}({{}}=)", value)
        own = (getattr(value, "__wrapped__", None), *state_of(value).values()) if acts else compared.values()
        return (cls, *own) if is_of_user(cls.__module__) else own

    def add_values(self, values: Mapping[str, Any], name: str, owner: Any) -> None:
        """Add the digests of values by their names. name: with {} in the place of theirs."""
        for key, value in values.items():
            unseen = is_whole(value) and not is_seen(owner)
            text = repr(_canonical(value)) if is_plain(value) else json.dumps(_shape(value))
            self.add(name.format(key) + UNSEEN * unseen, text)

    def add(self, base: str, text: str) -> None:
        """Add the digest of a text under a name, with a number appended if the name is taken."""
        if base.startswith("builtins."):
            return
        name, number = base, 2
        while name in self.digests:
            name, number = f"{base} {number}", number + 1
        self.digests[name] = hashlib.sha256(text.encode("utf-8", "backslashreplace")).hexdigest()[:16]


def _shape(value: Any, outer: tuple[int, ...] = ()) -> Any:
    """Return a value as JSON types that are equal in every process; in place of a function or object its name or type, because
    its own digests are beside. outer: ids of the containers around it."""
    if isinstance(value, enum.Enum):
        return {"enum": [_name(type(value)), value.name, _shape(value.value, outer)]}
    if value is None or isinstance(value, PLAIN):
        return value
    if id(value) in outer:
        return "..."
    inside = (*outer, id(value))
    if isinstance(value, Mapping) and value is not os.environ:
        return {"mapping": sorted([[json.dumps(_shape(key, inside)), _shape(x, inside)] for key, x in value.items()], key=str)}
    if isinstance(value, CONTAINERS):
        parts = [_shape(x, inside) for x in value]
        return {"set": sorted(map(json.dumps, parts))} if isinstance(value, set | frozenset) else parts
    if isinstance(value, VALUES):
        return {"value": _text(value)}
    if isinstance(value, bytes | types.ModuleType):
        return repr(value) if isinstance(value, bytes) else {"module": value.__name__}
    if not isinstance(value, type) and hasattr(type(value), "__array__"):
        with contextlib.suppress(TypeError, ValueError, RuntimeError):  # of another device, of keys, of gradients
            given: Any = value
            if getattr(given, "nbytes", 0) > MAX_ARRAY:
                return {"array": [str(given.dtype), list(given.shape)]}
            array = np.asarray(value)
            content = hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()
            return {"array": [str(array.dtype), list(array.shape), None if array.dtype.hasobject else content]}
    return {"object": _name(value if isinstance(value, types.FunctionType | type) else type(value))}


def _in_order(values: Iterable[Any]) -> list[Any]:
    """Return the elements of a container, those of a set in an order that all processes share."""
    return sorted(values, key=lambda x: json.dumps(_shape(x))) if isinstance(values, set | frozenset) else [*values]


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


def _name(function: Any) -> str:
    return f"{getattr(function, '__module__', None)}.{getattr(function, '__qualname__', type(function).__qualname__)}"


def _is_of_jmarl(function: Any) -> bool:
    return (getattr(function, "__module__", None) or "").startswith("jmarl.")


def _source(function: Any) -> str:
    """Return the source and constants of a function or class of the user; for one of this library the constants of its closure,
    so that a new version of the library is no difference."""
    if _is_of_jmarl(function):
        return repr([x for x in closure_of(function).values() if isinstance(x, PLAIN)])
    code = getattr(function, "__code__", None)  # the constants distinguish two lambdas in one line of source
    constants = repr([x for c in codes(code) for x in c.co_consts if isinstance(x, int | float)]) if code else ""
    try:
        return inspect.getsource(function) + constants
    except (OSError, TypeError):
        return constants


def difference(name: str, old: dict[str, Any], new: dict[str, Any]) -> str:
    """Describe the difference between two fingerprints in one line; empty if there is none.

    Functions that are only in the new fingerprint are no difference: an object may create them when it is first used (a pool,
    for example), an earlier version of the library did not look for them, and a reward that calls a new function has changed
    itself. Functions or objects of one name differ if those of the old fingerprint are not among the new ones, in order.
    """
    if "items" in new:
        if old == new:
            return ""
        return f"{name}: {old['items']} items -> {new['items']}" if old.get("items") != new["items"] else f"{name}: other items"
    old_groups, new_groups = _by_name(old), _by_name(new)
    shared = [key for key in new_groups if key in old_groups and not key.endswith(UNSEEN)]
    changed = [f"{key} (changed)" for key in shared if not _contains(new_groups[key], old_groups[key])]
    gone = [f"{key} (gone)" for key in old_groups if key not in new_groups and not key.endswith(UNSEEN)]
    added = [f"{key} (new)" for key in new_groups if key not in old_groups and " of " not in key and not key.endswith("=)")]
    return f"{name}: {', '.join(changed + gone + added)}" if changed or gone else ""


def doubts(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Return the names of the whole numbers that differ between two fingerprints and may be counters."""
    old, new = _by_name(old), _by_name(new)
    names = [key for key in new if key in old and key.endswith(UNSEEN) and not _contains(new[key], old[key])]
    return [name.removesuffix(UNSEEN) for name in names]


def _by_name(digests: Mapping[str, str]) -> dict[str, list[str]]:
    """Return the digests of each name, without those of wrappers."""
    groups: dict[str, list[str]] = {}
    for key, digest in digests.items():
        if not key.startswith(WRAPPERS):
            groups.setdefault(re.sub(r" \d+$", "", key), []).append(digest)
    return groups


def _contains(new: list[str], old: list[str]) -> bool:
    """Return whether the old digests are among the new ones, in order."""
    rest = iter(new)
    return all(digest in rest for digest in old)
