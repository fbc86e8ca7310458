"""Train agents on a file of preferences or texts: dpo, madpo (a team), reward_model (of all agents' texts together), sft.

Command: python -m experiments.offline --data pairs.json --algorithm dpo                (flags: --help)
Files: `.json` or `.jsonl` with prompt, chosen, rejected (dpo, reward_model; with several --agents, as madpo has, chosen and
rejected are lists of one text an agent), with prompt and completion, or with trajectories (sft); see `load_pairs`. A run of
`story_length --algorithm madpo_iter` writes such files (`pairs/round_0000.jsonl`). What belongs to a tenth of the prompts is
held out where no --eval-data is given; prints loss and accuracy on it before and after training. A reward model lies in
`reward_model/` of the output directory, for `jmarl.load_reward_model`.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from experiments.report import command
from jmarl.algorithms import find_row
from jmarl.config import Run, TrainConfig, check
from jmarl.models.hub.agents import load_agent
from jmarl.team import make_team
from jmarl.training.fit import check_fit, fit
from jmarl.training.preferences.pairs import load_pairs, load_trajectories, split_by_prompt
from jmarl.training.preferences.reward_model import FOLDER, fit_reward_model, save_reward_model
from jmarl.training.records import FitResult


@dataclasses.dataclass(frozen=True)
class OfflineConfig(TrainConfig):
    """Agents and the file that they learn from."""

    data: str = ""
    """File of pairs or texts."""
    eval_data: str = ""
    """File of held-out ones; empty: a tenth of the data."""
    min_reward: float | None = None
    """Leave out trajectories of a smaller sum of rewards (sft)."""
    model: str = "smollm2-135m-instruct"
    """Model of all agents: a name, a directory, a .gguf file or a hub id."""
    agents: int = 1
    """Agents of the team."""
    algorithm: str = "dpo"
    run: Run = Run(num_updates=50, output_dir="runs/offline")

    def __post_init__(self):
        super().__post_init__()
        check("data", self.data, bool(self.data), "the name of a file")
        check("agents", self.agents, self.agents >= 1, ">= 1")

    def read(self, path: str) -> list:
        if find_row(self.algorithm).data == "texts":
            return load_trajectories(path, self.min_reward)
        return load_pairs(path, self.agents)


def run(cfg: OfflineConfig) -> FitResult:
    check_fit(cfg, None)
    data, held = cfg.read(cfg.data), cfg.read(cfg.eval_data) if cfg.eval_data else []
    if not held:
        pairs = find_row(cfg.algorithm).data == "pairs"
        data, held = split_by_prompt(data, 10) if pairs else ([x for i, x in enumerate(data) if i % 10] or data, data[::10])
    if cfg.algorithm == "reward_model":
        model, result = fit_reward_model(load_agent(cfg.model), data, cfg, eval_pairs=held)
        if cfg.run.output_dir:
            save_reward_model(Path(cfg.run.output_dir) / FOLDER, model)
        return result
    team, params = make_team([load_agent(cfg.model)] * cfg.agents, lora=cfg.lora.lora_rank > 0)
    return fit(team, data, cfg, params=params, eval_data=held)


def show(cfg: OfflineConfig, result: FitResult) -> None:
    del cfg
    for when, found in (("before", result.before), ("after", result.after)):
        if found:
            print(f"held out, {when}: " + ", ".join(f"{name} {value:.3f}" for name, value in found.items()))


def main() -> None:
    command(OfflineConfig, run, show)


if __name__ == "__main__":
    main()
