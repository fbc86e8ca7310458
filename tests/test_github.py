"""The workflow and the issue form of GitHub: valid YAML, and all that they name exists."""

from __future__ import annotations

import os
import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import yaml

from jmarl.cli.main import COMMANDS, check_flags, parser_for

ROOT = Path(__file__).resolve().parent.parent
GITHUB = ROOT / ".github"


def read(name: str) -> dict[Any, Any]:
    return yaml.safe_load((GITHUB / name).read_text(encoding="utf-8"))


def test_the_workflow_runs_the_checks_with_each_python():
    (job,) = read("workflows/ci.yml")["jobs"].values()
    (check,) = [step for step in job["steps"] if step.get("run") == ".ci/run"]
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK) and "${PYTHON:-python3}" in script.read_text(encoding="utf-8")
    assert check["env"] == {"PYTHON": "python${{ matrix.python }}"}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    pythons = [text.rpartition(" ")[2] for text in project["classifiers"] if re.search(r":: 3\.\d+$", text)]
    assert job["strategy"]["matrix"]["python"] == pythons, "those of the classifiers, and texts: 3.10 would be 3.1"
    setup = next(step for step in job["steps"] if step.get("uses", "").startswith("actions/setup-python@"))
    assert setup["with"] == {"python-version": "${{ matrix.python }}"}
    assert any("apt-get install -y -qq bubblewrap" in step.get("run", "") for step in job["steps"])


def test_the_workflow_is_started_by_changes():
    assert read("workflows/ci.yml")[True].keys() == {"push", "pull_request"}  # YAML reads the key `on` as true


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
