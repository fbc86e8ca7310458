"""Environments in which agents write programs, which the sandbox runs.

The room imports `envs` and `sandbox`. Open `generation.py` first.
"""
