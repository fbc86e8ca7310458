"""The table of constraints: what its rows read exists, and no condition of the library names an algorithm."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

import jmarl
from jmarl.algorithms import ALGORITHMS, constraints
from jmarl.config import TrainConfig, flat
from jmarl.config import constraints as own_constraints
from jmarl.config.experiment import TaskConfig, TeamConfig

SETTINGS = {*flat(TrainConfig()), *(field.name for cls in (TeamConfig, TaskConfig) for field in dataclasses.fields(cls))}
PROPERTIES = {  # of the classes
    "target_names", "stop_texts", "allowed_changes", "best_column", "size", "reward_names", "trains_in_environments",
}  # fmt: skip
FACTS = {  # what callers add
    "row", "group", "group_name", "items", "wandb", "learning", "updates", "team", "divides_agents",
    "divides_rows", "processes", "order", "env", "max_turns", "plays",
    "seeds", "saves", "single_run",
}  # fmt: skip
TABLES = (own_constraints, constraints)


def rows():
    values = [value for module in TABLES for value in vars(module).values()]
    lists = [value for value in values if isinstance(value, list) and value and isinstance(value[0], tuple)]
    return [row for table in lists for row in table]


@pytest.mark.parametrize("module", TABLES)
def test_conditions_and_sentences_read_what_there_is(module):
    source = inspect.getsource(module)
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute)]
    read = {node.attr for node in nodes if isinstance(node.value, ast.Name) and node.value.id == "s"}
    read |= set(re.findall(r"\{s\.(\w+)", source))
    assert read and read <= SETTINGS | PROPERTIES | FACTS


def test_rows_are_about_settings():
    other = {"items", "wandb", "seeds", "reward_model", "critic"}  # arguments of train, and models of a team
    assert len(rows()) > 100
    for setting, holds, sentence in rows():
        assert setting in SETTINGS | other and callable(holds) and (callable(sentence) or sentence)


def test_the_first_constraint_that_does_not_hold_is_the_error():
    table = [
        ("a", lambda s: True, "never"),
        own_constraints.off_unless("a", {}, lambda s: s.b > 1, "where b={s.b}"),
        ("b", lambda s: False, lambda s: f"b is {s.b}"),
    ]
    with pytest.raises(ValueError, match=r"^a=3 is not allowed: a must be \{\} where b=1$"):
        own_constraints.require(table, SimpleNamespace(a=3, b=1))
    for s in (SimpleNamespace(a=3, b=2), SimpleNamespace(a={}, b=2)):
        with pytest.raises(ValueError, match="^b is 2$"):
            own_constraints.require(table, s)
    own_constraints.require(table[:2], SimpleNamespace(a={}, b=1))


def test_no_condition_names_an_algorithm():
    named = []
    for path in Path(jmarl.__file__).parent.rglob("*.py"):
        text = path.read_text()
        nodes = ast.walk(ast.parse(text)) if any(name in text for name in ALGORITHMS) else ()  # to parse takes long
        compared = [node for node in nodes if isinstance(node, ast.Compare)]
        constants = [x.value for node in compared for x in ast.walk(node) if isinstance(x, ast.Constant)]
        named += [f"{path}: {x}" for x in constants if isinstance(x, str) and x in ALGORITHMS]
    assert named == []
