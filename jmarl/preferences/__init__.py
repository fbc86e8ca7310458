"""Preferences: pairs, their tokens and batches, comparators, and reward models.

The room imports `files` and earlier ones; `fit`, which trains reward models, is given to it. Open `pairs.py` first, then
`encoding.py` (token ids, batches, scores), `comparators.py` and `reward_model.py`. Runs on them are in `runs/kinds`.
"""
