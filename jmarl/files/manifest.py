"""Write and check the manifest of a folder: size and SHA-256 of every file, to detect and name damaged files.

The manifest is written last, into the folder that it describes, and contains a digest of itself. Left out: repair.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from jmarl.config.bounded_files import open_file, read_json

NAME = "manifest.json"


def write_manifest(folder: Path) -> None:
    """Write the manifest of all files below `folder`, and flush every file to the disk."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    files = {str(path.relative_to(folder)): describe_file(path, sync=True) for path in paths}
    with (folder / NAME).open("w", encoding="utf-8") as file:
        json.dump({"files": files, "sha256": _digest(files)}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    for directory in [folder, *(path for path in folder.rglob("*") if path.is_dir())]:
        sync_directory(directory)


def find_damage(folder: Path) -> str | None:
    """Return which file differs from the manifest first, and how; None if the folder is intact."""
    try:
        content = read_json(folder / NAME)
        files: dict[str, list[Any]] = content["files"]
        if content["sha256"] != _digest(files):
            return f"{NAME} was changed after it was written"
    except FileNotFoundError:
        return f"{NAME} is missing"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{NAME} cannot be read ({error})"
    for name, (size, digest) in files.items():
        try:
            new_size, new_digest = describe_file(folder / name)
        except FileNotFoundError:
            return f"{name} is missing"
        except (OSError, ValueError) as error:
            return f"{name} cannot be read ({error})"
        if new_size != size:
            return f"{name} has {new_size} bytes, but {size} were written"
        if new_digest != digest:
            return f"{name} has other bytes than were written"
    return None


def describe_file(path: Path, sync: bool = False) -> list[Any]:
    """Return size and SHA-256 of a file. sync: first wait until the file is on the disk."""
    with open_file(path) as file:
        if sync:
            os.fsync(file.fileno())
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return [file.tell(), digest]


def sync_directory(directory: Path) -> None:
    """Flush the names in a directory to the disk, so that a rename survives a power cut."""
    fd = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _digest(files: Any) -> str:
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()
