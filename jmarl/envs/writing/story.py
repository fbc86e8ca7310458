"""Story (`story`): agent 0 (`setup`) writes a sentence that sets up a story, agent 1 (`story`) tells it; one turn.

Joint reward, from 0 to 1, in characters (`jmarl.envs.rewards.story_length_ratio`): 1 if length 2 / length 1 is in [2, 3], else
exp(-distance to that interval); 0 if text 1 is empty. The published reward is 100 times this: `LockStep(env,
processor=RewardProcessors.scale(100))`. Measure: `length_ratio` (length 2 / length 1, no part of the reward; NaN if text 1 is
empty).

The prompts do not mention the ratio. Baseline: `single=True`, see `two_texts.py`. Data: 32 topics to train on and 16 to
evaluate on, as in the experiment `story_length`. Left out, to be a quick demonstration: whether the text is a story.
"""

from __future__ import annotations

import math

import numpy as np

from jmarl.envs.data import check_split
from jmarl.envs.rewards import story_length_ratio
from jmarl.envs.writing.two_texts import SEPARATOR, Score, TwoTexts

TOPICS = [
    "a city in the clouds", "a new holiday", "a bedtime for a dragon", "a teleporter that went wrong",
    "a joke about dinosaurs", "a world without electricity", "a hero with an odd power", "the night the moon spoke",
    "a new type of fruit", "a playground on Mars", "a lighthouse keeper", "a lost umbrella", "the last library",
    "a robot that dreams", "a village under the sea", "a clock that runs backwards", "a talking river", "the baker's secret",
    "a letter from the future", "a cat who paints", "a storm in a bottle", "an honest thief", "a garden on the roof",
    "the longest train ride", "a map with no names", "a violin without strings", "a door in the forest",
    "a snowman in summer", "the smallest giant", "a market at midnight", "a ship that flies", "a school for shadows",
]  # fmt: skip
HELD_OUT = [
    "a bridge made of glass", "a fox who tells lies", "the island that moves", "a king with no crown",
    "a mirror that listens", "a desert full of flowers", "the quiet volcano", "a train to the stars", "a dog who reads",
    "a song nobody knows", "a tower of books", "the winter that stayed", "a pocket full of rain", "a whale in the sky",
    "the candle maker", "a town of twins",
]  # fmt: skip


def setup_prompt(task: dict) -> str:
    """Return the prompt of agent 0."""
    return f"Write one short sentence that sets up a story about {task['prompt']}."


def story_prompt(task: dict) -> str:
    """Return the prompt of agent 1."""
    return f"Tell a story about {task['prompt']}."


class Story(TwoTexts):
    """A setup and a story on a topic; see the module."""

    reward_range = (0.0, 1.0)
    writers, field = ("setup", "story"), "prompt"

    def tasks(self, split: str = "train", count: int = 100, seed: int = 0) -> list[dict]:
        check_split(split)
        topics = TOPICS if split == "train" else HELD_OUT
        return [{"prompt": topics[i]} for i in np.random.default_rng(seed).permutation(len(topics))[:count]]

    def prompts(self, source: str) -> tuple[str, str, str]:
        task = {"prompt": source}
        return (
            setup_prompt(task),
            story_prompt(task),
            f"{setup_prompt(task)} Then write {SEPARATOR}, and behind it tell the story.",
        )

    def score(self, first: str, second: str) -> Score:
        ratio = len(second) / len(first) if first else math.nan
        return Score(story_length_ratio([first], [second])[0], {}, {"length_ratio": ratio})
