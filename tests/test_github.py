"""The workflow and the issue form of GitHub: valid YAML, and all that they name exists."""

from __future__ import annotations

import os
import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from jmarl.cli.main import COMMANDS, check_flags, parser_for

ROOT = Path(__file__).resolve().parent.parent
GITHUB = ROOT / ".github"


def read(name: str) -> dict[Any, Any]:
    return yaml.safe_load((GITHUB / name).read_text(encoding="utf-8"))


@pytest.mark.parametrize("name, command", [("ci", ".ci/run"), ("nightly", ".ci/run nightly")])
def test_a_workflow_runs_the_checks_with_each_python(name, command):
    (job,) = read(f"workflows/{name}.yml")["jobs"].values()
    (check,) = [step for step in job["steps"] if step.get("run") == command]
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK) and "${PYTHON:-python3}" in script.read_text(encoding="utf-8")
    assert check["env"] == {"PYTHON": "python${{ matrix.python }}"}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    pythons = [text.rpartition(" ")[2] for text in project["classifiers"] if re.search(r":: 3\.\d+$", text)]
    assert job["strategy"]["matrix"]["python"] == pythons, "those of the classifiers, and texts: 3.10 would be 3.1"
    setup = next(step for step in job["steps"] if step.get("uses", "").startswith("actions/setup-python@"))
    assert setup["with"] == {"python-version": "${{ matrix.python }}"}
    assert any("apt-get install -y -qq bubblewrap" in step.get("run", "") for step in job["steps"])


def test_changes_start_the_checks_and_a_clock_starts_the_nightly_ones():
    on = True  # as YAML reads this key
    assert read("workflows/ci.yml")[on].keys() == {"push", "pull_request"}
    assert read("workflows/nightly.yml")[on].keys() == {"schedule", "workflow_dispatch"}


def test_the_issue_form_asks_for_what_exists():
    form = read("ISSUE_TEMPLATE/bug.yml")
    assert {"name", "description", "body"} <= form.keys()
    assert len({field["id"] for field in form["body"]}) == len(form["body"])
    assert all(field["type"] == "textarea" and field["attributes"]["label"] for field in form["body"])
    text = (GITHUB / "ISSUE_TEMPLATE" / "bug.yml").read_text(encoding="utf-8")
    commands = {" ".join(command.split()) for command in re.findall(r"`jmarl ([^`]+)`", text)}
    assert "info --json" in commands
    for command in commands:
        arguments = shlex.split(command)
        assert arguments[0] in COMMANDS
        check_flags(parser_for(arguments), arguments)


def test_a_source_distribution_has_what_its_tests_read():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert {"/tests", "/.ci", "/.github"} <= set(project["tool"]["hatch"]["build"]["targets"]["sdist"]["include"])
