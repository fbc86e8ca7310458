"""Learning from preferences: pairs, rounds that make new pairs, comparators, reward models.

Open `rounds.py` first.
"""
