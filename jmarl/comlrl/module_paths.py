"""Module paths of CoMLRL 1.4.3 below its packages, beside the shorter ones of its older documents.

`trainers.reinforce.magrpo` and `trainers.magrpo` are one module object, so a class is the same by every path.
"""

from __future__ import annotations

import importlib
import sys

# Package of CoMLRL -> its module -> the module here.
SUBMODULES = {
    "trainers.reinforce": {
        "magrpo": "trainers.magrpo",
        "mareinforce": "trainers.mareinforce",
        "maremax": "trainers.maremax",
        "marloo": "trainers.marloo",
    },
    "trainers.actor_critic": {"iac": "trainers.iac", "maac": "trainers.maac"},
    "trainers.preference": {
        "centralized": "trainers.centralized",
        "madpo": "trainers.madpo",
        "marlhf": "trainers.marlhf",
    },
}


def add_submodules(package: str) -> None:
    """Make the modules of CoMLRL's package importable below a package here. package: `__name__` of its `__init__.py`."""
    root, _, name = package.partition(".comlrl.")
    for module, home in SUBMODULES[name].items():
        imported = importlib.import_module(f"{root}.comlrl.{home}")
        sys.modules[f"{package}.{module}"] = imported
        setattr(sys.modules[package], module, imported)
