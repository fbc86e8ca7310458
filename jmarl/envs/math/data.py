"""GSM8K (arXiv 2110.14168) and SVAMP (arXiv 2103.07191) as tasks of `math_reasoning`, from the hub or a local file.

GSM8K's answer is what stands after `####`, without thousands commas; the worked solution before it is not used. SVAMP's
question is its body and its question. Where the question at the end asks for a percentage, the task's unit is "%", so that 25
and 25% are the same answer. `Rows` splits tasks by a hash of their question into train and eval; GSM8K's own test split is
another file: `load_tasks("gsm8k", split="test")`.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

from jmarl.envs.data import SPLITS, check_split, load_rows, split_of
from jmarl.envs.math.answers import read_gold

_PERCENTAGE = re.compile(r"\b(?:what|which)\b[a-z' ]{0,40}\bpercent(?:age)?\b|\bas a percent(?:age)?\b", re.I)


class Source(NamedTuple):
    hub: str
    config: str | None
    fields: tuple[str, ...]
    read: Callable[[dict], tuple[str, str]]  # question and answer


def of_gsm8k(row: dict) -> tuple[str, str]:
    return row["question"].strip(), row["answer"].rpartition("####")[2].strip().replace(",", "")


def of_svamp(row: dict) -> tuple[str, str]:
    body = row["Body"].strip()
    return f"{body}{'' if body[-1:] in '.,!?' else ','} {row['Question'].strip()}", str(Fraction(str(row["Answer"])))


SOURCES = {
    "gsm8k": Source("openai/gsm8k", "main", ("question", "answer"), of_gsm8k),
    "svamp": Source("ChilleD/SVAMP", None, ("Body", "Question", "Answer"), of_svamp),
}


def load_tasks(name: str, path: str | Path | None = None, split: str = "train", limit: int | None = None) -> list[dict]:
    """name: gsm8k or svamp; path: a JSON Lines file (also .gz) in place of the hub; split: of the hub's."""
    if name not in SOURCES:
        raise ValueError(f"unknown data set {name!r}: choose {', '.join(SOURCES)}")
    source, tasks = SOURCES[name], []
    for number, row in enumerate(
        load_rows(source.hub, source.fields, config=source.config, split=split, path=path, limit=limit)
    ):
        question, answer = source.read(row)
        last = re.split(r"(?<=[.!?])\s+", question)[-1]
        unit = "%" if _PERCENTAGE.search(last) else ""
        try:
            read_gold(answer, "number", unit)
        except ValueError as error:
            raise ValueError(f"row {number} of {path or source.hub}: {error}") from None
        tasks.append({"id": f"{name}/{question}", "question": question, "answer": answer, "kind": "number", "unit": unit})
    return tasks


class Rows:
    """Tasks that are there already, split by what they are. Each question counts once."""

    def __init__(self, tasks: Sequence[dict]):
        self.of_split: dict[str, list[dict]] = {split: [] for split in SPLITS}
        for task in {task["id"]: task for task in tasks}.values():
            self.of_split[split_of(task["id"])].append(task)

    def tasks(self, split: str = "train", count: int = 100, seed: int = 0) -> list[dict]:
        check_split(split)
        of = self.of_split[split]
        return random.Random(f"{seed} {split}").sample(of, min(count, len(of)))

    def describe(self) -> dict:
        return {"rows": {split: len(tasks) for split, tasks in self.of_split.items()}}
