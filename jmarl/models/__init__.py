"""Run models: the decoder, decoding with a KV cache, LoRA, value heads, the agent axis and its sharding.

Device code, except `hub`. The room imports `config` and `types`. Open `decoder.py` first.
"""
