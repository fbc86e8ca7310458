"""Parse the function calls in a text, compare them with the expected ones, and score a team's calls.

Formats. Python: `name(argument="text", other=3)`, one per line or several in a list. JSON: `{"name": ..., "arguments": {...}}`
(or `parameters`), alone, in a list or in `<tool_call>` tags; the arguments may be a string of JSON, and the object may be
wrapped in `{"function": ...}`. The other forms that models were taught are read as in `formats/native_calls.py`. These are
ignored: special tokens such as `<|python_tag|>` and `[TOOL_CALLS]`; prose around a fence; list marks, asterisks, backticks and
`Agent 1:` around a line; comments after it. Positional arguments get their names from the function's schema. Of each text the
first 8,000 characters and 32 calls are read. A call is dropped if it has a value that JSON does not have, that is nested more
than 16 deep, or an integer of more than 128 bits.

Comparison. Two values are equal if they are equal numbers (3 and 3.0, but not true and 1), strings that differ only in case and
white space, or lists and objects of equal values. The expected values of an argument are a list, one of which must be met; if
"" is among them, the argument may be left out.

The formula of the reward is in `function_calling.py`. Left out: calls nested in arguments of other calls.
"""

import ast
import json
import re
import warnings
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import linear_sum_assignment

from jmarl.envs.formats.native_calls import FUNCTION_TAG, Schemas, decode_json, read_function_tag, unique_names

MAX_TEXT, MAX_CALLS, MAX_DEPTH, MAX_BITS = 8000, 32, 16, 128
UNREADABLE = (ValueError, TypeError, SyntaxError, RecursionError, MemoryError)
JSON_WORDS = {"true": True, "false": False, "null": None}
SEPARATOR = re.compile(
    r"```(?:[\w-]{1,20}(?=[ \t]{0,9}\n)|(?:json|python|py|text)(?=\s))?|</?tool_call>|<\|[a-z_]{1,30}\|>"
    r"|<(?:/s|eos|end_of_turn)>|\[TOOL_CALLS\]"
)
MISTRAL_CALL = re.compile(r"(?<![\w.])([A-Za-z_][\w.-]{0,99})\[ARGS\](?=\s{0,9}\{)")
LINE_MARK = re.compile(
    r"[ \t`*]*(?:[-•][ \t]+|[0-9]{1,3}[.)][ \t]+)?[ \t`*]*(?:[Aa]gent[ \t]{0,3}[0-9]{0,3}[ \t]{0,3}:)?[ \t`*]*"
)
WEIGHTS = {
    "parse": 0.05,
    "names": 0.25,
    "arguments": 0.35,
    "count": 0.10,
    "balance": 0.15,
    "exact": 0.20,
    "overlap": -0.20,
    "lazy": -0.15,
    "extra": -0.05,
    "duplicate": -0.05,
}
CLAMP = (-0.4, 1.2)  # as published
ATTAINABLE = (-0.25, 1.10)  # by sums of the terms
ParameterNames = Mapping[str, Sequence[str]]  # function -> names of its arguments, in order


class FunctionCall(NamedTuple):
    """A call that an agent wrote."""

    name: str
    arguments: dict[str, Any]


class ExpectedCall(NamedTuple):
    """A call that a request needs."""

    name: str
    arguments: dict[str, list]  # allowed values; with "" among them the argument may be left out


# Parsing


def read_calls(text: str, parameters: ParameterNames, schemas: Schemas = {}) -> list[FunctionCall]:  # noqa: B006
    """Return the calls in a text. Functions that are not in `parameters` are read too.

    schemas: of the arguments of the functions, for calls that write every value as a text.
    """

    def as_json(function: re.Match[str]) -> str:
        try:
            name, arguments = read_function_tag(function[1], function[2], schemas)
        except ValueError:
            return "\n"
        return "\n" + json.dumps({"name": name, "arguments": arguments}) + "\n"

    text = FUNCTION_TAG.sub(as_json, text[:MAX_TEXT])
    blocks = [_clean_lines(block) for block in SEPARATOR.split(_mistral_as_json(text))]
    calls = _read_block([line for block in blocks for line in block], parameters)
    if not calls:  # not one list of calls: read block by block, and line by line where a block is not readable either
        for block in blocks:
            calls += _read_block(block, parameters) or [call for line in block for call in _read(line, parameters)]
    return calls[:MAX_CALLS]


def _mistral_as_json(text: str) -> str:
    """Write calls such as `name[ARGS]{...}` as objects of JSON."""
    written, position = [], 0
    while call := MISTRAL_CALL.search(text, position):
        written.append(text[position : call.start()])
        try:
            arguments, position = decode_json(text, text.index("{", call.end()))
            written.append("\n" + json.dumps({"name": call[1], "arguments": arguments}) + "\n")
        except ValueError:
            position = call.end()
    return "".join([*written, text[position:]])


def _clean_lines(text: str) -> list[str]:
    """Return the lines that are not empty, without marks around calls."""
    lines = [LINE_MARK.sub("", line, count=1).rstrip(" \t`*") for line in text.splitlines()]
    return [line for line in lines if line.strip()]


def _read_block(lines: Sequence[str], parameters: ParameterNames) -> list[FunctionCall]:
    """Read lines that are nothing but calls, or that contain a list of calls."""
    text = "\n".join(lines)
    in_brackets = text[text.find("[") : text.rfind("]") + 1]
    return _read(text, parameters) or (_read(in_brackets, parameters) if in_brackets != text else [])


