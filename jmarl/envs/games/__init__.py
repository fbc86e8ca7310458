"""Small cooperative games: grids, Sudoku, building with blocks.

The room imports `envs`. Open `grid.py` first.
"""
