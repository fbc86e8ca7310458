"""`jmarl info`: everything is tried out, and the exit code says if something that is installed does not work."""

from __future__ import annotations

import json

from jmarl.algorithms import ALGORITHMS
from jmarl.cli.info import OPTIONAL, environment
from jmarl.cli.main import main
from jmarl.envs import ENVIRONMENTS


def test_all_of_it_is_listed_and_works(capsys):
    code = main(["info", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert code == 0 and report["problems"] == []
    assert set(report["algorithms"]) == set(ALGORITHMS) and report["algorithms"]["sft"] == "texts"
    assert set(report["environments"]) == {*ENVIRONMENTS, "code"}
    assert report["environments"]["story"]["roles"] == ["setup", "story"]
    assert report["devices"]["names"] and report["versions"]["jax"] and set(report["optional"]) == set(OPTIONAL)


def test_an_environment_that_does_not_work_is_a_problem(monkeypatch, capsys):
    monkeypatch.setitem(ENVIRONMENTS, "broken", "jmarl.envs.base:TextEnvironment")
    monkeypatch.setitem(OPTIONAL, "jmarl", ("jmarl.no_such_module", "this test"))
    assert "has no tasks of its own" in environment("broken", True)["error"]
    assert main(["info"]) == 1
    out = capsys.readouterr().out
    assert "does not work: environment broken: TextEnvironment has no tasks" in out
    assert "does not work: package jmarl: ModuleNotFoundError: No module named 'jmarl.no_such_module'" in out
