"""GSM8K and SVAMP as tasks: how rows are read, percentages, splits, rows without an answer."""

from __future__ import annotations

import re

import numpy as np
import pytest

from jmarl.envs.math.data import LoadedTasks, load_tasks, read_gsm8k, read_svamp
from jmarl.envs.math.reasoning import MathReasoning

RNG = np.random.default_rng(0)


def test_rows_become_tasks():
    assert read_gsm8k({"question": "How?\n", "answer": "5 #### is\n#### -1,234,567"}) == ("How?", "-1234567")
    assert read_svamp({"Body": "If 3 go", "Question": "how many stay?", "Answer": 17.0}) == ("If 3 go, how many stay?", "17")
    assert read_svamp({"Body": "3 go.", "Question": "How many?", "Answer": 2.5}) == ("3 go. How many?", "5/2")


def test_the_unit_is_percent_if_the_last_sentence_asks_for_a_percentage(data_dir):
    tasks = load_tasks("gsm8k", data_dir / "gsm8k/main/train.jsonl.gz")
    percent = [task for task in tasks if task["unit"] == "%"]
    assert 50 < len(percent) < 80 and all("percent" in task["question"].lower() for task in percent)
    assert not any(
        re.search(r"how (much|many)[^,]*\?$", task["question"], re.I) and "percentage" not in task["question"]
        for task in percent
    )


@pytest.mark.parametrize(("name", "file"), [("gsm8k", "gsm8k/main/test.jsonl.gz"), ("svamp", "svamp/train.jsonl.gz")])
def test_data_sets_are_split_by_their_questions(data_dir, name, file):
    env = MathReasoning(data=name, data_path=data_dir / file)
    train, held_out = env.tasks("train", 10**6), env.tasks("eval", 10**6)
    questions = {task["question"] for task in load_tasks(name, data_dir / file)}
    assert len(train) + len(held_out) == len(questions) and 0.12 < len(held_out) / len(questions) < 0.28
    assert {task["question"] for task in train} | {task["question"] for task in held_out} == questions
    assert env.tasks("train", 9, seed=1) == env.tasks("train", 9, seed=1) != env.tasks("train", 9, seed=2)
    for task in train[:50]:
        state, _ = env.reset(task, RNG)
        assert env.step(state, [f"It is {task['answer']}."], RNG).reward == 1.0
    with pytest.raises(ValueError, match="train or eval"):
        env.tasks("test")


def test_a_row_without_a_number_is_refused_by_its_number(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"question": "How many?", "answer": "#### 3"}\n{"question": "Who?", "answer": "#### Ann"}\n')
    with pytest.raises(ValueError, match="row 1 of .*rows.jsonl: answer='Ann' cannot be read"):
        load_tasks("gsm8k", file)


def test_equal_tasks_are_used_once():
    task = {"id": "t", "question": "2 + 2?", "answer": "4"}
    assert LoadedTasks([task, task]).describe() in ({"rows": {"train": 1, "eval": 0}}, {"rows": {"train": 0, "eval": 1}})
