"""What an experiment prints of its run. No experiment itself."""

from __future__ import annotations

import math

from jmarl.evaluate import Evaluation, numbers
from jmarl.train import TrainResult


def told(result: Evaluation) -> str:
    """Every number of an evaluation, with its 95 % interval where it has one."""
    found, ci = numbers(result), "_ci95"
    shown = {name: with_interval(x, found.get(name + ci, math.nan)) for name, x in found.items() if not name.endswith(ci)}
    return ", ".join(f"{name.removeprefix('eval/')} {value}" for name, value in shown.items())


def with_interval(mean: float, interval: float) -> str:
    """0.523 ± 0.012; of a single number, which has no interval (NaN), 0.523."""
    return f"{mean:.3f}" if math.isnan(interval) else f"{mean:.3f} ± {interval:.3f}"


def report(result: TrainResult) -> None:
    """Print what held-out tasks gave before and after, and the end of the learning curve."""
    if result.before:  # not of a resumed run
        print(f"held-out before: {told(result.before)}")
    if result.after:
        print(f"held-out after: {told(result.after)}")
    print(end_of(result))


def end_of(result: TrainResult) -> str:
    """The end of the learning curve."""
    if not result.rewards:
        return "no update was left to make: raise --num-updates to train on"
    last = result.rewards[-10:]
    return f"mean reward of the last {len(last)} updates {sum(last) / len(last):.3f}"
