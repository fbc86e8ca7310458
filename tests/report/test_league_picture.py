"""The report of a league: who beats whom, the win rate against each slot, Elo."""

from __future__ import annotations

import json
import re
from pathlib import Path

from browser import dom, needs_chromium
from run_directories import write_run

from jmarl.report.load import load_runs
from jmarl.report.page import summarize, write_report


def write_league(directory: Path, slots: int = 2, snapshots: int = 3) -> Path:
    """Write a run whose slots take weights at updates 0, 2, 4, ... and whose newest slot wins 75 % against the oldest in them,
    90 % against the others."""
    run = write_run(directory, steps=2 * snapshots)
    start = run / "attempts" / "1" / "start.json"
    content = json.loads(start.read_text())
    content["settings"]["config"]["snapshots"] = slots
    start.write_text(json.dumps(content))
    rows, taken = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()], {}
    for row in (row for row in rows if "eval/updates" not in row):
        update = row["step"] - 1
        if update % 2 == 0:
            newest = update // 2 % slots
            taken[newest] = update
            row |= {f"league/slot_{k}/update": x for k, x in taken.items()}
            others = {k: x for k, x in taken.items() if k != newest}
            row |= {f"league/slot_{k}/newest_winrate": 0.75 if x == min(others.values()) else 0.9 for k, x in others.items()}
        row |= {f"league/slot_{k}/winrate": x / 100 for k, x in taken.items()}
        row |= {"league/slot_0/recent_winrate": 0.25, "league/elo": 10.0 * update, "league/elo_ci95": 5.0}
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return run


def test_players_are_named_by_the_update_at_which_they_were_taken(tmp_path):
    """Slot 0 took weights at updates 0 and 4, slot 1 at update 2: the first player is gone, with its curve."""
    (run,) = load_runs([write_league(tmp_path / "run")])
    league = summarize([run])["runs"][0]["league"]
    assert league["updates"] == [2, 4]
    assert league["rates"] == [[None, 0.25], [0.75, None], [None, 0.25]]
    assert [curve["x"] for curve in league["curves"]] == [[3, 4, 5, 6], [5, 6]]
    assert league["curves"][1]["mean"] == [0.04, 0.04]
    assert league["elo"]["mean"][-1] == 50 and league["elo"]["interval"] == [5] * 6


def test_strangers_stand_behind_the_slots(tmp_path):
    """The newest slot, of update 4, has met the second one; the present team both. Functions are named without their module."""
    run = write_league(tmp_path / "run")
    add_strangers(run, {"league/stranger_0/winrate": 0.5, "league/stranger_0/recent_winrate": 0.75}, {})
    add_strangers(run, {"league/stranger_1/newest_winrate": 0.125, "league/stranger_1/recent_winrate": 0.0}, {"step": 5})
    league = summarize(load_runs([run]))["runs"][0]["league"]
    assert league["updates"] == [2, 4] and league["strangers"] == ["minimax", "http://a:1/v1#mine"]
    assert [row[2:] for row in league["rates"]] == [[None, None], [None, 0.125], [None, None], [None, None], [0.75, None]]
    assert league["rates"][3] == [None, 0.875, None, None]
    assert [curve and curve["mean"][-1] for curve in league["curves"]] == [0.02, 0.04, 0.5, None]


def test_strangers_alone_have_a_picture(tmp_path):
    run = add_strangers(write_run(tmp_path / "run", steps=2), {"league/stranger_0/recent_winrate": 0.75}, {})
    league = summarize(load_runs([run]))["runs"][0]["league"]
    assert league["updates"] == [] and league["rates"] == [[None, None]] * 2 + [[0.75, None]]


def add_strangers(run: Path, columns: dict[str, float], where: dict[str, int]) -> Path:
    """Name two strangers in a run's settings, and add columns to the rows that have these values."""
    start = run / "attempts" / "1" / "start.json"
    content = json.loads(start.read_text())
    content["settings"]["config"]["strangers"] = ["jmarl.envs.games.tictactoe:minimax", "http://a:1/v1#mine"]
    start.write_text(json.dumps(content))
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rows = [row | columns if row.items() >= where.items() else row for row in rows]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return run


def test_a_league_without_ratings_or_games_has_no_curves(tmp_path):
    run = write_league(tmp_path / "run")
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    kept = [{name: x for name, x in row.items() if not re.search("elo|winrate", name)} for row in rows]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in kept))
    league = summarize(load_runs([run]))["runs"][0]["league"]
    assert league == {"updates": [2, 4], "strangers": [], "rates": [[None, None]] * 3, "curves": [None, None], "elo": None}


@needs_chromium
def test_the_picture_fits_a_phone_and_is_only_on_pages_of_leagues(tmp_path):
    """Six slots and two strangers in 400 pixels: the page itself does not scroll to the side."""
    run = add_strangers(write_league(tmp_path / "run", 6, 7), {"league/stranger_1/recent_winrate": 0.5}, {})
    write_report([run], tmp_path / "league.html")
    script = """
      const timer = setInterval(() => {
        if (!document.body.dataset.ready) return;
        clearInterval(timer);
        document.body.style.width = "400px";
        const isWider = (element) => !element.closest(".wide") && element.getBoundingClientRect().right > 400;
        document.body.dataset.wider = [...document.querySelectorAll("#league *")].filter(isWider).length;
        const table = document.querySelector("#league .wide");
        document.body.dataset.scrolled = table.scrollWidth - table.clientWidth;
      }, 100);"""
    page = tmp_path / "league.html"
    page.write_text(page.read_text().replace("</body>", f"<script>{script}</script></body>"))
    html = dom(page, tmp_path / "profile", "--window-size=600,900")
    assert re.findall(r'data-(?:wider|scrolled)="(\d+)"', html) == ["0", "0"]
    section = html.split('id="league"')[1].split("</section>")[0]
    assert section.count("<tr") == 1 + 9 and section.count('class="curve"') == 6 + 1
    assert "the present team wins 50 % against http://a:1/v1#mine" in section
    assert "update 12 wins 75 % against update 2" in section and "the present team wins 25 % against update 12" in section
    write_report([write_run(tmp_path / "plain")], tmp_path / "plain.html")
    assert "#league" not in (tmp_path / "plain.html").read_text().split("<script")[0].split("</style>")[1]
