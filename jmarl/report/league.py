"""Turn the columns of a league into what a report draws: who beats whom, the win rate against each slot, and the team's Elo.

A slot takes other weights now and then, so a player is named by the update at which its weights were taken. Shown are the
players who sit in the slots after the last update, strangers, and the present team.
"""

from __future__ import annotations

import re
from typing import Any

from jmarl.columns import INTERVAL
from jmarl.report.load import RecordedRun
from jmarl.report.summary import curve, points

COLUMN = re.compile(r"league/((?:slot|stranger)_\d+)/(update|winrate|recent_winrate|newest_winrate)")
ELO = "league/elo"
Player = float | str  # the update at which weights were taken, or stranger_N


def league(run: RecordedRun) -> dict[str, Any]:
    """Return what the page shows of the league of a run, as JSON values.

    `updates`: of the players in the slots, the oldest first. `strangers`: their names, behind those. `rates`: how often the
    player of a row wins against that of a column, null where they never met; a row for each of them, and one for the present
    team. `curves`: of each, how often the team wins against it; null if it never met it. `elo`: the curve of the team's Elo;
    null in games that are not zero-sum.
    """
    names = run.settings.get("strangers") or ()
    strangers: dict[str, Player] = {f"stranger_{i}": f"stranger_{i}" for i in range(len(names))}
    players, updates = strangers, list[float]()  # column -> player of it
    rates: dict[tuple[Player, Player], float] = {}
    lines: dict[Player, dict[float, float]] = {}
    present: dict[Player, float] = {}
    for row in run.rows:
        values = opponents_of(row)
        if "update" in values:
            updates = sorted(values["update"].values())
            players, newest = values["update"] | strangers, updates[-1]
            met = {players[name]: rate for name, rate in values.get("newest_winrate", {}).items() if name in players}
            rates |= {(newest, player): rate for player, rate in met.items()}
            rates |= {(player, newest): 1 - rate for player, rate in met.items()}
        for name in players.keys() & values.get("winrate", {}).keys():
            lines.setdefault(players[name], {})[row["step"]] = values["winrate"][name]
        present = {players[name]: rate for name, rate in values.get("recent_winrate", {}).items() if name in players}
    shown, elo = [*updates, *strangers.values()], points(run, ELO)
    return {
        "updates": updates,
        "strangers": [name if "//" in name else name.rpartition(":")[2] for name in names],
        "rates": [[rates.get((a, b)) for b in shown] for a in shown] + [[present.get(b) for b in shown]],
        "curves": [curve([lines[player]], [{}]) if player in lines else None for player in shown],
        "elo": curve([elo], [points(run, ELO + INTERVAL)]) if elo else None,
    }


def opponents_of(row: dict[str, float]) -> dict[str, dict[str, float]]:
    """Return the values of opponents in a row: what they are -> slot_N or stranger_N -> value."""
    values: dict[str, dict[str, float]] = {}
    for name, value in row.items():
        if match := COLUMN.fullmatch(name):
            values.setdefault(match[2], {})[match[1]] = value
    return values
