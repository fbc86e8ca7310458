"""Put agents of finished runs together, and evaluate the pairs: do roles specialize, and need agents each other?

Command: python -m experiments.evidence.roles roles_grid    (after `python -m experiments.evidence run --claims roles_grid`, on
    the same machine: it needs the models of the runs)
Pairs of each seed: `team`, as it was trained; `swapped`, each in the role of the other; `cross_play`, the second agent of the
next seed's team; `alone`, agents that learned without a team; `one_alone`, the first of the team and such a second one.
Each is `jmarl eval` on held-out tasks; its numbers become a record as that of a run. Time: 15 seconds a pair.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from experiments.evidence.record import RESULTS, checked_out

HERE = Path(__file__).parent
ROOT = Path("runs/evidence")
SEEDS = 5
ALONE = {"roles_grid": ("alone", "alone"), "roles_sudoku": ("proposer", "checker")}  # runs of the first and the second agent


def pairs_of(claim: str, seed: int) -> Iterator[tuple[str, list[Path]]]:
    """Yield the names of the pairs of a seed, and the directories of their two agents."""

    def agent(way: str, number: int, of_seed: int) -> Path:
        return ROOT / claim / f"way={way}" / f"seed_{of_seed % SEEDS}" / "models" / f"agent_{number}"

    first, second = ALONE[claim]
    partner = agent(second, 0, seed + 1)  # of another seed: with one seed, both would be the same agent
    yield "team", [agent("team", 0, seed), agent("team", 1, seed)]
    yield "swapped", [agent("team", 1, seed), agent("team", 0, seed)]
    yield "cross_play", [agent("team", 0, seed), agent("team", 1, seed + 1)]
    yield "alone", [agent(first, 0, seed), partner]
    yield "one_alone", [agent("team", 0, seed), partner]


def evaluate(claim: str, name: str, seed: int, agents: list[Path]) -> None:
    """Evaluate a pair of agents, and write its record."""
    file = RESULTS / f"{claim}_pairs" / f"pair={name}" / f"seed_{seed}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    command = ["eval", "--config", str(HERE / f"{claim}.yaml"), "--model", *map(str, agents), "--output", str(file)]
    flags = ["-n", "2000", "--num-generations", "8", "--batch-size", "250"]
    subprocess.run([sys.executable, "-m", "jmarl", *command, *flags], check=True, stdout=subprocess.DEVNULL)
    result = json.loads(file.read_text(encoding="utf-8"))
    measures = {f"measures/{measure}": numbers["mean"] for measure, numbers in result["measures"].items()}
    record = {
        "claim": f"{claim}_pairs", "run": f"pair={name}/seed_{seed}", "commit": checked_out(), "cpu_seconds": result["seconds"],
        "updates": 0, "tokens": 0, "reward_calls": result["episodes"], "curve": {"tokens": [], "reward/mean": []},
        "evaluations": [{"updates": 0, "tokens": 0, "reward": result["mean"], **measures}],
    }  # fmt: skip
    file.write_text(json.dumps(record) + "\n", encoding="utf-8")
    print(f"{claim} {name} {seed}: {result['mean']:.3f}", flush=True)


def main(claims: list[str]) -> None:
    unknown = {*claims} - {*ALONE}
    if unknown or not claims:
        raise SystemExit(f"give some of {', '.join(ALONE)}, not {', '.join(sorted(unknown)) or 'nothing'}")
    for claim in claims:
        for seed in range(SEEDS):
            for name, agents in pairs_of(claim, seed):
                evaluate(claim, name, seed, agents)


if __name__ == "__main__":
    main(sys.argv[1:])
