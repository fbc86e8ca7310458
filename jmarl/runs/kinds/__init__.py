"""Kinds of runs: rollouts, also from several seeds, given data, preference rounds, a learned reward. They differ by where
experience comes from: each is one file with its checks, its largest experience, its batches and its source (`Kind` in
`runs/run.py`).

May import all that a run needs. Open `rollouts.py` first. A new kind is a file, its name in KINDS and a case of `kind_of`; if
its updates have another form, also a batch (`types`), an objective, a log, and constraints of its settings
(`algorithms/constraints.py`).
"""

from jmarl.algorithms import find_row
from jmarl.lazy import Table
from jmarl.runs.kinds.rollouts import ROLLOUTS
from jmarl.runs.run import Kind, Task

KINDS = Table[Kind](  # that stand on `preferences`
    {
        "given": "jmarl.runs.kinds.given:GIVEN",
        "rounds": "jmarl.runs.kinds.rounds:ROUNDS",
        "learned": "jmarl.runs.kinds.learned:LEARNED",
    }
)


def kind_of(algorithm: str, task: Task) -> Kind:
    """Return the kind of a run."""
    row = find_row(algorithm)
    if task.env is not None and not row.makes_pairs:
        return ROLLOUTS
    return KINDS["given" if task.env is None else "learned" if row.learned else "rounds"]