def _read(text: str, parameters: ParameterNames) -> list[FunctionCall]:
    """Read a text that is nothing but calls; return no calls if it is something else."""
    text = text.rstrip(",; ")
    if text[:1] in ("{", "["):
        try:
            return _from_json(json.loads(text, object_pairs_hook=unique_names), 0)
        except UNREADABLE:
            if text[0] == "{":
                return []  # a list may still be Python
    if ")" not in text:
        return []
    try:
        with warnings.catch_warnings():  # Python warns of some escapes in strings
            warnings.simplefilter("ignore")
            body = ast.parse(text).body
    except UNREADABLE:
        return []
    values = [statement.value for statement in body if isinstance(statement, ast.Expr)]
    nodes = [node for value in values for node in (value.elts if isinstance(value, ast.List | ast.Tuple) else [value])]
    return [call for node in nodes if isinstance(node, ast.Call) for call in _from_python(node, parameters)]


def _from_json(value: Any, depth: int) -> list[FunctionCall]:
    if isinstance(value, list) and depth < 2:
        return [call for item in value for call in _from_json(item, depth + 1)]
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        value = value["function"]
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return []
    if {"arguments", "parameters"} <= set(value):
        return []
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments, object_pairs_hook=unique_names)
        except UNREADABLE:
            return []
    return [FunctionCall(value["name"], arguments)] if isinstance(arguments, dict) and _is_allowed(arguments) else []


def _from_python(node: ast.Call, parameters: ParameterNames) -> list[FunctionCall]:
    """Return the call in a list; an empty list if it has a value that JSON does not have."""
    try:
        name = ast.unparse(node.func)
        names = list(parameters.get(name, ()))[: len(node.args)]
        pairs = [*zip(names, node.args, strict=True), *((keyword.arg, keyword.value) for keyword in node.keywords)]
        arguments = unique_names([(key, _literal(value)) for key, value in pairs])  # type: ignore[misc]
    except UNREADABLE:
        return []
    is_name = all(part.isidentifier() for part in name.split("."))
    if not is_name or None in arguments or not _is_allowed(arguments):  # None: **options
        return []
    return [FunctionCall(name, arguments)]  # type: ignore[arg-type]


def _literal(node: ast.expr) -> Any:
    if isinstance(node, ast.Name) and node.id in JSON_WORDS:
        return JSON_WORDS[node.id]
    return ast.literal_eval(node)


def _is_allowed(value: Any, depth: int = 0) -> bool:
    """Return whether JSON has such a value, and it is neither too deep nor too large."""
    if depth > MAX_DEPTH:
        return False
    if isinstance(value, int):
        return value.bit_length() <= MAX_BITS
    if isinstance(value, list | tuple):
        return all(_is_allowed(item, depth + 1) for item in value)
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_allowed(item, depth + 1) for key, item in value.items())
    return value is None or isinstance(value, float | str)


# Comparison


def canonical(value: Any) -> Hashable:
    """Return a key that is the same for equal values."""
    if isinstance(value, str):
        return "text", " ".join(value.casefold().split())
    if value is None or isinstance(value, bool):
        return "word", value
    if isinstance(value, int | float):
        return "number", value if value == value else "nan"
    if isinstance(value, dict):
        return "object", frozenset((key, canonical(item)) for key, item in value.items())
    return "list", tuple(canonical(item) for item in value)


def similarity(call: FunctionCall, expected: ExpectedCall) -> float:
    """Return the share of right arguments among the arguments of either call; 0 for another function."""
    if call.name != expected.name:
        return 0.0
    num_right = sum(
        canonical(call.arguments[name]) in map(canonical, values) if name in call.arguments else "" in values
        for name, values in expected.arguments.items()
    )
    num_arguments = len(expected.arguments.keys() | call.arguments.keys())
    return num_right / num_arguments if num_arguments else 1.0


# Scoring


def score(
    calls: Sequence[Sequence[FunctionCall]], expected: Sequence[ExpectedCall]
) -> tuple[dict[str, float], list[FunctionCall]]:
    """Score the calls of a team.

    Args:
        calls: of each agent [N].
        expected: calls that the request needs; at least one.

    Returns:
        The terms of the reward in [0, 1], by the names of `WEIGHTS`, and the calls of all agents without repetitions.
    """
    by_agent = [{(call.name, canonical(call.arguments)): call for call in own} for own in calls]
    merged = {key: call for own in by_agent for key, call in own.items()}
    counts = [len(own) for own in by_agent]  # distinct calls of each agent
    n, m, num_written = len(expected), len(merged), sum(map(len, calls))
    common_names = Counter(call.name for call in merged.values()) & Counter(call.name for call in expected)
    similarities = np.array([[similarity(call, target) for target in expected] for call in merged.values()]).reshape(m, n)
    best_pairs = similarities[linear_sum_assignment(similarities, maximize=True)]
    even_counts = [(n + agent) // len(counts) for agent in range(len(counts))]
    imbalance = sum(abs(count - even) for count, even in zip(sorted(counts), even_counts, strict=True))
    terms = {
        "parse": float(m > 0),
        "names": 2 * sum(common_names.values()) / (m + n),
        "arguments": float(best_pairs.sum()) / n,
        "count": max(0.0, 1 - abs(m - n) / n),
        "balance": max(0.0, 1 - imbalance / n),
        "exact": float(m == n and bool((best_pairs == 1).all())),
        "overlap": min(1.0, (sum(counts) - m) / n),
        "lazy": sum(not own for own in calls) / len(calls),
        "extra": min(1.0, max(0, m - n) / n),
        "duplicate": min(1.0, (num_written - m) / n),
    }
    return terms, list(merged.values())


def reward_of(terms: Mapping[str, float]) -> float:
    """Return the weighted sum of the terms, clamped."""
    total = sum(WEIGHTS[name] * value for name, value in terms.items())
    return min(max(total, CLAMP[0]), CLAMP[1])
