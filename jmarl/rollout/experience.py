"""The experience of a step, before it becomes batches (a `Rollout`, or examples), and where a run gets it from.

Runs on rollouts, given data, preference rounds and several seeds differ only in their kind (`runs/run.py`) and in the loss.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from jmarl.types import Data, TeamState


class DataExperience(NamedTuple):
    """Pairs or texts that were drawn from data."""

    batches: tuple[Data, ...]  # one per stack, on the host; without the margins of other agents
    tokens: int  # number of tokens in the examples
    notes: Mapping[str, float] = {}  # further columns of the step's row
    preparation_s: float = 0.0  # seconds not counted as time of the step, in which pairs were sampled


def same_state(state: TeamState) -> TeamState:
    """Return a state as it is."""
    return state


class Source(NamedTuple):
    """Where a run gets its experience from: the functions that differ between kinds of runs."""

    play: Callable[[int, TeamState], Any]  # (step, state) -> a `Rollout` or `DataExperience`; of several seeds a list
    evaluate: Callable[[TeamState], Any] | None = None  # state -> evaluation on held-out items; None without held-out items
    open: Callable[[TeamState], TeamState] = same_state
    """Called once with the first or restored state: compile programs, read earlier rounds, take what belongs to the sampler."""
    to_save: Callable[[TeamState], TeamState] = same_state  # what a checkpoint saves: the inverse of `open`
    waits: Callable[[int], bool] = lambda step: False  # whether a step on pairs needs the update before, e.g. to sample them
    renew: Callable[[int, TeamState, Any], TeamState] = lambda step, state, evaluation: state
    """(step, state, newest evaluation) -> the state that the step plays with. A resumed run may call it with the result."""
