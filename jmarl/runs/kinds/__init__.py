"""Kinds of runs: rollouts, given data, preference rounds, a learned reward. They differ by where experience comes from: each is
one file with its checks, its largest update and its source, in a `Kind` (`runs/run.py`), one of which `prepare` chooses. Open
`rollouts.py` first. A new kind is a file like `given.py`, and a line in `prepare`.
"""
