"""Classes under the names and module paths of MRLM: policies, environments, configuration sections and trainers.

They fill a `TrainConfig` and call `training.train`. The room imports all rooms before it. Open `algorithms` first.
"""
