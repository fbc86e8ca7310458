"""Trainers on given data: DPO on pairs (arXiv 2305.18290), and imitation of texts and trajectories."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from jmarl.algorithms import find_row, resolve
from jmarl.comlrl.arguments import Model, check_wandb, load_agents, read_args
from jmarl.comlrl.settings.base import TrainerConfig
from jmarl.comlrl.trained import TrainedTeam
from jmarl.config import Count, Episodes, Range, Sampling
from jmarl.preferences import load_pairs, load_trajectories
from jmarl.runs.checks import check_data, check_fit
from jmarl.runs.kinds.given import encode, evaluate_on_data
from jmarl.runs.records import FitResult
from jmarl.runs.start import place_team
from jmarl.runs.train import fit
from jmarl.team import policies


class DPOConfig(TrainerConfig, algorithm="dpo"):
    """`TrainerConfig` of DPO on given pairs. A team can also use algorithm="madpo". The agents sample nothing, so settings of
    sampling are refused."""

    num_train_epochs: float = 1
    num_generations: Count = Episodes.num_generations
    max_new_tokens: Count = Sampling.max_new_tokens
    temperature: Annotated[float, Range(0, note="0 is greedy")] = Sampling.temperature
    top_k: Annotated[int, Range(0, note="0 is off")] = Sampling.top_k
    top_p: Annotated[float, Range(0, 1, low_open=True, note="1 is off")] = Sampling.top_p

    @classmethod
    def rename(cls, settings: Mapping[str, Any]) -> dict[str, Any]:
        data_names = {"per_device_train_batch_size": "batch_size"}  # in other trainers the prompts of a rollout
        return super().rename({data_names.get(name, name): value for name, value in settings.items()})

    def count_updates(self, num_items: int) -> int:
        size = resolve(self._with_updates(1)).preference.batch_size or 1
        return math.ceil(self.num_train_epochs * max(num_items // size, 1))


class SFTConfig(DPOConfig, algorithm="sft"):
    """`TrainerConfig` of imitation of texts and trajectories (bc_weight) and of prediction of observations
    (world_model_weight)."""

    min_reward: float | None = None
    """Leave out trajectories whose sum of rewards is lower."""


class DPOTrainer(TrainedTeam):
    """Trains agents on given preferences.

    Args:
        model: a name, path, loaded agent or loaded model of `transformers`, for a team of one.
        agents: a list of them, in place of a model, for a team.
        args: the settings, of this trainer's configuration class.
        train_dataset, eval_dataset: a file, a `datasets.Dataset` or a list of dicts; see
            `jmarl.preferences.pairs`.
        tokenizer: as in `MAGRPOTrainer`.
        wandb_config: keyword arguments of `wandb.init`; needs the extra `wandb` and an output directory.
    """

    config_class: type[DPOConfig] = DPOConfig

    def __init__(
        self,
        model: Model | None = None,
        *,
        agents: Sequence[Model] | None = None,
        args: DPOConfig | None = None,
        train_dataset: Any,
        eval_dataset: Any = None,
        tokenizer: Any = None,
        wandb_config: Mapping[str, Any] | None = None,
    ):
        self.args = read_args(args, self.config_class, type(self).__name__)
        check_wandb(wandb_config, self.args)
        if not find_row(self.args.algorithm).trains_team:
            raise ValueError("a reward model has no trainer: use jmarl.preferences.reward_model.fit_reward_model")
        self.wandb_config = None if wandb_config is None else dict(wandb_config)
        size = 1 if agents is None else len(agents)
        if self.args.num_agents not in (None, size):
            raise ValueError(f"num_agents={self.args.num_agents} does not fit: {size} agents were given")
        self.data = self._read(train_dataset, size)
        self.eval_data = () if eval_dataset is None else self._read(eval_dataset, size)[: self.args.eval_num_samples]
        self.config = self.args.train_config(len(self.data))
        self.algorithm = check_fit(self.config, self.wandb_config)
        check_data(self.data, self.config)
        loaded = load_agents(agents, model, size, tokenizer)
        self.config, self.team, self._params = place_team(loaded, self.config)
        self._result: FitResult | None = None

    def _read(self, dataset: Any, num_agents: int) -> Sequence[Any]:
        return load_pairs(dataset, num_agents)

    def train(self) -> FitResult:
        """Train as the settings say. Afterwards the trainer holds the trained weights."""
        self._result = result = fit(
            self.team, self.data, self.config, params=self.params, eval_data=self.eval_data, wandb_config=self.wandb_config
        )
        self._params = policies(result.state)
        return result

    def evaluate(self) -> dict[str, float]:
        """Return the loss and, of pairs, the accuracy on the trainer's eval_dataset: of the trained agents, or before training
        of the untrained ones."""
        if not self.eval_data:
            raise ValueError("there is nothing to evaluate on: give eval_dataset= to the trainer")
        if self._result is not None and self._result.after is not None:
            return self._result.after
        held_out = encode(self.team, self.params, self.eval_data, self.algorithm, self.config)
        return evaluate_on_data(self.team, self.params, held_out, self.algorithm)


class SFTTrainer(DPOTrainer):
    """Trains an agent on given texts or trajectories. Arguments as for `DPOTrainer`."""

    config_class = SFTConfig

    def _read(self, dataset: Any, num_agents: int) -> Sequence[Any]:
        return load_trajectories(dataset, self.args.min_reward)  # type: ignore[attr-defined]
