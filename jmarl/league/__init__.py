"""Leagues: the team also plays against frozen copies of its past and strangers. Populations: the worst of several teams that
learn together copy the best. Also cross-play over turns (`pairings`), exact policies (`scored`), what messages change (`talk`).

A guest of the core: `settings.league`, `settings.population` and `talk_every` choose it, and `runs.kinds.rollouts` and `seeds`
find it by its name. Open `league.py`, `population.py` or `talk.py` first.
"""
