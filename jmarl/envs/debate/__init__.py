"""Debates between two agents, and the judges that score them.

The room imports `envs`. Open `debate.py` first.
"""
