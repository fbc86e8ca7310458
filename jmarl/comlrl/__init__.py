"""Trainer classes under the names, arguments and module paths of CoMLRL.

Replace `comlrl` by `jmarl.comlrl` in imports. Each trainer fills a `TrainConfig` and calls `jmarl.train` or `jmarl.fit`.
The room imports all rooms before it. Open `trainers` first.

Its settings are in `peer_settings` and `preference_settings`, with what each does here.

Left out: models of torch after training, because a trainer copies their weights and returns agents (`trainer.agents`,
`save_model`), and names that are parts of torch (`only_in_comlrl`, which says what to use instead).
"""

__version__ = "1.4.3"  # the version of CoMLRL whose names and settings these are
