"""The table of algorithms, and how a row becomes the static argument of jitted programs.

The room imports `rl` and `config`. Open `table.py` first.
"""

from jmarl.algorithms.resolve import Algorithm, check_row, on_platform, resolve, with_fastest_updates
from jmarl.algorithms.table import ALGORITHMS, DEFAULTS, AlgorithmRow, find_row, row_of_loss

__all__ = [
    "ALGORITHMS",
    "DEFAULTS",
    "Algorithm",
    "AlgorithmRow",
    "check_row",
    "find_row",
    "on_platform",
    "resolve",
    "row_of_loss",
    "with_fastest_updates",
]
