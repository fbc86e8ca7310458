"""Policies, trainers, environments and settings under the names and module paths of MRLM.

Replace `mrlm` by `jmarl.mrlm` in imports. Each trainer fills a `TrainConfig` and calls `training.train` or `training.fit`. The
room imports all rooms before it. Open `algorithms` first.

Left out, since one trainer of several stacks does more: the classes `Trajectory`, `RolloutBuffer` and `PreferenceDataset`
(lists of dicts, files and `datasets` in their place), the trainers' arguments `optimizer` and `device` (settings `optimizer`
and `mesh`), and the loops of DDP and FSDP (devices of one process by `mesh`; processes come later). Serving environments over
gRPC comes later too. Settings that cannot act here are refused with the reason (`jmarl.config.mrlm_keys`).
"""
