"""Environments: what a team is asked, and what its answers earn. Each in a file of its own, host side, without jax."""
