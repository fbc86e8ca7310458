"""A signaling game (`signals`): a sender sees a thing and sends signals, a receiver reads only these and names the thing.

Task: one of the first `things` of THINGS (Lewis, "Convention", 1969). Roles act in turns; the one that does not act has no
prompt. The sender reads the thing. Its message is the first `length` words of the first `signals` of SIGNALS in what it writes;
all other text is lost, so it cannot simply name the thing: the two have to agree on a code. The receiver reads the message,
and the first of the things in what it writes is its answer.

Joint reward: 1 in the last step if the answer is the thing, 0 otherwise.

Measures of the last step: `solved`. Data: the things, the same in both splits: a code is an agreement on these things, and
nothing tells what signal another thing has. `solve` sends and reads one fixed code. Left out: things with properties, whose
codes could be composed; costs of long messages; more rounds.
"""

import re
from collections.abc import Sequence
from itertools import islice, product
from typing import Any, NamedTuple

import numpy as np

from jmarl.envs.base import Step, TextEnvironment
from jmarl.envs.games.random_tasks import all_tasks

THINGS = (
    "apple", "bridge", "candle", "drum", "engine", "feather", "garden", "hammer", "island", "jacket", "kettle", "ladder",
    "mirror", "needle", "orange", "pencil", "quilt", "river", "saddle", "tiger", "umbrella", "violin", "window", "xylophone",
    "yacht", "zebra",
)  # fmt: skip
SIGNALS = ("ba", "ke", "du", "fi", "zo", "mu", "ri", "ta")  # of no meaning, and rare in texts


class SignalState(NamedTuple):
    """The state of an episode."""

    thing: str
    message: tuple[str, ...] | None = None  # None: the sender has not written yet


class Signals(TextEnvironment):
    """The environment; see the module.

    Args:
        things: number of things, the first of THINGS.
        signals: number of signals, the first of SIGNALS.
        length: signals of a message that the receiver reads; there must be as many messages of this length as things.
        brief: prompts of a few words, such as "see apple" and "hear ba ke", for models that are trained from scratch.
    """

    roles = ("sender", "receiver")
    reward_range = (0.0, 1.0)
    max_turns = 2

    def __init__(self, *, things: int = 8, signals: int = 4, length: int = 2, brief: bool = False):
        if not 2 <= things <= len(THINGS) or not 1 <= signals <= len(SIGNALS):
            raise ValueError(
                f"things={things}, signals={signals}: give 2 to {len(THINGS)} things and 1 to {len(SIGNALS)} signals"
            )
        if not 1 <= length <= 8 or signals**length < things:
            raise ValueError(
                f"length={length}: give 1 to 8, such that messages of {signals} signals differ for {things} things"
            )
        self.things, self.signals, self.length, self.brief = THINGS[:things], SIGNALS[:signals], length, brief
        messages = product(self.signals, repeat=length)
        self.code: dict[str, tuple[str, ...]] = dict(zip(self.things, messages, strict=False))  # of `solve`

    def tasks(self, split: str = "train", count: int = 100, seed: int = 0) -> list[dict]:
        return all_tasks([{"thing": thing} for thing in self.things], split, count, seed)

    def reset(self, task: dict, rng: np.random.Generator) -> tuple[SignalState, list[str | None]]:
        thing = task.get("thing")
        if thing not in self.things:
            raise ValueError(f"task {task!r:.80} has no known thing: give one of {', '.join(self.things)}")
        state = SignalState(thing)
        return state, self.observations(state)

    def step(self, state: SignalState, messages: Sequence[str], rng: np.random.Generator) -> Step:
        if state.message is None:
            after = state._replace(message=tuple(_words(messages[0], self.signals, self.length)))
            return Step(after, self.observations(after), 0.0, False)
        solved = float(_words(messages[1], self.things, 1) == [state.thing])
        return Step(state, [None, None], solved, True, {"solved": solved})

    def observations(self, state: SignalState) -> list[str | None]:
        """Return what the agent that acts next reads; None for the other."""
        things, signals = ", ".join(self.things), ", ".join(self.signals)
        rules = (
            f"A sender sees one of these things: {things}. It sends a message of up to {self.length} of these words: "
            f"{signals}. A receiver reads only the message and has to name the thing."
        )
        if state.message is None:
            text = f"{rules} You are the sender and see: {state.thing}. Answer with the message."
            return [f"see {state.thing}" if self.brief else text, None]
        text = f"{rules} You are the receiver and read: {' '.join(state.message) or 'nothing'}. Answer with the thing."
        return [None, " ".join(["hear", *state.message]) if self.brief else text]

    def describe(self) -> dict[str, Any]:
        counts = {"things": len(self.things), "signals": len(self.signals), "length": self.length}
        return super().describe() | counts | {"brief": self.brief}

    def render(self, state: SignalState) -> str:
        return " ".join([state.thing, ":", *(state.message or ())])

    def solve(self, state: SignalState) -> list[str | None]:
        """Return the message of the code for the thing, then the thing of the message; None if it is not in the code."""
        if state.message is None:
            return [" ".join(self.code[state.thing]), None]
        return [None, next((thing for thing, message in self.code.items() if message == state.message), None)]


def _words(text: str, words: Sequence[str], count: int) -> list[str]:
    """Return the first `count` words of a text that are among the words, in upper or lower case."""
    pattern = rf"\b(?:{'|'.join(words)})\b"
    return [match[0] for match in islice(re.finditer(pattern, text.lower()), count)]
