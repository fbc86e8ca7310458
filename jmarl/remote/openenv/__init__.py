"""Environments of OpenEnv's servers as environments of training, and a seat of an environment for OpenEnv's clients. No jax.

Imports `envs` and `remote.access`; needs the extra `serve`. Open `client.py` first.
"""
