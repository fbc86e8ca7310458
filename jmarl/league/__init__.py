"""Leagues: the team also plays against frozen copies of its past, beside the present team. Populations: the worst of several
teams that learn together copy the best. Talk: what messages change.

A guest of the core: `settings.league`, `settings.population` and `talk_every` choose it, and `runs.kinds.rollouts` and `seeds`
find it by its name. Open `league.py`, `population.py` or `talk.py` first.
"""
