"""The process of a script, at CoMLRL's module path. Here it is always a single one; devices are chosen by `mesh`."""

from typing import Any, NamedTuple


class DistributedContext(NamedTuple):
    """What a script may ask about its process."""

    is_main: bool = True
    device: Any = None


def local_context(device: Any = None) -> DistributedContext:
    """Return the context of the only process."""
    return DistributedContext(device=device)


def unwrap_model(model: Any) -> Any:
    """Return the model inside a wrapper such as DistributedDataParallel, or the model itself."""
    return getattr(model, "module", model)
