"""Learning from preferences: pairs, rounds that make new pairs, comparators, reward models.

Open `pair_rounds.py` first.
"""
