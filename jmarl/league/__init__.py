"""Leagues: the team also plays against frozen copies of its past, beside the present team. Populations: the worst of several
teams that learn together copy the best.

A guest of the core: `settings.league` and `settings.population` choose it, and `runs.kinds.rollouts` and `seeds` find it by its
name. Open `league.py` or `population.py` first.
"""
