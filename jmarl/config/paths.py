"""Expand the home directory in paths that users give.

Each entrance of a path calls `expand_home`: settings, flags of commands, and functions that read or write a file of the user.
Left out: variables such as $HOME, which shells expand; a path with `./` in front of its ~ is the one in the working directory.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any


def expand_home(path: Any) -> Any:
    """Return a path with the home directory in place of a leading ~ or ~user, as shells write it; each one of several. Other
    values are returned as they are."""
    if isinstance(path, list | tuple):
        return type(path)(map(expand_home, path))
    if isinstance(path, str):
        return os.path.expanduser(path)
    return Path(os.path.expanduser(path)) if isinstance(path, os.PathLike) else path
