"""Environments of mathematical word problems, and how answers are compared.

The room imports `envs`. Open `reasoning.py` first.
"""
