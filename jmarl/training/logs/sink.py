"""What a metrics writer writes to: the base class of its logs."""

from __future__ import annotations

import abc

import numpy as np


class Sink(abc.ABC):
    """One log. Its `errors` are counted and do not stop the run."""

    errors: tuple[type[BaseException], ...] = (OSError,)

    @abc.abstractmethod
    def write(self, step: int, row: dict[str, float]) -> None:
        """Write a row of metrics by their tags."""

    def text(self, step: int, name: str, markdown: str) -> None:
        return None

    def histogram(self, step: int, name: str, values: np.ndarray) -> None:
        return None

    def sync(self) -> None:
        return None

    def close(self) -> None:
        return None
