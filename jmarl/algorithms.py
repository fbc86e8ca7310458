"""The table of algorithms: a row is an advantage estimator, a loss and their defaults.

A single-agent method is a team of one. The loss's options are settings of `Learning` that are None until a row or the user
gives them a value (`option`); one that a row has no use for is refused (`check_options`).
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from jmarl.losses import cispo, clipped_surrogate, policy_gradient


class Algorithm(NamedTuple):
    advantage: str  # a key of advantages.ESTIMATORS
    scale: str  # what the advantages are divided by, unless the config says otherwise
    loss: Callable
    aggregation: str  # how the loss averages tokens, unless the config says otherwise
    min_group: int  # completions a prompt that the baseline needs
    paper: str
    options: Mapping[str, str] = {}  # arguments of the loss -> the setting that each comes from
    defaults: Mapping[str, Any] = {}  # settings that this row has another default for


DEFAULTS: dict[str, Any] = {
    "clip_eps_low": 0.2,
    "clip_eps_high": 0.2,
    "ratio_level": "token",
    "dual_clip": 0.0,
    "mask_overlong": False,
}
BOUNDS = {"eps_low": "clip_eps_low", "eps_high": "clip_eps_high"}
CLIPPING = BOUNDS | {"level": "ratio_level", "dual": "dual_clip"}

ALGORITHMS = {
    "mareinforce": Algorithm("raw", "none", policy_gradient, "token_mean", 1, "REINFORCE, Williams 1992, for teams"),
    "magrpo": Algorithm("group_mean", "none", policy_gradient, "token_mean", 2, "arXiv 2508.04652"),
    "marloo": Algorithm("leave_one_out", "none", policy_gradient, "token_mean", 2, "arXiv 2402.14740, for teams"),
    "maremax": Algorithm("max_baseline", "none", policy_gradient, "token_mean", 2, "CoMLRL's variant of arXiv 2310.10505"),
    "grpo": Algorithm("group_mean", "std", clipped_surrogate, "sequence_mean", 2, "arXiv 2402.03300", CLIPPING),
    "dr_grpo": Algorithm("group_mean", "none", clipped_surrogate, "constant", 2, "arXiv 2503.20783", CLIPPING),
    "dapo": Algorithm(
        "group_mean",
        "std",
        clipped_surrogate,
        "token_mean",
        2,
        "arXiv 2503.14476",
        CLIPPING,
        {"clip_eps_high": 0.28, "mask_overlong": True},
    ),
    "gspo": Algorithm(
        "group_mean",
        "std",
        clipped_surrogate,
        "sequence_mean",
        2,
        "arXiv 2507.18071",
        CLIPPING,
        {"clip_eps_low": 3e-4, "clip_eps_high": 4e-4, "ratio_level": "sequence"},
    ),
    "cispo": Algorithm(
        "group_mean", "std", cispo, "token_mean", 2, "arXiv 2506.13585", BOUNDS, {"clip_eps_low": 1.0, "clip_eps_high": 0.28}
    ),
    "at_grpo": Algorithm("group_mean", "std", clipped_surrogate, "token_mean", 2, "arXiv 2510.11062", CLIPPING),
}


def algorithm(name: str) -> Algorithm:
    """The row of that name; an unknown name is an error that names the nearest."""
    if name not in ALGORITHMS:
        near = difflib.get_close_matches(name, ALGORITHMS, n=1, cutoff=0.0)[0]
        raise ValueError(f"algorithm={name!r} is unknown; did you mean {near!r}? Known: {', '.join(ALGORITHMS)}")
    return ALGORITHMS[name]


def option(name: str, given: Any, row: Algorithm) -> Any:
    """The value of a setting: what was given, or the row's default."""
    return row.defaults.get(name, DEFAULTS[name]) if given is None else given


def check_options(settings: Mapping[str, Any]) -> None:
    """Refuse settings of a loss that the algorithm's row has no use for."""
    row = algorithm(settings["algorithm"])
    for setting in CLIPPING.values():
        if settings[setting] is not None and setting not in row.options.values():
            others = ", ".join(name for name, other in ALGORITHMS.items() if setting in other.options.values())
            raise ValueError(
                f"{setting}={settings[setting]!r} has no meaning for algorithm={settings['algorithm']!r}; it is for {others}"
            )
