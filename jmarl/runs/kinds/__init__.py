"""Kinds of runs: rollouts, also from several seeds, given data, preference rounds, a learned reward. They differ by where
experience comes from: each is one file with its checks, its largest update and its source, which `prepare` or its caller
chooses (`Kind` in `runs/run.py`).

May import all that a run needs. Open `rollouts.py` first. A kind whose updates have another form also needs a batch (`types`),
an objective, a log, and constraints of its settings (`algorithms/constraints.py`).
"""
