"""Small games that need no data. Of a team: grid planning, Sudoku, building with blocks (StrBuild, HouseBuild), signals. Of two
players with rewards of their own: tic-tac-toe, Kuhn poker, the iterated prisoner's dilemma, with players to measure against.

Imports only `jmarl.envs` (no jax). Open `grid.py` first; `building.py` has what the two building games share, `textarena.py`
plays the games of another package.
"""
