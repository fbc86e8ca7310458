"""Generate mathematical problems from templates: any number of them, with exact answers and nothing to download.

Topics: `arithmetic`, `algebra` (linear and quadratic equations, inequalities, systems), `word` (25 stories) and `multi_step`
(chains of operations, numbers thought of, sequences, composed functions, percentages, divisors). Difficulty 1 takes one or two
steps; 2 and 3 take more, with larger numbers, fractions and roots.

Tasks are drawn from a seed. The split of a task is a hash of its question, or of the template and the numbers of a story (other
names make no new problem). So no task of `eval` is ever in `train`, whatever the seeds and difficulties. Fields of a task:

    question, answer, kind, unit    see `answers.py`; the answer is in its standard form
    lowest_terms                    True: an answer that is a fraction must be in lowest terms
    id, topic, difficulty
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from jmarl.envs.data import check_split, split_of
from jmarl.envs.math.algebra import ALGEBRA, arithmetic
from jmarl.envs.math.multi_step import MULTI_STEP
from jmarl.envs.math.templates import Template
from jmarl.envs.math.word_problems import WORD_PROBLEMS

MAX_FAILED_DRAWS = 5000  # in a row, after which the topics are taken to have no more tasks

TOPICS: dict[str, dict[str, Template]] = {  # the name of a template is a part of the ids of its tasks
    "arithmetic": {"arithmetic": arithmetic},
    "algebra": ALGEBRA,
    "word": WORD_PROBLEMS,
    "multi_step": MULTI_STEP,
}


class MathProblemGenerator:
    """Generates tasks.

    Args:
        difficulty_range: lowest and highest difficulty, both included, from 1 to 3.
        topics: topics of `TOPICS`, all equally likely.
    """

    def __init__(self, difficulty_range: tuple[int, int] = (1, 3), topics: Sequence[str] = tuple(TOPICS)):
        low, high = difficulty_range
        if not 1 <= low <= high <= 3:
            raise ValueError(f"difficulty_range={difficulty_range}: give (lowest, highest), between 1 and 3")
        if not topics or set(topics) - TOPICS.keys():
            raise ValueError(f"topics={tuple(topics)}: choose {', '.join(TOPICS)}")
        self.difficulty_range, self.topics = (low, high), tuple(topics)

    def tasks(self, split: str = "train", count: int = 100, seed: int = 0) -> list[dict]:
        """Return `count` distinct tasks, the same for the same seed; fewer if the topics do not have as many."""
        check_split(split)
        rng = random.Random(f"{seed} {split} {self.difficulty_range} {self.topics}")
        tasks: dict[str, dict] = {}
        failed_draws = 0
        while len(tasks) < count and failed_draws < MAX_FAILED_DRAWS:
            task = self._draw(rng)
            failed_draws += 1
            if task and split_of(task["id"]) == split and task["id"] not in tasks:
                tasks[task["id"]] = task
                failed_draws = 0
        return list(tasks.values())

    def _draw(self, rng: random.Random) -> dict | None:
        """Draw a task of either split; None if the template's numbers do not make a good problem."""
        level, topic = rng.randint(*self.difficulty_range), rng.choice(self.topics)
        name = rng.choice(sorted(TOPICS[topic]))
        problem = TOPICS[topic][name](level, rng)
        if problem is None:
            return None
        return {
            "id": f"{name}/{problem.key or problem.question}",
            "question": problem.question,
            "answer": problem.answer,
            "kind": problem.kind,
            "unit": problem.unit,
            "lowest_terms": True,
            "topic": topic,
            "difficulty": level,
        }

    def describe(self) -> dict:
        """Return what must be unchanged when a run is resumed."""
        return {"difficulty_range": list(self.difficulty_range), "topics": list(self.topics)}
