"""MRLM's `environments.math`; see `jmarl.envs.math`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jmarl.envs.math.problems import MathProblemGenerator as MathProblemGenerator
from jmarl.envs.math.reasoning import MathReasoning
from jmarl.envs.messages import EnvironmentMode
from jmarl.envs.options import OwnTasks
from jmarl.mrlm.environment_keys import own_problems
from jmarl.mrlm.environments.played import PlayedByMessages, check_client, one_source
from jmarl.mrlm.names import refusing

__getattr__ = refusing(__name__)


class MathReasoningEnvironment(PlayedByMessages, MathReasoning):
    """`MathReasoning` under MRLM's name and arguments.

    Args:
        problems: problems of the user, of which a fifth is held out, or a generator.
        dataset: gsm8k or svamp, as data.
        max_attempts, max_turns: attempts at a problem.
        require_solution: whether a correct attempt earns 0.2 more if it shows its steps, as steps_bonus.
        mode: CLIENT, since environments are never trained.
        problem_generator, generator: where tasks come from.
        **options: other arguments of `MathReasoning`.
    """

    def __init__(
        self,
        problems: Sequence[Mapping[str, Any]] | Any = None,
        dataset: str | None = None,
        max_attempts: int | None = None,
        require_solution: bool = False,
        mode: EnvironmentMode = EnvironmentMode.CLIENT,
        *,
        problem_generator: Any = None,
        generator: Any = None,
        max_turns: int | None = None,
        **options: Any,
    ):
        check_client(mode)
        own = OwnTasks(own_problems(problems)) if isinstance(problems, list | tuple) else problems
        source = one_source(problems=own, problem_generator=problem_generator, generator=generator)
        turns = one_source(max_attempts=max_attempts, max_turns=max_turns)
        if dataset is not None:
            options["data"] = one_source(dataset=dataset, data=options.get("data"))
        if require_solution:
            options["steps_bonus"] = True
        super().__init__(source, max_turns=turns or 1, **options)
