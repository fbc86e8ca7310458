"""The settings of CoMLRL 1.4.3 and its defaults, and what each does to a run.

Another name of a setting of ours is in `config.aliases`. Each setting without a counterpart is a field of a class here, and is
translated (`run_settings`), or has no effect or a single value (`RULES`). Open `base.py` first, then `rollouts.py`.
"""
