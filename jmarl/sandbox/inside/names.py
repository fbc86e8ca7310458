"""What names mean to the tests before the program gives any: trusted code only, from where the program cannot write."""

from __future__ import annotations

import ast
import builtins
import functools
import importlib
import os
import random
import re
import symtable
import sys
import types
import unittest
from collections.abc import Callable
from typing import Any

from . import handles
from .handles import TESTS

ALIASES = {"np": "numpy", "pd": "pandas"}


def trust_only_what_was_there() -> None:
    """Modules are imported only from below the directories that they came from before the tests ran. Tests of objects share
    theirs with the program, which may have left a file there with the name of a module that they import, or run by its path."""
    shared = os.path.realpath(os.getcwd())
    places = {os.path.realpath(path) for path in sys.path if os.path.isabs(path)}
    trusted = tuple(f"{place}/" for place in places if not f"{shared}/".startswith(f"{place}/"))

    def guarded(hook: Callable[[str], Any]) -> Callable[[str], Any]:
        def finder(path: str) -> Any:
            place = os.path.realpath(path)  # not what a link will point at later
            if not f"{place}/".startswith(trusted):
                raise ImportError(f"no modules are imported from {path}", path=path)
            return hook(place)

        return finder

    def no_code(event: str, about: tuple) -> None:
        if event != "open" or not str(about[0]).endswith((".py", ".pyc")) or about[2] & (os.O_WRONLY | os.O_RDWR):
            return
        if any(path.startswith(f"{shared}/") for path in (os.path.abspath(about[0]), os.path.realpath(about[0]))):
            raise PermissionError(f"no code is read from {about[0]}")

    sys.path_hooks[:] = [guarded(hook) for hook in sys.path_hooks]
    sys.addaudithook(no_code)


@functools.cache
def free_names(code: str) -> list[str]:
    """Names of the module that a script reads and does not make itself."""
    top = symtable.symtable(code, "<tests>", "exec")
    read: dict[str, None] = {}
    made = set(dir(builtins))
    tables = [top]
    for table in tables:
        tables += table.get_children()
        for symbol in table.get_symbols():
            if table is top or symbol.is_global():
                read |= {symbol.get_name(): None} if symbol.is_referenced() else {}
                made |= {symbol.get_name()} if symbol.is_assigned() or symbol.is_imported() else set()
    return [name for name in read if name not in made]


def namespace(tests: dict) -> dict[str, Any]:
    """What trusted code makes, and modules that the tests take for granted; a name that they call is no module."""
    unittest.main = lambda *arguments, **named: None  # type: ignore[assignment,misc]  # often the last line
    handles.prepare_unittest()
    random.seed(0)
    module = sys.modules[TESTS] = types.ModuleType(TESTS)
    names = module.__dict__
    names.update(handles.FOR_TESTS, __file__="tests.py")
    if "asyncio" in tests["setup"] + tests["code"]:
        handles.prepare_asyncio()
    exec(compiled(tests["setup"], "<setup>"), names)
    calls = (node.func for node in ast.walk(ast.parse(tests["code"])) if isinstance(node, ast.Call))
    called = {function.id for function in calls if isinstance(function, ast.Name)}
    for name in free_names(tests["code"]):
        target = ALIASES.get(name, name)
        if name not in names and name not in called and (target in sys.stdlib_module_names or name in ALIASES):
            try:
                names[name] = importlib.import_module(target)
            except ImportError:
                continue
    return names


def wanted_names(tests: dict, names: dict) -> list[str]:
    """What the program has to give; nothing that Python itself goes by, as the path of a file."""
    entry = [tests["entry_point"]] if tests["entry_point"] else []
    free = [name for name in free_names(tests["code"]) if name not in names and name not in entry]
    return entry + [name for name in free if not (name.startswith("__") and name.endswith("__"))]


_IS = re.compile(r"\bis\b")


class Same(ast.NodeTransformer):
    """Asks whether two objects are one by `handles.same`: what stands for one is another thing each time it crosses."""

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        self.generic_visit(node)
        if (
            len(node.ops) != 1
            or not isinstance(node.ops[0], ast.Is | ast.IsNot)
            or isinstance(node.comparators[0], ast.Constant)
        ):
            return node
        call: ast.expr = ast.Call(ast.Name("__same__", ast.Load()), [node.left, node.comparators[0]], [])
        return ast.copy_location(call if isinstance(node.ops[0], ast.Is) else ast.UnaryOp(ast.Not(), call), node)


def compiled(code: str, name: str, tree: ast.Module | None = None) -> types.CodeType:
    """tree: of the code, if it has been changed."""
    tree = ast.parse(code) if tree is None else tree
    return compile(ast.fix_missing_locations(Same().visit(tree) if _IS.search(code) else tree), name, "exec")
