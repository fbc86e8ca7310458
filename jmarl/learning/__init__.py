"""From a batch to new parameters: the objective, the optimizer, critics, and settings of single agents.

The room imports `sampling` (log-probabilities), `models`, `rl` and what comes before them. Open `update.py` first.
"""
