"""One seat of an environment, played by somebody outside: what each step gives to it, while others play the other seats.

In steps in which the seat does not act the others play on, and their rewards for the seat are added to those of the last step
in which it acted.
"""

import secrets
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from jmarl.envs.base import Unanswered
from jmarl.envs.calls.time_limit import call_within
from jmarl.models.hub.tokenize import ChatPrompt

# others(prompts [N], seed) -> texts [N]: what the other seats write; None as prompt: that seat does not act, or is the own one.
Others = Callable[[Sequence[Any], int], Sequence[str]]
MAX_TASKS = 1000
MAX_SEED = 1 << 31
MAX_HANGING = 8  # calls of an environment or a team that are left to themselves


class Seen(NamedTuple):
    """What the seat sees after a step."""

    prompt: Any  # a text, or a ChatPrompt; None: the episode is over
    reward: float | None  # None: after a reset in which nobody acted
    done: bool


class Seat:
    """A seat of an environment; each episode of it has a state of its own.

    Args:
        env: a `LockStep`, or another `Environment` with roles, tasks and max_turns.
        seat: number of the role.
        others: plays the other seats; needed if there are any.
        split: whose tasks are played.
        call_s: seconds that a call of the environment or the team may take, and that others wait; None: no limit.
    """

    def __init__(
        self, env: Any, seat: int = 0, others: Others | None = None, split: str = "train", call_s: float | None = None
    ):
        if not 0 <= seat < len(env.roles):
            roles = ", ".join(f"{i} ({role})" for i, role in enumerate(env.roles))
            raise ValueError(f"seat={seat} is not allowed: the environment has the seats {roles}")
        if others is None and len(env.roles) > 1:
            raise ValueError(
                f"the environment has the seats {', '.join(env.roles)}: give a team that plays the others (--models), or serve "
                "an environment of one agent"
            )
        self.env, self.seat, self.others = env, seat, others
        self.tasks = env.tasks(split, MAX_TASKS, 0)
        if not self.tasks:
            raise ValueError(f"the environment has no tasks in the split {split!r}")
        self.call, self.ask = Calls("the environment", call_s), Calls("the team", call_s)

    def episode(self) -> "SeatEpisode":
        """Return an episode that has not begun."""
        return SeatEpisode(self)


class Calls:
    """Makes calls, one at a time.

    Args:
        name: whose, in errors.
        seconds: that a call may take, and that others wait for their turn; None: no limit.
    """

    def __init__(self, name: str, seconds: float | None):
        self.name, self.seconds, self.lock = name, seconds, threading.Lock()
        self.free = threading.Semaphore(MAX_HANGING)  # not under the lock: a thread that was left ends at any time

    def __call__(self, function: Callable[[], Any]) -> Any:
        """Return what a function returns, or raise what it raises.

        Raises:
            TimeoutError: it, or the one before it, takes too long. Its thread is left to itself, and others go on.
        """

        def run() -> Any:
            try:
                return function()
            finally:
                self.free.release()

        if not self.lock.acquire(timeout=-1 if self.seconds is None else self.seconds):
            raise TimeoutError(f"another call of {self.name} takes too long")
        try:
            if not self.free.acquire(blocking=False):
                raise TimeoutError(f"{self.name} hangs in {MAX_HANGING} calls")
            return call_within(self.seconds, run)
        finally:
            self.lock.release()


class SeatEpisode:
    """An episode of a seat: `reset`, then `step` until it is done; then it may be reset again."""

    def __init__(self, seat: Seat):
        self.of, self.steps, self.done = seat, 0, True
        self.state: Any = None
        self.prompts: list[Any] = []  # [N]

    def reset(self, seed: int | None) -> Seen:
        """Begin an episode. Equal seeds give equal tasks and random numbers. Raises Unanswered if it cannot begin."""
        seed = secrets.randbelow(MAX_SEED) if seed is None else seed
        self.rng, self.steps, self.turns, self.done = np.random.default_rng(seed), 0, 0, True
        task = self.of.tasks[seed % len(self.of.tasks)]
        self._see(*self.of.call(lambda: self.of.env.reset([task], self.rng)))
        self.done = False
        seen = Seen(self.prompts[self.of.seat], None, False)
        return seen if seen.prompt is not None else self._play("")

    def step(self, message: str) -> Seen:
        """Play the seat's message. Raises Unanswered if there is no reward; the episode is over then."""
        self.steps += 1
        return self._play(message)

    def _play(self, message: str) -> Seen:
        """Play joint actions until the seat acts again or the episode is over."""
        seat, reward = self.of.seat, 0.0
        while True:
            prompts = [None if i == seat else prompt for i, prompt in enumerate(self.prompts)]
            texts = [""] * len(prompts)
            if self.of.others is not None and any(prompt is not None for prompt in prompts):
                seed = int(self.rng.integers(MAX_SEED))
                texts = list(self.of.ask(partial(self.of.others, prompts, seed)))
            texts[seat] = message
            self.done, self.turns = True, self.turns + 1  # also where the environment raises
            answer, seen = self.of.call(lambda texts=texts: self._answer(texts))
            if answer.result.invalid[0]:
                raise Unanswered(answer.result.faults.get(0, "no reward"))
            self.done = seen is None
            if seen is not None:
                self._see(*seen)
            reward += float(answer.result.rewards[0, seat])
            if self.done or self.prompts[seat] is not None:
                return Seen(None if self.done else self.prompts[seat], reward, self.done)
            message = ""

    def _answer(self, texts: Sequence[str]) -> tuple[Any, tuple[Any, Any] | None]:
        """Return the answer to a joint action, and the next states and prompts; None in their place: the episode is over."""
        env = self.of.env
        answer = env.step([self.state], [[text] for text in texts], self.rng)
        is_over = bool(answer.result.invalid[0]) or bool(answer.done[0]) or self.turns >= env.max_turns
        return answer, None if is_over else env.observe(answer.after)

    def _see(self, states: Sequence[Any], prompts: Sequence[Sequence[Any]]) -> None:
        self.state, self.prompts = states[0], [column[0] for column in prompts]


def fields_of(prompt: Any) -> dict[str, Any]:
    """Return a prompt as the fields of an observation: prompt, a text, and messages, those of a chat."""
    messages = [dict(message) for message in prompt.messages] if isinstance(prompt, ChatPrompt) else []
    text = "\n\n".join(message["content"] for message in messages) if messages else prompt or ""
    return {"prompt": str(text), "messages": messages}
