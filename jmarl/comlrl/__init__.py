"""Trainer classes under the names, arguments and module paths of CoMLRL.

Each fills a `TrainConfig` and calls `training.train` or `training.fit`. The room imports all rooms before it. Open `trainers`
first.
"""
