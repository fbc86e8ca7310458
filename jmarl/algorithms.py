"""The table of algorithms: a row is an advantage estimator, a loss and their defaults.

A single-agent method is a team of one.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import NamedTuple

from jmarl.losses import clipped_surrogate, policy_gradient


class Algorithm(NamedTuple):
    advantage: str  # a key of advantages.ESTIMATORS
    scale: str  # what the advantages are divided by, unless the config says otherwise
    loss: Callable
    aggregation: str  # how the loss averages tokens, unless the config says otherwise
    min_group: int  # completions a prompt that the baseline needs
    paper: str
    options: dict[str, str] = {}  # arguments of the loss -> the setting that each comes from


CLIPPING = {"eps_low": "clip_eps_low", "eps_high": "clip_eps_high", "level": "ratio_level"}
ALGORITHMS = {
    "mareinforce": Algorithm("raw", "none", policy_gradient, "token_mean", 1, "REINFORCE, Williams 1992, for teams"),
    "magrpo": Algorithm("group_mean", "none", policy_gradient, "token_mean", 2, "arXiv 2508.04652"),
    "marloo": Algorithm("leave_one_out", "none", policy_gradient, "token_mean", 2, "arXiv 2402.14740, for teams"),
    "maremax": Algorithm("max_baseline", "none", policy_gradient, "token_mean", 2, "CoMLRL's variant of arXiv 2310.10505"),
    "grpo": Algorithm("group_mean", "std", clipped_surrogate, "sequence_mean", 2, "arXiv 2402.03300", CLIPPING),
}


def algorithm(name: str) -> Algorithm:
    """The row of that name; an unknown name is an error that names the nearest."""
    if name not in ALGORITHMS:
        near = difflib.get_close_matches(name, ALGORITHMS, n=1, cutoff=0.0)[0]
        raise ValueError(f"algorithm={name!r} is unknown; did you mean {near!r}? Known: {', '.join(ALGORITHMS)}")
    return ALGORITHMS[name]
