"""Module paths of CoMLRL 1.4.3 and of its older documents, as names of modules here.

A class is the same object by every path. Each path below is one more name of a module, such as `trainers.reinforce.marloo` of
`trainers.reinforce`.
"""

from __future__ import annotations

import importlib
import sys

# Package -> module -> other paths of it. All below `jmarl.comlrl`.
PATHS = {
    "": {"only_in_comlrl": "models models.actor_critic schedulers schedulers.device_scheduler"},
    "trainers": {
        "trainers.magrpo": "trainers.reinforce.magrpo",
        "trainers.reinforce": "trainers.mareinforce trainers.maremax trainers.marloo trainers.reinforce.mareinforce "
        "trainers.reinforce.maremax trainers.reinforce.marloo",
        "trainers.centralized": "trainers.reinforce.centralized_magrpo trainers.preference.centralized",
        "trainers.actor_critic": "trainers.iac trainers.maac trainers.ippo trainers.mappo trainers.actor_critic.ac_base "
        "trainers.actor_critic.iac trainers.actor_critic.maac",
        "trainers.preference": "trainers.madpo trainers.marlhf trainers.preference.madpo trainers.preference.marlhf "
        "trainers.preference.iterative",
        "trainers.dpo": "trainers.sft",
    },
    "utils": {
        "utils": "utils.checkpoint utils.distributed utils.formatters utils.model_loading utils.reference_kl "
        "utils.reward_processor utils.reward_utils utils.tokenizer_utils",
    },
}


def add_paths(package: str) -> None:
    """Make the modules of a package importable by their other paths. package: its `__name__`."""
    root, _, name = f"{package}.".partition(".comlrl.")
    for home, paths in PATHS[name.rstrip(".")].items():
        module = importlib.import_module(f"{root}.comlrl.{home}")
        for path in paths.split():
            parent, _, last = f"{root}.comlrl.{path}".rpartition(".")
            sys.modules[f"{parent}.{last}"] = module
            setattr(sys.modules[parent], last, module)
