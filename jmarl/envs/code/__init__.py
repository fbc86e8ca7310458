"""Environments in which agents write Python programs, scored by running tests in the sandbox.

The room imports `envs` and `sandbox`. Open `generation.py` first: the other environments (completion, execution) are
variants of it.
"""
