"""What an experiment prints of its run. No experiment itself."""

from __future__ import annotations

from jmarl.evaluate import Evaluation, numbers
from jmarl.train import TrainResult


def told(result: Evaluation) -> str:
    """Every number of an evaluation, with its 95 % interval where it has one."""
    found, ci = numbers(result), "_ci95"
    each = [name for name in found if not name.endswith(ci)]
    shown = {name: f"{found[name]:.3f}" + (f" ± {found[name + ci]:.3f}" if name + ci in found else "") for name in each}
    return ", ".join(f"{name.removeprefix('eval/')} {value}" for name, value in shown.items())


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
