"""MRLM's front end: its environments, configuration sections and trainers.

The classes fill a `TrainConfig` and call `training.train`. The room imports all rooms before it. Open `trainers.py` first.
"""
