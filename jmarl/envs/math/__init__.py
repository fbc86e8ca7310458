"""Mathematical questions for a solver alone, a solver with a verifier, or a planner with a solver, and exact answer checking.

Imports only `jmarl.envs` (no jax). Open `reasoning.py` first; `problems.py` generates tasks and `answers.py` checks answers.
"""
