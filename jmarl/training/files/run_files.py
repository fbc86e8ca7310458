"""Find the settings of a run from its directory, and versions of packages. Imports no jax, so that the report starts at once,
and `jmarl info` can say that jax does not work."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping
from pathlib import Path
from typing import Any

CONFIG_FILE = "config.yaml"
PACKAGES = ("jmarl", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "transformers", "numpy")
DICTIONARIES = {"options", "wandb"}  # settings that are mappings, not sections


def config_file_of(directory: Path) -> Path | None:
    """Return the file with the settings of a run; of one of several seeds it is in the directory above. None: there is none."""
    own, above = directory / CONFIG_FILE, directory.absolute().parent / CONFIG_FILE
    if own.is_file():
        return own
    return above if directory.absolute().name.startswith("seed_") and above.is_file() else None


def leaves(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings in the parts and sections of a config.yaml by their short names."""
    named: dict[str, Any] = {}
    for name, value in tree.items():
        named |= leaves(value) if isinstance(value, Mapping) and name not in DICTIONARIES else {name: value}
    return named


def version_of(package: str) -> str:
    """Return the version of a package; empty if it is not installed as one."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
