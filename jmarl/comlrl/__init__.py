"""Trainer classes under the names, arguments and module paths of CoMLRL.

Replace `comlrl` by `jmarl.comlrl` in imports. Each trainer fills a `TrainConfig` and calls `training.train` or `training.fit`.
The room imports all rooms before it. Open `trainers` first.

Left out: `model_config`, which is refused with what to use instead, as are settings without a counterpart (`REFUSED` in
`config`: agents are spread over devices by `mesh`, and an update takes all prompts of its rollout); models of torch after
training, because a trainer copies their weights and returns agents (`trainer.agents`, `save_model`).
"""

__version__ = "1.4.3"  # the version of CoMLRL whose names and settings these are
