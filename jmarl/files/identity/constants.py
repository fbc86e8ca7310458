"""Find the constants that functions and objects of the user read, for fingerprints: of their modules, closures, defaults,
constructors and attributes. What a method or an inner function writes again (a counter) is no constant, see `writes`.

Constants of a module are compared by the source of their assignments, so that what only this process knows (a time, a cache) is
no difference; those of a notebook, which has no such source, by their values. Attributes are compared where code of the user
reads them by name: settings of a whole run also say where it is written. Left out: values of a module that come from files or
the environment; assignments inside a top-level if or try.
"""

from __future__ import annotations

import ast
import contextlib
import dis
import functools
import inspect
import os
import sys
import sysconfig
import types
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from jmarl.files.identity.writes import CONSTRUCTORS, FILLS, source_of, writes_in

READS_ALL = {"getattr", "vars", "asdict", "astuple", "__dict__", "model_dump", "_asdict", "attrgetter"}  # by names unseen
GENERATED = {
    f"__{name}__" for name in ("repr", "eq", "lt", "le", "gt", "ge", "hash", "setattr", "delattr", "getstate", "replace")
}
INTERFACE = {"reset", "step", "observe", "tasks", "solve"}  # methods of environments, which this library calls
PLAIN = bool | int | float | str | bytes
LIBRARIES = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib"))


def codes(code: types.CodeType) -> list[types.CodeType]:
    """Return the code of a function, and of the functions and comprehensions inside it."""
    return [code, *(inner for x in code.co_consts if isinstance(x, types.CodeType) for inner in codes(x))]


def is_plain(value: Any, outer: tuple[int, ...] = ()) -> bool:
    """Whether a value is a number, a text, None, or a container of such. outer: ids of the containers around it."""
    if value is os.environ:
        return False
    if isinstance(value, Mapping | list | tuple | set | frozenset):
        parts = [x for pair in value.items() for x in pair] if isinstance(value, Mapping) else value
        return id(value) not in outer and all(is_plain(x, (*outer, id(value))) for x in parts)
    return value is None or isinstance(value, PLAIN)


def is_whole(value: Any) -> bool:
    """Whether a value is a whole number, which may count calls."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_of_user(module: str | None) -> bool:
    """Whether a module is neither of this library nor of Python or an installed package."""
    if module is None or module.startswith("jmarl.") or module.split(".")[0] in sys.stdlib_module_names - {"__main__"}:
        return False
    file = getattr(sys.modules.get(module), "__file__", None)  # None: of a notebook, or built in
    return module == "__main__" or (file is not None and not str(file).startswith(LIBRARIES))


def functions_of(value: Any) -> list[types.FunctionType]:
    """Return a function, or the functions in the body of a class."""
    members = vars(value).values() if isinstance(value, type) else [value]
    plain = [member.__func__ if isinstance(member, staticmethod | classmethod) else member for member in members]
    plain += [x for member in members if isinstance(member, property) for x in (member.fget, member.fset)]
    plain += [member.func for member in members if isinstance(member, functools.cached_property | functools.partialmethod)]
    plain += [member.__wrapped__ for member in members if isinstance(member, functools._lru_cache_wrapper)]
    return [function for function in plain if isinstance(function, types.FunctionType)]


def named_by(function: types.FunctionType) -> list[Any]:
    """Return the functions and classes of the user that a function names, also as `module.name`; then its objects."""
    names = [name for code in codes(function.__code__) for name in code.co_names]
    values = [function.__globals__.get(name) for name in names]
    modules = [x for x in values if isinstance(x, types.ModuleType) and is_of_user(x.__name__)]
    values += [vars(module).get(name) for module in modules for name in names]
    values = [x.func if isinstance(x, functools.partial) else x for x in values]
    values = [x.__wrapped__ if isinstance(x, functools._lru_cache_wrapper) else x for x in values]
    code = [x for x in values if isinstance(x, types.FunctionType | type) and is_of_user(x.__module__)]
    objects = [x.__self__ if isinstance(x, types.MethodType) else x for x in values]
    return code + [x for x in objects if not isinstance(x, types.FunctionType | type) and is_of_user(type(x).__module__)]


def values_of(function: types.FunctionType) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the constants that a function reads, and what else it reads.

    Constants are the source of those of its module, and the plain values of its closure and defaults. Else: whole numbers and
    objects of its closure that no code writes, objects among its defaults, and the plain values of a notebook that it names."""
    code, inside, source = function.__code__, codes(function.__code__), _source(function.__module__)
    names = {name for part in inside for name in part.co_names}
    arguments = code.co_varnames[: code.co_argcount]
    defaults = dict(zip(reversed(arguments), reversed(function.__defaults__ or ()), strict=False))
    defaults |= function.__kwdefaults__ or {}
    changed = _written("STORE_DEREF", inside) | _filled(inside)
    closure = {name: value for name, value in closure_of(function).items() if name not in changed}
    given = {name: value for name, value in closure.items() if not is_whole(value)} | defaults
    constants = {name: value for name, value in given.items() if value is not None and is_plain(value)}
    constants = _read_from(_assignments(source), names) | constants
    around = function.__qualname__.partition(".<locals>")[0] + "."
    written = {name for where, name in writes_in(source_of(code)).variables if where.startswith(around)}
    values = {name: value for name, value in closure.items() if name not in written} | defaults
    if is_of_user(function.__module__) and not source:
        names -= _written("STORE_GLOBAL", inside)
        in_module = {name: function.__globals__[name] for name in sorted(names & function.__globals__.keys())}
        values |= {name: value for name, value in in_module.items() if isinstance(value, PLAIN | tuple) and is_plain(value)}
    return constants, {name: value for name, value in values.items() if name not in constants}


