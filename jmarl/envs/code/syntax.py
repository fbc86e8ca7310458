"""Answer questions about Python programs from their syntax tree: what they define, and how one function uses another.

Nothing is executed. A program that does not parse is treated as empty, unless a function says otherwise. What a program does
through `exec`, `globals()` or similar is not seen.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import TypeGuard

UNPARSABLE = (SyntaxError, ValueError, RecursionError, MemoryError)
"""What `ast.parse` and `compile` raise for bad programs: wrong syntax, null bytes, or too deep nesting."""

JUMPS = (ast.Return, ast.Raise, ast.Break, ast.Continue)


def parse_program(code: str) -> ast.Module | None:
    """Return the syntax tree of a program, or None if it does not parse."""
    try:
        with warnings.catch_warnings():  # Python warns of some escapes in strings
            warnings.simplefilter("ignore")
            return ast.parse(code)
    except UNPARSABLE:
        return None


def compiles(code: str) -> bool:
    """Return whether Python would start the program. Some errors, such as a misplaced `nonlocal`, show only here."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compile(code, "<program>", "exec", dont_inherit=True)
        return True
    except UNPARSABLE:
        return False


def statements(code: str) -> Sequence[ast.stmt]:
    """Return the top-level statements of a program."""
    tree = parse_program(code)
    return tree.body if tree else ()


def find_function(code: str, name: str) -> ast.FunctionDef | None:
    """Return the last top-level function of this name: the one that a call would reach."""
    functions = [node for node in statements(code) if isinstance(node, ast.FunctionDef) and node.name == name]
    return functions[-1] if functions else None


def returns_value(code: str, name: str) -> bool:
    """Return whether the program defines a function of this name that returns or yields something.

    A program that does not parse is matched by a regular expression: the reward for the form of a program comes before the
    one for its syntax.
    """
    if parse_program(code) is None:
        definition = re.search(rf"^([ \t]*)def[ \t]+{re.escape(name)}\b.*(?:\n(?:\1[ \t]+.*|[ \t]*))*", code, re.MULTILINE)
        return definition is not None and re.search(r"\breturn[ \t]+\S", definition.group()) is not None
    function = find_function(code, name)
    if function is None:
        return any(
            isinstance(node, ast.Assign) and isinstance(node.value, ast.Lambda) and binds(node, name)
            for node in statements(code)
        )
    return any(
        isinstance(node, ast.Yield | ast.YieldFrom) or (isinstance(node, ast.Return) and node.value is not None)
        for node in _own_nodes(function)
    )


def binds(node: ast.AST, name: str) -> bool:
    """Return whether anything inside a node binds the name: an assignment, a definition, a parameter or an import."""
    for inner in ast.walk(node):
        if isinstance(inner, ast.Name) and inner.id == name and not isinstance(inner.ctx, ast.Load):
            return True
        if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and inner.name == name:
            return True
        if isinstance(inner, ast.arg) and inner.arg == name:
            return True
        if isinstance(inner, ast.alias) and (inner.asname or inner.name) in (name, "*"):
            return True
    return False


def _own_nodes(function: ast.FunctionDef) -> list[ast.AST]:
    """Return the nodes of a function without the bodies of the functions and classes inside it."""
    nodes, pending = [], list[ast.AST](function.body)
    while pending:
        node = pending.pop()
        nodes.append(node)
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            pending += ast.iter_child_nodes(node)
    return nodes


def reachable_calls(node: ast.AST, name: str) -> list[ast.Call]:
    """Return the calls of `name` inside a node, without those in dead code (after `return`, or under `if False`)."""
    calls, pending = [], [node]
    while pending:
        current = pending.pop()
        if _is_call(current, name):
            calls.append(current)
        pending += _reachable_children(current)
    return calls


def _is_call(node: ast.AST | None, name: str) -> TypeGuard[ast.Call]:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name


