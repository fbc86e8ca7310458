"""Benchmarks: time and memory of sampling, updates, turns, seeds, LoRA, refilled slots, rewards and the sandbox."""
