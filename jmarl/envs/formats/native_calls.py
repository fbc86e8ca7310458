"""Read tool calls in the forms that models were taught.

    {"name": "f", "arguments": {"a": 1}}               Qwen, Hermes, Mistral; the arguments also as a text of JSON
    {"name": "f", "parameters": {"a": 1}}              Llama 3, and the examples in our prompts
    {"type": "function", "function": {...}}            one of these, wrapped
    <function=f>{"a": 1}</function>                    Llama 3.1
    <function=f><parameter=a>1</parameter></function>  Qwen3-Coder; a text where the schema allows one, JSON elsewhere
    [f(a=1), g(b="x")]                                 Llama 3.2 and 4
    f[ARGS]{"a": 1}                                    Mistral

Each text has one reading or none. A call with two values for one name, two sets of arguments or unknown fields is refused, and
a `ValueError` says what is wrong, for the agent that made it. Reading takes time proportional to the length.
"""

from __future__ import annotations

import ast
import json
import math
import re
import warnings
from collections import Counter
from collections.abc import Mapping
from typing import Any

MAX_CALL = 6000  # characters
MAX_BRACKETS = 64  # opening brackets of a call
MAX_DIGITS = 400  # of an integer
JSON_STRING = re.compile(r'"(?:[^"\\]|\\.)*+"?', re.DOTALL)
FORMAT_HINT = 'write <tool_call>{"name": "...", "parameters": {...}}</tool_call>'
FUNCTION_TAG = re.compile(r"<function=([^<>\s]{1,100})>(.*?)</function>", re.DOTALL)
_PARAMETER = re.compile(r"\s*<parameter=([^<>\s]{1,100})>((?:(?!<parameter=).)*?)</parameter>\s*", re.DOTALL)
_PYTHON_WORDS = {"true": True, "false": False, "null": None}

Schemas = Mapping[str, Mapping[str, Any]]  # tool -> JSON schema of its parameters
NameAndParameters = tuple[str, Any]


def read_json_call(text: str) -> NameAndParameters:
    """Return name and parameters of a call in JSON."""
    return call_of(_decode_whole(text))


def _decode_whole(text: str) -> Any:
    """Return the JSON value that a text is."""
    check_size(text := text.strip())
    value, end = decode_json(text, 0)
    if end < len(text):
        raise ValueError(f"the call is no JSON (text after it, {text[end : end + 40].strip()!r}): {FORMAT_HINT}")
    return value


def decode_json(text: str, start: int) -> tuple[Any, int]:
    """Return the JSON value that begins in a text at `start`, without blanks before it, and where it ends."""
    try:
        value, end = _DECODER.raw_decode(text, start)
    except json.JSONDecodeError as error:
        raise ValueError(f"the call is no JSON ({error.msg}, character {error.pos - start + 1}): {FORMAT_HINT}") from None
    except RecursionError:
        raise ValueError(f"the call has more than {MAX_BRACKETS} brackets") from None
    check_size(text[start:end])
    return value, end


def call_of(value: Any) -> NameAndParameters:
    """Return name and parameters of a decoded call."""
    if isinstance(value, dict) and isinstance(value.get("function"), dict) and set(value) <= {"function", "type", "id"}:
        value = value["function"]
    fields = set(value) - {"type", "id"} if isinstance(value, dict) else set()
    given = fields & {"parameters", "arguments"}
    if len(given) == 2:
        raise ValueError(f'the call has "parameters" and "arguments": {FORMAT_HINT}')
    if fields != {"name", *given} or not given or not isinstance(value["name"], str) or not _is_plain(value):
        raise ValueError(f'a call has "name", a text, and "parameters", and nothing else: {FORMAT_HINT}')
    parameters = value[given.pop()]
    return value["name"], _decode_whole(parameters) if isinstance(parameters, str) else parameters


def _is_plain(value: dict) -> bool:
    """Return whether the fields beside name and parameters say only that this is a call."""
    return value.get("type", "function") == "function" and isinstance(value.get("id", ""), str)


