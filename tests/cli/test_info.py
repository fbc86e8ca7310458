"""`jmarl info`: everything is tried out, and the exit code says if something that is installed does not work."""

from __future__ import annotations

import json

import pytest

from jmarl.algorithms import ALGORITHMS
from jmarl.cli.info import OPTIONAL, text_of
from jmarl.cli.main import main
from jmarl.envs import ENVIRONMENTS


@pytest.mark.long
def test_what_does_not_work_is_a_problem_and_all_else_works(monkeypatch, capsys):
    """An environment without tasks and a package that cannot be imported are the only problems."""
    monkeypatch.setitem(ENVIRONMENTS, "broken", "jmarl.envs.base:TextEnvironment")
    monkeypatch.setitem(OPTIONAL, "jmarl", ("jmarl.no_such_module", "this test"))
    assert main(["info", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["problems"] == [
        "environment broken: TextEnvironment has no tasks of its own: pass items to train(...)",
        "package jmarl: ModuleNotFoundError: No module named 'jmarl.no_such_module'",
    ]
    assert set(report["algorithms"]) == set(ALGORITHMS) and report["algorithms"]["sft"] == "texts"
    assert set(report["environments"]) == {*ENVIRONMENTS, "code"}
    assert report["environments"]["story"]["roles"] == ["setup", "story"]
    assert report["devices"]["names"] and report["versions"]["jax"] and set(report["optional"]) == set(OPTIONAL)
    lines = text_of(report).splitlines()
    assert any(line.startswith(f"sandbox (programs that models write): {report['sandbox']['level']}") for line in lines)
    assert "  story             setup, story; at most 1 turn" in lines and "  broken            broken" in lines
    assert lines[-2].startswith("does not work: environment broken: ")
