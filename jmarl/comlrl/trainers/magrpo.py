"""MAGRPO, and the constructor, `train`, `evaluate` and `save_model` of all trainers that sample completions.

A trainer loads and checks its arguments, fills a `TrainConfig` and calls `jmarl.runs.train.train`. The other trainers of
this room differ in the class of their configuration, and so in the algorithm.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

from jmarl.comlrl.arguments import Model, read_items
from jmarl.comlrl.checkpoints import copy_run, updates_per_epoch, with_checkpoints
from jmarl.comlrl.convert import convert
from jmarl.comlrl.eval_metrics import EvalAggregator, EvalLogger, MetricsCallback
from jmarl.comlrl.settings.rollouts import ReinforceConfig, RolloutConfig
from jmarl.comlrl.trained import TrainedTeam
from jmarl.envs.reward_environment import Formatter, Transition
from jmarl.envs.rewards import Processor
from jmarl.evaluation.evaluate import evaluate, numbers
from jmarl.logs.terminal import say
from jmarl.models.hub.agents import Agent
from jmarl.runs.records import TrainResult
from jmarl.runs.train import train
from jmarl.team import agents_of, policies


class MAGRPOConfig(ReinforceConfig, algorithm="magrpo"):
    """`ReinforceConfig` of MAGRPO: the baseline is the mean of the group (arXiv 2508.04652)."""


class MAGRPOTrainer(TrainedTeam):
    """Multi-agent GRPO (arXiv 2508.04652): trains a team of language models on a joint reward.

    Args:
        model, agent_model: a name, path, loaded agent or loaded model of `transformers` that all `num_agents` agents start
            from (two names of one argument). It may be given beside agents= if it is the same model.
        num_agents: the number of agents; default: as in `args`, else 2.
        agents: the agents themselves, in place of a model: loaded ones (`jmarl.load_agent`, or models of `transformers`, whose
            weights are copied), names or paths, of one model or of different ones.
        critic_model, critics: what critics start from, in algorithms that have them: a name, path or loaded agent, or a
            list of equal ones. Default: their agents.
        reward_model: what the reward model starts from, in marlhf and marlhf_iter. Default: the first agent.
        reward_func, reward_funcs: one function or a list (two names of one argument). Each gets one list of completions
            per agent, and `batch_items`, `prompts`, `rng` if its signature names them; see `jmarl.envs.rewards`, and
            `jmarl.comlrl.rewards` for CoMLRL's other signatures.
        reward_weights: one per function; default: 1 / (number of functions).
        reward_processor, reward_processors: one callable for the weighted sum, or a list with one per function.
        batched_reward: False calls rewards once per joint action, with lists of one; True once per step, with all of them.
        on_error, reward_timeout: what to do if a reward raises, and the limit of one call in seconds: `on_error` and
            `timeout` of `make_reward`.
        formatters: item -> prompt, one for all agents or a list with one per agent; default: the item's "prompt".
        args: the settings, of this trainer's configuration class.
        train_dataset, eval_dataset: a `datasets.Dataset`, a list or any other series of dicts.
        tokenizer: what the agents use, one for all or a list with one per agent; it must have the vocabulary of the model.
            Default: those of the models.
        external_transition: writes the prompts of later turns; see `jmarl.envs.reward_environment.RewardEnvironment`, and
            `jmarl.comlrl.environment` for how they pass through the formatters.
        wandb_config: keyword arguments of `wandb.init`, and CoMLRL's run_name and config_sections; needs the extra `wandb` and
            an output directory.
        model_config: torch_dtype and special_tokens, as in CoMLRL; see `jmarl.comlrl.model_config`.
        eval_logger, eval_aggregator: metrics of your own for held-out completions; see `jmarl.comlrl.eval_metrics`.
        metrics_callback: samples of a held-out item (`eval_metrics.RolloutSample`) -> metrics by name, which are averaged over
            the items and logged as `eval/<name>`. Training steps do not call it.
        centralized_adapter, centralized_comparator_adapter: what joins and splits the texts of the roles if one model writes
            for all of them (two names of one argument); see `jmarl.comlrl.trainers.centralized`.
        dataset_type: has no effect, as in CoMLRL.
    """

    config_class: type[RolloutConfig] = MAGRPOConfig

    def __init__(
        self,
        model: Model | None = None,
        *,
        agent_model: Model | None = None,
        agents: Sequence[Model] | None = None,
        num_agents: int | None = None,
        critic_model: Model | None = None,
        critics: Sequence[Model] | None = None,
        reward_model: Model | None = None,
        reward_func: Callable | Sequence[Callable] | None = None,
        reward_funcs: Callable | Sequence[Callable] | None = None,
        reward_weights: Sequence[float] | None = None,
        reward_processor: Processor | Sequence[Processor | None] | None = None,
        reward_processors: Processor | Sequence[Processor | None] | None = None,
        batched_reward: bool = False,
        on_error: Literal["raise", "mask"] | float = "raise",
        reward_timeout: float | None = None,
        formatters: Formatter | Sequence[Formatter] | None = None,
        args: RolloutConfig | None = None,
        train_dataset: Iterable[Mapping] | None = None,
        eval_dataset: Iterable[Mapping] | None = None,
        tokenizer: Any = None,
        wandb_config: Mapping[str, Any] | None = None,
        model_config: Mapping[str, Any] | None = None,
        external_transition: Transition | None = None,
        eval_logger: EvalLogger | None = None,
        eval_aggregator: EvalAggregator | None = None,
        metrics_callback: MetricsCallback | None = None,
        centralized_adapter: Any = None,
        centralized_comparator_adapter: Any = None,
        dataset_type: str | None = None,
    ):
        arguments = dict(vars())  # at once: a debugger that looks at a frame changes the mapping
        del arguments["self"]
        given = convert(arguments, self.config_class, type(self).__name__)
        self.args, self.config, self.team, self._params, self._names, task, self.reward, self.wandb_config = given
        self.env, self.items, self._eval_dataset = task.env, task.items, task.held_out
        self.eval_metrics: Any = task.eval_metrics
        self.eval_items = self._first_items(self._eval_dataset)
        self._run_config = self.config  # of the last run

    @property
    def num_agents(self) -> int:
        return self.team.num_agents

    @property
    def agents(self) -> list[Agent]:
        """The agents with their current weights, as `load_agent` returns them. LoRA adapters are merged."""
        return [agent._replace(name=name) for agent, name in zip(agents_of(self.team, self.params), self._names, strict=True)]

    @property
    def verbose(self) -> bool:
        """Whether training shows its progress: the setting progress."""
        return self.config.run.progress

    @verbose.setter
    def verbose(self, value: bool) -> None:
        self.config = self.config.replace(progress=bool(value))

    def train(
        self,
        resume_from_checkpoint: str | os.PathLike | None = None,
        checkpoint_dir: str | os.PathLike | None = None,
        checkpoint_interval: int = 1,
        checkpoint_total_limit: int | None = None,
    ) -> TrainResult:
        """Train as the settings say. Afterwards the trainer holds the trained weights, also if training was interrupted.

        A second call continues from these weights with a new optimizer, and moves the files of the first run to `earlier_1`.
        After an interruption it is refused, because the run has not ended: make a trainer with resume=True to continue it.

        Args:
            resume_from_checkpoint: the directory of a run, or one of its checkpoints (DIRECTORY/checkpoints/STEP), which then
                continues in its directory; num_train_epochs counts from its beginning.
            checkpoint_dir: the directory of the run's files, in place of output_dir.
            checkpoint_interval: epochs between checkpoints (of iterative trainers: rounds), if one of these arguments is given.
                By default there is a checkpoint every save_minutes.
            checkpoint_total_limit: checkpoints kept; None: save_total_limit.
        """
        checkpoints = (resume_from_checkpoint, checkpoint_dir, checkpoint_interval, checkpoint_total_limit)
        epoch = updates_per_epoch(self.args, self.config, len(self.items))
        self._run_config = with_checkpoints(self.config, epoch, *checkpoints)
        episodes = self.config.episodes
        if self.verbose and episodes.num_turns > 1 and episodes.early_termination_threshold is None:
            say("every episode has all of its turns; CoMLRL's default is early_termination_threshold=-0.2")
        result = train(
            self.team,
            self.env,
            self.items,
            self._run_config,
            params=self.params,
            eval_items=self.eval_items,
            wandb_config=self.wandb_config,
            eval_metrics=self.eval_metrics,
        )
        self._params = policies(result.state)
        return result

    def evaluate(
        self, eval_dataset: Iterable[Mapping] | int | None = None, *, num_eval_samples: int | None = None
    ) -> dict[str, float]:
        """Return what a run logs of an evaluation of the current weights on `eval_dataset` (default: the trainer's): the mean
        return, half the width of its 95 % interval, the number of episodes, parts, measures, and the metrics of `EvalMetrics`.

        num_eval_samples: evaluate on the first items only; default: eval_num_samples of the settings. It may be the first
        argument, as in CoMLRL.
        """
        if isinstance(eval_dataset, int):
            eval_dataset, num_eval_samples = None, eval_dataset
        dataset = self._eval_dataset if eval_dataset is None else read_items("eval_dataset", eval_dataset)
        if not dataset or num_eval_samples == 0:
            raise ValueError("there is nothing to evaluate on: give eval_dataset= to evaluate() or to the trainer")
        items = self._first_items(dataset, num_eval_samples)
        result = evaluate(self.team, self.params, items, self.env, self.config)
        notes = self.eval_metrics(items, result.rollout)
        return numbers(result._replace(notes=notes))

    def save_checkpoint(self, output_dir: str | os.PathLike) -> str:
        """Copy the run of the last `train` with its newest checkpoint to a directory, and return the directory.

        `train(resume_from_checkpoint=output_dir)` of a trainer with the same arguments continues it there."""
        return str(copy_run(self._run_config.run.output_dir, output_dir))

    def load_checkpoint(self, checkpoint: str | os.PathLike) -> None:
        """Refuse: a checkpoint is loaded when training continues."""
        raise NotImplementedError(
            f"a checkpoint is loaded when training continues: call train(resume_from_checkpoint={os.fspath(checkpoint)!r}); "
            "for its agents alone, load what save_model wrote"
        )

    def _first_items(self, dataset: Sequence[Any], num_samples: int | None = None) -> list[Any]:
        """Return the items of a data set that are evaluated. num_samples: their number; default: that of the settings."""
        given = self.args.eval_num_samples
        limit = num_samples if num_samples is not None else given if given is None else max(given, 1)
        return [dataset[i] for i in range(len(dataset) if limit is None else min(limit, len(dataset)))]
