"""The training loop and everything that a run needs around it.

The room imports all rooms before it. Open `loop.py` first: it shows one training step, for all kinds of runs.
"""
