"""What MRLM's trainers of rollouts share: policies and environments in, `training.train` called.

A policy in mode SERVER learns, one in mode CLIENT is frozen; a list of policies is a team. As in MRLM, the policies are trained
in `eval_envs`; `evaluate` plays held-out tasks (split `eval`) of the same environments. Equal environments are merged into one,
because episodes are played side by side anyway; different ones become a mixture with equal weights. An episode ends when it is
done, at the latest after the `max_turns` of its environment; if that is None, after `max_episode_length`, else 16 turns.
Several turns form a chain: each completion continues with a single one.

Left out: mini-batches by tokens, mixed precision by GradScaler, and trainers of DPO and SFT (`jmarl.comlrl.trainers.DPOTrainer`
and `SFTTrainer` train on data sets).
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jmarl.comlrl.arguments import check_not_deleted
from jmarl.envs.messages import MAX_TURNS, EnvironmentMode, as_text_environment
from jmarl.envs.mixture import Mixture
from jmarl.envs.vector import LockStep
from jmarl.evaluation.evaluate import evaluate, numbers
from jmarl.mrlm.config import ExperimentConfig
from jmarl.mrlm.core.llm_environment import LLMEnvironment
from jmarl.team import make_team, place_params, policies, save_team
from jmarl.training.checks import check_settings, check_team, environment_of
from jmarl.training.records import TrainResult
from jmarl.training.train import train

NUM_TASKS, NUM_EPISODES = 1000, 20  # of training and of an evaluation


class Trainer:
    """Trains policies in environments.

    Args:
        policy_env: an `LLMEnvironment`, or a list with one per role.
        eval_envs: an environment or a list of them.
        config: the settings.

    Subclasses set the section of `ExperimentConfig` that they read, the algorithms of one policy and of a team, and defaults by
    the names of `TrainConfig`.
    """

    section: str
    algorithm: str
    team_algorithm: str
    defaults: Mapping[str, Any] = {}

    def __init__(
        self,
        policy_env: LLMEnvironment | Sequence[LLMEnvironment],
        eval_envs: Any,
        config: ExperimentConfig | None = None,
    ):
        policy_envs = [policy_env] if isinstance(policy_env, LLMEnvironment) else list(policy_env)
        for i, policy in enumerate(policy_envs):
            if not isinstance(policy, LLMEnvironment):
                raise TypeError(f"policy {i} is a {type(policy).__name__}: give an LLMEnvironment(model, mode=...)")
        config = config or ExperimentConfig()
        self.env = merge_environments(eval_envs, config.num_turns or MAX_TURNS)
        self.config = config.train_config(
            self.section,
            {
                **self.defaults,
                "num_turns": getattr(self.env, "max_turns", 1),
                "algorithm": self.algorithm if len(policy_envs) == 1 else self.team_algorithm,
                "frozen_agents": tuple(i for i, policy in enumerate(policy_envs) if policy.mode is EnvironmentMode.CLIENT),
            },
        )
        self.team, params = make_team([policy.agent for policy in policy_envs], lora=self.config.lora.lora_rank > 0)
        check_settings(self.config)
        check_team(self.team, self.config)
        environment_of(self.team, self.env, self.config)  # raises for an environment that does not fit
        self._params = place_params(self.team, params, self.config.run.mesh)

    @property
    def params(self) -> list[Any]:
        """The current parameters [A, ...] of each stack."""
        return check_not_deleted(self._params)

    def train(self, num_iterations: int | None = None) -> TrainResult:
        """Make `num_iterations` updates (default: as in the settings). Afterwards the trainer holds the trained weights.

        Held-out tasks are played if `eval_every` is set. A second call continues from these weights with a new optimizer and
        schedule, on the same tasks, and moves the files of the first run to `earlier_1`. After an interruption it is refused.
        """
        cfg = self.config if num_iterations is None else self.config.replace(num_updates=num_iterations)
        held_out = self.env.tasks("eval", NUM_EPISODES, cfg.run.seed) if cfg.run.eval_every else ()
        tasks = self.env.tasks("train", NUM_TASKS, cfg.run.seed)
        result = train(self.team, self.env, tasks, cfg, params=self.params, eval_items=held_out)
        self._params = policies(result.state)
        return result

    def evaluate(self, num_episodes: int = NUM_EPISODES) -> dict[str, float]:
        """Return the mean return over held-out tasks with its 95 % interval, and the parts of the reward."""
        tasks = self.env.tasks("eval", num_episodes, self.config.run.seed)
        return numbers(evaluate(self.team, self.params, tasks, self.env, self.config))

    def save_model(self, output_dir: str | os.PathLike) -> None:
        """Write each policy as a Hugging Face directory: `agent_0/`, `agent_1/`, …"""
        save_team(Path(output_dir), self.team, self.params)


def merge_environments(envs: Any, max_turns: int = MAX_TURNS) -> Any:
    """Return one environment, or a mixture of several. max_turns: the limit of those of MRLM's kind that set none."""
    unmerged = list(envs) if isinstance(envs, list | tuple) else [envs]
    if not unmerged:
        raise ValueError("eval_envs has no environment")
    if len(unmerged) > 1:
        unmerged = list({identity_of(env): env for env in unmerged}.values())
    names = [type(env).__name__ for env in unmerged]
    numbered = [f"{name}_{names[:i].count(name)}" if names.count(name) > 1 else name for i, name in enumerate(names)]
    vectorized = [
        env if callable(getattr(env, "observe", None)) else LockStep(as_text_environment(env, max_turns)) for env in unmerged
    ]
    return Mixture(dict(zip(numbered, vectorized, strict=True))) if len(vectorized) > 1 else vectorized[0]


def identity_of(env: Any) -> Any:
    """Return a key that is the same for equal environments only."""
    try:
        return pickle.dumps(env)
    except (pickle.PicklingError, TypeError, AttributeError):  # it holds a lock or a connection, and equals only itself
        return id(env)
