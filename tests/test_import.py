"""`import jmarl`: its effects on other packages, and the names that it provides."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import jmarl

ROOT = Path(__file__).resolve().parent.parent

WITHOUT_TORCH = """
import importlib.util, sys
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name == "torch" else find(name, package)
if sys.argv[1:]:
    import jmarl
import transformers
assert not transformers.utils.is_torch_available()
transformers.utils.logging.get_logger("transformers").warning("something else")
transformers.utils.logging.get_logger("transformers.models").warning("something of a part")
"""


def transformers_warnings(*arguments: str) -> list[str]:
    """Return what transformers writes to standard error without PyTorch. With an argument, jmarl is imported first."""
    done = subprocess.run([sys.executable, "-c", WITHOUT_TORCH, *arguments], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [line.removeprefix("[transformers] ") for line in done.stderr.splitlines()]


def test_transformers_warns_of_everything_but_the_missing_pytorch():
    alone, with_jmarl = transformers_warnings(), transformers_warnings("jmarl")
    assert "PyTorch was not found" in alone[0]
    assert with_jmarl == alone[1:] == ["something else", "something of a part"]


def test_names_that_are_imported_lazily_are_visible_to_type_checkers():
    tree = ast.parse(Path(jmarl.__file__).read_text())
    (block,) = (node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    visible: dict[str, list[str]] = {}
    for node in block.body:
        assert isinstance(node, ast.ImportFrom) and node.names[0].asname == node.names[0].name
        visible.setdefault(str(node.module).removeprefix("jmarl."), []).append(node.names[0].name)
    assert {module: tuple(names) for module, names in visible.items()} == jmarl._MODULES
    for names in jmarl._MODULES.values():
        for name in names:
            assert callable(getattr(jmarl, name))


def test_the_error_for_an_unknown_name_has_the_nearest_name():
    with pytest.raises(AttributeError, match="the nearest name is 'cross_play'"):
        _ = jmarl.cross_paly
