"""Code completion: a team fills in the methods of one class (ClassEval, arXiv 2308.01861).

Task: an item with the skeleton of a class (every method with its description, none with its body) and hidden unittest classes.
Data: ClassEval from the hub or a file; about a fifth of its classes are `eval`. Roles: every agent reads the skeleton and is
told its methods:

    arguments    those that take only `self` are agent 0's, the others agent 1's (with more agents, in turn of all but agent 0)
    alternate    in turn
    self_select  nobody is told: each writes what it chooses

Reward of a joint action, from 0 to 6, the same for all agents:

    2 (methods with a valid snippet) / (methods)  +  4 (tests passed) / (tests)
    - (methods that more than one agent wrote) / (methods)

A snippet is valid if it parses, has the method's name, and does something; one that takes neither `self` nor `cls` is static.
The class is put together from the given constructor, one snippet a method (of several, one chosen by a hash of task and texts),
and other methods that agents have added; imports come first. If that is no program, the reward is 0.

Metrics: `reward/snippets`, `reward/tests`, `reward/overlap`, `reward/solved`, `reward/limited`. Turns and feedback are those of
`code_generation`. Left out: functions outside of the class, and showing tests in feedback.
"""

from __future__ import annotations

import ast
import random
import textwrap
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from jmarl.envs.code import text as code_text
from jmarl.envs.code.data import load_items
from jmarl.envs.code.generation import CodeGeneration, Episode, Score, form_problems, share_passed
from jmarl.envs.data import split_rows
from jmarl.sandbox import ExecutionResult, Tests, unittests
from jmarl.sandbox.types import utf8

Partition = Literal["arguments", "alternate", "self_select"]
SNIPPETS, TESTS, OVERLAP = 2.0, 4.0, -1.0


class Merged(NamedTuple):
    """A class put together."""

    program: str  # empty if it could not be
    valid: int  # methods with a valid snippet
    overlap: int  # methods that more than one agent wrote


def partition(methods: Sequence[dict], how: str, num_agents: int) -> list[list[str]]:
    """The methods of each agent."""
    names = [method["name"] for method in methods]
    if how == "self_select" or num_agents == 1:
        return [list(names) for _ in range(num_agents)]
    parts: list[list[str]] = [[] for _ in range(num_agents)]
    others = 0
    for i, method in enumerate(methods):
        if how == "alternate":
            parts[i % num_agents].append(method["name"])
        elif method["only_self"]:
            parts[0].append(method["name"])
        else:
            parts[1 + others % (num_agents - 1)].append(method["name"])
            others += 1
    return parts


def functions_of(completion: str) -> tuple[list[ast.FunctionDef], list[ast.stmt]]:
    """Functions in a completion, at its top or in a class, and its imports. Methods may stand there indented, and where the
    whole does not parse, those that do by themselves count."""
    code = code_text.extract_code(completion) or _dedented(completion)
    tree = code_text.parsed(code)
    nodes = list(tree.body) if tree else [node for block in _blocks(code) for node in code_text.tops(block)]
    inner = [x for node in nodes if isinstance(node, ast.ClassDef) for x in node.body]
    found = [node for node in [*nodes, *inner] if isinstance(node, ast.FunctionDef)]
    return found, [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]


def _dedented(completion: str) -> str:
    lines = completion.replace("\r\n", "\n").split("\n")
    start = next((i for i, line in enumerate(lines) if line.lstrip().startswith(("def ", "@"))), len(lines))
    return code_text.extract_code(textwrap.dedent("\n".join(lines[start:])))


def _blocks(code: str) -> list[str]:
    """Each `def` with what is indented below it."""
    out, lines = [], code.split("\n")
    for i, line in enumerate(lines):
        if line.lstrip().startswith("def "):
            indent = len(line) - len(line.lstrip())
            rest = range(i + 1, len(lines))
            stop = next((j for j in rest if lines[j].strip() and len(lines[j]) - len(lines[j].lstrip()) <= indent), len(lines))
            out.append(textwrap.dedent("\n".join(lines[i:stop])))
    return out


def does_something(of: ast.FunctionDef) -> bool:
    """More than a description, `pass` or `...`."""
    return any(
        not isinstance(x, ast.Pass) and not (isinstance(x, ast.Expr) and isinstance(x.value, ast.Constant)) for x in of.body
    )


def bound(of: ast.FunctionDef) -> ast.FunctionDef:
    """A method that takes no object is static, whether it says so or not."""
    arguments = [*of.args.posonlyargs, *of.args.args]
    if not of.decorator_list and not of.args.vararg and (not arguments or arguments[0].arg not in ("self", "cls")):
        of.decorator_list = [ast.Name("staticmethod", ast.Load())]
    return of


