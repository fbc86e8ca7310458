"""Preferences: pairs, their tokens and batches, comparators, and reward models.

The room imports `files` and earlier ones; `fit`, which trains reward models, is given to it. Open `pairs.py` first, then
`encoding.py` (token ids, batches, scores), `comparators.py` and `reward_model.py`. Runs on them are in `runs/kinds`.
"""

from jmarl.lazy import face

__getattr__ = face(
    __name__,
    {
        "pairs": "load_pairs load_trajectories save_pairs select split_by_prompt",
        "long_rows": "fit_rows prompts_of",
        "reward_model": "fit_reward_model load_reward_model save_reward_model",
    },
)