def _reachable_children(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the children of a node, without statements after a jump and branches that a constant condition rules out."""
    dead_field = ""
    if isinstance(node, ast.If | ast.While | ast.IfExp) and isinstance(node.test, ast.Constant):
        dead_field = "orelse" if node.test.value else "body"
    for field, value in ast.iter_fields(node):
        if field == dead_field:
            continue
        if isinstance(value, list):
            jump = next((i for i, child in enumerate(value) if isinstance(child, JUMPS)), len(value))
            yield from (child for child in value[: jump + 1] if isinstance(child, ast.AST))
        elif isinstance(value, ast.AST):
            yield value


def is_wrapper(function: ast.FunctionDef, helper: str) -> bool:
    """Return whether a function only passes its arguments on: `return helper(a, b)`, directly or through one variable."""
    body = [statement for statement in function.body if not has_no_effect(statement)]
    if not body or not isinstance(body[-1], ast.Return):
        return False
    value = body[-1].value
    if len(body) == 2 and isinstance(value, ast.Name):
        value = _assigned_value(body[0], value.id)
    elif len(body) != 1:
        return False
    if not _is_call(value, helper):
        return False
    arguments = [*value.args, *(keyword.value for keyword in value.keywords)]
    return all(isinstance(x.value if isinstance(x, ast.Starred) else x, ast.Name | ast.Constant) for x in arguments)


def has_no_effect(statement: ast.stmt) -> bool:
    """Return whether a statement is `pass`, a docstring or `...`."""
    return isinstance(statement, ast.Pass) or (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant))


def _assigned_value(statement: ast.stmt, name: str) -> ast.expr | None:
    """Return the value that a statement assigns to this name and nothing else; None if it does something else."""
    if isinstance(statement, ast.Assign):
        targets = statement.targets
    elif isinstance(statement, ast.AnnAssign):
        targets = [statement.target]
    else:
        return None
    if len(targets) != 1 or not isinstance(targets[0], ast.Name) or targets[0].id != name:
        return None
    return statement.value


def ignores_result(function: ast.FunctionDef, helper: str) -> bool:
    """Return whether a function calls `helper` and uses the result of none of the calls.

    A result is unused if the call is a statement of its own, or if it is assigned to variables that are never read.
    """
    names_read = {x.id for x in ast.walk(function) if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Load)}
    calls = reachable_calls(function, helper)
    return bool(calls) and all(_is_unused(function, call, names_read) for call in calls)


def _is_unused(function: ast.FunctionDef, call: ast.Call, names_read: set[str]) -> bool:
    for node in ast.walk(function):
        if isinstance(node, ast.Expr) and node.value is call:
            return True
        if isinstance(node, ast.NamedExpr) and node.value is call:
            return False
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is call:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if not all(isinstance(target, ast.Name | ast.Tuple | ast.List | ast.Starred) for target in targets):
                return False  # an attribute or an item: it may be read elsewhere
            names = [x.id for target in targets for x in ast.walk(target) if isinstance(x, ast.Name)]
            return not any(name in names_read for name in names)
    return False


def remove_statements(code: str, unwanted: Callable[[ast.stmt], bool]) -> str:
    """Return a program without some of its top-level statements; the other lines stay as they are.

    A program that does not parse is returned unchanged, but for empty lines at its ends.
    """
    lines = code.split("\n")
    for node in statements(code):
        if unwanted(node):
            decorators = getattr(node, "decorator_list", [])
            first = min([node.lineno, *(decorator.lineno for decorator in decorators)])
            last = node.end_lineno or first
            lines[first - 1 : last] = [""] * (last - first + 1)
    return "\n".join(lines).strip("\n")


def remove_names(code: str, names: Sequence[str]) -> str:
    """Return a program without the top-level definitions, assignments and imports of these names."""

    def defines_a_name(node: ast.stmt) -> bool:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            return node.name in names
        simple = isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign | ast.Import | ast.ImportFrom)
        return simple and any(binds(node, name) for name in names)

    return remove_statements(code, defines_a_name)


def join_programs(programs: Sequence[str]) -> str:
    """Concatenate programs, with `from __future__ import` lines first, where Python wants them."""
    lines = [line for program in programs for line in program.split("\n")]
    future = [line for line in lines if re.match(r"from +__future__ +import\b", line)]
    body = "\n".join(line for line in lines if line not in future).strip("\n")
    return "\n".join([*dict.fromkeys(future), body])
