"""Print the table of algorithms, made from the code.

Command: python -m experiments.algorithms
A row: what is subtracted from the return of a completion and what the difference is divided by, the critic, the loss and how it
averages tokens, settings that have another default than the config's, and the paper. The definitions: `jmarl/algorithms.py`,
`jmarl/advantages.py`, `jmarl/losses.py`.
"""

from __future__ import annotations

import tyro

from jmarl.algorithms import ALGORITHMS, Algorithm

ADVANTAGES = {
    "raw": "R",
    "group_mean": "R − mean of the group",
    "leave_one_out": "R − mean of the others",
    "max_baseline": "R − max of the group",
    "greedy_baseline": "R − return of the greedy completion",
    "ema_baseline": "R − moving average of the role",
    "value_baseline": "λ-return − value",
    "gae": "GAE of each token",
    "margin": "Δ: log-ratio to the reference, chosen − rejected",
    "joint_margin": "Δ of the agent + Δ of the others",
    "score_margin": "score of chosen − rejected",
    "imitation": "–",
}
DIVISORS = {"none": "–", "std": "std of the group", "batch_std": "std of the batch"}
CRITICS = {None: "–", "own": "own", "central": "central"}
HEAD = (
    "`--algorithm`",
    "learns from",
    "advantage of a completion",
    "divided by",
    "critic",
    "loss",
    "tokens",
    "defaults",
    "paper",
)


def cells(name: str, row: Algorithm) -> tuple[str, ...]:
    defaults = ", ".join(f"{setting} {value}" for setting, value in row.defaults.items()) or "–"
    loss, tokens = row.loss.__name__.replace("_", " "), row.aggregation.replace("_", " ")
    advantage = ADVANTAGES[row.advantage] + (" (all turns)" if row.grouping == "episode" else "")
    return f"`{name}`", row.data, advantage, DIVISORS[row.scale], CRITICS[row.critic], loss, tokens, defaults, row.paper


def table() -> str:
    """The table in Markdown."""
    rows = [HEAD, ("---",) * len(HEAD), *(cells(name, row) for name, row in ALGORITHMS.items())]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows).replace("| --- ", "|---").replace("|--- |", "|---|")


if __name__ == "__main__":
    tyro.cli(lambda: print(table()), description=__doc__)
