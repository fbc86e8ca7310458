"""The study of leagues measures all checkpoints of its runs, and its table and picture have them."""

from __future__ import annotations

import json

import pytest

from experiments.league import LeagueConfig, draw, run_one, table, updates_of, with_stored
from experiments.tables import README


@pytest.mark.nightly
def test_a_run_is_measured_at_all_its_checkpoints(tmp_path):
    run = run_one(LeagueConfig(quick=True, measure_every=10, output_dir=tmp_path), "kuhn", 0, "league")
    assert [point["update"] for point in run["curve"]] == [0, 10, 20]
    assert all(0 < point["nash_conv"] < 4 and 0 <= point["illegal"] < 1 for point in run["curve"])


def test_numbers_of_games_that_were_not_played_stay(tmp_path):
    """New runs of a game take the place of its old ones."""
    (tmp_path / "old.json").write_text(json.dumps([{"game": "tictactoe", "seed": 0}, {"game": "kuhn", "seed": 0}]))
    got = with_stored([{"game": "tictactoe", "seed": 1}], tmp_path / "old.json")
    assert got == [{"game": "kuhn", "seed": 0}, {"game": "tictactoe", "seed": 1}]


def test_a_league_of_half_of_the_games_makes_a_third_more_updates():
    """It learns from one of two seats in half of its games, three quarters of the tokens."""
    assert [updates_of(LeagueConfig(num_updates=150), "tictactoe", way) for way in ("self-play", "league")] == [150, 200]


def test_the_table_and_the_picture_are_those_of_the_numbers_beside_them(tmp_path):
    runs = json.loads((README.parent / "league.json").read_text(encoding="utf-8"))
    assert f"<!-- league -->\n{table(runs)}\n<!-- end of league -->" in README.read_text(encoding="utf-8")
    draw(runs, tmp_path / "league.png")
    assert (tmp_path / "league.png").stat().st_size > 10_000
