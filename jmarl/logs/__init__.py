"""Logs of a run: rows of metrics, tables of completions, TensorBoard, a progress bar.

A logger neither owns the loop nor saves checkpoints. The room imports `evaluation` and what comes before it.
Open `step_log.py` first.
"""
