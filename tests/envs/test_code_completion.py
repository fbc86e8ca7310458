"""Code completion: partitions of methods, assembly of the class, hand-computed rewards, reference solutions."""

from __future__ import annotations

import gzip
import json
import sys

import numpy as np
import pytest

from jmarl.envs.code.classes import find_functions, merge
from jmarl.envs.code.completion import CodeCompletion, partition_methods
from jmarl.envs.code.data import load_items
from jmarl.sandbox import Limits

HEAD = "class Counter:\n    def __init__(self, start):\n        self.n = start"
ITEM = {
    "task_id": "c/0",
    "prompt": f"{HEAD}\n\n    def up(self, by): ...\n\n    def now(self): ...",
    "methods": [{"name": "up", "only_self": False}, {"name": "now", "only_self": True}],
    "constructor": HEAD,
    "imports": "import math",
    "test": "import unittest\n\nclass TestUp(unittest.TestCase):\n    def test_up(self):\n        c = Counter(1)\n"
    "        c.up(2)\n        self.assertEqual(c.n, 3)\n\nclass TestNow(unittest.TestCase):\n    def test_now(self):\n"
    "        self.assertEqual(Counter(4).now(), 4)\n",
}
NOW = "def now(self):\n    return self.n"
UP = "def up(self, by):\n    self.n += by"

FULL = (2.0, 4.0, 0.0)
# agent 0, agent 1, snippets (2), tests (4), overlap (-1)
CASES = {
    "right": (NOW, UP, *FULL),
    "in fences": (f"So:\n```python\n{NOW}\n```", f"```python\n{UP}\n```\nDone.", *FULL),
    "in the class": ("```python\nclass Counter:\n    def now(self):\n        return self.n\n```",
     "class Counter:\n    def up(self, by):\n        self.n += by", *FULL),
    "indented": ("    def now(self):\n        return self.n", "Here:\n    def up(self, by):\n        self.n += by", *FULL),
    "one is wrong": ("def now(self):\n    return 7", UP, 2.0, 2.0, 0.0),
    "one is missing": (NOW, "I do not know.", 1.0, 2.0, 0.0),
    "one does nothing": (NOW, "def up(self, by):\n    '''Counts.'''\n    pass", 1.0, 2.0, 0.0),
    "both wrote both": (f"{NOW}\n\n{UP}", f"{NOW}\n\n{UP}", 2.0, 4.0, -1.0),
    "one wrote both": (f"{NOW}\n\n{UP}", "", *FULL),
    "one twice": (NOW, f"{NOW}\n\n{UP}", 2.0, 4.0, -0.5),
    "nothing": ("", "", 0.0, 0.0, 0.0),
    "a syntax error beside": (NOW, f"def other(self:\n    return\n\n{UP}", *FULL),
    "a syntax error inside": (NOW, "def up(self, by):\n    self.n +=", 1.0, 2.0, 0.0),
    "no program": (NOW, "def up(self, by):\n    nonlocal x\n    self.n += by", 0.0, 0.0, 0.0),
    "a number too long to write": (NOW, f"def up(self, by):\n    self.n += 0x{'f' * 4000}", 0.0, 0.0, 0.0),
    "a helper of its own": (NOW, "def up(self, by):\n    self.n = self._sum(by)\ndef _sum(self, by):\n    return self.n + by",
     *FULL),
    "imports of its own": (NOW, "import operator\ndef up(self, by):\n    self.n = operator.add(self.n, by)", *FULL),
    "an exit": (NOW, "def up(self, by):\n    import os\n    os._exit(0)", 2.0, 0.0, 0.0),
    "a static method": (NOW, "def up(self, by):\n    self.n = self._sum(self.n, by)\ndef _sum(a, b):\n    return a + b", *FULL),
    "a loop": (NOW, "def up(self, by):\n    while True: pass", 2.0, 0.0, 0.0),
    "equal to everything": ("def now(self):\n    class E:\n        def __eq__(s, o): return True\n    return E()", UP, 2.0, 2.0,
     0.0),
}  # fmt: skip


@pytest.fixture(scope="module")
def env():
    return CodeCompletion(limits=Limits(wall_s=1.5, cpu_s=2))


def play_turn(env, *texts, item=ITEM):
    states, _ = env.reset([item], np.random.default_rng(0))
    return env.step(states, [[text] for text in texts], np.random.default_rng(0))


@pytest.fixture(scope="module")
def played(env):
    """The answer to the joint actions of all cases."""
    states, _ = env.reset([ITEM] * len(CASES), np.random.default_rng(0))
    texts = [[case[agent] for case in CASES.values()] for agent in range(2)]
    return env.step(states, texts, np.random.default_rng(0))


@pytest.mark.parametrize("name", CASES)
def test_rewards_equal_those_computed_by_hand(env, played, name):
    i, expected = list(CASES).index(name), CASES[name][2:]
    score = played.after[i].score
    assert list(score.parts.values()) == pytest.approx(expected), score
    assert played.result.total[i] == pytest.approx(sum(expected))
    assert env.reward_range[0] <= sum(expected) <= env.reward_range[1] == 6.0


