"""Small cooperative games that need no data: grid planning, Sudoku, and building with blocks (StrBuild, HouseBuild).

Imports only `jmarl.envs` (no jax). Open `grid.py` first; `building.py` has what the two building games share, `textarena.py`
plays the games of another package.
"""
