"""Code generation one after the other: in turn t agent t writes its part, and reads what those before it wrote.

A baseline beside `code_generation`, where all write at once: the same items, reward and metrics. Play it with num_turns =
num_agents; the last turn's reward is that of the whole program. Agents whose turn it is not are asked for a word, and what they
say is not read. Left out: training on it, because of those words.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jmarl.envs.code.generation import CodeGeneration, Episode

WAIT = "Another programmer is writing. Answer with the word ok."


class CodePipeline(CodeGeneration):
    """The environment; see the module."""

    def __init__(self, num_agents: int = 2, **more: Any):
        super().__init__(num_agents, feedback="plain", **more)

    def reset(self, items, rng):
        states, _ = super().reset(items, rng)
        return states, self._prompts([self.ask_again(state) for state in states])

    def codes(self, state: Episode, texts: Sequence[str]) -> tuple[str, ...]:
        codes = list(state.codes or ("",) * self.num_agents)
        codes[state.turn] = self.written(texts[state.turn])
        return tuple(codes)

    def ask_again(self, state: Episode) -> list[str]:
        done = "".join(f"\n\n```python\n{code}\n```" for code in state.codes[: state.turn] if code)
        said = f"\n\nWritten by others so far:{done}" if done else ""
        asked = self.ask(state.item)
        return [text + said if agent == state.turn else WAIT for agent, text in enumerate(asked)]
