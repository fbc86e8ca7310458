"""Environments in which agents write texts together.

The room imports `envs`. Open `writing.py` first.
"""