def test_methods_are_divided_among_agents():
    methods = [{"name": name, "only_self": name in "bd"} for name in "abcde"]
    assert partition_methods(methods, "arguments", 2) == [["b", "d"], ["a", "c", "e"]]
    assert partition_methods(methods, "arguments", 3) == [["b", "d"], ["a", "e"], ["c"]]
    assert partition_methods(methods, "alternate", 2) == [["a", "c", "e"], ["b", "d"]]
    assert partition_methods(methods, "self_select", 2) == [list("abcde")] * 2
    assert partition_methods(methods, "arguments", 1) == [list("abcde")]


def test_prompts_name_the_methods_of_each_agent():
    _, prompts = CodeCompletion().reset([ITEM], np.random.default_rng(0))
    assert "Write the methods now." in prompts[0][0] and "Write the methods up." in prompts[1][0]
    assert all(ITEM["prompt"] in text[0] and "assertEqual" not in text[0] for text in prompts)
    _, prompts = CodeCompletion(partition="self_select").reset([ITEM], np.random.default_rng(0))
    assert "that you choose" in prompts[0][0]
    _, prompts = CodeCompletion(1).reset([ITEM], np.random.default_rng(0))
    assert "up, now" in prompts[0][0] and "Other" not in prompts[0][0]


def test_the_choice_among_snippets_is_reproducible_and_favors_no_agent():
    def first_is_chosen(i):
        snippets = [f"def now(self):\n    return '{agent} {i}'" for agent in ("first", "second")]
        return "first" in merge(snippets, ITEM).program

    choices = [first_is_chosen(i) for i in range(40)]
    assert choices == [first_is_chosen(i) for i in range(40)] and 5 < sum(choices) < 35


def test_feedback_shows_tests_passed_and_no_test(env):
    answer = play_turn(env, NOW, "def up(self, by):\n    self.n -= by")
    text = env.observe(answer.after)[1][1][0]
    assert "1 of 2 tests pass" in text and "self.n -= by" in text and "assertEqual" not in text
    levels = CodeCompletion(feedback="level_passed")
    text = levels.observe(play_turn(levels, NOW, "").after)[1][0][0]
    assert "all methods: not passed\nsyntax: passed\ntests: not passed" in text


def test_bad_items_and_options_are_refused(env):
    with pytest.raises(ValueError, match="c/0.*constructor"):
        env.reset([ITEM | {"constructor": ""}], np.random.default_rng(0))
    with pytest.raises(ValueError, match="arguments, alternate, self_select"):
        CodeCompletion(partition="odd")
    with pytest.raises(TypeError, match="shown_tests"):
        CodeCompletion(shown_tests=2)


def test_tasks_are_valid_items_and_splits_are_disjoint(data_dir, own_cache):
    env = CodeCompletion(data_path=data_dir / "classeval/test.jsonl.gz")
    tasks = {split: env.tasks(split, 200, seed=1) for split in ("train", "eval")}
    assert {split: len({item["task_id"] for item in items}) for split, items in tasks.items()} == {"train": 59, "eval": 15}
    assert not {task["task_id"] for task in tasks["train"]} & {task["task_id"] for task in tasks["eval"]}
    assert env.tasks("train", 3, seed=1) == env.tasks("train", 3, seed=1) != env.tasks("train", 3, seed=2)
    states, _ = env.reset([*tasks["train"], *tasks["eval"]], np.random.default_rng(0))
    assert len(states) == 74
    with pytest.raises(ValueError, match="split='test'"):
        env.tasks("test")


def test_functions_that_parse_alone_are_used_if_the_whole_does_not_parse():
    functions, imports = find_functions("import re\ndef f(self):\n    return (\n\ndef g(self):\n    return re\n")
    assert [f.name for f in functions] == ["g"] and imports == []


UNSOLVABLE = {
    "ClassEval_17",  # expects a date to lie in the future
    "ClassEval_25",  # a method is not among those of the data
    "ClassEval_48",  # expects a host name
    "ClassEval_52",  # downloads
    "ClassEval_69",  # its single methods are not those of its whole solution, and older than the library
}


@pytest.mark.slow
def test_reference_solutions_earn_the_maximum(data_dir, own_cache):
    """ClassEval's own methods, divided among two agents, earn 6 on all classes but those named above."""
    path = data_dir / "classeval/test.jsonl.gz"
    items = load_items("classeval", path=path)
    rows = [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]
    env = CodeCompletion(limits=Limits(wall_s=20, cpu_s=15, memory_mb=2048))
    states, prompts = env.reset(items, np.random.default_rng(0))
    texts = [[], []]
    for item, row in zip(items, rows, strict=True):
        solutions = {method["method_name"]: method["solution_code"] for method in row["methods_info"]}
        for agent, names in enumerate(partition_methods(item["methods"], "arguments", 2)):
            texts[agent].append("```python\n" + "\n\n".join(solutions[name] for name in names) + "\n```")
    total = env.step(states, texts, np.random.default_rng(0)).result.total
    failed = {item["task_id"]: float(x) for item, x in zip(items, total, strict=True) if x < 6}
    assert set(failed) <= UNSOLVABLE | ({"ClassEval_31"} if sys.version_info >= (3, 12) else set()), failed  # rounding of sums
    for item, row, *own_prompts in zip(items, rows, *prompts, strict=True):
        tests = [method["test_code"] for method in row["methods_info"]]
        assert not any(test in prompt for test in tests for prompt in own_prompts), item["task_id"]
