"""Programs in what a model writes: finding the code, and what its functions do, decided on the syntax tree."""

from __future__ import annotations

import ast
import re
import textwrap
import warnings
from collections.abc import Callable, Sequence

_LANGUAGES = ("", "python", "py", "python3")
_STARTS = re.compile(r"(?:async def|def|class) +\w|import +\w|from +[\w.]+ +import\b|@\w|\w+ *(?::[^=]*)?=[^=]|[rR]?[\"']{3}")


def extract_code(completion: str) -> str:
    """The code of a completion, without asserts and prints at its top, which would be the model's own tests.

    With fences: their blocks of Python or of no language, one after the other, a last one that was cut off too; if one of them
    has a function or class, only those that parse. Without: all of it if it parses, else the first stretch of lines that parses
    and has a function or class, else what looks like code from its first such line on.
    """
    text = completion.replace("\r\n", "\n")
    blocks = [_block(part) for part in text.split("```")[1::2]]
    if blocks:
        codes = [code for language, code in blocks if language in _LANGUAGES]
        good = [code for code in codes if _defines(code)]
        codes = [code for code in codes if parsed(code) and not _only_values(code)] if good else codes
        return without_tests("\n".join(codes))
    if (tree := parsed(text)) is not None:
        return without_tests(text) if tree.body and not _only_values(text) else ""
    lines = text.split("\n")
    starts = [i for i, line in enumerate(lines) if _STARTS.match(line)]
    for start in starts:
        if _defines(code := _longest(lines[start:])):
            return without_tests(code)
    first = next((i for i in starts if re.match(r"(async def|def|class|@)", lines[i])), len(lines))
    stop = next((i for i in range(first + 1, len(lines)) if _prose(lines[i])), len(lines))
    return "\n".join(lines[first:stop]).rstrip()


def _block(part: str) -> tuple[str, str]:
    """Language and code of what stands between fences."""
    head, _, body = part.partition("\n")
    language = head.strip().lower()
    return (language, textwrap.dedent(body).rstrip()) if re.fullmatch(r"[\w+-]*", language) else ("", part.strip())


def _defines(code: str) -> bool:
    return any(isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) for node in tops(code))


def _only_values(code: str) -> bool:
    """No statement but values, such as the output of an example, or words that happen to parse."""
    return all(isinstance(node, ast.Expr) for node in tops(code))


def _prose(line: str) -> bool:
    return bool(line.strip()) and not line[0].isspace() and not _STARTS.match(line) and line[0] not in "#)]}"


def _longest(lines: list[str]) -> str:
    """The beginning of these lines that parses, cut before each line that a parser stumbles over."""
    while lines:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                ast.parse("\n".join(lines))
            return "\n".join(lines).rstrip()
        except SyntaxError as error:
            lines = lines[: min((error.lineno or 1) - 1, len(lines) - 1)]
        except (ValueError, RecursionError, MemoryError):
            return ""
    return ""


def without_tests(code: str) -> str:
    """A program without asserts and prints at its top."""

    def unwanted(node: ast.stmt) -> bool:
        printed = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and ast.unparse(node.value.func) == "print"
        return isinstance(node, ast.Assert) or printed

    return _cut(code, unwanted)


def _cut(code: str, unwanted: Callable[[ast.stmt], bool]) -> str:
    """A program without some of the statements at its top, everything else as it was; one that does not parse stays."""
    lines = code.split("\n")
    for node in tops(code):
        if unwanted(node):
            decorators = getattr(node, "decorator_list", [])
            start = min([node.lineno, *(x.lineno for x in decorators)])
            lines[start - 1 : node.end_lineno] = [""] * ((node.end_lineno or start) - start + 1)
    return "\n".join(lines).strip("\n")


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
    """Whether a function of this name is there and returns or yields something. Of code that does not parse, whether it looks
    like that: a level for the form comes before the one for the syntax."""
    if parsed(code) is not None:
        of = function(code, name)
        if of is None:
            return any(
                isinstance(node, ast.Assign) and isinstance(node.value, ast.Lambda) and binds(node, name) for node in tops(code)
            )
        kinds = ast.Yield | ast.YieldFrom
        return any(isinstance(x, kinds) or isinstance(x, ast.Return) and x.value is not None for x in own_nodes(of))
    looks = re.search(rf"^([ \t]*)def[ \t]+{re.escape(name)}\b.*(?:\n(?:\1[ \t]+.*|[ \t]*))*", code, re.MULTILINE)
    return looks is not None and re.search(r"\breturn[ \t]+\S", looks.group()) is not None


def binds(node: ast.AST, name: str) -> bool:
    """Whether a name gets a meaning anywhere in a node."""
    for x in ast.walk(node):
        if isinstance(x, ast.Name) and x.id == name and not isinstance(x.ctx, ast.Load):
            return True
        if isinstance(x, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and x.name == name:
            return True
        if isinstance(x, ast.arg) and x.arg == name:
            return True
        if isinstance(x, ast.alias) and (x.asname or x.name) in (name, "*"):
            return True
    return False


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
    """The calls of a function by its name, in what of a node can be reached: not after `return`, nor under `if False`."""
    found, left = [], [of]
    while left:
        node = left.pop()
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name:
            found.append(node)
        dead = ""
        if isinstance(node, ast.If | ast.While | ast.IfExp) and isinstance(node.test, ast.Constant):
            dead = "orelse" if node.test.value else "body"
        for field, value in ast.iter_fields(node):
            if field == dead:
                continue
            if isinstance(value, list):
                end = next(
                    (i for i, x in enumerate(value) if isinstance(x, ast.Return | ast.Raise | ast.Break | ast.Continue)),
                    len(value),
                )
                left += [x for x in value[: end + 1] if isinstance(x, ast.AST)]
            elif isinstance(value, ast.AST):
                left.append(value)
    return found


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
    """A program in which nothing at its top has one of these names; one that does not parse stays as it is."""

    def unwanted(node: ast.stmt) -> bool:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            return node.name in names
        single = isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign | ast.Import | ast.ImportFrom)
        return single and any(binds(node, name) for name in names)

    return _cut(code, unwanted)


def joined(parts: Sequence[str]) -> str:
    """Programs one after the other; what has to stand first (`from __future__ import`) does."""
    lines = [line for part in parts for line in part.split("\n")]
    future = [line for line in lines if re.match(r"from +__future__ +import\b", line)]
    return "\n".join([*dict.fromkeys(future), "\n".join(line for line in lines if line not in future).strip("\n")])


def compiles(code: str) -> bool:
    """Whether a program is one that Python would start."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compile(code, "<program>", "exec", dont_inherit=True)
        return True
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
