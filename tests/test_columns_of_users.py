"""No number of the user replaces one of the library in a row: a name that the library writes is refused or gets a suffix."""

from __future__ import annotations

import warnings

import pytest

from jmarl.columns import AGENT, EVALUATION, MEASURES, RESERVED, REWARD, check_names, join_numbers, own_columns
from tests.logs.test_columns import README

OF_LOSSES = {"clip_share", "accuracy", "margin"}  # the library's losses return them as a user's may


def described(prefix: str) -> set[str]:
    """Return the names after a prefix in the table of columns, without patterns."""
    table = README.read_text().split("<!-- columns -->")[1].split("<!-- end of columns -->")[0]
    names = [part for line in table.splitlines() for part in line.split(" | ")[0].split("`")[1::2]]
    return {
        name.removeprefix(prefix)
        for name in names
        if name.startswith(prefix) and "NAME" not in name and "…" not in name.split("/")
    }


@pytest.mark.parametrize("prefix", [REWARD, EVALUATION, AGENT])
def test_every_described_column_is_reserved(prefix):
    names = {name for name in described(prefix) if "…" not in name} - OF_LOSSES
    assert len(names) > {EVALUATION: 0}.get(prefix, 3)
    for name in names:
        with pytest.raises(ValueError, match="is not allowed as the name of a part"):
            check_names(prefix, ["win", name], "part")
        with pytest.warns(UserWarning, match="is taken by a column of the library"):
            assert own_columns(prefix, ["win", name]) == {"win": f"{prefix}win", name: f"{prefix}{name}_own"}


@pytest.mark.parametrize(
    ("prefix", "names", "columns"),
    [
        (REWARD, ["mean", "mean_own"], ["mean_own_own", "mean_own"]),
        (REWARD, ["mean_ci95"], ["mean_ci95_own"]),  # of several seeds
        (REWARD, ["pass@1"], ["pass@1_own"]),
        (MEASURES, [1, "1"], ["1", "1_own"]),
        (MEASURES, ["a\ud800", "a\udfff"], ["a\ufffd", "a\ufffd_own"]),  # equal where they are written
        (MEASURES, ["x_ci95"], ["x_ci95_own"]),  # reports take it for the interval of x
        (MEASURES, ["x", "x_episodes", "x_runs"], ["x", "x_episodes_own", "x_runs_own"]),
        (EVALUATION, ["reward", "reward_ci95"], ["reward_own", "reward_ci95_own"]),
        (EVALUATION, ["member_10", "member"], ["member_10_own", "member"]),  # of a population
        (EVALUATION, ["reward/win", "measures/x"], ["reward/win_own", "measures/x_own"]),
        (EVALUATION, ["math/pass@4_ci95"], ["math/pass@4_ci95_own"]),
        (AGENT, ["critic_loss"], ["critic_loss_own"]),
    ],
)
def test_names_that_are_taken_get_a_suffix_that_is_free(prefix, names, columns):
    with pytest.raises(ValueError, match="is not allowed as the name of a measure"):
        check_names(prefix, names, "measure")
    with pytest.warns(UserWarning, match="is taken"):
        assert own_columns(prefix, names) == dict(zip(names, (prefix + column for column in columns), strict=True))


@pytest.mark.parametrize("prefix", RESERVED)
def test_other_names_stay(prefix):
    names = [
        "win",
        "level/mean",
        "Mean",
        "x",
        "x_ci95",
        "num_episodes",
        "invalid_moves",
        "a b",
        "success",
        "turn_1/reward_mean",
    ]
    check_names(prefix, names, "measure")
    assert own_columns(prefix, names) == {name: prefix + name for name in names}


def test_joining_keeps_all_numbers():
    """Those of an environment around another one keep their names, then the first table does."""
    with pytest.warns(UserWarning, match="the name task is taken by a column of the library, so your number is task_own"):
        assert join_numbers({"task": 1}, {"task": 2, "x": 3}) == {"task": 1, "task_own": 2, "x": 3}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert join_numbers({"task": 1}, {"x": 2, "x_own": 3}, {"x": 4}) == {"task": 1, "x": 2, "x_own": 3, "x_own_own": 4}
