"""Plan a run before there is a GPU: compile its programs for a device that is not here, and count what they need.

The room imports everything up to `training`. Open `plan.py` first.
"""
