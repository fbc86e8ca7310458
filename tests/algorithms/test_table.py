"""The table of algorithms: the parts of its rows, their defaults, and rows that do not exist."""

from __future__ import annotations

import functools
import typing

import jax
import pytest

from jmarl.algorithms import ALGORITHMS, DEFAULTS, find_row, resolve, row_of_loss
from jmarl.algorithms.table import CLIPPING
from jmarl.config import Aggregation, Scale, TrainConfig, flat
from jmarl.rl.advantages import group_mean, leave_one_out, max_baseline, raw
from jmarl.rl.losses import cispo, clipped_surrogate, cross_entropy, policy_gradient, preference


def test_rows_of_the_table():
    """The parts of every row, and all settings that rows name exist."""
    online = {name: row for name, row in ALGORITHMS.items() if row.data == "rollouts"}
    parts = {name: (row.estimator, row.baseline, row.per_token, row.scale, row.loss) for name, row in online.items()}
    assert parts == {
        "mareinforce": (raw, "none", False, "none", policy_gradient),
        "magrpo": (group_mean, "none", False, "none", policy_gradient),
        "marloo": (leave_one_out, "none", False, "none", policy_gradient),
        "maremax": (max_baseline, "none", False, "none", policy_gradient),
        "grpo": (group_mean, "none", False, "std", clipped_surrogate),
        "dr_grpo": (group_mean, "none", False, "none", clipped_surrogate),
        "dapo": (group_mean, "none", False, "std", clipped_surrogate),
        "gspo": (group_mean, "none", False, "std", clipped_surrogate),
        "cispo": (group_mean, "none", False, "std", cispo),
        "at_grpo": (group_mean, "none", False, "std", clipped_surrogate),
        "dr_mas": (group_mean, "none", False, "std", clipped_surrogate),
        "remax": (raw, "greedy", False, "none", policy_gradient),
        "rae": (raw, "ema", False, "none", clipped_surrogate),
        "c3": (leave_one_out, "none", False, "none", policy_gradient),
        "adalign": (leave_one_out, "none", False, "none", policy_gradient),
        "iac": (raw, "critic", False, "none", policy_gradient),
        "maac": (raw, "critic", False, "none", policy_gradient),
        "ppo": (raw, "none", True, "batch_std", clipped_surrogate),
        "ippo": (raw, "none", True, "batch_std", clipped_surrogate),
        "mappo": (raw, "critic", False, "batch_std", clipped_surrogate),
    }
    assert {name: row.critic for name, row in ALGORITHMS.items() if row.critic} == {
        "iac": "own", "ppo": "own", "ippo": "own", "maac": "central", "mappo": "central",
    }  # fmt: skip
    assert {name: (row.margin, row.data, row.loss) for name, row in ALGORITHMS.items() if name not in online} == {
        "dpo": ("own", "pairs", preference),
        "madpo": ("joint", "pairs", preference),
        "madpo_iter": ("joint", "pairs", preference),
        "reward_model": ("score", "pairs", preference),
        "marlhf": ("score", "pairs", preference),
        "marlhf_iter": ("score", "pairs", preference),
        "sft": (None, "texts", cross_entropy),
    }
    assert all(row.margin is None for row in online.values())
    settings = flat(TrainConfig())
    assert {name for name in DEFAULTS if settings[name] is not None} == set(), (
        "settings with defaults per row must be None in TrainConfig"
    )
    for row in online.values():
        assert row.scale in typing.get_args(Scale) and row.aggregation in typing.get_args(Aggregation)
        assert set(row.options.values()) <= set(CLIPPING.values()) and set(row.defaults) <= set(DEFAULTS)


def test_settings_default_to_their_row():
    """A setting has the user's value, else the row's default, else the default of the table."""

    def loss(**settings):
        return resolve(TrainConfig.of(**settings)).loss

    assert loss(algorithm="dapo").clip_eps_high == 0.28 and loss(algorithm="dapo").clip_eps_low == 0.2
    assert loss(algorithm="dapo", clip_eps_high=0.5).clip_eps_high == 0.5
    assert loss(algorithm="gspo").ratio_level == "sequence"
    assert loss(algorithm="dapo").mask_overlong is True and loss(algorithm="dapo", mask_overlong=False).mask_overlong is False


def test_settings_that_the_row_does_not_use_are_errors():
    with pytest.raises(ValueError, match=r"clip_eps_high=0.3 has no effect for algorithm='magrpo'; it is for grpo, dr_grpo"):
        resolve(TrainConfig.of(clip_eps_high=0.3))
    assert resolve(TrainConfig.of(algorithm="grpo", clip_eps_high=0.3)).loss.clip_eps_high == 0.3
    with pytest.raises(ValueError, match="ratio_level='sequence' has no effect for algorithm='cispo'"):
        resolve(TrainConfig.of(algorithm="cispo", ratio_level="sequence"))


def test_the_error_for_an_unknown_algorithm_names_the_nearest_and_all():
    with pytest.raises(ValueError, match="'magrp' is unknown; did you mean 'magrpo'.*mareinforce.*grpo"):
        find_row("magrp")
    with pytest.raises(ValueError, match=r"'qmix' is unknown\. Known: mareinforce, .*grpo"):
        find_row("qmix")


def test_own_losses_take_settings_that_they_do_not_bind():
    def loss(logp, old, advantages, weights, *, eps_low, eps_high):
        return 0.0

    both = {"eps_low": "clip_eps_low", "eps_high": "clip_eps_high"}
    assert row_of_loss(loss).options == row_of_loss(jax.jit(loss)).options == both
    assert row_of_loss(functools.partial(loss, eps_low=0.5)).options == {"eps_high": "clip_eps_high"}
