"""Held-out evaluation, cross-play between runs, and statistics.

The room imports `rollout` and what comes before it. Open `evaluate.py` first.
"""
