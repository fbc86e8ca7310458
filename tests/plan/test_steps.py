"""When `jmarl plan --device cpu --measure` has made enough steps, and what it says of them."""

from __future__ import annotations

import pytest

from jmarl.config import ExperimentConfig
from jmarl.plan.steps import Steps, StepTime, agree, lines_of_steps


@pytest.mark.parametrize(
    "seconds, enough",
    [
        ([], False),
        ([9.0, 9.0], False),  # the first step has no update before it
        ([1.0, 10.0, 10.5], True),
        ([1.0, 10.52, 10.0], True),
        ([1.0, 10.0, 10.6], False),
        ([1.0, 10.6, 10.0], False),
        ([5.0, 10.0, 10.0, 20.0], False),  # only the last two count
        ([5.0, 20.0, 10.0, 20.0], False),  # neighbors, not any two
    ],
)
def test_two_steps_in_a_row_agree_within_a_twentieth_of_the_longer_one(seconds: list[float], enough: bool) -> None:
    assert agree(seconds) == enough


@pytest.mark.parametrize(
    "updates, line",
    [
        ([4.0, 2.0, 2.02], "compiling 7 s, once; steps 3 and 4 agree within 5 %"),
        ([4.0, 2.0, 3.0], "no two steps in a row agree within 5 %: from step 2 on they took 5.00, 3.00, 4.00 s"),
    ],
)
def test_it_is_said_whether_the_last_two_steps_agree(updates: list[float], line: str) -> None:
    """The run is as long as its last step says, with compiling."""
    steps = Steps([StepTime(1.0, 0.0, update, 0.0) for update in (0.0, *updates)], 7.0, "one CPU device")
    cfg = ExperimentConfig.of(models=["any"], num_agents=2, data="any.jsonl", reward="any:reward", num_updates=100)
    lines = lines_of_steps(steps, cfg, eval_items=0)
    assert line in "\n".join(lines)
    assert lines[0].startswith(f"measured: {1 + updates[-1]:.2f} s a step") and "measured on one CPU device" in lines
    seconds = 7 + 100 * (1 + updates[-1])
    assert lines[-1].startswith(f"the run: about 0:0{seconds // 60:.0f}:{seconds % 60:02.0f} for 100 updates")
