"""The wheel: it contains the library and nothing else, and importing it does not import large packages."""

from __future__ import annotations

import email
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from jmarl.cli.init import FILES

ROOT = Path(__file__).resolve().parent.parent
pytestmark = pytest.mark.slow

IMPORT = """
import sys, time
sys.path.insert(0, sys.argv[1])
import jmarl
assert jmarl.__file__.startswith(sys.argv[1]), jmarl.__file__
heavy = {"torch", "tensorflow", "datasets", "wandb", "gguf", "matplotlib", "tensorboard", "textarena"} & set(sys.modules)
assert not heavy, f"import jmarl imports {sorted(heavy)}"
"""


def run(*command: str, cwd: Path) -> None:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(ROOT), cwd=out)
    (path,) = out.glob("*.whl")
    return path


def test_the_wheel_contains_all_modules_and_nothing_else(wheel):
    files = set(zipfile.ZipFile(wheel).namelist())
    library = {path.relative_to(ROOT).as_posix() for kind in ("*.py", "*.json") for path in (ROOT / "jmarl").rglob(kind)}
    library |= {f"jmarl/cli/configs/{path.name}" for path in (ROOT / "experiments" / "configs").glob("*.yaml")}
    library |= {f"jmarl/cli/template/{name}" for name in FILES}
    assert library <= files
    assert {name.split("/")[0] for name in files} == {"jmarl", "jmarl-0.1.0.dist-info"}
    assert "jmarl-0.1.0.dist-info/licenses/LICENSE" in files


def test_the_metadata_has_the_python_version_the_license_and_the_extras(wheel):
    text = zipfile.ZipFile(wheel).read("jmarl-0.1.0.dist-info/METADATA").decode()
    metadata = email.message_from_string(text)
    assert metadata["Requires-Python"] == ">=3.11"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert set(metadata.get_all("Provides-Extra", [])) >= {"cuda12", "gguf", "wandb", "test", "notebooks"}
    assert not any(line.startswith("torch") and "extra" not in line for line in metadata.get_all("Requires-Dist", []))


def test_the_installed_wheel_imports_without_heavy_packages(wheel, tmp_path):
    target = str(tmp_path / "site")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    run(*pip, "--target", target, str(wheel), cwd=tmp_path)
    run(sys.executable, "-c", IMPORT, target, cwd=tmp_path)


def test_an_editable_install_puts_no_copy_of_the_package_beside_the_checkout(tmp_path):
    """Such a copy would be older than the checkout at once, and programs in the sandbox could import it."""
    target = str(tmp_path / "site")
    run(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", target, "-e", str(ROOT), cwd=tmp_path)
    assert not (tmp_path / "site" / "jmarl").exists()
    assert any((tmp_path / "site").glob("jmarl-*.dist-info"))
