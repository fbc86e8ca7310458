"""The templates of `experiments/cluster` can be parsed, and their commands have the flags that jmarl has."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import yaml

from jmarl.cli.main import parser_for

CLUSTER = Path(__file__).resolve().parents[2] / "experiments/cluster"
SCRIPTS = sorted(CLUSTER.glob("*.sh"))
JOB = CLUSTER / "kubernetes.yaml"


@pytest.mark.parametrize("path", [*SCRIPTS, JOB], ids=lambda path: path.name)
def test_the_first_line_says_what_was_not_run(path):
    first = next(line for line in path.read_text().splitlines() if not line.startswith("#!"))
    assert re.match("# .*not run", first) and len(SCRIPTS) == 2


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_a_script_of_slurm_starts_jmarl_with_known_flags(path):
    subprocess.run(["bash", "-n", path], check=True)
    text = path.read_text().replace("\\\n", "").replace("$((20000 + SLURM_JOB_ID % 10000))", "20000")
    words = re.search(r"jmarl ((?:train|launch) .*?)(?:'| \|\|)", text)[1].replace('"', "").split()
    for number in ("$PROCESSES", "$SLURM_NNODES", "$SLURM_NODEID"):
        words = ["1" if word == number else word for word in words]
    check(words)


def test_the_pods_of_kubernetes_start_jmarl_with_known_flags():
    service, job = yaml.safe_load_all(JOB.read_text())
    pod = job["spec"]["template"]["spec"]
    assert pod["subdomain"] == service["metadata"]["name"] and job["spec"]["completionMode"] == "Indexed"
    program, *words = (word.replace("$(JOB_COMPLETION_INDEX)", "0") for word in pod["containers"][0]["command"])
    args = check(words)
    assert program == "jmarl" and args.nnodes == job["spec"]["completions"] == job["spec"]["parallelism"]
    assert args.master_addr == f"{job['metadata']['name']}-0.{service['metadata']['name']}"


def check(words):
    """Parse a command, and that which `launch` starts."""
    args = parser_for(words).parse_args(words)
    if words[0] == "launch":
        parser_for(args.command).parse_args(args.command)
    return args
