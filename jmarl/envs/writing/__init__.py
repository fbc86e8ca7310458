"""Environments in which two agents, or one as a baseline, write two texts that belong together: TLDR, arXiv, and a story.

Imports only `jmarl.envs` (no jax). Open `two_texts.py` first; `gated_reward.py` has the reward of TLDR and arXiv.
"""
