"""From a batch to new parameters: one agent's step, the program of a stack, critics, and settings of single agents.

The room imports `objectives` (what an agent minimizes), `sampling` (log-probabilities), `models` and what comes before them.
Open `program.py` first, then `step.py`.
"""
