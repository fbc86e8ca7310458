"""Leagues: the team also plays against frozen copies of its past and strangers; and cross-play over turns (`pairings`).

A guest of the core: `settings.league` chooses it, and `runs.kinds.rollouts` finds it by its name. Open `league.py` first.
"""
