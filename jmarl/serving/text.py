"""From tokens to text while a row is written: what can be sent already, where a stop string cuts the text, why it ended."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from jmarl.models.hub.tokenize import decode

STOP, LENGTH = "stop", "length"  # why a completion ended
UNFINISHED = "\ufffd"  # what tokenizers write for the first bytes of a character


class Piece(NamedTuple):
    """What is new of a completion."""

    text: str
    ids: list[int]
    logprobs: list[float]
    finish: str | None  # why it has ended; None: it goes on
    top: tuple[dict[int, float], ...] = ()  # of each token the likeliest ids in its place; (): not asked for


def joined(pieces: Sequence[Piece]) -> Piece:
    """Return the pieces of a completion as one."""
    ids, logprobs = [i for piece in pieces for i in piece.ids], [x for piece in pieces for x in piece.logprobs]
    return Piece("".join(piece.text for piece in pieces), ids, logprobs, pieces[-1].finish)


@dataclasses.dataclass
class RowText:
    """The text of a row so far.

    What may be the beginning of a stop string, or of a character, is sent only when it turns out to be none.
    """

    tokenizer: Any
    stops: Sequence[str] = ()
    shown: Collection[str] = ()  # special tokens that stay in the text, see `decode`
    skip: bool = True  # whether the others are left out
    whole: bool = False  # send all text at the end
    ids: list[int] = dataclasses.field(default_factory=list)
    text: str = ""  # without the stop string
    finish: str | None = None
    sent: int = 0  # characters

    def add(self, ids: Sequence[int], logprobs: Sequence[float], ended: bool, last: bool) -> Piece:
        """Add tokens, and return what can be sent. The tokens after the one that completes a stop string are dropped.

        ended: the last token ends the completion. last: no more will come.
        """
        before = len(self.ids)
        text = self._decode([*self.ids, *ids])
        if any(stop in text for stop in self.stops):
            ids = ids[: self._complete(ids)]
            text = self._decode([*self.ids, *ids])
            self.text, self.finish = text[: min(text.index(stop) for stop in self.stops if stop in text)], STOP
        else:
            self.text, self.finish = text, (STOP if ended else LENGTH) if last else None
        self.ids += ids
        end = len(self.text) - (0 if self.finish else self._withheld())
        new = self.text[self.sent : end]
        self.sent = max(self.sent, end)
        return Piece(new, self.ids[before:], [*logprobs[: len(self.ids) - before]], self.finish)

    def _decode(self, ids: Sequence[int]) -> str:
        return decode(self.tokenizer, [ids], self.skip, self.shown)[0]

    def _complete(self, ids: Sequence[int]) -> int:
        """Return how many of the new tokens complete a stop string."""
        for count in range(1, len(ids)):
            text = self._decode([*self.ids, *ids[:count]])
            if any(stop in text for stop in self.stops):
                return count
        return len(ids)

    def _withheld(self) -> int:
        """Return how many characters at the end of the text may not be sent yet."""
        if self.whole:
            return len(self.text)
        complete = self.text.rstrip(UNFINISHED)
        beginnings = (size for stop in self.stops for size in range(1, len(stop)) if complete.endswith(stop[:size]))
        return len(self.text) - len(complete) + max(beginnings, default=0)
