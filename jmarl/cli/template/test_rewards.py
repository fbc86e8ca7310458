"""Tests of the reward: python -m pytest. Cheap answers that earn much are what a team learns first: try some here."""

import json
from pathlib import Path

from rewards import brevity, coverage, score

ROWS = [json.loads(line) for line in (Path(__file__).parent / "prompts.jsonl").read_text(encoding="utf-8").splitlines()]


def test_a_short_title_and_a_text_with_all_words_earn_1():
    assert score(["The Last Lamp"], ["In the storm the lamp showed the ship a way."], [["lamp", "storm", "ship"]]) == [1.0]


def test_a_better_answer_earns_more():
    assert 0 < brevity("word " * 20) < brevity("word " * 10) < brevity("word " * 6) == 1
    assert coverage("A ship.", ["lamp", "ship"]) == 0.5


def test_nothing_earns_nothing():
    assert score([""], [""], [["lamp"]]) == [0.0]


def test_every_row_has_a_prompt_with_its_words():
    assert len(ROWS) == 20 and all(word in row["prompt"] for row in ROWS for word in row["words"])
