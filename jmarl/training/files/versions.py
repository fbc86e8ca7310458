"""Versions of the packages that a run depends on. Imports no jax, so that `jmarl info` can say that jax does not work."""

from __future__ import annotations

import importlib.metadata

PACKAGES = ("jmarl", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "transformers", "numpy")


def version_of(package: str) -> str:
    """Return the version of a package; empty if it is not installed as one."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