def closure_of(function: Any) -> dict[str, Any]:
    """Return the variables of a function's closure; None for one without a value yet."""
    contents, names = {}, getattr(getattr(function, "__code__", None), "co_freevars", ())  # none of a class
    for name, cell in zip(names, getattr(function, "__closure__", None) or (), strict=True):
        contents[name] = None
        with contextlib.suppress(ValueError):
            contents[name] = cell.cell_contents
    return contents


def _is_called(cls: type, function: types.FunctionType, reads: set[str]) -> bool:
    """Whether a method of a class may be called, if code reads these names."""
    name, from_library = function.__name__, any(not is_of_user(base.__module__) for base in cls.__mro__[:-1])
    special = name.startswith("__") and name not in GENERATED.union(CONSTRUCTORS)
    return special or (from_library and name not in CONSTRUCTORS) or name in reads | INTERFACE


class AttributeUse(NamedTuple):
    """What the functions of the user that a reward reaches do with attributes."""

    reads: frozenset[str]  # names of attributes; with one of READS_ALL, any
    writes: frozenset[tuple[str, str]]  # class whose method writes an attribute of its own, empty for others, and its name


def attribute_use_of(
    functions: Iterable[types.FunctionType], members: Iterable[tuple[type, types.FunctionType]]
) -> AttributeUse:
    """Return what code does with attributes.

    functions: that are called; members: those of classes, of which some are: special ones, those of an environment, those that
    called ones name, and where a library has a base of the class, any."""
    called, reads, rest, grows = [*functions], set[str](), [*members], True
    while grows:
        reads |= {name for function in called for code in codes(function.__code__) for name in code.co_names}
        more = [pair for pair in rest if _is_called(*pair, reads)]
        called += [function for _, function in more]
        rest, grows = [pair for pair in rest if pair not in more], bool(more)
    writes: set[tuple[str, str]] = set()
    for function in called:
        source, name = source_of(function.__code__), function.__qualname__
        if source:
            own = [x for x in writes_in(source).attributes if x.function == name or x.function.startswith(f"{name}.<locals>")]
            writes |= {(x.owner, x.name) for x in own}
        elif function.__name__ not in CONSTRUCTORS:
            writes |= {("", attribute) for attribute in _written("STORE_ATTR", codes(function.__code__))}
    return AttributeUse(frozenset(reads), frozenset(writes))


def attributes_of(value: Any, use: AttributeUse) -> dict[str, Any]:
    """Return the attributes of an object, or of a class, that the user's code reads and does not write.

    Also left out: what a constructor or the body of a class computes without arguments, which the source of the class covers.
    """
    is_class = isinstance(value, type)
    classes = [x for x in (value.__mro__ if is_class else type(value).__mro__) if is_of_user(x.__module__)]
    names = {"", *(x.__qualname__ for x in classes)}
    left_out = {name for owner, name in use.writes if owner in names}
    for cls in classes:
        sources = {source for f in functions_of(cls) if (source := source_of(f.__code__))} | {_source(cls.__module__)}
        left_out |= {name for source in sources for owner, name in writes_in(source).computed if owner in names}
    read = state_of(value).keys() if use.reads & READS_ALL else use.reads
    return {name: x for name, x in state_of(value).items() if name in read and name not in left_out}


