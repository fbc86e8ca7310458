"""Policies, trainers, environments and settings under the names and module paths of MRLM.

Replace `mrlm` by `jmarl.mrlm` in imports. Each trainer fills a `TrainConfig` and calls `jmarl.train` or `jmarl.fit`. The
room imports all rooms before it. Open `algorithms` first; `convert.py` makes our settings of files, flags and arguments, by the
table in `keys.py`.

Left out, since one trainer of several stacks does more: rollout buffers, and the loops of DDP and FSDP (devices by `mesh`,
processes by `jmarl launch` or torchrun). Serving environments over gRPC comes later. `names` has the names that are elsewhere
here or refused with a sentence. Settings that cannot act here are refused with the reason (`jmarl.mrlm.keys`).
"""

import importlib
from typing import Any

from jmarl.mrlm.names import install, refuse

install()

_HOMES = {
    "core": "BaseEnvironment EnvironmentMode LLMEnvironment Message MessageRole Observation Reward SimulatedEnvironment",
    "algorithms": "BaseTrainer DPOTrainer GRPOTrainer PPOTrainer SFTTrainer",
    "config": "DPOConfig ExperimentConfig GRPOConfig ModelConfig PPOConfig SFTConfig TrainingConfig",
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name in _HOME_OF:
        return getattr(importlib.import_module(f"{__name__}.{_HOME_OF[name]}"), name)
    return refuse(__name__, name)
