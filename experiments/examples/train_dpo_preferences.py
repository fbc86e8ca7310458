"""DPO on preference pairs: of two answers to a math question the right one is preferred.

The pairs are made from generated problems: the right answer, and the right answer to the problem before. Some are held out.
Command: python -m experiments.examples.train_dpo_preferences [--quick]
"""

from __future__ import annotations

from experiments.examples.start import config, policy, quick_flag, train_and_show
from jmarl.mrlm.algorithms.dpo import DPOTrainer
from jmarl.mrlm.config import DPOConfig
from jmarl.mrlm.environments.math import MathProblemGenerator


def preference_pairs(split: str, count: int) -> list[dict]:
    """Return rows with prompt (chat messages in real use, here a text), chosen and rejected."""
    tasks = MathProblemGenerator(difficulty_range=(1, 1)).tasks(split, count + 1)
    pairs = [(task["question"], task["answer"], other["answer"]) for task, other in zip(tasks[1:], tasks, strict=False)]
    answer = "The answer is {}.".format
    return [{"prompt": q, "chosen": answer(a), "rejected": answer(b)} for q, a, b in pairs if a != b]


def main(quick: bool) -> None:
    pairs, held_out = preference_pairs("train", 16 if quick else 256), preference_pairs("eval", 8 if quick else 64)
    settings = config(quick, "dpo", DPOConfig(beta=0.1, loss_type="sigmoid"), updates=64, batch_size=8)
    train_and_show("preferences", DPOTrainer(policy(quick), pairs, settings, eval_dataset=held_out))


if __name__ == "__main__":
    main(quick_flag(__doc__))
