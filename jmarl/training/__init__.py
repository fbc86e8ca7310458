"""The training loop and everything that a run needs around it.

The room imports all rooms before it. Open `train.py` first: it has the loop.
"""
