"""Programs in what a model writes: finding the code, and what its functions do, decided on the syntax tree."""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Sequence

_FENCE = re.compile(r"^[ \t]*```[ \t]*([\w+-]*)[^\n]*\n(.*?)(?:^[ \t]*```[ \t]*$|\Z)", re.MULTILINE | re.DOTALL)
_STARTS = re.compile(r"(async def|def|class|import|from|@)\b|@")
_GOES_ON = re.compile(
    r"(async|def|class|import|from|if|elif|else|for|while|try|except|finally|with|return)\b|[@#)\]}'\"]|[\w.]+[^=\n]*="
)


def extract_code(completion: str) -> str:
    """The code of a completion: its fenced blocks of Python (or of no language) one after the other, a last one that was cut
    off too; without fences what follows the first line that begins like code, up to the first that does not."""
    fences = _FENCE.findall(completion)
    if fences:
        return "\n".join(body.rstrip() for language, body in fences if language.lower() in ("", "python", "py", "python3"))
    lines = completion.splitlines()
    first = next((i for i, line in enumerate(lines) if _STARTS.match(line)), len(lines))
    kept: list[str] = []
    for line in lines[first:]:
        if line.strip() and not line[0].isspace() and not _GOES_ON.match(line):
            break
        kept.append(line)
    return "\n".join(kept).rstrip()


def parsed(code: str) -> ast.Module | None:
    """The tree of a program; None if it is none."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def function(code: str, name: str) -> ast.FunctionDef | None:
    """The last function of this name at the top of a program; the last is the one that Python keeps."""
    found = [node for node in tops(code) if isinstance(node, ast.FunctionDef) and node.name == name]
    return found[-1] if found else None


def tops(code: str) -> Sequence[ast.stmt]:
    tree = parsed(code)
    return tree.body if tree else ()


def returns(code: str, name: str) -> bool:
    """Whether a function of this name is there and returns something. Of code that does not parse, whether it looks like that:
    a level for the form comes before the one for the syntax."""
    if parsed(code) is not None:
        of = function(code, name)
        return of is not None and any(isinstance(node, ast.Return) and node.value is not None for node in own_nodes(of))
    looks = re.search(rf"^([ \t]*)def[ \t]+{re.escape(name)}\b.*(?:\n(?:\1[ \t]+.*|[ \t]*))*", code, re.MULTILINE)
    return looks is not None and re.search(r"\breturn[ \t]+\S", looks.group()) is not None


def own_nodes(of: ast.FunctionDef) -> list[ast.AST]:
    """The nodes of a function without those of functions and classes inside it."""
    found, left = [], list[ast.AST](of.body)
    while left:
        node = left.pop()
        found.append(node)
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            left += ast.iter_child_nodes(node)
    return found


def calls(of: ast.AST, name: str) -> list[ast.Call]:
    """The calls of a function by its name, anywhere in a node."""
    return [x for x in ast.walk(of) if isinstance(x, ast.Call) and isinstance(x.func, ast.Name) and x.func.id == name]


def is_wrapper(of: ast.FunctionDef, name: str) -> bool:
    """Whether a function only hands its arguments on: `return aux(a, b)`, or the same by way of a variable."""
    body = [
        x
        for x in of.body
        if not (isinstance(x, ast.Expr) and isinstance(x.value, ast.Constant)) and not isinstance(x, ast.Pass)
    ]
    last = body[-1] if body else None
    if not isinstance(last, ast.Return) or last.value is None:
        return False
    value = last.value
    if len(body) == 2 and isinstance(value, ast.Name):
        first = body[0]
        targets = first.targets if isinstance(first, ast.Assign) else [first.target] if isinstance(first, ast.AnnAssign) else []
        if len(targets) != 1 or not isinstance(targets[0], ast.Name) or targets[0].id != value.id:
            return False
        value = first.value  # type: ignore[union-attr]
    elif len(body) != 1:
        return False
    if not (isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == name):
        return False
    handed = [*value.args, *(keyword.value for keyword in value.keywords)]
    return all(isinstance(x.value if isinstance(x, ast.Starred) else x, ast.Name | ast.Constant) for x in handed)


def ignores(of: ast.FunctionDef, name: str) -> bool:
    """Whether a function calls `name` and makes nothing of what it gets, in any of the calls: the value stands alone, or in a
    variable that is never read."""
    read = {x.id for x in ast.walk(of) if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Load)}
    made = calls(of, name)
    return bool(made) and all(_unused(of, call, read) for call in made)


def _unused(of: ast.FunctionDef, call: ast.Call, read: set[str]) -> bool:
    for node in ast.walk(of):
        if isinstance(node, ast.Expr) and node.value is call:
            return True
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.NamedExpr) and node.value is call:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [x for target in targets for x in ast.walk(target) if isinstance(x, ast.Name)]
            plain = all(isinstance(x, ast.Name | ast.Tuple | ast.List | ast.Starred) for x in targets)
            return plain and not isinstance(node, ast.NamedExpr) and not any(x.id in read for x in names)
    return False


def without(code: str, names: Sequence[str]) -> str:
    """A program without its functions and classes of these names; one that does not parse stays as it is."""
    tree = parsed(code)
    if tree is None or not any(getattr(node, "name", None) in names for node in tree.body):
        return code
    tree.body = [node for node in tree.body if getattr(node, "name", None) not in names]
    return ast.unparse(tree)