def read_function_tag(name: str, body: str, schemas: Schemas) -> NameAndParameters:
    """Return name and parameters of `<function=name>body</function>`."""
    if len(body := body.strip()) > MAX_CALL:
        raise ValueError(f"the call has {len(body)} characters: at most {MAX_CALL}")
    if body.startswith("{"):
        return name, _decode_whole(body)
    properties = (schemas.get(name) or {}).get("properties") or {}
    pairs, position = [], 0
    while position < len(body):
        match = _PARAMETER.match(body, position)
        if match is None:
            raise ValueError(
                f"between <function={name}> and </function> stand JSON or <parameter=...>...</parameter>, got "
                f"{body[position : position + 40]!r}"
            )
        pairs.append((match[1], _typed(_without_line_ends(match[2]), properties.get(match[1]) or {})))
        position = match.end()
    return name, unique_names(pairs)


def _without_line_ends(text: str) -> str:
    return text.removeprefix("\r").removeprefix("\n").removesuffix("\n").removesuffix("\r")


def _typed(text: str, schema: Mapping[str, Any]) -> Any:
    """Return a value of a schema: the text where the schema allows texts, else the JSON that it is."""
    kinds = schema.get("type", [])
    if "string" in ([kinds] if isinstance(kinds, str) else kinds) or text in schema.get("enum", ()):
        return text
    try:
        return _decode_whole(text)
    except ValueError:
        return text  # the check of the schema says what is wrong


def read_python_calls(text: str) -> list[NameAndParameters]:
    """Return the calls of a list in Python, `[f(a=1), g(b="x")]`."""
    check_size(text)
    try:
        with warnings.catch_warnings():  # Python warns of some escapes in strings
            warnings.simplefilter("ignore")
            tree = ast.parse(text.strip(), mode="eval").body
        calls = tree.elts if isinstance(tree, ast.List) else []
        return [_read_python_call(call) for call in calls]
    except (SyntaxError, TypeError, RecursionError, MemoryError) as error:
        raise ValueError(f"the calls are no list of Python calls ({error})") from None


def _read_python_call(node: ast.expr) -> NameAndParameters:
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name | ast.Attribute) or node.args:
        raise ValueError("write [name(argument=value, ...)], with a name for every argument")
    pairs = [(keyword.arg, _literal(keyword.value)) for keyword in node.keywords]
    if any(name is None for name, _ in pairs):
        raise ValueError("write [name(argument=value, ...)], without **")
    return ast.unparse(node.func), unique_names(pairs)  # type: ignore[arg-type]


def _literal(node: ast.expr) -> Any:
    """Return a literal value that JSON has too."""
    if isinstance(node, ast.Name) and node.id in _PYTHON_WORDS:
        return _PYTHON_WORDS[node.id]
    if isinstance(node, ast.List):
        return [_literal(entry) for entry in node.elts]
    if isinstance(node, ast.Dict):
        keys = [key.value if isinstance(key, ast.Constant) else None for key in node.keys]
        if not all(isinstance(key, str) for key in keys):
            raise ValueError("the names of an object are texts")
        return unique_names(list(zip(map(str, keys), map(_literal, node.values), strict=True)))
    try:
        value = ast.literal_eval(node)
    except ValueError:  # its text has the address of an object
        raise ValueError(f"{ast.unparse(node)[:40]} is no value of JSON") from None
    if isinstance(value, int) and abs(value) >= 10**MAX_DIGITS:
        raise ValueError(f"a number of more than {MAX_DIGITS} digits")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError("a number is too large")
    if not isinstance(value, str | int | float | None):
        raise ValueError(f"{ast.unparse(node)[:40]} is no value of JSON")
    return value


def check_size(text: str) -> None:
    if len(text) > MAX_CALL:
        raise ValueError(f"the call has {len(text)} characters: at most {MAX_CALL}")
    if len(re.findall(r"[\[{(]", JSON_STRING.sub("", text))) > MAX_BRACKETS:
        raise ValueError(f"the call has more than {MAX_BRACKETS} brackets")


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is no number of JSON")  # NaN, Infinity


def _parse_int(text: str) -> int:
    if len(text) > MAX_DIGITS:
        raise ValueError(f"a number of {len(text)} digits: at most {MAX_DIGITS}")
    return int(text)


def _parse_finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {text[:40]} is too large")
    return value


def unique_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        repeated, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise ValueError(f"the name {repeated[:40]!r} stands twice in an object")
    return fields


_DECODER = json.JSONDecoder(
    object_pairs_hook=unique_names, parse_constant=_refuse_constant, parse_int=_parse_int, parse_float=_parse_finite
)