def state_of(value: Any) -> dict[str, Any]:
    """Return the attributes of an object, of its dict or of slots; of a class those that are no functions or descriptors."""
    state = dict(getattr(value, "__dict__", {}))
    if isinstance(value, type):
        return {name: x for name, x in state.items() if not (name.startswith("__") or callable(x) or hasattr(x, "__get__"))}
    for cls in type(value).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            with contextlib.suppress(AttributeError):
                state.setdefault(name, object.__getattribute__(value, name))
    return {name: x for name, x in state.items() if not name.startswith("__")}


def is_seen(value: Any) -> bool:
    """Whether the source of all code that may write a variable of a function, or an attribute of an object, can be read."""
    if isinstance(value, types.FunctionType):
        return bool(source_of(value.__code__))
    methods = [f for cls in type(value).__mro__ if is_of_user(cls.__module__) for f in functions_of(cls)]
    own = [f for f in methods if f.__name__ == "__call__" or not f.__name__.startswith("__")]  # others may be generated
    return all(source_of(f.__code__) for f in own)


def options_of(value: Any) -> dict[str, Any]:
    """Return the attributes of an object that are arguments of its constructor and are not written by its methods."""
    cls = type(value)
    methods = [f for base in cls.__mro__ for f in functions_of(base) if f.__name__ not in ("__init__", "__post_init__")]
    changed = _written("STORE_ATTR", (code for method in methods for code in codes(method.__code__)))
    try:
        names = inspect.signature(cls).parameters
    except (ValueError, TypeError):  # of a class in C
        return {}
    attributes = getattr(value, "__dict__", {})
    return {name: attributes[name] for name in names if name in attributes.keys() - changed and is_plain(attributes[name])}


def _written(operation: str, inside: Iterable[types.CodeType]) -> set[str]:
    """Return the names that code writes by an operation of the interpreter."""
    return {str(step.argval) for code in inside for step in dis.get_instructions(code) if step.opname == operation}


def _filled(inside: Iterable[types.CodeType]) -> set[str]:
    """Return the names of containers in a closure that code adds to or removes from, such as `seen.append(text)`."""
    names = set()
    for code in inside:
        steps = [*dis.get_instructions(code)]
        for step, following in zip(steps, steps[1:], strict=False):
            if step.opname == "LOAD_DEREF" and following.argval in FILLS:
                names.add(str(step.argval))
    return names


def _read_from(assignments: Mapping[str, tuple[str, frozenset[str]]], names: set[str]) -> dict[str, str]:
    """Return the source of assignments to names, and to the names in these."""
    source: dict[str, str] = {}
    waiting = sorted(names & assignments.keys())
    while waiting:
        name = waiting.pop()
        if name not in source:
            source[name], more = assignments[name]
            waiting += sorted(more & assignments.keys())
    return source


def _source(module: str) -> str:
    """Return the source of a module; empty if there is none, as of a notebook."""
    try:
        return inspect.getsource(sys.modules[module])
    except (OSError, TypeError, KeyError):
        return ""


@functools.lru_cache(64)
def _assignments(source: str) -> dict[str, tuple[str, frozenset[str]]]:
    """Return, by name, the values that a module assigns at its top level as source, and the names in these."""
    assigned: dict[str, tuple[str, frozenset[str]]] = {}
    for node in ast.parse(source).body:
        single = isinstance(node, ast.AnnAssign | ast.AugAssign)
        targets = node.targets if isinstance(node, ast.Assign) else [node.target] if single else []
        for name in [x.id for target in targets for x in ast.walk(target) if isinstance(x, ast.Name)]:
            value = node.value  # type: ignore[attr-defined]
            if value is not None:
                read = frozenset(x.id for x in ast.walk(value) if isinstance(x, ast.Name))
                text, others = assigned.get(name, ("", frozenset()))
                source = ast.unparse(node if isinstance(node, ast.AugAssign) else value)
                assigned[name] = (f"{text}\n{source}" if text else source, read | others)
    return assigned
