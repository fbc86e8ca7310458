"""Sample the completions of all agents, and compute the log-probabilities of given completions.

The room imports `models`, `team` and earlier rooms. Open `sampler.py` first.
"""
