"""Put agents of finished runs together, and evaluate the pairs: do roles specialize, and need agents each other?

Command: python -m experiments.evidence.roles roles_grid    (after `python -m experiments.evidence run --claims roles_grid`, on
    the same machine: it needs the models of the runs)
Pairs of each seed: `team`, as it was trained; `swapped`, each in the role of the other; `cross_play`, the second agent of the
next seed's team; `alone`, agents that learned without a team; `one_alone`, the first of the team and such a second one.
Each is `jmarl eval` on held-out tasks; its numbers become a record as that of a run. Time: 15 seconds a pair.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from experiments.evidence.record import write_evaluation

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


def main(claims: list[str]) -> None:
    unknown = {*claims} - {*ALONE}
    if unknown or not claims:
        raise SystemExit(f"give some of {', '.join(ALONE)}, not {', '.join(sorted(unknown)) or 'nothing'}")
    for claim in claims:
        for seed in range(SEEDS):
            for name, agents in pairs_of(claim, seed):
                flags = ["--config", str(HERE / f"{claim}.yaml"), "-n", "2000", "--num-generations", "8", "--batch-size", "250"]
                reward = write_evaluation(f"{claim}_pairs", f"pair={name}/seed_{seed}", agents, flags)
                print(f"{claim} {name} {seed}: {reward:.3f}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
