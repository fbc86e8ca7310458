"""Kinds of runs: rollouts, also from several seeds, given data, preference rounds, a learned reward. They differ by where
experience comes from: each is one file with its checks, its largest experience, its batches and its source (`Kind` in
`runs/run.py`).

May import all that a run needs. Open `rollouts.py` first. A new kind is a file and a case of `kind_of`; if its updates have
another form, also a batch (`types`), an objective, a log, and constraints of its settings (`algorithms/constraints.py`).
"""

from jmarl.algorithms import find_row
from jmarl.runs.kinds.rollouts import ROLLOUTS
from jmarl.runs.run import Kind, Task


def kind_of(algorithm: str, task: Task) -> Kind:
    """Return the kind of a run. Those on preferences are imported only by runs of them."""
    row = find_row(algorithm)
    if task.env is None:
        from jmarl.runs.kinds.given import GIVEN

        return GIVEN
    if row.learned:
        from jmarl.runs.kinds.learned import LEARNED

        return LEARNED
    if row.makes_pairs:
        from jmarl.runs.kinds.rounds import ROUNDS

        return ROUNDS
    return ROLLOUTS
