"""Trainers that learn from preferences and texts: of a team's own completions (MADPO, MARLHF and their iterative forms,
arguments as for `MAGRPOTrainer`), and of a data set (DPO, SFT)."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from jmarl.algorithms import resolve
from jmarl.comlrl.config import TrainerConfig, trainer_config
from jmarl.comlrl.trainers.reinforce import MAGRPOTrainer, check_wandb, load_agents, present
from jmarl.config import Count, Episodes, Range, Sampling, TrainConfig
from jmarl.models.hub.agents import Agent
from jmarl.team import make_team, placed, policies, save_team
from jmarl.training.fit import FitResult, check_data, check_fit, encode, evaluate_on_data, fit
from jmarl.training.preferences.pairs import load_pairs, load_trajectories


@trainer_config
class PreferenceConfig(TrainerConfig):
    """`TrainerConfig` for what learns from pairs of the team's completions."""

    num_generations: int = 16
    """Completions a prompt and agent, of which pairs are made."""
    num_train_epochs: float = 1

    def _updates_on_pairs(self, num_items: int) -> int:
        """As many as num_train_epochs passes over pairs_per_prompt pairs of each item take, in batches of batch_size; fewer
        pairs are then passed over more often."""
        settings = resolve(self._with_updates(1)).preference
        limit, size = settings.pairs_per_prompt or self.num_generations, settings.batch_size or 1
        return math.ceil(self.num_train_epochs * num_items * limit / size)


@trainer_config
class MADPOConfig(PreferenceConfig):
    """`PreferenceConfig` for multi-agent DPO on pairs of the untrained team's completions. Without num_updates there are as
    many as num_train_epochs passes over pairs_per_prompt pairs of each item take."""

    algorithm: str = "madpo"
    output_dir: str = "runs/madpo"

    def _updates(self, num_items: int) -> int:
        return self._updates_on_pairs(num_items)


@trainer_config
class MADPOIterConfig(PreferenceConfig):
    """`PreferenceConfig` for multi-agent DPO in rounds, each on pairs of the team's completions against a comparator's."""

    algorithm: str = "madpo_iter"
    output_dir: str = "runs/madpo_iter"
    num_prompts: int = 8
    num_iterations: int = 6
    """Rounds, where num_updates is not given; each then has as many updates as num_train_epochs of its pairs take."""

    def train_config(self, num_items: int) -> TrainConfig:
        found = super().train_config(num_items)
        return found if self.num_updates else found.replace(round_updates=self._of_round(num_items))

    def _updates(self, num_items: int) -> int:
        return self.num_iterations * self._of_round(num_items)

    def _of_round(self, num_items: int) -> int:
        return self.round_updates or self._updates_on_pairs(min(num_items, self.num_prompts))


@trainer_config
class MARLHFConfig(PreferenceConfig):
    """`PreferenceConfig` for training on a learned reward (arXiv 2203.02155): rl_algorithm says by which row. Its updates are
    the team's, counted by prompts as in `TrainerConfig`."""

    algorithm: str = "marlhf"
    output_dir: str = "runs/marlhf"


@trainer_config
class MARLHFIterConfig(MARLHFConfig):
    """`MARLHFConfig` in rounds of round_updates updates, each with new pairs and a reward model trained on."""

    algorithm: str = "marlhf_iter"
    output_dir: str = "runs/marlhf_iter"


class MADPOTrainer(MAGRPOTrainer):
    """Multi-agent DPO: the team's completions are ranked by the reward and learned from as pairs. Arguments as for
    `MAGRPOTrainer`."""

    config_class = MADPOConfig


class MADPOIterTrainer(MAGRPOTrainer):
    """Multi-agent DPO in rounds. Arguments as for `MAGRPOTrainer`."""

    config_class = MADPOIterConfig


class MARLHFTrainer(MAGRPOTrainer):
    """A reward model of the team's ranked completions, and any policy gradient on its scores. Arguments as for `MAGRPOTrainer`,
    and `reward_model`: a name, path or loaded agent that the reward model starts from; default: the first agent."""

    config_class = MARLHFConfig

    def __init__(
        self,
        model: str | os.PathLike | Agent | None = None,
        *,
        reward_model: str | os.PathLike | Agent | None = None,
        **arguments: Any,
    ):
        self.reward_model = None if reward_model is None else load_agents([reward_model], None, 1)[0]
        super().__init__(model, **arguments)


class MARLHFIterTrainer(MARLHFTrainer):
    """The same in rounds. Arguments as for `MARLHFTrainer`."""

    config_class = MARLHFIterConfig


