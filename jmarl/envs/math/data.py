"""Load GSM8K (arXiv 2110.14168) and SVAMP (arXiv 2103.07191) as tasks, from the hub or from a local file.

The answer of GSM8K is the text after `####`, without thousands commas; the worked solution before it is not used. The question
of SVAMP is its body followed by its question. If the last sentence of a question asks for a percentage, the task's unit is "%",
so that 25 and 25% are the same answer. `LoadedTasks` splits tasks into train and eval by a hash of their question; the test
split of GSM8K is a file of its own: `load_tasks("gsm8k", split="test")`.
"""

import random
import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

from jmarl.envs.data import SPLITS, check_split, load_rows, split_of
from jmarl.envs.math.answers import read_gold

_ASKS_FOR_PERCENTAGE = re.compile(r"\b(?:what|which)\b[a-z' ]{0,40}\bpercent(?:age)?\b|\bas a percent(?:age)?\b", re.I)


class MathSource(NamedTuple):
    """A data set of the hub."""

    hub: str
    config: str | None
    fields: tuple[str, ...]
    parse: Callable[[dict], tuple[str, str]]  # from a row to its question and answer


def read_gsm8k(row: dict) -> tuple[str, str]:
    """Return the question and the answer of a row of GSM8K."""
    return row["question"].strip(), row["answer"].rpartition("####")[2].strip().replace(",", "")


def read_svamp(row: dict) -> tuple[str, str]:
    """Return the question and the answer of a row of SVAMP."""
    body = row["Body"].strip()
    return f"{body}{'' if body[-1:] in '.,!?' else ','} {row['Question'].strip()}", str(Fraction(str(row["Answer"])))


SOURCES = {
    "gsm8k": MathSource("openai/gsm8k", "main", ("question", "answer"), read_gsm8k),
    "svamp": MathSource("ChilleD/SVAMP", None, ("Body", "Question", "Answer"), read_svamp),
}


def load_tasks(name: str, path: str | Path | None = None, split: str = "train", limit: int | None = None) -> list[dict]:
    """Load the tasks of a data set.

    Args:
        name: gsm8k or svamp.
        path: a JSON Lines file (also .gz) that is read instead of the hub.
        split: split of the hub's data set.
        limit: number of rows to read; None: all.

    Raises:
        ValueError: the name is unknown, or a row has no answer that can be read.
    """
    if name not in SOURCES:
        raise ValueError(f"unknown data set {name!r}: choose {', '.join(SOURCES)}")
    source, tasks = SOURCES[name], []
    rows = load_rows(source.hub, source.fields, config=source.config, split=split, path=path, limit=limit)
    for number, row in enumerate(rows):
        question, answer = source.parse(row)
        last_sentence = re.split(r"(?<=[.!?])\s+", question)[-1]
        unit = "%" if _ASKS_FOR_PERCENTAGE.search(last_sentence) else ""
        try:
            read_gold(answer, "number", unit)
        except ValueError as error:
            raise ValueError(f"row {number} of {path or source.hub}: {error}") from None
        tasks.append({"id": f"{name}/{question}", "question": question, "answer": answer, "kind": "number", "unit": unit})
    return tasks


class LoadedTasks:
    """Tasks of a data set, split by a hash of their id. A task that occurs several times is used once."""

    def __init__(self, tasks: Sequence[dict]):
        self.by_split: dict[str, list[dict]] = {split: [] for split in SPLITS}
        for task in {task["id"]: task for task in tasks}.values():
            self.by_split[split_of(task["id"])].append(task)

    def tasks(self, split: str = "train", count: int = 100, seed: int = 0) -> list[dict]:
        """Draw at most `count` tasks without replacement, the same for the same seed."""
        check_split(split)
        tasks = self.by_split[split]
        return random.Random(f"{seed} {split}").sample(tasks, min(count, len(tasks)))

    def describe(self) -> dict:
        """Return what must be unchanged when a run is resumed."""
        return {"rows": {split: len(tasks) for split, tasks in self.by_split.items()}}
