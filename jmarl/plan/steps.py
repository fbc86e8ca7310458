"""Make steps of a run, with its own weights, tasks, rewards and mesh, until two take equally long; say how long the run takes.

The time of compiling is separate. The first step has no update before it and does not count. Other work on the machine makes
single steps longer: so two in a row must agree.

Left out: checkpoints, and evaluations, whose time is estimated from the completions that they sample.
"""

import datetime
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jmarl.config import ExperimentConfig
from jmarl.config.paths import expand_home
from jmarl.files.interrupt import Interrupted
from jmarl.learning.meshes import line_of_cores
from jmarl.logs.metrics_writer import read_rows
from jmarl.runs.experiment import task_of, team_of
from jmarl.runs.loop import run_training
from jmarl.runs.run import Task
from jmarl.runs.train import fit, prepared
from jmarl.team import Team

TOLERANCE = 0.05  # share by which two steps in a row may differ
MOST_STEPS, ENOUGH = 10, 240.0  # steps, and seconds after which no further one begins, if no two agree
SHORT = dict(
    num_updates=MOST_STEPS, lr_schedule="constant", warmup_updates=0, save_every=0, save_models=False, tensorboard=False,
    max_completions_mb=0, log_tokens=0, eval_every=0, progress=False, resume=False, resume_step=None, replay_rollout="",
)  # fmt: skip


class StepTime(NamedTuple):
    """What a step took, in seconds."""

    sampling: float
    rewards: float
    update: float
    rest: float  # logs and the loop

    @property
    def total(self) -> float:
        """The time of a step, without compiling."""
        return sum(self)


class Steps(NamedTuple):
    """Steps of a run: the first has no update before it, the last one is taken as the time of all."""

    times: Sequence[StepTime]
    compiling: float  # seconds, in all steps
    devices: str  # on which they were made


def agree(seconds: Sequence[float]) -> bool:
    """Return whether the last two steps differ by at most `TOLERANCE` of the longer one. The very first step does not count."""
    return len(seconds) > 2 and abs(seconds[-1] - seconds[-2]) <= TOLERANCE * max(seconds[-2:])


def has_weights(model: str) -> bool:
    """Return whether a model can be run: a directory needs a file of weights beside its config.json."""
    path = Path(expand_home(model))
    return not path.is_dir() or any(path.glob("*.safetensors"))


def time_steps(cfg: ExperimentConfig) -> Steps:
    """Make steps on the devices of this process, until two agree or it has taken long enough. Nothing is kept."""
    task = task_of(cfg.task, cfg.team, num_turns=cfg.train.episodes.num_turns, seed=cfg.train.run.seed)
    with tempfile.TemporaryDirectory(prefix="jmarl-plan-") as directory:
        settings = cfg.train.replace(**SHORT, output_dir=directory)
        run, source, state = prepared(settings, team_of(cfg.team), Task(task.env, task.items, fit=fit))
        file, begin, enough = Path(directory) / "metrics.jsonl", time.monotonic(), list[dict[str, Any]]()

        def play(step: int, state: Any) -> Any:
            rows = read_rows(file)  # of all steps but the one whose update runs now
            times = [time_of(row).total for row in rows]
            if agree(times) or (len(times) > 1 and time.monotonic() - begin > ENOUGH):
                enough[:] = rows
                raise Interrupted
            return source.play(step, state)

        result, _ = run_training(run, source._replace(play=play), state, None)
        if result.interrupted and not enough:
            raise KeyboardInterrupt
        rows = enough or read_rows(file)
    compiling = sum(row["time/compiling"] for row in rows)
    return Steps([time_of(row) for row in rows], compiling, describe_devices(run.setup.team))


def time_of(row: Mapping[str, float]) -> StepTime:
    """Return the time of a step from its row of metrics."""
    return StepTime(*(row[f"time/{name}"] for name in ("sampling", "rewards", "update", "idle")))


def describe_devices(team: Team) -> str:
    """Return the devices of a run as text, and how it could use more cores."""
    kind, mesh = jax.devices()[0].platform.upper(), team.stacks[0].mesh
    if mesh is None:
        return "; ".join(filter(None, (f"one {kind} device", line_of_cores(team))))
    return f"{mesh.size} {kind} devices, mesh " + ",".join(f"{name}={size}" for name, size in mesh.shape.items() if size > 1)


def lines_of_steps(steps: Steps, cfg: ExperimentConfig, eval_items: int) -> list[str]:
    """Return the time of a step and of the whole run as text. eval_items: number of held-out tasks."""
    run, episodes, step = cfg.train.run, cfg.train.episodes, steps.times[-1]
    parts = f"sampling {step.sampling:.2f}, rewards {step.rewards:.2f}, update {step.update:.2f}"
    lines = [f"measured: {step.total:.2f} s a step ({parts}); compiling {steps.compiling:.0f} s, once"]
    seconds, last, percent = [x.total for x in steps.times], len(steps.times), 100 * TOLERANCE
    if agree(seconds):
        lines[0] += f"; steps {last - 1} and {last} agree within {percent:.0f} %"
    else:
        listed = ", ".join(f"{x:.2f}" for x in seconds[1:])
        lines.append(f"no two steps in a row agree within {percent:.0f} %: from step 2 on they took {listed} s")
    lines.append(f"measured on {steps.devices}")
    share = eval_items * run.eval_generations / (episodes.num_prompts * episodes.num_generations)
    evaluation = share * (step.sampling + step.rewards)
    count = 1 + -(-run.num_updates // (run.eval_every or run.num_updates)) if eval_items else 0
    total = steps.compiling + run.num_updates * step.total + count * evaluation
    held_out = f" and {count} evaluations of about {evaluation:.1f} s" if count else ""
    duration = datetime.timedelta(seconds=round(total))
    lines.append(f"the run: about {duration} for {run.num_updates} updates{held_out}; checkpoints are not counted")
    return lines
