"""The study of leagues measures all checkpoints of its runs, and its table and picture have them."""

from __future__ import annotations

import pytest

from experiments.league import LeagueConfig, draw, run_one, table


@pytest.mark.long
def test_a_run_is_measured_at_all_its_checkpoints(tmp_path):
    cfg = LeagueConfig(quick=True, measure_every=10, output_dir=tmp_path)
    run = run_one(cfg, "kuhn", 0, "league")
    assert [point["update"] for point in run["curve"]] == [0, 10, 20]
    assert all(0 < point["nash_conv"] < 4 and 0 <= point["illegal"] < 1 for point in run["curve"])
    runs = [run | {"way": way} for way in ("self-play", "league")]
    assert [line.split(" | ")[2] for line in table(runs).splitlines()[2:]] == ["self-play", "league"]
    draw(runs, tmp_path / "league.png")
    assert (tmp_path / "league.png").stat().st_size > 10_000
