"""Find the Python code in what a language model writes.

Models put code between fences, between sentences, or write nothing else. `extract_code` handles all three. It guesses only
where no fence says where the code is; a completion in which nothing looks like code gives the empty text. Fences are those of
`formats/fences.py`.
"""

from __future__ import annotations

import ast
import re
import warnings

from jmarl.envs.code.syntax import UNPARSABLE, parse_program, remove_statements, statements
from jmarl.envs.formats.fences import SPECIAL_TOKENS_AT_END, fenced_blocks, is_python

CODE_LINE = re.compile(r"(?:async def|def|class) +\w|import +\w|from +[\w.]+ +import\b|@\w|\w+ *(?::[^=]*)?=[^=]|[rR]?[\"']{3}")
DEFINITION_LINE = re.compile(r"(async def|def|class|@)")


def extract_code(completion: str) -> str:
    """Return the code of a completion, without top-level `assert` and `print`, which would be the model's own tests.

    With fences: all blocks of Python or of no language, joined; a last block that was cut off counts too. If one of them
    defines a function or class, only blocks that parse are used.
    Without fences: the whole text if it parses; else the first run of lines that parses and defines a function or class; else
    the lines from the first definition to the next line of prose.
    """
    text = SPECIAL_TOKENS_AT_END.sub("", completion.replace("\r\n", "\n").replace("\r", "\n"))
    blocks = fenced_blocks(text)
    if blocks:
        codes = [block.text for block in blocks if is_python(block.language)]
        if any(_defines(code) for code in codes):
            codes = [code for code in codes if parse_program(code) and not _has_only_values(code)]
        return _remove_tests("\n".join(codes))
    tree = parse_program(text)
    if tree is not None:
        return _remove_tests(text) if tree.body and not _has_only_values(text) else ""
    return _code_between_prose(text.split("\n"))


def _code_between_prose(lines: list[str]) -> str:
    starts = [i for i, line in enumerate(lines) if CODE_LINE.match(line)]
    for start in starts:
        code = _longest_program(lines[start:])
        if _defines(code):
            return _remove_tests(code)
    first = next((i for i in starts if DEFINITION_LINE.match(lines[i])), len(lines))
    stop = next((i for i in range(first + 1, len(lines)) if _is_prose(lines[i])), len(lines))
    return "\n".join(lines[first:stop]).rstrip()


def _defines(code: str) -> bool:
    return any(isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) for node in statements(code))


def _has_only_values(code: str) -> bool:
    """Return whether every statement is an expression: the output of an example, or words that happen to parse."""
    return all(isinstance(node, ast.Expr) for node in statements(code))


def _is_prose(line: str) -> bool:
    return bool(line.strip()) and not line[0].isspace() and not CODE_LINE.match(line) and line[0] not in "#)]}"


def _longest_program(lines: list[str]) -> str:
    """Return the longest prefix that parses, shortened before each line at which the parser fails."""
    while lines:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                ast.parse("\n".join(lines))
            return "\n".join(lines).rstrip()
        except SyntaxError as error:
            lines = lines[: min((error.lineno or 1) - 1, len(lines) - 1)]
            while lines and lines[-1].lstrip()[:1] in ("", "#"):  # thousands of blank lines would be parsed as often
                lines.pop()
        except UNPARSABLE:
            return ""
    return ""


def _remove_tests(code: str) -> str:
    def is_test(node: ast.stmt) -> bool:
        if isinstance(node, ast.Assert):
            return True
        return isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and ast.unparse(node.value.func) == "print"

    return remove_statements(code, is_test)
