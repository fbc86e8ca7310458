"""Story: agent 0 (`setup`) writes a sentence that sets up a story, agent 1 (`story`) tells it; one turn, one joint reward.

Reward, from 0 to 1, in characters (`jmarl.envs.rewards.story_length_ratio`): 1 where length 2 / length 1 is in [2, 3], else e
to the minus distance from that range; 0 where text 1 is empty. The published one is this times 100:
`LockStep(env, processor=RewardProcessors.scale(100))`. `info`: `length_ratio` (NaN where text 1 is empty).

The prompts do not name the ratio. Baseline, `single=True`: one agent writes both texts with `[PARAGRAPH_SPLIT]` between them,
read as in `writing`; without a separator the reward is 0.

Data: 32 topics to train on and 16 to evaluate on, those of the experiment `story_length`. Left out: whether there is a story.
"""

from __future__ import annotations

import math

import numpy as np

from jmarl.envs.data import check_split
from jmarl.envs.rewards import story_length_ratio
from jmarl.envs.writing.writing import SEPARATOR, TwoTexts

TOPICS = """a city in the clouds|a new holiday|a bedtime for a dragon|a teleporter that went wrong|a joke about dinosaurs
a world without electricity|a hero with an odd power|the night the moon spoke|a new type of fruit|a playground on Mars
a lighthouse keeper|a lost umbrella|the last library|a robot that dreams|a village under the sea|a clock that runs backwards
a talking river|the baker's secret|a letter from the future|a cat who paints|a storm in a bottle|an honest thief
a garden on the roof|the longest train ride|a map with no names|a violin without strings|a door in the forest
a snowman in summer|the smallest giant|a market at midnight|a ship that flies|a school for shadows""".replace("\n", "|").split(
    "|"
)
HELD_OUT = """a bridge made of glass|a fox who tells lies|the island that moves|a king with no crown|a mirror that listens
a desert full of flowers|the quiet volcano|a train to the stars|a dog who reads|a song nobody knows|a tower of books
the winter that stayed|a pocket full of rain|a whale in the sky|the candle maker|a town of twins""".replace("\n", "|").split(
    "|"
)


def setup(task: dict) -> str:
    """Agent 0's prompt."""
    return f"Write one short sentence that sets up a story about {task['prompt']}."


def story(task: dict) -> str:
    """Agent 1's prompt."""
    return f"Tell a story about {task['prompt']}."


class Story(TwoTexts):
    """A setup and a story on a topic; see the module."""

    reward_range = (0.0, 1.0)
    writers, field = ("setup", "story"), "prompt"

    def tasks(self, split: str = "train", count: int = 100, seed: int = 0) -> list[dict]:
        check_split(split)
        topics = TOPICS if split == "train" else HELD_OUT
        return [{"prompt": topics[i]} for i in np.random.default_rng(seed).permutation(len(topics))[:count]]

    def ask(self, source):
        task = {"prompt": source}
        return [setup(task), story(task), f"{setup(task)} Then write {SEPARATOR}, and behind it tell the story."]

    def judge(self, first, second):
        ratio = len(second) / len(first) if first else math.nan
        return story_length_ratio([first], [second])[0], {"length_ratio": ratio}
