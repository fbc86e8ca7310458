"""Data sets of programming problems as items of `code_generation`, from the hub or from a local file of the same fields.

An item has `prompt`, `entry_point`, `test` (hidden), `setup` (trusted code that runs before the tests, on their side),
`setup_program` (what stands before the team's program: imports that the problem gives) and `task_id`. What tests expect is in
no prompt: of MBPP, whose problems do not name their function, the prompt gives its signature instead of the usual examples.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from jmarl.envs.code import text as code_text
from jmarl.envs.data import load_rows


class Source(NamedTuple):
    """Where a data set is, and how a row becomes an item."""

    hub: str
    config: str | None
    split: str
    fields: tuple[str, ...]
    item: Callable[[dict], dict]


def load_items(name: str, split: str | None = None, path: str | Path | None = None, limit: int | None = None) -> list[dict]:
    """The items of a data set: humaneval, coophumaneval, mbpp, mbpp_sanitized or mbpp_openmlrl, and classeval for
    `code_completion`.

    split: one of the hub's; path: a JSON Lines file (also .gz) to read instead of the hub; a features.json beside it says the
    types of columns that are empty in whole files.
    """
    if name not in SOURCES:
        raise ValueError(f"unknown data set {name!r}: choose {', '.join(SOURCES)}")
    source = SOURCES[name]
    how: dict[str, Any] = dict(config=source.config, split=split or source.split, path=path, limit=limit)
    return [source.item(row) for row in load_rows(source.hub, source.fields, **how)]


def of_check(row: dict) -> dict:
    """HumanEval and what is shaped like it: a prompt that is the head of a program, and `check(candidate)`."""
    head = code_text.without(row["prompt"], [row["entry_point"]])
    return {
        "task_id": str(row["task_id"]),
        "prompt": row["prompt"],
        "entry_point": row["entry_point"],
        "test": row["test"],
        "setup": row["prompt"] if code_text.parsed(row["prompt"]) else "",
        "setup_program": head if head != row["prompt"] else "",
    }


def of_mbpp(row: dict) -> dict:
    """MBPP: a text, a reference, and asserts that call it."""
    test = "\n".join([row.get("test_setup_code") or "", *row["test_list"], *(row.get("challenge_test_list") or [])])
    used = {node.id for node in ast.walk(code_text.parsed(test) or ast.Module([], [])) if isinstance(node, ast.Name)}
    made = [
        node for node in code_text.tops(row["code"]) if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name in used
    ]
    functions = [node for node in made if isinstance(node, ast.FunctionDef)]
    if not functions:
        raise ValueError(f"task {row['task_id']}: no function of the reference is called by its tests")
    asked = "\n".join(map(signature, made))
    return {
        "task_id": str(row["task_id"]),
        "prompt": f"{(row.get('text') or row.get('prompt') or '').strip()}\n\n{asked}",
        "entry_point": functions[-1].name,
        "test": test,
        "setup": "\n".join(row.get("test_imports") or []),
        "setup_program": "",
    }


def of_classeval(row: dict) -> dict:
    """ClassEval: the skeleton of a class, its constructor, and what its methods take. Solutions and tests of single methods,
    which the rows have too, stay out."""
    methods = []
    for method in row["methods_info"]:
        takes = re.search(r"def\s+\w+\(([^)]*)\)", method["method_description"])
        arguments = [x.strip() for x in (takes.group(1) if takes else "").split(",") if x.strip()]
        methods.append({"name": method["method_name"], "only_self": arguments == ["self"]})
    return {
        "task_id": str(row["task_id"]),
        "prompt": row["skeleton"].strip().removeprefix("'''").strip(),
        "methods": methods,
        "constructor": row["class_constructor"].rstrip() + ("" if "def " in row["class_constructor"] else "\n    pass"),
        "imports": "\n".join(row["import_statement"]),
        "test": row["test"],
    }


def signature(node: ast.FunctionDef | ast.ClassDef) -> str:
    """The head of a function or class, without what it does."""
    if isinstance(node, ast.FunctionDef):
        return f"def {node.name}({ast.unparse(node.args)}): ..."
    heads = [f"    {signature(x)}" for x in node.body if isinstance(x, ast.FunctionDef) and x.name == "__init__"]
    return "\n".join([f"class {node.name}:", *(heads or ["    ..."])])


SOURCES = {
    "classeval": Source(
        "FudanSELab/ClassEval", None, "test", ("task_id", "skeleton", "test", "class_constructor", "methods_info"), of_classeval
    ),
    "humaneval": Source("openai/openai_humaneval", None, "test", ("task_id", "prompt", "test", "entry_point"), of_check),
    "coophumaneval": Source("OpenMLRL/CoopHumanEval", None, "test", ("task_id", "prompt", "test", "entry_point"), of_check),
    "mbpp": Source("google-research-datasets/mbpp", "full", "train", ("task_id", "text", "code", "test_list"), of_mbpp),
    "mbpp_sanitized": Source(
        "google-research-datasets/mbpp", "sanitized", "train", ("task_id", "prompt", "code", "test_list"), of_mbpp
    ),
    "mbpp_openmlrl": Source("OpenMLRL/MBPP", None, "sanitized", ("task_id", "prompt", "test", "entry_point"), of_check),
}
