"""SFT in MRLM's sense: behavior cloning and a world model, on trajectories of environments.

`bc_weight` is the weight of the tokens that the policy writes, `world_model_weight` that of the environment's answers. Where no
trajectories are given, the environments' own solvers play their tasks. Each message is a trajectory: what the policy read, what
was written, and what it read next, at the end of an episode "Done. Reward: 1".

Left out: trajectories of the policy itself in the midst of training (`collect_every`), since a policy that rarely succeeds
copies its failures; `jmarl collect` writes its trajectories to a file, which can be given here. World models of wrong messages
need such files too, because solvers make no mistakes.
"""

from __future__ import annotations

import os
import warnings
from typing import Any

from jmarl.config import TrainConfig
from jmarl.envs.data import Trajectory as TextTrajectory
from jmarl.evaluation.evaluate import evaluate, numbers
from jmarl.mrlm.algorithms.data import Trajectory as Trajectory
from jmarl.mrlm.algorithms.data import TrajectoryDataset as TrajectoryDataset
from jmarl.mrlm.algorithms.data import rows_of
from jmarl.mrlm.algorithms.trainer import NUM_EPISODES, Policies, merge_environments, sampling_of, with_system_prompts
from jmarl.mrlm.config import ExperimentConfig
from jmarl.mrlm.core.llm_environment import LLMEnvironment
from jmarl.mrlm.core.system_prompts import prefixed
from jmarl.mrlm.keys import COLLECT_EVERY
from jmarl.mrlm.names import refusing
from jmarl.preferences import load_trajectories
from jmarl.runs.checks import check_data, check_fit
from jmarl.runs.experiment import hold_out
from jmarl.runs.imitation import collect_solutions
from jmarl.runs.records import FitResult
from jmarl.runs.train import fit
from jmarl.team import Team, sort_into_stacks

__getattr__ = refusing(__name__)


class SFTTrainer(Policies):
    """Trains one policy on trajectories.

    Args:
        policy_env: an `LLMEnvironment`; in environments of several roles it imitates all of them.
        eval_envs: an environment or a list of them: whose solvers play, unless trajectories are given, and where `evaluate`
            plays. It may be empty if trajectories are given.
        config, device, checkpoint_dir: as for `Trainer`.
        trajectory_dataset: a file, a `datasets.Dataset` or a list of dicts; see
            `jmarl.preferences.pairs.load_trajectories`. The first max_trajectories are trained on.

    If eval_every is set, the loss on held-out trajectories is logged: on the last eval_episodes (default: 20) of
    trajectory_dataset, which are then not trained on, or on those that solvers write for held-out tasks.
    """

    section, algorithm, team_algorithm = "sft", "sft", "sft"

    def __init__(
        self,
        policy_env: LLMEnvironment,
        eval_envs: Any,
        config: ExperimentConfig | None = None,
        trajectory_dataset: Any = None,
        device: Any = None,
        checkpoint_dir: str | os.PathLike | None = None,
    ):
        super().__init__(policy_env, config, device, checkpoint_dir)
        if len(self.policy_envs) > 1:
            raise ValueError(f"SFTTrainer trains one policy, got {len(self.policy_envs)}: make a trainer for each")
        self.config = self._resolve(1)
        check_fit(self.config, self.wandb)
        given = trajectory_dataset is not None
        self.env: Any = None if given and not eval_envs else merge_environments(eval_envs, chat=self.chat, self_play=True)
        held_out = (self.num_held_out or 0) if self.config.run.eval_every else 0
        if given:
            parts = hold_out(load_trajectories(rows_of(trajectory_dataset), self.min_reward), held_out, self.num_tasks)
        else:
            seed, answers = self.config.run.seed, bool(self.config.loss.world_model_weight)
            train = collect_solutions(self.env, "train", self.num_tasks, seed, answers, self.min_reward)
            parts = train, collect_solutions(self.env, "eval", held_out, seed, answers, self.min_reward) if held_out else []
        self.data, self.eval_data = ([self._with_system_prompt(trajectory) for trajectory in part] for part in parts)
        check_data(self.data, self.config)
        self._make_team(1)

    def _with_system_prompt(self, trajectory: TextTrajectory) -> TextTrajectory:
        system = self.policy_envs[0].system_prompt
        first, *rest = trajectory.observations
        prompt = prefixed(None if system is None else (system, bool(self.config.episodes.chat_settings.of(0))), first)
        return trajectory._replace(observations=(prompt, *rest))

    @property
    def trajectory_dataset(self) -> TrajectoryDataset:
        """What is trained on."""
        return TrajectoryDataset.of_texts(self.data)

    def train(
        self,
        num_iterations: int | None = None,
        collect_every: int | None = None,
        eval_every: int | None = None,
        save_every: int | None = None,
    ) -> FitResult:
        """Make `num_iterations` updates (default, as of the others: as in the settings), each on `batch_size` trajectories.

        The loss on held-out trajectories is logged if `eval_every` is set. collect_every: without effect, with a warning."""
        if collect_every is not None:
            warnings.warn(f"collect_every changes nothing here: {COLLECT_EVERY.reason}", stacklevel=2)
        cfg = self._config_of(num_iterations, eval_every, save_every)
        held_out = self.eval_data if cfg.run.eval_every else ()
        result = fit(self.team, self.data, cfg, params=self.params, eval_data=held_out, wandb_config=self.wandb)
        self._learned(result.state)
        return result

    def evaluate(self, num_episodes: int | None = None) -> dict[str, float]:
        """Return the mean return of the current weights over held-out tasks with its 95 % interval, as PPO's trainer does."""
        if self.env is None:
            raise ValueError("there is no environment to evaluate in: give eval_envs to the trainer")
        cfg = TrainConfig.of(
            num_turns=self.env.max_turns,
            branching="chain" if self.env.max_turns > 1 else "tree",
            chat=bool(self.config.episodes.chat_settings.of(0)),
            chat_template_kwargs=self.config.episodes.chat_template_kwargs,
            chat_date=self.config.episodes.chat_date,
            seed=self.config.run.seed,
            **sampling_of(self.policy_envs),
        )
        env = with_system_prompts(self.env, self.policy_envs, cfg)
        tasks = env.tasks("eval", num_episodes or self.num_held_out or NUM_EPISODES, cfg.run.seed)
        roles = Team(sort_into_stacks([self.policy_envs[0].agent] * env.num_agents, shared_weights=True))
        return numbers(evaluate(roles, self.params, tasks, env, cfg))
