"""Learning from preferences: given pairs, rounds in which the team samples pairs, comparators, and reward models.

The room imports `files` and earlier ones; `fit`, which trains reward models, is given to it. Open `pairs.py` first, then
`encoding.py` (token ids, batches, scores), `data_source.py` (given data), `pair_rounds.py`, `comparators.py` and
`reward_model.py`.
"""
