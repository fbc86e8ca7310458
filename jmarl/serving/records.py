"""What the engine knows of requests: who asks for what, the rows in the slots of a pool, and what they have written."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from jmarl.serving.rows import RowPool


class Update(NamedTuple):
    """What a row has written since the last update."""

    choice: int  # number of the row in its request
    ids: list[int]
    logprobs: list[float]  # over the whole vocabulary, at the temperature of the request
    ended: bool  # the last token ends the completion
    last: bool  # the row writes no more: it has ended, or reached its limit


@dataclasses.dataclass(eq=False)
class SamplingRequest:
    """What a client asks one agent for."""

    agent: int
    ids: Sequence[int]  # the prompt
    limit: int  # longest completion
    seed: int
    deliver: Callable[[Update | Exception], None]  # called in the engine's thread; an exception is the last call
    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    unwanted: set[int] = dataclasses.field(default_factory=set)
    """Choices that nobody waits for any more; whoever gets the updates adds them, and their slots become free."""

    def cancel(self) -> None:
        """Free all rows of this request."""
        self.unwanted.update(range(self.n))

    @property
    def is_cancelled(self) -> bool:
        return len(self.unwanted) == self.n


class Size(NamedTuple):
    """What the rows of a pool have in common."""

    stack: int
    width: int  # longest prompt
    capacity: int  # longest completion


@dataclasses.dataclass(eq=False)
class Row:
    """A row in a slot."""

    request: SamplingRequest
    choice: int
    sent: int = 0  # tokens that are delivered


@dataclasses.dataclass(eq=False)
class OpenPool:
    """A pool and the rows in its slots."""

    arrays: RowPool
    rows: list[list[Row | None]]  # [A][slot]

    @property
    def taken(self) -> np.ndarray:
        """Which slots have a row, [A, slot]."""
        return np.array([[row is not None for row in rows] for rows in self.rows])

    def places(self) -> list[tuple[int, int, Row]]:
        """Return the rows with their places: parameter set and slot."""
        return [(a, slot, row) for a, rows in enumerate(self.rows) for slot, row in enumerate(rows) if row is not None]


class Programs(NamedTuple):
    """The compiled programs of a pool."""

    admit: Callable[..., RowPool]
    advance: Callable[..., RowPool]