@trainer_config
class DPOConfig(TrainerConfig):
    """`TrainerConfig` for DPO on given pairs (arXiv 2305.18290); for teams algorithm may also be madpo. Nothing is written, so
    settings of sampling are refused."""

    algorithm: str = "dpo"
    num_train_epochs: float = 1
    output_dir: str = "runs/dpo"
    num_generations: Count = Episodes.num_generations
    max_new_tokens: Count = Sampling.max_new_tokens
    temperature: Annotated[float, Range(0, note="0 is greedy")] = Sampling.temperature
    top_k: Annotated[int, Range(0, note="0 is off")] = Sampling.top_k
    top_p: Annotated[float, Range(0, 1, low_open=True, note="1 is off")] = Sampling.top_p

    @classmethod
    def known(cls, settings: Mapping[str, Any]) -> dict[str, Any]:
        data_names = {"per_device_train_batch_size": "batch_size"}  # elsewhere the prompts of a rollout
        return super().known({data_names.get(name, name): value for name, value in settings.items()})

    def _updates(self, num_items: int) -> int:
        size = resolve(self._with_updates(1)).preference.batch_size or 1
        return math.ceil(self.num_train_epochs * max(num_items // size, 1))


@trainer_config
class SFTConfig(DPOConfig):
    """`TrainerConfig` for imitation of texts and trajectories (bc_weight) and prediction of answers (world_model_weight)."""

    algorithm: str = "sft"
    output_dir: str = "runs/sft"
    min_reward: float | None = None
    """Leave out trajectories of a smaller sum of rewards."""


class DPOTrainer:
    """Trains agents on given preferences.

    Args:
        model: one name, path or loaded agent; agents: in its place a list, of a team.
        train_dataset, eval_dataset: a file, a `datasets.Dataset` or a list of dicts: see `jmarl.training.preferences.pairs`.
        args: the settings.
        wandb_config: keyword arguments of `wandb.init`; needs the extra `wandb` and an output directory.
    """

    config_class: type[DPOConfig] = DPOConfig

    def __init__(
        self,
        model: str | os.PathLike | Agent | None = None,
        *,
        agents: Sequence[Agent | str | os.PathLike] | None = None,
        args: DPOConfig | None = None,
        train_dataset: Any,
        eval_dataset: Any = None,
        wandb_config: Mapping[str, Any] | None = None,
    ):
        self.args = self.config_class() if args is None else args
        if not isinstance(self.args, self.config_class):
            wants = self.config_class.__name__
            raise TypeError(f"{type(self).__name__} takes args={wants}(...), got {type(args).__name__}")
        check_wandb(wandb_config, self.args)
        if self.args.algorithm == "reward_model":
            raise ValueError("a reward model has no trainer: use jmarl.training.preferences.reward_model.fit_reward_model")
        self.wandb_config = None if wandb_config is None else dict(wandb_config)
        size = 1 if agents is None else len(agents)
        if self.args.num_agents not in (None, size):
            raise ValueError(f"num_agents={self.args.num_agents} does not fit: {size} agents were given")
        self.data, self.eval_data = (() if of is None else self._load(of, size) for of in (train_dataset, eval_dataset))
        self.eval_data = self.eval_data[: self.args.eval_num_samples]
        self.config = self.args.train_config(len(self.data))
        self.algorithm = check_fit(self.config, self.wandb_config)
        check_data(self.data, self.config)
        self.team, params = make_team(load_agents(agents, model, size), lora=self.args.lora_rank > 0)
        self._params = placed(self.team, params, self.config.run.mesh)
        self._result: FitResult | None = None

    @property
    def params(self) -> list[Any]:
        """The present parameters [A, ...] of each stack."""
        return present(self._params)

    def _load(self, dataset: Any, num_agents: int) -> Sequence[Any]:
        return load_pairs(dataset, num_agents)

    def train(self) -> FitResult:
        """Train as the settings say; afterwards the trainer holds the trained weights."""
        self._result = result = fit(
            self.team, self.data, self.config, params=self.params, eval_data=self.eval_data, wandb_config=self.wandb_config
        )
        self._params = policies(result.state)
        return result

    def evaluate(self) -> dict[str, float]:
        """Loss, and of pairs the accuracy, on the trainer's eval_dataset: of the untrained agents or, after training, of the
        trained ones."""
        if not self.eval_data:
            raise ValueError("there is nothing to evaluate on: give eval_dataset= to the trainer")
        if self._result is not None and self._result.after is not None:
            return self._result.after
        held_out = encode(self.team, self.params, self.eval_data, self.algorithm, self.config)
        return evaluate_on_data(self.team, self.params, held_out, self.algorithm)

    def save_model(self, output_dir: str | os.PathLike) -> None:
        """Write every agent as a Hugging Face directory: `agent_0/`, `agent_1/`, …"""
        save_team(Path(output_dir), self.team, self.params)


class SFTTrainer(DPOTrainer):
    """Trains an agent on given texts or trajectories. Arguments as for `DPOTrainer`."""

    config_class = SFTConfig

    def _load(self, dataset: Any, num_agents: int) -> Sequence[Any]:
        return load_trajectories(dataset, self.args.min_reward)  # type: ignore[attr-defined]
