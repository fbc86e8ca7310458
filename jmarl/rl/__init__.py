"""Advantages, returns and losses: pure functions of arrays.

They see no model, tokenizer or configuration of a run. The room imports only `jmarl.types`. Open `losses.py` first.
"""
