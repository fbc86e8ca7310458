"""Function calls as models write them: read from a text, compared with what was wanted, and scored for a team.

A call is written as Python, `name(argument="text", other=3)`, one a line or several in a list, or as JSON,
`{"name": …, "arguments": {…}}` (or `parameters`), alone, in a list or in `<tool_call>` tags; its arguments may be a text of
JSON, and it may stand in `{"function": …}`. Prose around a fence, list marks, stars, backticks or `Agent 1:` around a line,
and a comment behind it do no harm. Arguments by position get their names from the function's schema. Of each text the first
8,000 characters and 32 calls are read; a call with a value that JSON has not, nested more than 16 deep or beyond 128 bits is
none.

Two values are the same if they are equal numbers (3 and 3.0, but not true and 1), texts that differ in case and white space
only, or lists and objects of such. What is wanted of an argument is a list of values, one of which has to be met; with "" among
them the argument may be left out.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import linear_sum_assignment

MAX_TEXT, MAX_CALLS, MAX_DEPTH, MAX_BITS = 8000, 32, 16, 128
UNREADABLE = (ValueError, TypeError, SyntaxError, RecursionError, MemoryError)
WORDS = {"true": True, "false": False, "null": None}
AROUND = re.compile(r"```(?:[\w-]{1,20}(?=[ \t]{0,9}\n)|(?:json|python|py|text)(?=\s))?|</?tool_call>")
MARK = re.compile(r"[ \t`*]*(?:[-•][ \t]+|[0-9]{1,3}[.)][ \t]+)?[ \t`*]*(?:[Aa]gent[ \t]{0,3}[0-9]{0,3}[ \t]{0,3}:)?[ \t`*]*")
WEIGHTS = {
    "parse": 0.05, "names": 0.25, "arguments": 0.35, "count": 0.10, "balance": 0.15, "exact": 0.20,
    "overlap": -0.20, "lazy": -0.15, "extra": -0.05, "duplicate": -0.05,
}  # fmt: skip
CLAMP = (-0.4, 1.2)
REACHED = (-0.25, 1.10)  # by sums of the terms


class Call(NamedTuple):
    name: str
    arguments: dict[str, Any]


class Wanted(NamedTuple):
    name: str
    arguments: dict[str, list]  # values of which one has to be met; with "" the argument may be left out


# Reading


def read_calls(text: str, parameters: Mapping[str, Sequence[str]]) -> list[Call]:
    """The calls in a text. parameters: of each function, the names of its arguments in their order."""
    blocks = [_lines(block) for block in AROUND.split(text[:MAX_TEXT])]
    found = _read_block([line for block in blocks for line in block], parameters)
    for block in () if found else blocks:
        found += _read_block(block, parameters) or [call for line in block for call in _read(line, parameters)]
    return found[:MAX_CALLS]


def _lines(text: str) -> list[str]:
    """Those that are not empty, without what stands around calls."""
    lines = [MARK.sub("", line, count=1).rstrip(" \t`*") for line in text.splitlines()]
    return [line for line in lines if line.strip()]


def _read_block(lines: Sequence[str], parameters: Mapping[str, Sequence[str]]) -> list[Call]:
    """Of lines that are together nothing but calls, or have a list of them."""
    whole = "\n".join(lines)
    inner = whole[whole.find("[") : whole.rfind("]") + 1]
    return _read(whole, parameters) or (_read(inner, parameters) if inner != whole else [])


def _read(text: str, parameters: Mapping[str, Sequence[str]]) -> list[Call]:
    """Of a text that is nothing but calls; none where it is something else."""
    text = text.rstrip(",; ")
    if text[:1] in ("{", "["):
        try:
            return _of_json(json.loads(text), 0)
        except UNREADABLE:
            if text[0] == "{":
                return []
    if ")" not in text:
        return []
    try:
        with warnings.catch_warnings():  # of escapes in texts
            warnings.simplefilter("ignore")
            body = ast.parse(text).body
    except UNREADABLE:
        return []
    nodes = [statement.value for statement in body if isinstance(statement, ast.Expr)]
    nodes = [n for node in nodes for n in (node.elts if isinstance(node, ast.List | ast.Tuple) else [node])]
    return [call for node in nodes if isinstance(node, ast.Call) for call in _of_python(node, parameters)]


def _of_json(value: Any, depth: int) -> list[Call]:
    if isinstance(value, list) and depth < 2:
        return [call for item in value for call in _of_json(item, depth + 1)]
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        value = value["function"]
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return []
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except UNREADABLE:
            return []
    return [Call(value["name"], arguments)] if isinstance(arguments, dict) and _fits(arguments) else []


def _of_python(node: ast.Call, parameters: Mapping[str, Sequence[str]]) -> list[Call]:
    """The call; none if it has what JSON has not."""
    try:
        name = ast.unparse(node.func)
        names = [*parameters.get(name, ())][: len(node.args)]
        pairs = [*zip(names, node.args, strict=True), *((keyword.arg, keyword.value) for keyword in node.keywords)]
        arguments = {
            key: WORDS[of.id] if isinstance(of, ast.Name) and of.id in WORDS else ast.literal_eval(of) for key, of in pairs
        }
    except UNREADABLE:
        return []
    named = all(part.isidentifier() for part in name.split("."))
    return [Call(name, arguments)] if named and None not in arguments and _fits(arguments) else []  # type: ignore[arg-type]


def _fits(value: Any, depth: int = 0) -> bool:
    """Whether JSON has such a value, and it is neither deep nor huge."""
    if depth > MAX_DEPTH:
        return False
    if isinstance(value, int):
        return value.bit_length() <= MAX_BITS
    if isinstance(value, list | tuple):
        return all(_fits(item, depth + 1) for item in value)
    if isinstance(value, dict):
        return all(isinstance(key, str) and _fits(item, depth + 1) for key, item in value.items())
    return value is None or isinstance(value, float | str)


def canonical(value: Any) -> Hashable:
    """Equal for values that are the same."""
    if isinstance(value, str):
        return "text", " ".join(value.casefold().split())
    if value is None or isinstance(value, bool):
        return "word", value
    if isinstance(value, int | float):
        return "number", value if value == value else "nan"
    if isinstance(value, dict):
        return "object", frozenset((key, canonical(item)) for key, item in value.items())
    return "list", tuple(canonical(item) for item in value)


def key_of(call: Call) -> Hashable:
    return call.name, canonical(call.arguments)


# Scoring


def similarity(call: Call, wanted: Wanted) -> float:
    """The share of the arguments, of both calls together, that are as wanted; 0 for another function."""
    if call.name != wanted.name:
        return 0.0
    met = sum(
        canonical(call.arguments[name]) in map(canonical, values) if name in call.arguments else "" in values
        for name, values in wanted.arguments.items()
    )
    arguments = len(wanted.arguments.keys() | call.arguments.keys())
    return met / arguments if arguments else 1.0


def score(calls: Sequence[Sequence[Call]], wanted: Sequence[Wanted]) -> tuple[dict[str, float], list[Call]]:
    """Of each agent's calls [N]: the terms of the reward as shares of 0 to 1, named as in `WEIGHTS`; and all calls merged."""
    own = [{key_of(call): call for call in of} for of in calls]
    merged = {key: call for of in own for key, call in of.items()}
    n, made, written = len(wanted), len(merged), sum(map(len, calls))
    same = sum((Counter(call.name for call in merged.values()) & Counter(of.name for of in wanted)).values())
    alike = np.array([[similarity(call, of) for of in wanted] for call in merged.values()]).reshape(made, n)
    pairs = alike[linear_sum_assignment(alike, maximize=True)]
    even = [(n + agent) // len(own) for agent in range(len(own))]
    off = sum(abs(a - b) for a, b in zip(sorted(map(len, own)), even, strict=True))
    return {
        "parse": float(made > 0),
        "names": 2 * same / (made + n),
        "arguments": float(pairs.sum()) / n,
        "count": max(0.0, 1 - abs(made - n) / n),
        "balance": max(0.0, 1 - off / n),
        "exact": float(made == n and bool((pairs == 1).all())),
        "overlap": min(1.0, (sum(map(len, own)) - made) / n),
        "lazy": sum(not of for of in own) / len(own),
        "extra": min(1.0, max(0, made - n) / n),
        "duplicate": min(1.0, (written - made) / n),
    }, list(merged.values())


def reward_of(terms: Mapping[str, float]) -> float:
    total = sum(WEIGHTS[name] * share for name, share in terms.items())
    return min(max(total, CLAMP[0]), CLAMP[1])