def merge(completions: Sequence[str], item: dict) -> Merged:
    """The class of all agents together."""
    names = [method["name"] for method in item["methods"]]
    wrote = [functions_of(text) for text in completions]
    own = [{f.name: f for f in found if does_something(f)} for found, _ in wrote]  # the last of a name is the one that counts
    offers = {name: [functions[name] for functions in own if name in functions] for name in names}
    seed = zlib.crc32("\0".join([str(item.get("task_id", "")), *completions]).encode("utf-8", "replace"))
    chosen = [found[seed % len(found)] for found in offers.values() if found]
    added = {name: f for functions in own for name, f in functions.items() if name not in names and name != "__init__"}
    tree = ast.parse(item["constructor"])
    of_class = next(node for node in tree.body if isinstance(node, ast.ClassDef))
    of_class.body += [bound(f) for f in (*chosen, *added.values())]
    tree.body[:0] = [node for _, imports in wrote for node in imports]
    try:
        program = code_text.joined([item["imports"], ast.unparse(ast.fix_missing_locations(tree))])
    except (ValueError, RecursionError, MemoryError):  # a number or an expression that cannot be written down
        program = ""
    overlap = sum(len(found) > 1 for found in offers.values())
    return Merged(program if code_text.compiles(program) else "", len(chosen), overlap)


class ClassEval:
    """The classes of ClassEval as tasks. path: of a JSON Lines file to read instead of the hub."""

    def __init__(self, path: str | Path | None = None):
        self.path = path

    def tasks(self, split: str = "train", count: int = 100, seed: int = 0) -> list[dict]:
        of_split = split_rows(load_items("classeval", path=self.path), split, key=lambda item: item["task_id"])
        return random.Random(f"{seed} {split}").sample(of_split, min(count, len(of_split)))


class CodeCompletion(CodeGeneration):
    """The environment; see the module. partition: who writes what; generator: where `tasks` come from, by default ClassEval of
    the hub, or of the file data_path; other options are those of `CodeGeneration`."""

    def __init__(
        self,
        num_agents: int = 2,
        *,
        partition: Partition = "arguments",
        generator: Any = None,
        data_path: str | Path | None = None,
        **options: Any,
    ):
        if generator is not None and data_path is not None:
            raise ValueError("a generator and data_path are two sources of tasks: give one of them")
        if partition not in get_args(Partition):
            raise ValueError(f"partition={partition!r}: choose {', '.join(get_args(Partition))}")
        if options.get("shown_tests"):
            raise ValueError("shown_tests is for code_generation: unittest methods are not shown")
        super().__init__(num_agents, generator=generator or ClassEval(data_path), **options)
        self.partition = partition
        self.reward_range = (0.0, SNIPPETS + TESTS)

    def tests(self, item: dict) -> Tests:
        """The hidden tests of an item; refuses a malformed one with what it lacks."""
        missing = [name for name in ("prompt", "test", "constructor") if not str(item.get(name) or "").strip()]
        missing += ["methods"] * (not item.get("methods"))
        if missing:
            raise ValueError(
                f"item {item.get('task_id', item)!r:.80} has no {', '.join(missing)}: load ClassEval with load_items"
            )
        return unittests(item["test"], item["imports"])

    def program(self, texts: Sequence[str], item: dict) -> str:
        return merge(texts, item).program

    def written(self, completion: str) -> str:
        return utf8(completion)  # methods are looked for in all of it

    def scores(self, items: Sequence[dict], written: Sequence[Sequence[str]]) -> list[Score]:
        merged = [merge(texts, item) for item, texts in zip(items, written, strict=True)]
        run = [i for i, of in enumerate(merged) if of.program]
        results = self.sandbox.run_many([merged[i].program for i in run], [self.tests(items[i]) for i in run], self.limits)
        found: dict[int, ExecutionResult] = dict(zip(run, results, strict=True))
        return [
            score_of(of, len(item["methods"]), found.get(i)) for i, (of, item) in enumerate(zip(merged, items, strict=True))
        ]

    def levels(self, state: Episode) -> dict[str, bool]:
        merged = merge(state.codes, state.item)
        solved = state.score is not None and state.score.solved
        return {"all methods": merged.valid == len(state.item["methods"]), "syntax": bool(merged.program), "tests": solved}

    def ask(self, item: dict) -> list[str]:
        out = []
        for own in partition(item["methods"], self.partition, self.num_agents):
            what = f"the methods {', '.join(own)}" if own else "no method: leave them to the others"
            if self.partition == "self_select" and self.num_agents > 1:
                what = "the methods that you choose; what several of you write counts against you"
            others = " Other programmers write the rest." if self.num_agents > 1 else ""
            out.append(
                f"Complete this class:\n\n{item['prompt']}\n\nWrite {what}.{others} Answer with the code of the methods only."
            )
        return out


def score_of(merged: Merged, methods: int, result: ExecutionResult | None) -> Score:
    """The reward in its parts; all 0 where there is no program."""
    if not merged.program:
        return Score({"snippets": 0.0, "tests": 0.0, "overlap": 0.0}, ("the methods make no valid class",), result)
    parts = {
        "snippets": SNIPPETS * merged.valid / methods,
        "tests": TESTS * share_passed(result),
        "overlap": OVERLAP * merged.overlap / methods,
    }
    problems = [f"{methods - merged.valid} of {methods} methods are missing"] * (merged.valid < methods)
    problems += [f"{merged.overlap} methods were written more than once"] * (merged.overlap > 0)
    return Score(parts, form_problems(tuple(problems), result), result)
