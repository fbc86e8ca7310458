"""Turn the columns of a league into what a report draws: who beats whom, the win rate against each slot, and the team's Elo.

A slot takes other weights now and then, so a player is named by the update at which its weights were taken. Shown are the
players who sit in the slots after the last update, and the present team.
"""

from __future__ import annotations

import re
from typing import Any

from jmarl.columns import INTERVAL
from jmarl.report.load import RecordedRun
from jmarl.report.summary import curve, points

COLUMN = re.compile(r"league/slot_(\d+)/(update|winrate|recent_winrate|newest_winrate)")
ELO = "league/elo"


def league(run: RecordedRun) -> dict[str, Any]:
    """Return what the page shows of the league of a run, as JSON values.

    `updates`: of the players in the slots, the oldest first. `rates`: how often the player of a row wins against that of a
    column, null where they never met; a row for each slot, and one for the present team. `curves`: of each slot, how often the
    team wins against it; null if it never met it. `elo`: the curve of the team's Elo; null in games that are not zero-sum.
    """
    players: dict[int, float] = {}  # slot -> update of the player in it
    rates: dict[tuple[float, float], float] = {}
    lines: dict[float, dict[float, float]] = {}
    present: dict[float, float] = {}
    for row in run.rows:
        values = slots_of(row)
        if "update" in values:
            players = values["update"]
            newest = max(players.values())
            met = {players[k]: rate for k, rate in values.get("newest_winrate", {}).items() if k in players}
            rates |= {(newest, update): rate for update, rate in met.items()}
            rates |= {(update, newest): 1 - rate for update, rate in met.items()}
        for slot in players.keys() & values.get("winrate", {}).keys():
            lines.setdefault(players[slot], {})[row["step"]] = values["winrate"][slot]
        present = {players[k]: rate for k, rate in values.get("recent_winrate", {}).items() if k in players}
    updates, elo = sorted(players.values()), points(run, ELO)
    return {
        "updates": updates,
        "rates": [[rates.get((a, b)) for b in updates] for a in updates] + [[present.get(b) for b in updates]],
        "curves": [curve([lines[update]], [{}]) if update in lines else None for update in updates],
        "elo": curve([elo], [points(run, ELO + INTERVAL)]) if elo else None,
    }


def slots_of(row: dict[str, float]) -> dict[str, dict[int, float]]:
    """Return the values of slots in a row: name of a column -> slot -> value."""
    values: dict[str, dict[int, float]] = {}
    for name, value in row.items():
        if match := COLUMN.fullmatch(name):
            values.setdefault(match[2], {})[int(match[1])] = value
    return values
