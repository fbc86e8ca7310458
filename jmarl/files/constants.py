"""Find the constants that functions and objects of the user read, for fingerprints: of their modules, closures, defaults and
constructors. What a method or an inner function writes again (a counter) is no constant.

Constants of a module are compared by the source of their assignments, so that what only this process knows (a time, a cache) is
no difference. Left out: modules without source, as of a notebook; values that come from files or the environment; assignments
inside a top-level if or try; whole numbers in closures, which may say in which call something happens.
"""

from __future__ import annotations

import ast
import dis
import functools
import inspect
import sys
import sysconfig
import types
from collections.abc import Iterable, Mapping
from typing import Any

FILLS = {"append", "extend", "insert", "add", "update", "setdefault", "pop", "remove", "clear", "appendleft"}
PLAIN = bool | int | float | str | bytes
LIBRARIES = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib"))


def codes(code: types.CodeType) -> list[types.CodeType]:
    """Return the code of a function, and of the functions and comprehensions inside it."""
    return [code, *(inner for x in code.co_consts if isinstance(x, types.CodeType) for inner in codes(x))]


def is_plain(value: Any) -> bool:
    """Whether a value is a number, a text, None, or a container of such."""
    if isinstance(value, Mapping):
        return all(is_plain(x) for pair in value.items() for x in pair)
    if isinstance(value, list | tuple | set | frozenset):
        return all(map(is_plain, value))
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
    return [function for function in plain if isinstance(function, types.FunctionType)]


def named_by(function: types.FunctionType) -> list[Any]:
    """Return the functions and classes of the user that a function names, also as `module.name`."""
    names = [name for code in codes(function.__code__) for name in code.co_names]
    values = [function.__globals__.get(name) for name in names]
    modules = [x for x in values if isinstance(x, types.ModuleType) and is_of_user(x.__name__)]
    values += [vars(module).get(name) for module in modules for name in names]
    values = [x.func if isinstance(x, functools.partial) else x for x in values]
    values = [x.__wrapped__ if isinstance(x, functools._lru_cache_wrapper) else x for x in values]
    return [x for x in values if isinstance(x, types.FunctionType | type) and is_of_user(x.__module__)]


def constants_of(function: types.FunctionType) -> dict[str, Any]:
    """Return the constants that a function reads: the source of those of its module, and the values of its closure and
    defaults."""
    inside = codes(function.__code__)
    names = {name for code in inside for name in code.co_names}
    arguments = function.__code__.co_varnames[: function.__code__.co_argcount]
    defaults = dict(zip(reversed(arguments), reversed(function.__defaults__ or ()), strict=False))
    changed = _written("STORE_DEREF", inside) | _filled(inside)
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    closure = {name: _content(cell) for name, cell in cells if name not in changed}
    closure = {name: value for name, value in closure.items() if not is_whole(value)}
    values = {**closure, **defaults, **(function.__kwdefaults__ or {})}
    own = {name: value for name, value in values.items() if value is not None and is_plain(value)}
    return _read_from(_assignments(_source(function.__module__)), names) | own


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


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # a variable without a value yet
        return None


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
