"""One seat of an environment, played by somebody outside: what each step gives to it, while others play the other seats.

In steps in which the seat does not act the others play on, and their rewards for the seat are added to those of the last step
in which it acted.
"""

import secrets
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from jmarl.envs.base import Unanswered
from jmarl.models.hub.tokenize import ChatPrompt

# others(prompts [N], seed) -> texts [N]: what the other seats write; None as prompt: that seat does not act, or is the own one.
Others = Callable[[Sequence[Any], int], Sequence[str]]
MAX_TASKS = 1000
MAX_SEED = 1 << 31


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
    """

    def __init__(self, env: Any, seat: int = 0, others: Others | None = None, split: str = "train"):
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
        self.lock = threading.Lock()  # environments are called by one thread at a time

    def episode(self) -> "Episode":
        """Return an episode that has not begun."""
        return Episode(self)


class Episode:
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
        with self.of.lock:
            states, prompts = self.of.env.reset([task], self.rng)
        self._see(states, prompts)
        self.done = False
        seen = Seen(self.prompts[self.of.seat], None, False)
        return seen if seen.prompt is not None else self._play("")

    def step(self, message: str) -> Seen:
        """Play the seat's message. Raises Unanswered if there is no reward; the episode is over then."""
        self.steps += 1
        return self._play(message)

    def _play(self, message: str) -> Seen:
        """Play joint actions until the seat acts again or the episode is over."""
        seat, env, reward = self.of.seat, self.of.env, 0.0
        while True:
            prompts = [None if i == seat else prompt for i, prompt in enumerate(self.prompts)]
            texts = [""] * len(prompts)
            if self.of.others is not None and any(prompt is not None for prompt in prompts):
                texts = list(self.of.others(prompts, int(self.rng.integers(MAX_SEED))))
            texts[seat] = message
            self.done, self.turns = True, self.turns + 1  # also where the environment raises
            with self.of.lock:
                answer = env.step([self.state], [[text] for text in texts], self.rng)
                if answer.result.invalid[0]:
                    raise Unanswered(answer.result.faults.get(0, "no reward"))
                self.done = bool(answer.done[0]) or self.turns >= env.max_turns
                if not self.done:
                    self._see(*env.observe(answer.after))
            reward += float(answer.result.rewards[0, seat])
            if self.done or self.prompts[seat] is not None:
                return Seen(None if self.done else self.prompts[seat], reward, self.done)
            message = ""

    def _see(self, states: Sequence[Any], prompts: Sequence[Sequence[Any]]) -> None:
        self.state, self.prompts = states[0], [column[0] for column in prompts]


def fields_of(prompt: Any) -> dict[str, Any]:
    """Return a prompt as the fields of an observation: prompt, a text, and messages, those of a chat."""
    messages = [dict(message) for message in prompt.messages] if isinstance(prompt, ChatPrompt) else []
    text = "\n\n".join(message["content"] for message in messages) if messages else prompt or ""
    return {"prompt": str(text), "messages": messages}
