"""CoMLRL's front end: its trainer classes, argument names and module paths.

The classes fill a `TrainConfig` and call `training.train`. The room imports all rooms before it. Open `trainers` first.
"""
