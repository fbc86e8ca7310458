"""MRLM's `environments.code`; see `jmarl.envs.code`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jmarl.envs.base import Answer
from jmarl.envs.code.data import load_items
from jmarl.envs.code.execution import CodeExecution
from jmarl.envs.code.problems import CodeProblemGenerator as CodeProblemGenerator
from jmarl.envs.messages import EnvironmentMode
from jmarl.envs.options import OwnTasks
from jmarl.mrlm.environment_keys import own_problems
from jmarl.mrlm.environments.played import PlayedByMessages, check_client, one_source
from jmarl.mrlm.names import refusing
from jmarl.sandbox import Limits

__getattr__ = refusing(__name__)


class CodeExecutionEnvironment(PlayedByMessages, CodeExecution):
    """`CodeExecution` under MRLM's name and arguments.

    Args:
        problems: problems of the user, of which a fifth is held out, or a generator.
        dataset: humaneval, mbpp or another one of `jmarl.envs.code.data`.
        timeout: seconds that the tests of a program may take.
        max_attempts, max_turns: attempts at a problem; an episode ends when it is solved.
        mode: CLIENT, since environments are never trained.
        problem_generator, generator: where problems come from.
        num_agents: agents that write code.
        **options: other arguments of `CodeExecution`.
    """

    def __init__(
        self,
        problems: Sequence[Mapping[str, Any]] | Any = None,
        dataset: str | None = None,
        timeout: float | None = None,
        max_attempts: int | None = None,
        mode: EnvironmentMode = EnvironmentMode.CLIENT,
        *,
        problem_generator: Any = None,
        generator: Any = None,
        max_turns: int | None = None,
        num_agents: int = 1,
        **options: Any,
    ):
        check_client(mode)
        own = OwnTasks(own_problems(problems)) if isinstance(problems, list | tuple) else problems
        loaded = None if dataset is None else OwnTasks(load_items(dataset))
        source = one_source(problems=own, dataset=loaded, problem_generator=problem_generator, generator=generator)
        if timeout is not None:
            limits = options.get("limits") or Limits()
            options["limits"] = dataclasses.replace(limits, wall_s=timeout, cpu_s=max(1, math.ceil(timeout)))
        super().__init__(num_agents, generator=source, **options)
        self.max_turns = one_source(max_attempts=max_attempts, max_turns=max_turns) or 1

    def step(self, *arguments: Any, **named: Any) -> Any:
        """Play a message, as `PlayedByMessages`, or score completions, as `CodeExecution`; solved episodes are done."""
        answer = super().step(*arguments, **named)
        if not isinstance(answer, Answer):
            return answer
        done = [after.turn >= self.max_turns or bool(after.score.solved) for after in answer.after]
        return answer._replace(done=np.array(done))
