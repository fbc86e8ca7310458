"""Load data sets of programming problems as items of the code environments, from the hub or a local file of the same fields.

An item is a dict with `task_id`, `prompt`, `entry_point`, `test` (hidden), `setup` (trusted code that runs before the tests, in
the process of the tests) and `setup_program` (code before the team's program: imports that the problem gives). ClassEval items
have other fields (`classeval_item`).

No prompt contains what a test expects. MBPP's problems do not name their function; the usual prompts show a test for that. Here
the prompt gives the signature of the function instead.
"""

import ast
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from jmarl.envs.code import syntax
from jmarl.envs.data import load_rows


class CodeSource(NamedTuple):
    """Where a data set is, and how to turn a row into an item."""

    hub: str
    config: str | None
    split: str
    fields: tuple[str, ...]
    to_item: Callable[[dict], dict]


def load_items(name: str, split: str | None = None, path: str | Path | None = None, limit: int | None = None) -> list[dict]:
    """Load the items of a data set.

    Args:
        name: humaneval, coophumaneval, mbpp, mbpp_sanitized or mbpp_openmlrl; classeval for `CodeCompletion`.
        split: of the hub; default: the one in `SOURCES`.
        path: a file to read instead of the hub, as `read_rows` reads it.
        limit: number of rows to read; default: all.

    Raises:
        ValueError: an unknown name, a missing column or an empty field.
        FileNotFoundError: there is no such file.
    """
    if name not in SOURCES:
        raise ValueError(f"unknown data set {name!r}: choose {', '.join(SOURCES)}")
    source = SOURCES[name]
    rows = load_rows(source.hub, source.fields, config=source.config, split=split or source.split, path=path, limit=limit)
    return [source.to_item(row) for row in rows]


def humaneval_item(row: dict) -> dict:
    """Convert a row of HumanEval or a set of its shape: the prompt is the head of a program, the test is `check(candidate)`."""
    head = syntax.remove_names(row["prompt"], [row["entry_point"]])
    return {
        "task_id": str(row["task_id"]),
        "prompt": row["prompt"],
        "entry_point": row["entry_point"],
        "test": row["test"],
        "setup": row["prompt"] if syntax.parse_program(row["prompt"]) else "",
        "setup_program": head if head != row["prompt"] else "",
    }


def mbpp_item(row: dict) -> dict:
    """Convert a row of MBPP: a text, a reference solution, and asserts that call it."""
    test = "\n".join([row.get("test_setup_code") or "", *row["test_list"], *(row.get("challenge_test_list") or [])])
    test_tree = syntax.parse_program(test) or ast.Module([], [])
    names = {node.id for node in ast.walk(test_tree) if isinstance(node, ast.Name)}
    tested = [
        node
        for node in syntax.statements(row["code"])
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name in names
    ]
    functions = [node for node in tested if isinstance(node, ast.FunctionDef)]
    if not functions:
        raise ValueError(f"task {row['task_id']}: its tests call no function of its reference solution; remove the row")
    signatures = "\n".join(map(signature, tested))
    return {
        "task_id": str(row["task_id"]),
        "prompt": f"{(row.get('text') or row.get('prompt') or '').strip()}\n\n{signatures}",
        "entry_point": functions[-1].name,
        "test": test,
        "setup": "\n".join(row.get("test_imports") or []),
        "setup_program": "",
    }


def classeval_item(row: dict) -> dict:
    """Convert a row of ClassEval: the skeleton of a class, its constructor, and for each method whether it takes only `self`.

    Solutions and tests of single methods, which the rows also have, are dropped.
    """
    methods = []
    for method in row["methods_info"]:
        definition = re.search(r"def\s+\w+\(([^)]*)\)", method["method_description"])
        parameters = definition.group(1).split(",") if definition else []
        names = [name.strip() for name in parameters if name.strip()]
        methods.append({"name": method["method_name"], "only_self": names == ["self"]})
    return {
        "task_id": str(row["task_id"]),
        "prompt": row["skeleton"].strip().removeprefix("'''").strip(),
        "methods": methods,
        "constructor": row["class_constructor"].rstrip() + ("" if "def " in row["class_constructor"] else "\n    pass"),
        "imports": "\n".join(row["import_statement"]),
        "test": row["test"],
    }


def signature(node: ast.FunctionDef | ast.ClassDef) -> str:
    """Return the head of a function, or of a class with its constructor, with `...` for a body."""
    if isinstance(node, ast.FunctionDef):
        return f"def {node.name}({ast.unparse(node.args)}): ..."
    heads = [f"    {signature(x)}" for x in node.body if isinstance(x, ast.FunctionDef) and x.name == "__init__"]
    return "\n".join([f"class {node.name}:", *(heads or ["    ..."])])


HUMANEVAL_FIELDS = ("task_id", "prompt", "test", "entry_point")
CLASSEVAL_FIELDS = ("task_id", "skeleton", "test", "class_constructor", "methods_info")
MBPP, MBPP_FIELDS = "google-research-datasets/mbpp", ("task_id", "text", "code", "test_list")
SOURCES = {
    "classeval": CodeSource("FudanSELab/ClassEval", None, "test", CLASSEVAL_FIELDS, classeval_item),
    "humaneval": CodeSource("openai/openai_humaneval", None, "test", HUMANEVAL_FIELDS, humaneval_item),
    "coophumaneval": CodeSource("OpenMLRL/CoopHumanEval", None, "test", HUMANEVAL_FIELDS, humaneval_item),
    "mbpp": CodeSource(MBPP, "full", "train", MBPP_FIELDS, mbpp_item),
    "mbpp_sanitized": CodeSource(MBPP, "sanitized", "train", ("task_id", "prompt", "code", "test_list"), mbpp_item),
    "mbpp_openmlrl": CodeSource("OpenMLRL/MBPP", None, "sanitized", HUMANEVAL_FIELDS, humaneval_item),
}
