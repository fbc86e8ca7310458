"""`import jmarl`: its effects on other packages, and the names that it provides."""

from __future__ import annotations

import ast
import gc
import os
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest

import jmarl
from jmarl.comlrl import trainers
from jmarl.envs.rows import read_rows
from jmarl.lazy import collector_paused
from jmarl.shadows import ShadowedPackage, explained

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
    comlrl, *own = block.body
    assert ast.unparse(comlrl) == "from jmarl.comlrl.trainers import *"
    visible: dict[str, list[str]] = {}
    for node in own:
        assert isinstance(node, ast.ImportFrom) and node.names[0].asname == node.names[0].name
        visible.setdefault(str(node.module).removeprefix("jmarl."), []).append(node.names[0].name)
    assert {module: " ".join(names) for module, names in visible.items()} == jmarl._NAMES
    for name in jmarl._MODULE_OF:
        assert callable(getattr(jmarl, name))


def test_the_search_for_garbage_is_paused_and_goes_on_after_an_error():
    """A pause inside another one, or where the user has switched it off, does not switch it on."""
    assert gc.isenabled()
    with pytest.raises(ZeroDivisionError), collector_paused():
        with collector_paused():
            assert not gc.isenabled()
        assert not gc.isenabled()
        1 / 0  # noqa: B018
    assert gc.isenabled()


def test_the_trainers_of_comlrl_are_importable_from_jmarl():
    names = [name for name in dir(trainers) if name.endswith(("Config", "Trainer"))]
    assert len(names) == 28
    for name in names:
        assert getattr(jmarl, name) is getattr(trainers, name)


def test_the_old_name_of_preferences_is_importable():
    from jmarl.training.preferences.encoding import end_token

    assert end_token is jmarl.preferences.encoding.end_token is jmarl.training.preferences.encoding.end_token


def test_the_error_for_an_unknown_name_has_the_nearest_name():
    with pytest.raises(AttributeError, match="the nearest name is 'cross_play'"):
        _ = jmarl.cross_paly


def test_the_docstring_of_jmarl_names_files_that_exist():
    names = re.findall(r"`([\w/]+(?:/|\.py|\.md))`", jmarl.__doc__)
    assert len(names) > 15
    assert [name for name in names if not any((root / name).exists() for root in (ROOT / "jmarl", ROOT))] == []


@pytest.mark.long
def test_what_the_readme_asks_for_help_on_has_one_after_import_jmarl():
    """In one fresh process, in which nothing else is imported before. Rooms and modules are attributes too."""
    calls = list(dict.fromkeys(re.findall(r"help\(jmarl[^)]*\)", (ROOT / "README.md").read_text())))
    assert "help(jmarl)" in calls and len(calls) > 1
    script = "\n".join(["import jmarl, sys", "assert 'jmarl.envs' not in sys.modules", *reversed(calls)])
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert all(f"Help on {kind} {name}" in done.stdout for kind, name in map(kind_and_name, calls))


def kind_and_name(call: str) -> tuple[str, str]:
    """Return what the first line of a help says of a module: what it is, and its name."""
    name = call.removeprefix("help(").removesuffix(")")
    path = ROOT / name.replace(".", "/")
    return ("package" if path.is_dir() else "module"), name


# --- files of the user with the name of a package --------------------------------------------------------------------------


def test_a_file_with_the_name_of_a_package_is_named_where_the_package_is_needed(tmp_path):
    """And only there: names that need no package are imported."""
    (tmp_path / "jinja2.py").write_text("ROWS = []\n")
    script = "import jmarl; print(jmarl.TrainConfig.of().algorithm); jmarl.load_pairs"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)}
    )
    assert done.stdout == "magrpo\n"
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"jmarl.shadows.ShadowedPackage: {tmp_path / 'jinja2.py'} has the name of the package jinja2, which")
    assert "rename the file (ImportError: cannot import name 'TemplateError' from 'jinja2'" in last


@pytest.mark.parametrize("name", ["datasets.py", "datasets/__init__.py"])
def test_the_error_of_a_shadowed_package_is_explained_whatever_python_says(tmp_path, monkeypatch, name):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("")
    texts = "module 'datasets' has no attribute 'Dataset'", "No module named 'datasets.load'; 'datasets' is not a package"
    errors = [AttributeError(texts[0]), ModuleNotFoundError(texts[1]), ImportError("Could not import module 'Tokenizer'")]
    errors[2].__cause__ = errors[1]
    assert all(explained(error) is error for error in errors), "datasets is the package itself"
    monkeypatch.syspath_prepend(tmp_path)
    for error in errors:
        assert str(explained(error)).startswith(f"{tmp_path / name} has the name of the package datasets, which is needed")
    for other in (ValueError(texts[0]), AttributeError("module 'numpy' has no attribute 'x'"), KeyError("datasets")):
        assert explained(other) is other


def test_rows_are_read_beside_a_file_with_the_name_of_a_library(tmp_path, monkeypatch):
    """Also if it has a class of the library's name. A directory that the library saved needs the library."""
    own = types.ModuleType("datasets")
    vars(own)["Dataset"] = type("Dataset", (list,), {})
    saved = tmp_path / "saved"
    saved.mkdir()
    (saved / "state.json").write_text("{}")
    (tmp_path / "datasets.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    for library in ("datasets", "pandas"):
        monkeypatch.setitem(sys.modules, library, own)
    assert read_rows(vars(own)["Dataset"]([{"prompt": "q"}])) == read_rows([{"prompt": "q"}]) == [{"prompt": "q"}]
    with pytest.raises(ShadowedPackage, match="datasets.py has the name of the package datasets"):
        read_rows(saved)
