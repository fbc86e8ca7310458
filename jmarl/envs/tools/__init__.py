"""Environments in which agents call tools or functions.

The room imports `envs` and `sandbox`. Open `use.py` first.
"""
