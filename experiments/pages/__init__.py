"""Algorithms on one page each, on pure functions alone. Copy the page that is nearest to yours and change its lines.

magrpo: two agents and a group as baseline. critic: a critic of the team as baseline. turns: an environment with a tool over
several turns. pairs: preference pairs. adapters: roles that are LoRA adapters of one base. The first updates of each are those
of `jmarl.train` (tests/test_pages.py).
"""
