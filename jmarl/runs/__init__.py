"""The training loop and everything that a run needs around it.

The room may import all earlier rooms. Open `loop.py` first: it shows one training step, for all kinds of runs.
Then `prepare.py`, which every run starts with, `run.py`, its record, and `kinds/`: what a run learns from.
"""
