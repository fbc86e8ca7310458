"""Find which attributes and variables code writes, by its source, for fingerprints: what code writes again is no parameter of a
run, and what a constructor computes without its arguments (a time, a process id) need not be the same in the next process.

Left out: writes through another name of a container (`seen = self.seen; seen.append(text)`), and by code without source.
"""

import ast
import contextlib
import functools
import linecache
import types
from collections.abc import Iterator
from typing import NamedTuple

CONSTRUCTORS = ("__init__", "__post_init__", "__new__", "__setstate__")
FILLS = {
    "append", "extend", "insert", "add", "update", "setdefault", "pop", "remove", "clear", "discard", "appendleft", "popleft",
}  # fmt: skip
LOCALS = "<locals>"


class Write(NamedTuple):
    """An attribute that a function writes, or whose content it changes."""

    function: str  # its qualified name
    owner: str  # the class whose method writes an attribute of its own object; empty: the attribute is of another object
    name: str


class Writes(NamedTuple):
    """What the code of a file writes."""

    attributes: frozenset[Write]  # not those that constructors, and setters of properties for them, set for the first time
    variables: frozenset[tuple[str, str]]  # of closures: qualified name of the function that writes it, and its name
    computed: frozenset[tuple[str, str]]  # class and attribute: set by expressions that read neither literals nor arguments


def source_of(code: types.CodeType) -> str:
    """Return the source of the file or notebook cell with a function; empty if there is none."""
    linecache.checkcache(code.co_filename)
    return "".join(linecache.getlines(code.co_filename))


@functools.lru_cache(64)
def writes_in(source: str) -> Writes:
    """Return what the code of a file writes; nothing for what is not Python, such as magics of a notebook."""
    reader = _Reader()
    with contextlib.suppress(SyntaxError):
        reader.visit(ast.parse(source))
    return Writes(frozenset(reader.attributes), frozenset(reader.variables), frozenset(reader.computed))


class _Reader(ast.NodeVisitor):
    """Visits a file. path: names of the classes and functions around a node, as in `__qualname__`."""

    def __init__(self) -> None:
        self.path: list[str] = []
        self.own = ("", "")  # name of the object whose method is visited, and its class
        self.constructs = False  # whether the code of a constructor or setter is visited
        self.attributes: set[Write] = set()
        self.variables: set[tuple[str, str]] = set()
        self.computed: set[tuple[str, str]] = set()

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        name = ".".join([*self.path, node.name])
        assigned = [(target, value) for target, value in _assignments(node.body) if isinstance(target, ast.Name)]
        self.computed |= {(name, target.id) for target, value in assigned if not _is_literal(value)}
        before = self.path, self.own, self.constructs
        self.path, self.own, self.constructs = [*self.path, node.name], ("", name), False
        self.generic_visit(node)
        self.path, self.own, self.constructs = before

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> None:
        name = getattr(node, "name", "<lambda>")
        before = self.path, self.own, self.constructs
        is_method = bool(self.path) and self.path[-1] != LOCALS and self.own[1] == ".".join(self.path)
        decorators = [x.attr for x in getattr(node, "decorator_list", ()) if isinstance(x, ast.Attribute)]
        self.constructs = is_method and (name in CONSTRUCTORS or "setter" in decorators)
        if is_method and node.args.args:
            self.own = (node.args.args[0].arg, self.own[1])
        if is_method and name in CONSTRUCTORS and not isinstance(node, ast.Lambda):
            self.computed |= {(self.own[1], attribute) for attribute in _computed(node, self.own[0])}
        self.path = [*self.path, name, LOCALS]
        self.generic_visit(node)
        self.path, self.own, self.constructs = before

    visit_AsyncFunctionDef = visit_Lambda = visit_FunctionDef  # type: ignore[assignment]

    def visit_Nonlocal(self, node: ast.Nonlocal) -> None:
        self.variables |= {(".".join(self.path[:-1]), name) for name in node.names}

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if not isinstance(node.ctx, ast.Load):
            self._add(node.value, node.attr)
        self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        if not isinstance(node.ctx, ast.Load) and isinstance(node.value, ast.Attribute):
            key = node.slice.value if isinstance(node.slice, ast.Constant) else None
            in_dict = node.value.attr == "__dict__" and isinstance(key, str)
            self._add(node.value.value, str(key) if in_dict else node.value.attr)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        called, texts = node.func, [x.value for x in node.args if isinstance(x, ast.Constant) and isinstance(x.value, str)]
        if isinstance(called, ast.Attribute) and called.attr in FILLS and isinstance(called.value, ast.Attribute):
            self._add(called.value.value, called.value.attr)
        elif (isinstance(called, ast.Name) and called.id in ("setattr", "delattr")) or (
            isinstance(called, ast.Attribute) and called.attr == "__setattr__"
        ):
            self._add(node.args[0] if node.args else called, texts[0] if texts else "")
        self.generic_visit(node)

    def _add(self, base: ast.expr, name: str) -> None:
        if LOCALS in self.path and not self.constructs:
            is_own = isinstance(base, ast.Name) and base.id == self.own[0] != ""
            self.attributes.add(Write(".".join(self.path[:-1]), self.own[1] if is_own else "", name))


def _assignments(body: list[ast.stmt]) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Yield target and value of each assignment, of tuples that of each element."""
    for node in body:
        value = getattr(node, "value", None)
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        for target in [x for x in targets if x is not None] if isinstance(value, ast.expr) else []:
            pair = isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts)
            yield from zip(target.elts, value.elts, strict=True) if pair else [(target, value)]  # type: ignore[union-attr]


def _names(node: ast.AST) -> set[str]:
    return {x.id for x in ast.walk(node) if isinstance(x, ast.Name)}


def _is_literal(value: ast.expr) -> bool:
    return not _names(value)


def _computed(constructor: ast.FunctionDef | ast.AsyncFunctionDef, own: str) -> set[str]:
    """Return the attributes that a constructor sets without its arguments, and not to literals."""
    arguments = constructor.args
    named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
    given, before = {argument.arg for argument in named if argument is not None}, -1
    nodes = [*ast.walk(constructor)]
    assigned = [*_assignments([node for node in nodes if isinstance(node, ast.stmt | ast.NamedExpr)])]  # type: ignore[misc]
    assigned += [(node.target, node.iter) for node in nodes if isinstance(node, ast.For)]
    assigned += [(x.optional_vars, x.context_expr) for x in nodes if isinstance(x, ast.withitem) and x.optional_vars]
    while len(given) > before:  # what is made of the arguments is given, too
        before = len(given)
        given |= {name for target, value in assigned if _names(value) & given for name in _names(target) - {own}}
    attributes = [(x.attr, value) for target, value in assigned for x in ast.walk(target) if _is_own(x, own)]  # type: ignore[union-attr]
    free = {name for name, value in attributes if not (_names(value) & given or _is_literal(value))}
    return free - {name for name, value in attributes if _names(value) & given}


def _is_own(node: ast.AST, own: str) -> bool:
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == own
