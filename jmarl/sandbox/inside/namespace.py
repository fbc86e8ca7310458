"""Build the namespace that the tests run in, from trusted code only: their setup, and modules that the program cannot write.

Names that are left over come from the program.
"""

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

from . import proxy
from .proxy import TESTS_MODULE

ALIASES = {"np": "numpy", "pd": "pandas"}


def forbid_imports_from_program() -> None:
    """Import modules only from below the directories on the path as it is now, and read no code from the current directory.

    Classes of unittest share their directory with the program. It may have left a file there with the name of a module that the
    tests import, or run by its path.
    """
    shared = os.path.realpath(os.getcwd())
    directories = {os.path.realpath(path) for path in sys.path if os.path.isabs(path)}
    trusted = tuple(f"{directory}/" for directory in directories if not f"{shared}/".startswith(f"{directory}/"))

    def guarded(hook: Callable[[str], Any]) -> Callable[[str], Any]:
        def find(path: str) -> Any:
            real_path = os.path.realpath(path)  # resolved once, because a link may point elsewhere later
            if not f"{real_path}/".startswith(trusted):
                raise ImportError(f"modules cannot be imported from {path}, which the program may write", path=path)
            return hook(real_path)

        return find

    def refuse_code(event: str, arguments: tuple) -> None:
        if event != "open":
            return
        path, _, flags = arguments
        if not str(path).endswith((".py", ".pyc")) or flags & (os.O_WRONLY | os.O_RDWR):
            return
        if any(p.startswith(f"{shared}/") for p in (os.path.abspath(path), os.path.realpath(path))):
            raise PermissionError(f"code cannot be read from {path}, which the program may write")

    sys.path_hooks[:] = [guarded(hook) for hook in sys.path_hooks]
    sys.addaudithook(refuse_code)


@functools.cache
def free_names(code: str) -> list[str]:
    """Return the global names that a script reads but does not assign or import."""
    top = symtable.symtable(code, "<tests>", "exec")
    read: dict[str, None] = {}
    defined = set(dir(builtins))
    tables = [top]
    for table in tables:
        tables += table.get_children()
        for symbol in table.get_symbols():
            if table is top or symbol.is_global():
                read |= {symbol.get_name(): None} if symbol.is_referenced() else {}
                defined |= {symbol.get_name()} if symbol.is_assigned() or symbol.is_imported() else set()
    return [name for name in read if name not in defined]


def build_namespace(tests: dict) -> dict[str, Any]:
    """Return the names of the tests' module after the setup has run.

    Data sets often use a module of the standard library, numpy or pandas without importing it; these are imported here. A name
    that the tests call is not taken for a module.
    """
    unittest.main = lambda *arguments, **keywords: None  # type: ignore[assignment,misc]  # often the last line
    proxy.prepare_unittest()
    random.seed(0)
    module = sys.modules[TESTS_MODULE] = types.ModuleType(TESTS_MODULE)
    names = module.__dict__
    names.update(proxy.REPLACED_NAMES, __file__="tests.py")
    if "asyncio" in tests["setup"] + tests["code"]:
        proxy.prepare_asyncio()
    exec(compile_for_proxies(tests["setup"], "<setup>"), names)
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


def program_names(tests: dict, names: dict) -> list[str]:
    """Return the names that the program must define: the entry point first, then those that `names` lacks. Names such as
    `__file__` are excluded, because Python itself relies on them."""
    entry = [tests["entry_point"]] if tests["entry_point"] else []
    free = [name for name in free_names(tests["code"]) if name not in names and name not in entry]
    return entry + [name for name in free if not (name.startswith("__") and name.endswith("__"))]


_IS = re.compile(r"\bis\b")


class ReplaceIs(ast.NodeTransformer):
    """Replaces `a is b` by `proxy.is_same(a, b)`, because an object of the program gets a new proxy each time it crosses."""

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        self.generic_visit(node)
        is_identity = len(node.ops) == 1 and isinstance(node.ops[0], ast.Is | ast.IsNot)
        if not is_identity or isinstance(node.comparators[0], ast.Constant):
            return node
        call: ast.expr = ast.Call(ast.Name("__same__", ast.Load()), [node.left, node.comparators[0]], [])
        return ast.copy_location(call if isinstance(node.ops[0], ast.Is) else ast.UnaryOp(ast.Not(), call), node)


def compile_for_proxies(code: str, filename: str, tree: ast.Module | None = None) -> types.CodeType:
    """Compile code of the tests with `is` replaced. tree: the syntax tree of the code if the caller has changed it."""
    tree = ast.parse(code) if tree is None else tree
    return compile(ast.fix_missing_locations(ReplaceIs().visit(tree) if _IS.search(code) else tree), filename, "exec")
