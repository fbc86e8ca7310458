"""Print the table of algorithms from the code.

Command: python -m experiments.algorithms
Each row has the data that it learns from; the estimator of advantages of a group, or the margin of a pair; the baseline that is
subtracted from returns before; the divisor of advantages; the critic; the loss and how it averages over tokens; the settings
whose defaults it changes; and the paper. They are defined in `jmarl/algorithms/table.py`, `jmarl/rl/advantages.py` and
`jmarl/rl/losses.py`.
Expected: the rows of the README, with all columns. Time: seconds.
"""

from __future__ import annotations

import tyro

from experiments.tables import markdown_table
from jmarl.algorithms import ALGORITHMS, AlgorithmRow

NONE = "–"
MARGINS = {"own": "log-ratio to the reference", "joint": "log-ratio, summed over the team", "score": "score of a value head"}
DIVISORS = {"none": NONE, "std": "std of the group", "batch_std": "std of the batch", "running_std": "running std"}
HEAD = (
    "`--algorithm`", "learns from", "estimator", "baseline", "divided by", "critic", "loss", "tokens", "defaults", "paper",
)  # fmt: skip


def estimator_name(row: AlgorithmRow) -> str:
    """Return the name of what a row estimates: advantages of a group, GAE of each token, or the margin of a pair."""
    if row.margin:
        return MARGINS[row.margin]
    if row.data != "rollouts":
        return NONE
    if row.per_token:
        return "gae of each token"
    name = row.estimator.__name__ + (f" + {row.across_turns.__name__}" if row.across_turns else "")
    return name.replace("_", " ") + (" (all turns)" if row.grouping == "episode" else "")


def cells(name: str, row: AlgorithmRow) -> tuple[str, ...]:
    """Return the cells of a row of the table."""
    defaults = ", ".join(f"{setting} {value}" for setting, value in row.defaults.items()) or NONE
    loss, tokens = row.loss.__name__.replace("_", " "), row.aggregation.replace("_", " ")
    baseline = NONE if row.baseline == "none" else row.baseline
    estimate = estimator_name(row), baseline, DIVISORS[row.scale], row.critic or NONE
    return f"`{name}`", row.data, *estimate, loss, tokens, defaults, row.paper


def table() -> str:
    """Return the table in Markdown."""
    text = markdown_table(HEAD, [cells(name, row) for name, row in ALGORITHMS.items()])
    return text.replace("| --- ", "|---").replace("|--- |", "|---|")


if __name__ == "__main__":
    tyro.cli(lambda: print(table()), description=__doc__)
