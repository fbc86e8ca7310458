"""DPO on given preferences (arXiv 2305.18290)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from jmarl.algorithms import resolve
from jmarl.envs.data import Pair
from jmarl.mrlm.algorithms.data import PreferenceDataset as PreferenceDataset
from jmarl.mrlm.algorithms.data import PreferencePair as PreferencePair
from jmarl.mrlm.algorithms.data import rows_of
from jmarl.mrlm.algorithms.trainer import Policies
from jmarl.mrlm.config import ExperimentConfig
from jmarl.mrlm.core.llm_environment import LLMEnvironment
from jmarl.mrlm.core.system_prompts import prefixed
from jmarl.mrlm.names import refusing
from jmarl.preferences import load_pairs
from jmarl.runs.checks import check_data, check_fit
from jmarl.runs.experiment import hold_out
from jmarl.runs.kinds.given import encode, evaluate_on_data
from jmarl.runs.records import FitResult
from jmarl.runs.train import fit

__getattr__ = refusing(__name__)


class DPOTrainer(Policies):
    """Trains policies on preference pairs: each policy alone (`dpo`), a team on joint pairs (`madpo`).

    Args:
        policy_env: an `LLMEnvironment`, or a list with one per role.
        preference_dataset: a file, a `datasets.Dataset` or a list of dicts with prompt, chosen and rejected (texts or chat
            messages); see `jmarl.preferences.pairs.load_pairs`.
        config, device, checkpoint_dir: as for `Trainer`.
        eval_dataset: held-out pairs, of which an evaluation takes the first eval_episodes (default: all). None: the last
            eval_episodes of preference_dataset, which are then not trained on (default: 20 if eval_every is set, else
            `evaluate` takes the pairs that are trained on).
    """

    section, algorithm, team_algorithm = "dpo", "dpo", "madpo"

    def __init__(
        self,
        policy_env: LLMEnvironment | Sequence[LLMEnvironment],
        preference_dataset: Any,
        config: ExperimentConfig | None = None,
        eval_dataset: Any = None,
        device: Any = None,
        checkpoint_dir: str | os.PathLike | None = None,
    ):
        super().__init__(policy_env, config, device, checkpoint_dir)
        size = len(self.policy_envs)
        self.config = self._resolve(size)
        pairs = self._read(preference_dataset)
        if eval_dataset is None:
            self.data, self.eval_data = hold_out(pairs, self.num_held_out or 0)
        else:
            self.data, self.eval_data = pairs, self._read(eval_dataset)[: self.experiment.training.eval_episodes]
        check_fit(self.config, self.wandb)
        check_data(self.data, self.config)
        self._make_team(size)
        # The reference is what training starts from, so an evaluation has to know it afterwards, too.
        self._encoded = encode(self.team, self.params, self.eval_data or self.data, resolve(self.config), self.config)

    def _read(self, dataset: Any) -> list[Pair]:
        """Return the pairs of a data set, with the system prompts of the policies."""
        systems = [
            None if policy.system_prompt is None else (policy.system_prompt, bool(self.config.episodes.chat_settings.of(i)))
            for i, policy in enumerate(self.policy_envs)
        ]
        pairs = load_pairs(rows_of(dataset), len(self.policy_envs))
        return [pair._replace(prompts=tuple(prefixed(*x) for x in zip(systems, pair.prompts, strict=True))) for pair in pairs]

    def train(
        self, num_iterations: int | None = None, eval_every: int | None = None, save_every: int | None = None
    ) -> FitResult:
        """Make `num_iterations` updates (default, as of the others: as in the settings), each on `batch_size` pairs. Held-out
        pairs are evaluated if `eval_every` is set."""
        cfg = self._config_of(num_iterations, eval_every, save_every)
        held_out = self.eval_data if cfg.run.eval_every else ()
        result = fit(self.team, self.data, cfg, params=self.params, eval_data=held_out, wandb_config=self.wandb)
        self._learned(result.state)
        return result

    def evaluate(self) -> dict[str, float]:
        """Return loss, margin and accuracy (the share of pairs ranked as in the data) of the current weights."""
        row = evaluate_on_data(self.team, self.params, self._encoded, resolve(self.config))
        return {f"eval/{name}": value for name, value in row.items()}
