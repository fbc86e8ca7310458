"""What a checkpoint of a trainer says about itself, at CoMLRL's module path."""

from __future__ import annotations

import os
from typing import Any

from jmarl.comlrl.checkpoints import read_metadata


def read_checkpoint_metadata(checkpoint: str | os.PathLike) -> dict[str, Any]:
    """Return what a checkpoint says about itself, without loading its arrays.

    checkpoint: a run's directory (its newest checkpoint), or DIRECTORY/checkpoints/STEP. The result has the version of the
    format, sequence (the number of updates made), trainer_class, and the run's algorithm and settings as config. run_id and
    wandb are None: a run that continues has its W&B run without them.
    """
    metadata = read_metadata(checkpoint)
    return metadata | {"trainer_class": _trainers().get(metadata["algorithm"])}


def _trainers() -> dict[str, str]:
    """Return the name of the trainer of each algorithm."""
    from jmarl.comlrl import trainers

    classes = [value for name, value in vars(trainers).items() if name.endswith("Trainer")]
    return {trainer.config_class().algorithm: trainer.__name__ for trainer in classes}
