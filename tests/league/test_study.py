"""The study of leagues measures all checkpoints of its runs, and its table and picture have them."""

from __future__ import annotations

import json

import pytest

from experiments.league import LeagueConfig, draw, run_one, table
from experiments.tables import README


@pytest.mark.nightly
def test_a_run_is_measured_at_all_its_checkpoints(tmp_path):
    run = run_one(LeagueConfig(quick=True, measure_every=10, output_dir=tmp_path), "kuhn", 0, "league")
    assert [point["update"] for point in run["curve"]] == [0, 10, 20]
    assert all(0 < point["nash_conv"] < 4 and 0 <= point["illegal"] < 1 for point in run["curve"])


def test_the_table_and_the_picture_are_those_of_the_numbers_beside_them(tmp_path):
    runs = json.loads((README.parent / "league.json").read_text(encoding="utf-8"))
    assert f"<!-- league -->\n{table(runs)}\n<!-- end of league -->" in README.read_text(encoding="utf-8")
    draw(runs, tmp_path / "league.png")
    assert (tmp_path / "league.png").stat().st_size > 10_000
