"""Find the settings of a run from its directory. Imports no jax, because the report does not."""

from __future__ import annotations

from pathlib import Path

CONFIG_FILE = "config.yaml"


def config_file_of(directory: Path) -> Path | None:
    """Return the file with the settings of a run; of one of several seeds it is in the directory above. None: there is none."""
    own, above = directory / CONFIG_FILE, directory.absolute().parent / CONFIG_FILE
    if own.is_file():
        return own
    return above if directory.absolute().name.startswith("seed_") and above.is_file() else None
