"""The environment `code` of YAML files and command lines: `CodeExecution`, whose constructor here takes plain values only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from jmarl.envs.base import Answer
from jmarl.envs.code.data import load_items
from jmarl.envs.code.execution import CodeExecution
from jmarl.envs.code.problems import CodeProblemGenerator
from jmarl.envs.options import OwnTasks, reward_processor
from jmarl.envs.rows import read_rows
from jmarl.sandbox import Limits


class Code(CodeExecution):
    """Programming problems with tests; see `execution`. An episode ends when all tests pass, or after `max_turns` attempts.

    Args:
        num_agents: agents that write code.
        max_turns: attempts at a problem.
        difficulty_range: lowest and highest difficulty of generated problems, from 1 to 3; default (1, 3).
        data: humaneval, coophumaneval, mbpp, mbpp_sanitized or mbpp_openmlrl, instead of generated problems.
        problems: items of the user, a list or a .json or .jsonl file.
        feedback, shown_tests, limits: as for `CodeGeneration`.
        reward_scale, reward_clip, reward_bias: as in `envs.options`.
    """

    def __init__(
        self,
        num_agents: int = 1,
        *,
        max_turns: int = 1,
        difficulty_range: tuple[int, int] | None = None,
        data: str | None = None,
        problems: Any = None,
        feedback: str = "level_feedback",
        shown_tests: int = 0,
        limits: Limits | None = None,
        reward_scale: float = 1.0,
        reward_clip: Any = None,
        reward_bias: float = 0.0,
    ):
        if sum(source is not None for source in (difficulty_range, data, problems)) > 1:
            raise ValueError("difficulty_range, data and problems are three sources of tasks: give one of them")
        if max_turns < 1:
            raise ValueError(f"max_turns={max_turns}: give at least 1")
        if problems is not None or data is not None:
            generator: Any = OwnTasks(load_items(data) if data is not None else read_rows(problems))
        else:
            generator = CodeProblemGenerator((1, 3) if difficulty_range is None else difficulty_range)
        self.reward_options = {"reward_scale": reward_scale, "reward_bias": reward_bias}
        self.reward_options |= {} if reward_clip is None else {"reward_clip": reward_clip}
        changed = self.reward_options != {"reward_scale": 1.0, "reward_bias": 0.0}
        super().__init__(
            num_agents,
            feedback=feedback,
            shown_tests=shown_tests,
            processor=reward_processor(self.reward_options) if changed else None,
            limits=limits,
            generator=generator,
        )
        self.max_turns = max_turns

    def describe(self) -> dict[str, Any]:
        return super().describe() | {"max_turns": self.max_turns} | self.reward_options

    def step(self, states: Sequence[Any], actions: Sequence[Sequence[str]], rng: np.random.Generator) -> Answer:
        """Score the completions [N][B]; episodes that are solved or out of turns are done."""
        answer = super().step(states, actions, rng)
        done = [after.turn >= self.max_turns or bool(after.score.solved) for after in answer.after]
        return answer._replace(done=np.array(done))
