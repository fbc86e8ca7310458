"""Code generation one agent after the other: agent t writes its part in turn t and reads what the agents before it wrote.

A baseline for `envs.code.generation`, where all agents write at once, with the same items, reward, reward range and metrics.
Play it with num_turns = num_agents; the reward of the last turn is that of the whole program. Agents that are not on turn are
asked for a single word, and their completions are ignored. Left out: training, because the agents would learn from those words.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from jmarl.envs.code.generation import CodeEpisode, CodeGeneration
from jmarl.envs.rewards import Processor
from jmarl.sandbox import Limits, Sandbox

WAIT = "Another programmer is writing. Answer with the word ok."


class CodePipeline(CodeGeneration):
    """The sequential environment; see the module docstring. The arguments are those of `CodeGeneration`."""

    def __init__(
        self,
        num_agents: int = 2,
        *,
        processor: Processor | None = None,
        limits: Limits | None = None,
        sandbox: Sandbox | None = None,
        generator: Any = None,
    ):
        super().__init__(num_agents, feedback="plain", processor=processor, limits=limits, sandbox=sandbox, generator=generator)

    def reset(self, items: Sequence[dict], rng: np.random.Generator) -> tuple[list[CodeEpisode], list[list[str]]]:
        """Return the states [P] and the first prompts [N][P]: only agent 0 is asked for code."""
        states, _ = super().reset(items, rng)
        return self.observe(states)

    def update_codes(self, state: CodeEpisode, texts: Sequence[str]) -> tuple[str, ...]:
        """Replace the code of the agent on turn; the other completions are ignored."""
        codes = list(state.codes or ("",) * self.num_agents)
        codes[state.turn] = self.code_of(texts[state.turn])
        return tuple(codes)

    def later_prompts(self, state: CodeEpisode) -> list[str]:
        """Return the prompts [N]: the agent on turn reads the earlier agents' code, the others `WAIT`."""
        blocks = "".join(f"\n\n```python\n{code}\n```" for code in state.codes[: state.turn] if code)
        earlier_code = f"\n\nWritten by others so far:{blocks}" if blocks else ""
        prompts = self.first_prompts(state.item)
        return [text + earlier_code if agent == state.turn else WAIT for agent, text in enumerate(prompts)]
