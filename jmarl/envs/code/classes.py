"""Assemble a class from the methods that several agents wrote, for `completion.py`."""

from __future__ import annotations

import ast
import textwrap
import zlib
from collections.abc import Sequence
from typing import NamedTuple

from jmarl.envs.code import syntax
from jmarl.envs.code.extraction import extract_code


class MergedClass(NamedTuple):
    """A class assembled from the completions of a team."""

    program: str  # empty if it is no valid program
    num_valid: int  # methods with a valid snippet
    num_overlaps: int  # methods that more than one agent wrote


def merge(completions: Sequence[str], item: dict) -> MergedClass:
    """Assemble the class of an item from the agents' completions [N]; the module docstring of `completion.py` has the rules."""
    method_names = [method["name"] for method in item["methods"]]
    parsed = [find_functions(text) for text in completions]
    # Of several functions of one name in a completion, the last counts, as in Python.
    by_agent = [{f.name: f for f in functions if has_body(f)} for functions, _ in parsed]
    candidates = [[functions[name] for functions in by_agent if name in functions] for name in method_names]
    choice = zlib.crc32("\0".join([str(item.get("task_id", "")), *completions]).encode("utf-8", "replace"))
    chosen = [snippets[choice % len(snippets)] for snippets in candidates if snippets]
    reserved = {*method_names, "__init__"}
    added = {name: f for functions in by_agent for name, f in functions.items() if name not in reserved}

    tree = ast.parse(item["constructor"])
    class_node = next(node for node in tree.body if isinstance(node, ast.ClassDef))
    class_node.body += [make_method(function) for function in (*chosen, *added.values())]
    tree.body[:0] = [node for _, imports in parsed for node in imports]
    try:
        program = syntax.join_programs([item["imports"], ast.unparse(ast.fix_missing_locations(tree))])
    except (ValueError, RecursionError, MemoryError):  # too long a number, or too deep an expression, to write out
        program = ""
    num_overlaps = sum(len(snippets) > 1 for snippets in candidates)
    return MergedClass(program if syntax.compiles(program) else "", len(chosen), num_overlaps)


def find_functions(completion: str) -> tuple[list[ast.FunctionDef], list[ast.stmt]]:
    """Return the functions in a completion, at its top level or in a class, and its imports.

    Methods may be indented as in a class. If the code as a whole does not parse, each `def` that parses alone counts.
    """
    code = extract_code(completion) or _extract_indented(completion)
    tree = syntax.parse_program(code)
    nodes = tree.body if tree else [node for block in _definition_blocks(code) for node in syntax.statements(block)]
    in_classes = [inner for node in nodes if isinstance(node, ast.ClassDef) for inner in node.body]
    functions = [node for node in [*nodes, *in_classes] if isinstance(node, ast.FunctionDef)]
    return functions, [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]


def _extract_indented(completion: str) -> str:
    """Return the code from the first indented method on."""
    lines = completion.replace("\r\n", "\n").split("\n")
    start = next((i for i, line in enumerate(lines) if line.lstrip().startswith(("def ", "@"))), len(lines))
    return extract_code(textwrap.dedent("\n".join(lines[start:])))


def _definition_blocks(code: str) -> list[str]:
    """Return each `def` with the lines that are indented below it."""
    blocks, lines = [], code.split("\n")
    for i, line in enumerate(lines):
        if line.lstrip().startswith("def "):
            body = range(i + 1, len(lines))
            stop = next((j for j in body if lines[j].strip() and _indent(lines[j]) <= _indent(line)), len(lines))
            blocks.append(textwrap.dedent("\n".join(lines[i:stop])))
    return blocks


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def has_body(function: ast.FunctionDef) -> bool:
    """Return whether a function does more than a docstring, `pass` or `...`."""
    return not all(syntax.has_no_effect(statement) for statement in function.body)


def make_method(function: ast.FunctionDef) -> ast.FunctionDef:
    """Mark a function as static if it takes neither `self` nor `cls` and has no decorator."""
    arguments = [*function.args.posonlyargs, *function.args.args]
    takes_object = bool(function.args.vararg) or bool(arguments and arguments[0].arg in ("self", "cls"))
    if not takes_object and not function.decorator_list:
        function.decorator_list = [ast.Name("staticmethod", ast.Load())]
    return function
