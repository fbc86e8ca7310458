"""Play episodes and make the batches that agents and critics learn from.

Here the host world and the device world meet. The room imports `envs`, `learning` and what comes before them. Open `play.py`
first; its records are in `turns.py`. What a run learns from, and where it gets it, is in `experience.py`.
"""
