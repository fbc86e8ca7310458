"""The training loop and everything that a run needs around it.

The room may import all earlier rooms. Open `loop.py` first: it shows one training step, for all kinds of runs.
Then `prepare.py`, which every run starts with, and `run.py`, its record.
"""
