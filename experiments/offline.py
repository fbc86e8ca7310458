"""Train agents on a file of preferences or texts: dpo, madpo (a team), reward_model (of the texts of all agents together), sft.

Claim: one command trains on any of these files, and held-out accuracy and loss improve.
Command: python -m experiments.offline --data pairs.json --algorithm dpo                (flags: --help)
Files: `.json` or `.jsonl` with
    prompt, chosen, rejected   for dpo and reward_model; with several --agents, as for madpo, chosen and rejected are lists of
                               one text per agent
    prompt, completion         for sft, or trajectories: see `jmarl/preferences/pairs.py`
`python -m experiments.story_length --algorithm madpo_iter` writes such files (`pairs/round_0000.jsonl`). Without --eval-data,
the rows of a tenth of the prompts are held out. A reward model is written to `reward_model/` of the output directory, for
`jmarl.load_reward_model`.
Expected: a policy that is its own reference has accuracy 0.5 and loss 0.693 before training; accuracy rises. The time depends
    on the file: 50 updates are the default.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from experiments.report import command
from experiments.start import load_team
from jmarl.algorithms import find_row
from jmarl.config import Count, Run, TrainConfig, check, check_fields
from jmarl.models.hub.agents import load_agent
from jmarl.preferences.pairs import load_pairs, load_trajectories, split_by_prompt
from jmarl.preferences.reward_model import FOLDER, fit_reward_model, save_reward_model
from jmarl.runs.checks import check_fit
from jmarl.runs.records import FitResult
from jmarl.runs.train import fit


@dataclasses.dataclass(frozen=True)
class OfflineConfig(TrainConfig):
    """Agents, and the file that they learn from."""

    data: str = ""
    """File of pairs or texts."""
    eval_data: str = ""
    """File of held-out pairs or texts; empty: hold out a tenth of the data."""
    min_reward: float | None = None
    """Leave out trajectories with a smaller sum of rewards (sft)."""
    model: str = "smollm2-135m-instruct"
    """Model of all agents: a name, a directory, a .gguf file or a Hub id."""
    agents: Count = 1
    """Agents of the team."""
    algorithm: str = "dpo"
    run: Run = Run(num_updates=50, output_dir="runs/offline")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(self)
        check("data", self.data, bool(self.data), "the name of a file")

    def read(self, path: str) -> list:
        """Return the pairs or trajectories of a file."""
        if find_row(self.algorithm).data == "texts":
            return load_trajectories(path, self.min_reward)
        return load_pairs(path, self.agents)


def run(cfg: OfflineConfig) -> FitResult:
    check_fit(cfg, None)
    data = cfg.read(cfg.data)
    if cfg.eval_data:
        eval_data = cfg.read(cfg.eval_data)
    elif find_row(cfg.algorithm).data == "pairs":
        data, eval_data = split_by_prompt(data, 10)
    else:
        data, eval_data = [x for i, x in enumerate(data) if i % 10] or data, data[::10]
    if cfg.algorithm == "reward_model":
        model, result = fit_reward_model(load_agent(cfg.model), data, cfg, eval_pairs=eval_data, fit=fit)
        if cfg.run.output_dir:
            save_reward_model(Path(cfg.run.output_dir) / FOLDER, model)
        return result
    team, params = load_team(cfg.model, cfg.agents, cfg)
    return fit(team, data, cfg, params=params, eval_data=eval_data)


def show(cfg: OfflineConfig, result: FitResult) -> None:
    del cfg
    for name, metrics in (("before", result.before), ("after", result.after)):
        if metrics:
            print(f"held out, {name}: " + ", ".join(f"{column} {value:.3f}" for column, value in metrics.items()))


if __name__ == "__main__":
    command(OfflineConfig, run, show)
