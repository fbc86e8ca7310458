"""Make two steps of a run, with its own weights, tasks and rewards, and say how long the run takes.

The second step is timed, and the time of compiling is separate.

Left out: checkpoints, and evaluations, whose time is estimated from the completions that they sample.
"""

from __future__ import annotations

import datetime
import tempfile
from pathlib import Path
from typing import NamedTuple

from jmarl.config import ExperimentConfig
from jmarl.config.paths import expand_home
from jmarl.logs.metrics_writer import read_rows
from jmarl.runs.experiment import task_of, team_of
from jmarl.runs.train import train

SHORT = dict(
    num_updates=2, lr_schedule="constant", warmup_updates=0, save_every=0, save_models=False, tensorboard=False,
    max_completions_mb=0, eval_every=0, progress=False, resume=False, resume_step=None, replay_rollout="",
)  # fmt: skip


class StepTime(NamedTuple):
    """What a step took, in seconds."""

    sampling: float
    rewards: float
    update: float
    rest: float  # logs and the loop
    compiling: float  # once, in both steps

    @property
    def total(self) -> float:
        """The time of a step, without compiling."""
        return self.sampling + self.rewards + self.update + self.rest


def has_weights(model: str) -> bool:
    """Return whether a model can be run: a directory needs a file of weights beside its config.json."""
    path = Path(expand_home(model))
    return not path.is_dir() or any(path.glob("*.safetensors"))


def time_step(cfg: ExperimentConfig) -> StepTime:
    """Make two steps on the device of this process. Nothing is kept."""
    task = task_of(cfg.task, cfg.team, num_turns=cfg.train.episodes.num_turns, seed=cfg.train.run.seed)
    with tempfile.TemporaryDirectory(prefix="jmarl-plan-") as directory:
        train(team_of(cfg.team), task.env, task.items, cfg.train.replace(**SHORT, output_dir=directory))
        first, second = read_rows(Path(directory) / "metrics.jsonl")
    compiling = first["time/compiling"] + second["time/compiling"]
    sampling, rewards, update, rest = (second[f"time/{name}"] for name in ("sampling", "rewards", "update", "idle"))
    return StepTime(sampling, rewards, update, rest, compiling)


def lines_of_steps(step: StepTime, cfg: ExperimentConfig, eval_items: int) -> list[str]:
    """Return the time of a step and of the whole run as text. eval_items: number of held-out tasks."""
    run, episodes = cfg.train.run, cfg.train.episodes
    parts = f"sampling {step.sampling:.2f}, rewards {step.rewards:.2f}, update {step.update:.2f}"
    lines = [f"measured: {step.total:.2f} s a step ({parts}), the second of two; compiling {step.compiling:.0f} s, once"]
    share = eval_items * run.eval_generations / (episodes.num_prompts * episodes.num_generations)
    evaluation = share * (step.sampling + step.rewards)
    count = 1 + -(-run.num_updates // (run.eval_every or run.num_updates)) if eval_items else 0
    total = step.compiling + run.num_updates * step.total + count * evaluation
    held_out = f" and {count} evaluations of about {evaluation:.1f} s" if count else ""
    time = datetime.timedelta(seconds=round(total))
    lines.append(f"the run: about {time} for {run.num_updates} updates{held_out}; checkpoints are not counted")
    return lines
