"""From prompts to completions of all agents, and the log-probabilities of given completions.

The room imports `models`, `team` and what comes before them. Open `sampler.py` first.
"""
