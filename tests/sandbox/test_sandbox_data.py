"""Real data sets: every reference solution passes its tests, and fails them when what it returns is wrong.

A mutant is the reference with one `return` changed so that it still parses and returns, but another value.
"""

from __future__ import annotations

import ast
import gzip
import json
import sys
from collections.abc import Iterator

import pytest

from jmarl.sandbox import Limits, Sandbox, Tests, asserts, unittests

pytestmark = pytest.mark.filterwarnings("ignore:invalid escape sequence")  # in MBPP's programs

# ClassEval's references that cannot pass anywhere but where, and when, they were written.
CANNOT = {
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


def rows(path) -> list[dict]:
    text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    return [json.loads(line) for line in text.splitlines()]


@pytest.fixture(scope="module")
def box():
    with Sandbox(limits=Limits(wall_s=20, cpu_s=15, memory_mb=2048)) as found:
        yield found


def humaneval(data_dir) -> Iterator[tuple[str, Tests, str]]:
    """Program, tests, name of the function."""
    for row in rows(data_dir / "humaneval/test.jsonl.gz"):
        program = row["prompt"] + row["canonical_solution"]
        yield program, asserts(row["test"], row["entry_point"], row["prompt"]), row["entry_point"]


def mbpp(data_dir) -> Iterator[tuple[str, Tests, str]]:
    for split in ("train", "test", "validation", "prompt"):
        for row in rows(data_dir / f"mbpp/sanitized/{split}.jsonl.gz"):
            made = [node.name for node in ast.parse(row["code"]).body if isinstance(node, ast.FunctionDef)]
            used = {node.id for test in row["test_list"] for node in ast.walk(ast.parse(test)) if isinstance(node, ast.Name)}
            entry = next(name for name in made if name in used)
            yield row["code"], asserts(row["test_list"], entry, "\n".join(row["test_imports"])), entry


class Returns(ast.NodeTransformer):
    """Changes the value of one `return`."""

    def __init__(self, which: int):
        self.left = which

    def visit_Return(self, node: ast.Return) -> ast.Return:
        self.left -= 1
        if self.left == -1:
            node.value = ast.Call(ast.Name("_wrong", ast.Load()), [node.value or ast.Constant(None)], [])
        return node


def mutants(program: str, entry: str) -> list[str]:
    """One for every `return` of the function."""
    out = []
    function = [x for x in ast.parse(program).body if isinstance(x, ast.FunctionDef) and x.name == entry][-1]
    for which in range(sum(isinstance(node, ast.Return) for node in ast.walk(function))):
        tree = ast.parse(program)
        of = [x for x in tree.body if isinstance(x, ast.FunctionDef) and x.name == entry][-1]
        Returns(which).visit(of)
        out.append(ast.unparse(ast.fix_missing_locations(tree)) + WRONG)
    return out


@pytest.mark.slow
@pytest.mark.parametrize("items, count", [(humaneval, 122), (mbpp, 300)])
def test_references_pass_and_their_mutants_fail(box, data_dir, items, count):
    programs, tests, entries = zip(*items(data_dir), strict=True)
    assert len(programs) == count
    results = box.run_many(programs, tests)
    assert [r for r in results if r.outcome != "passed" or r.integrity != "strong"] == []
    found: list[list[str]] = [mutants(program, entry) for program, entry in zip(programs, entries, strict=True)]
    flat = [(mutant, of) for each, of in zip(found, tests, strict=True) for mutant in each]
    verdicts = iter(box.run_many([mutant for mutant, _ in flat], [of for _, of in flat]))
    outcomes = [[next(verdicts).outcome for _ in each] for each in found]
    not_caught = [entry for entry, each in zip(entries, outcomes, strict=True) if "failed" not in each]
    assert not_caught == []
    assert sum(each.count("passed") for each in outcomes) <= 0.08 * len(flat)  # a return that no test reaches


@pytest.mark.slow
def test_classeval_references_pass(box, data_dir):
    items = rows(data_dir / "classeval/test.jsonl.gz")
    setups = ["\n".join(item["import_statement"]) for item in items]
    programs = [f"{setup}\n{item['solution_code']}" for setup, item in zip(setups, items, strict=True)]
    tests = [unittests(item["test"], setup) for setup, item in zip(setups, items, strict=True)]
    results = box.run_many(programs, tests)
    failed = {item["task_id"] for item, r in zip(items, results, strict=True) if r.outcome != "passed"}
    assert failed <= {*CANNOT, *NEWER} and len(failed - set(NEWER)) <= 0.05 * len(items)
    assert all(r.integrity == "strong" for r in results)
    empty = [ast.unparse(NoBodies().visit(ast.parse(item["solution_code"]))) for item in items]
    assert [r.outcome for r in box.run_many(empty, tests)].count("passed") == 0


class NoBodies(ast.NodeTransformer):
    """Empties every method but the constructors."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        if node.name != "__init__":
            node.body = [ast.Pass()]
        return node
