"""Goodput: the share of wall time that a run spends in sampling, rewards, updates, checkpoints, evaluations and compiling.

`CLOCK` measures the thread of the training loop, and each of several runs in threads of their own; each second counts for one
phase only, the innermost one. The device works asynchronously, so what counts is where the host waits:

    sampling    from the call of the sampler until its completions are there; weights that are not ready are waited for before
    rewards     the rest of playing: environments, reward functions, tokenization. Sampling beside them (`sample_parts`) counts
                only as long as the host waits for it
    data        drawing given pairs and texts, in place of sampling and rewards
    update      making batches, starting the update, and waiting for it, which happens before the next sampling or row; what the
                host does meanwhile (logs, tokenization) counts for its own phase, although the device updates
    checkpoint  copying the state to the host and starting to write it; the rest is written in the background. At the end of
                the run: waiting for the last one, and writing the models
    evaluation  held-out evaluations, their sampling and rewards included
    compiling   lowering and compiling programs, whichever phase needed them; tracing counts for that phase
    idle        the host is in none of these: it writes logs, or the loop itself runs

The columns `time/…` of a step have the seconds since those of the step before. On rollouts they are taken once the update is
started: the wait for this update is in the row of the next step, which then samples. On given data, and on the pairs of rounds,
they are taken when the update has ended, which is so in the row of its own step. The evaluation and the checkpoint after a step
are in the row of the next one, and what follows the last step (also its models) in no row.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import jax

from jmarl.sampling.generate import Sampler, SampleRequest, sample_team
from jmarl.team import Team
from jmarl.types import Completions

PHASES = ("sampling", "rewards", "update", "checkpoint", "evaluation", "compiling", "idle")
COMPILING = ("/jax/core/compile/jaxpr_to_mlir_module_duration", "/jax/core/compile/backend_compile_duration")


class Clock(threading.local):
    """Attributes the time of a thread to nested phases. Each thread sees only its own: a phase of a thread beside the loop,
    such as that of rewards, does not count for the run."""

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        """Start to measure the calling thread, which is idle."""
        self.current, self.since = "idle", time.monotonic()
        self.lowered: float | None = None  # when a program was lowered that is being compiled now
        self.seconds: defaultdict[str, float] = defaultdict(float)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Measure a run in the calling thread. A run inside another one, such as of a reward model, counts for the phase of the
        outer one."""
        outer = self.current, self.since, self.seconds
        self.start()
        try:
            yield
        finally:
            self.current, self.since, self.seconds = outer

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Attribute the time in the context to a phase."""
        outer = self.current
        self._switch(name)
        try:
            yield
        finally:
            self._switch(outer)

    def reader(self) -> Callable[[], tuple[str, float]]:
        """Return a function for other threads: it returns the phase of the calling thread, and the seconds since it began."""
        own = vars(self)  # of the calling thread, in every thread

        def read() -> tuple[str, float]:
            name, since, lowered = own["current"], own["since"], own["lowered"]
            return (name, time.monotonic() - since) if lowered is None else ("compiling", time.monotonic() - lowered)

        return read

    def take(self) -> dict[str, float]:
        """Return the seconds of each phase since the last call or `start`."""
        self._switch(self.current)
        seconds, self.seconds = self.seconds, defaultdict(float)
        return {name: seconds[name] for name in dict.fromkeys((*PHASES, *seconds))}

    def compiled(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        """Move the seconds of a compilation from the current phase to `compiling`. A listener of `jax.monitoring`."""
        del kwargs
        if event in COMPILING:
            self.lowered = time.monotonic() if event == COMPILING[0] else None  # compiling follows lowering at once
            self.seconds[self.current] -= duration_secs
            self.seconds["compiling"] += duration_secs

    def _switch(self, name: str) -> None:
        now = time.monotonic()
        self.seconds[self.current] += now - self.since
        self.current, self.since, self.lowered = name, now, None


CLOCK = Clock()
jax.monitoring.register_event_duration_secs_listener(CLOCK.compiled)


def timed(sample: Sampler, params: Sequence[Any]) -> Sampler:
    """Return a sampler whose time counts as sampling. params: parameters [A, ...] of each stack, with which it samples."""

    def sample_and_count(request: SampleRequest) -> tuple[Completions, ...]:
        outer, meanwhile = CLOCK.current, request.meanwhile

        def counted() -> None:
            if meanwhile is not None:
                with CLOCK.phase(outer):
                    meanwhile()

        with CLOCK.phase("update"):
            jax.block_until_ready(params)
        with CLOCK.phase("sampling"):
            return jax.block_until_ready(sample(request._replace(meanwhile=meanwhile and counted)))

    return sample_and_count


def timed_sampler(team: Team, params: Sequence[Any]) -> Sampler:
    """Return a timed function that samples completions with these parameters [A, ...] of each stack."""
    return timed(partial(sample_team, team, params), params)
