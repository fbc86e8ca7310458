"""Environments of two agents, who act in turns or earn rewards of their own, for tests of episodes and of training."""

from __future__ import annotations

from jmarl.envs.base import Step, TextEnvironment


class Relay(TextEnvironment):
    """Agents act in turns: the first, the second, then both. Agent a earns a + 1 in every step, whoever acts."""

    roles, reward_range, max_turns = ("a", "b"), (1.0, 2.0), 3

    def tasks(self, split="train", count=100, seed=0):
        return [{"id": i} for i in range(count)]

    def reset(self, task, rng):
        return 0, ["you first", None]

    def step(self, state, messages, rng):
        assert [bool(m) for m in messages] == [[True, False], [False, True], [True, True]][state] or "" in messages
        idle = [1, 0, None][state]
        assert idle is None or messages[idle] == "", "an agent that does not act has no message"
        return Step(state + 1, [[None, "now you"], ["both", "both"], ["", ""]][state], [1.0, 2.0], state == 2)


class Silent(Relay):
    """Agent 1 never acts."""

    max_turns = 1

    def step(self, state, messages, rng):
        return Step(1, ["", None], float(len(messages[0])) / 1000 + 1, True)


class Pass(TextEnvironment):
    """Which agent acts second depends on the first message."""

    roles, reward_range, max_turns = ("a", "b"), (0.0, 1.0), 2

    def reset(self, task, rng):
        return None, ["begin", None]

    def step(self, state, messages, rng):
        if state is None:
            speaker = len(messages[0]) % 2
            return Step(speaker, ["go" if speaker == n else None for n in range(2)], 0.5, False)
        assert messages[1 - state] == "", "an agent that does not act has no message"
        return Step(state, [None, None], 1.0, True)


class Scaled(TextEnvironment):
    """The reward of each agent depends on its own text; that of agent 1 is scaled by -1000."""

    roles, reward_range = ("a", "b"), (-1e6, 1e6)

    def tasks(self, split="train", count=100, seed=0):
        return [{"id": i} for i in range(count)]

    def reset(self, task, rng):
        return None, ["go", "go"]

    def step(self, state, messages, rng):
        worth = [sum(map(ord, text)) % 97 / 97 for text in messages]
        return Step(None, [None, None], [worth[0], 500 - 1000 * worth[1]], True)
