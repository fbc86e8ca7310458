"""Advantages, returns and losses: pure functions of arrays, which know no model, tokenizer or configuration of a run.

The room imports only `jmarl.types`. Open `losses.py` first.
"""
