"""Leagues: the team also plays against frozen copies of its past, beside the present team.

A guest of the core: `settings.league` chooses it, and `runs.kinds.rollouts` finds it by its name. Open `league.py` first.
`talk.py` stands beside it: what messages change (`talk_every`).
"""
