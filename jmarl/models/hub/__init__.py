"""Load and save models: Hugging Face directories, GGUF files, PEFT adapters, and their tokenizers.

Host code without jax. The room imports `config` and `models.config`. Open `agents.py` first.
"""
