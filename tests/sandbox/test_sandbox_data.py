"""Real data sets: every reference solution passes its tests, and fails them if it returns something else.

A mutant is the reference solution with one `return` changed to return another value.
"""

from __future__ import annotations

import ast
import gzip
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from jmarl.sandbox import Limits, Sandbox, Tests, asserts, unittests

pytestmark = pytest.mark.filterwarnings("ignore:invalid escape sequence")  # in MBPP's programs

# Reference solutions of ClassEval that pass only where or when they were written.
CANNOT_PASS = {
    "ClassEval_17": "expects 2024-01-02 to lie in the future",
    "ClassEval_48": "expects the host name LAPTOP-2CS86KUM",
    "ClassEval_52": "needs nltk's corpora, which are downloaded when it runs",
}
NEWER = {"ClassEval_31": "a sum of floats that Python rounds otherwise from 3.12 on"} if sys.version_info >= (3, 12) else {}
WRONG = (
    "\ndef _wrong(x):\n"
    "    if type(x) is bool: return not x\n"
    "    if type(x) in (int, float, complex): return 2 * x + 1\n"
    "    if type(x) is str: return x + 'x'\n"
    "    if type(x) is list: return x + [None]\n"
    "    if type(x) is tuple: return x + (None,)\n"
    "    if type(x) in (set, frozenset): return x | {'x'}\n"
    "    if type(x) is dict: return {**x, 'x': None}\n"
    "    return 0 if x is None else None\n"
)


def rows(path: Path) -> list[dict]:
    """Read a file of JSON lines, which may be compressed."""
    text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    return [json.loads(line) for line in text.splitlines()]


@pytest.fixture(scope="module")
def box() -> Iterator[Sandbox]:
    with Sandbox(limits=Limits(wall_s=20, cpu_s=15, memory_mb=2048)) as sandbox:
        yield sandbox


def humaneval(data_dir: Path) -> Iterator[tuple[str, Tests, str]]:
    """Yield program, tests and name of the function."""
    for row in rows(data_dir / "humaneval/test.jsonl.gz"):
        program = row["prompt"] + row["canonical_solution"]
        yield program, asserts(row["test"], row["entry_point"], row["prompt"]), row["entry_point"]


def mbpp(data_dir: Path) -> Iterator[tuple[str, Tests, str]]:
    """Yield program, tests and name of the function."""
    for split in ("train", "test", "validation", "prompt"):
        for row in rows(data_dir / f"mbpp/sanitized/{split}.jsonl.gz"):
            defined = [node.name for node in ast.parse(row["code"]).body if isinstance(node, ast.FunctionDef)]
            used = {node.id for test in row["test_list"] for node in ast.walk(ast.parse(test)) if isinstance(node, ast.Name)}
            entry = next(name for name in defined if name in used)
            yield row["code"], asserts(row["test_list"], entry, "\n".join(row["test_imports"])), entry


class ChangeReturn(ast.NodeTransformer):
    """Changes the value of one `return`. position: which one, counted from 0."""

    def __init__(self, position: int):
        self.position, self.count = position, 0

    def visit_Return(self, node: ast.Return) -> ast.Return:
        self.count += 1
        if self.count == self.position + 1:
            node.value = ast.Call(ast.Name("_wrong", ast.Load()), [node.value or ast.Constant(None)], [])
        return node


def mutants(program: str, entry: str) -> list[str]:
    """Return one mutant for every `return` of the function."""
    programs = []
    function = [x for x in ast.parse(program).body if isinstance(x, ast.FunctionDef) and x.name == entry][-1]
    for position in range(sum(isinstance(node, ast.Return) for node in ast.walk(function))):
        tree = ast.parse(program)
        copy = [x for x in tree.body if isinstance(x, ast.FunctionDef) and x.name == entry][-1]
        ChangeReturn(position).visit(copy)
        programs.append(ast.unparse(ast.fix_missing_locations(tree)) + WRONG)
    return programs


@pytest.mark.slow
@pytest.mark.parametrize("items, count", [(humaneval, 122), (mbpp, 300)])
def test_reference_solutions_pass_and_their_mutants_fail(
    box: Sandbox, data_dir: Path, items: Callable[[Path], Iterator[tuple[str, Tests, str]]], count: int
) -> None:
    programs, tests, entries = zip(*items(data_dir), strict=True)
    assert len(programs) == count
    results = box.run_many(programs, tests)
    assert [r for r in results if r.outcome != "passed" or r.integrity != "strong"] == []
    wrong = [mutants(program, entry) for program, entry in zip(programs, entries, strict=True)]  # a list for each program
    flat = [(mutant, own_tests) for group, own_tests in zip(wrong, tests, strict=True) for mutant in group]
    verdicts = iter(box.run_many([mutant for mutant, _ in flat], [own_tests for _, own_tests in flat]))
    outcomes = [[next(verdicts).outcome for _ in group] for group in wrong]
    assert [entry for entry, group in zip(entries, outcomes, strict=True) if "failed" not in group] == []
    assert sum(group.count("passed") for group in outcomes) <= 0.08 * len(flat)  # mutants of a return that no test reaches


@pytest.mark.slow
def test_classeval_references_pass_and_empty_methods_fail(box: Sandbox, data_dir: Path) -> None:
    items = rows(data_dir / "classeval/test.jsonl.gz")
    setups = ["\n".join(item["import_statement"]) for item in items]
    programs = [f"{setup}\n{item['solution_code']}" for setup, item in zip(setups, items, strict=True)]
    tests = [unittests(item["test"], setup) for setup, item in zip(setups, items, strict=True)]
    results = box.run_many(programs, tests)
    failed = {item["task_id"] for item, r in zip(items, results, strict=True) if r.outcome != "passed"}
    assert failed <= {*CANNOT_PASS, *NEWER} and len(failed - set(NEWER)) <= 0.05 * len(items)
    assert all(r.integrity == "strong" for r in results)
    empty = [ast.unparse(NoBodies().visit(ast.parse(item["solution_code"]))) for item in items]
    assert [r.outcome for r in box.run_many(empty, tests)].count("passed") == 0


class NoBodies(ast.NodeTransformer):
    """Empties every method but constructors."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        if node.name != "__init__":
            node.body = [ast.Pass()]
        return node
