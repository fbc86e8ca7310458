"""What a checkpoint of a trainer says about itself, at CoMLRL's module path."""

from __future__ import annotations

import os
from typing import Any


def read_checkpoint_metadata(checkpoint: str | os.PathLike) -> dict[str, Any]:
    """Placeholder."""
    raise NotImplementedError
