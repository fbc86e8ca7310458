"""Fingerprints of data and rewards: equal in every process, and different if data or reward differ."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import json
import linecache
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from jmarl.config import TrainConfig
from jmarl.envs import make
from jmarl.envs.pool import Pool
from jmarl.envs.reward_environment import RewardEnvironment, default_formatter
from jmarl.envs.rewards import RewardProcessors, make_reward
from jmarl.envs.vector import LockStep
from jmarl.files.identity import fingerprint
from jmarl.runs.kinds.seeds import several
from jmarl.runs.prepare import prepare
from jmarl.runs.run import Task
from jmarl.team import Team

SCRIPT = """
import json
from jmarl.envs.reward_environment import RewardEnvironment, default_formatter
from jmarl.envs.rewards import RewardProcessors, make_reward
from jmarl.files.identity import fingerprint
from tests.files.test_fingerprint import ITEMS, by_length, Judge
reward = make_reward([by_length, Judge(by_length)], num_agents=2, processors=RewardProcessors.scale(2.0))
env = RewardEnvironment(reward, [default_formatter] * 2)
print(json.dumps([fingerprint.of_data(ITEMS), fingerprint.of_reward(env)]))
"""
ITEMS = [{"prompt": "a", "tags": {"x", "y", "z"}, "counts": {(0, 0): 1, 2: None}, "image": object(), "array": np.arange(3)}]
ITEMS[0] |= {"raw": [b"\x89", 3j]}


def helper(text):
    return len(text)


def by_length(a, b):
    return [helper(x) - helper(y) for x, y in zip(a, b, strict=True)]


def by_letters(a, b, letter="e"):
    return [x.count(letter) for x in a]


class Judge:
    def __init__(self, rule):
        self.rule, self.calls = rule, 0

    def __call__(self, a, b):
        self.calls += 1
        return self.rule(a, b)

    def judge(self, a, b):
        return self.rule(a, b)


@dataclasses.dataclass
class Target:
    """A reward with an option, which counts its calls."""

    style: str
    calls: int = 0

    def __call__(self, a, b):
        self.calls += 1
        return [len(x) if self.style == "long" else -len(x) for x in a]


def scaled_by(factor):
    calls = 0

    def reward(a, b):
        nonlocal calls
        calls += 1
        return [factor * len(x) for x in a]

    return reward


def reward_of(*functions, **options):
    """Return the fingerprint of a reward."""
    reward = make_reward(list(functions), num_agents=2, **options)
    return fingerprint.of_reward(RewardEnvironment(reward, [default_formatter] * 2))


@pytest.mark.long
def test_fingerprints_are_equal_in_every_process(capsys):
    """In this one, and in one that hashes texts to other numbers."""
    root = Path(__file__).resolve().parents[2]
    seed = str(1 + (os.environ.get("PYTHONHASHSEED") == "1"))
    env = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": str(root)}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=env, cwd=root, capture_output=True, text=True, check=True)
    exec(SCRIPT, {})
    assert capsys.readouterr().out == done.stdout and json.loads(done.stdout)[0]["items"] == 1


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (reward_of(by_length), reward_of(by_letters)),
        (reward_of(by_length, by_letters, weights=[1, 0]), reward_of(by_length, by_letters, weights=[0, 1])),
        (reward_of(scaled_by(2.0)), reward_of(scaled_by(3.0))),
        (reward_of(Target("long")), reward_of(Target("short"))),
        (reward_of(lambda a, b, size=1: size), reward_of(lambda a, b, size=2: size)),
        (reward_of(functools.partial(by_letters, letter="a")), reward_of(functools.partial(by_letters, letter="b"))),
        (reward_of(Judge(by_length)), reward_of(Judge(by_letters))),
        (reward_of(Judge(by_length).judge), reward_of(Judge(by_letters).judge)),
        (reward_of(Judge({"math": by_length}).judge), reward_of(Judge({"math": by_letters}).judge)),
        (reward_of(lambda a, b: 1.0), reward_of(lambda a, b: 2.0)),
        (
            reward_of(by_length, processors=RewardProcessors.scale(2.0)),
            reward_of(by_length, processors=RewardProcessors.scale(3.0)),
        ),
    ],
    ids=["function", "weights", "closure", "option", "default", "partial", "object", "method", "dict", "lambda", "processor"],
)
def test_a_changed_reward_is_named(one, other):
    assert fingerprint.difference("reward", one, one) == "" and fingerprint.difference("reward", one, other)


def test_functions_of_the_same_file_count():
    """`by_length` calls `helper` within a comprehension."""
    assert any(name.endswith("test_fingerprint.helper") for name in reward_of(by_length))


def test_using_a_reward_changes_nothing():
    judge, target, scaled = Judge(by_length), Target("long"), scaled_by(2.0)
    before = reward_of(judge, target, scaled)
    for reward in (judge, target, scaled):
        reward(["a"], ["b"])
    judge.pool = by_letters  # made when it was first used
    assert fingerprint.difference("reward", before, reward_of(judge, target, scaled)) == ""


MODULES = {
    "formats": "PREFIX = 'Describe '\nSTYLES = {'short': PREFIX + 'briefly '}\nSEEN = {}\n"
    "def formatter(item):\n    SEEN[item['prompt']] = 1\n    return STYLES['short'] + item['prompt']\n",
    "turns": "import formats\nfrom scores import overlap\nREPEAT = 2\n"
    "def transition(agent_completions, **_):\n"
    "    return [formats.formatter({'prompt': x}) * REPEAT for x in agent_completions]\n"
    "def reward(a, b):\n    return [overlap(x, y) for x, y in zip(a, b)]\n",
    "scores": "import functools\nLOW = 0.5\nHIGH = 2\nHIGH *= 3\n"
    "@functools.lru_cache\ndef share(x, y):\n    return HIGH * len(set(x) & set(y))\n"
    "half = functools.partial(pow, 2.0)\n"
    "def overlap(x, y):\n    return LOW + share(x, y) + half(1)\n",
}


@pytest.mark.parametrize(
    ("file", "old", "new", "named"),
    [
        ("formats", "Describe ", "Explain ", "PREFIX of formats_of_tests.formatter (changed)"),
        ("formats", "briefly", "at length", "STYLES of formats_of_tests.formatter (changed)"),
        ("formats", "+ item", "+ 'a ' + item", "formats_of_tests.formatter (changed)"),
        ("turns", "REPEAT = 2", "REPEAT = 3", "REPEAT of turns_of_tests.transition (changed)"),
        ("scores", "LOW = 0.5", "LOW = 0.1", "LOW of scores_of_tests.overlap (changed)"),
        ("scores", "len(set", "2 * len(set", "scores_of_tests.share (changed)"),
        ("scores", "HIGH *= 3", "HIGH *= 4", "HIGH of scores_of_tests.share (changed)"),
        ("scores", "HIGH = 2", "HIGH = 5", "HIGH of scores_of_tests.share (changed)"),
        ("scores", "pow, 2.0", "pow, 3.0", "half of scores_of_tests.overlap (changed)"),
        ("scores", "share(x, y) +", "2 * share(x, y) +", "scores_of_tests.overlap (changed)"),
    ],
)
def test_what_writes_prompts_and_rewards_is_named_over_all_files_of_the_user(tmp_path, monkeypatch, file, old, new, named):
    """A formatter, a transition, a reward and what they use of other modules. A cache (SEEN) that has grown is no change."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def written(changes):
        for name, text in changes.items():
            text = text.replace("formats", "formats_of_tests").replace("from scores", "from scores_of_tests")
            (tmp_path / f"{name}_of_tests.py").write_text(text, encoding="utf-8")
            sys.modules.pop(f"{name}_of_tests", None)
        linecache.clearcache()
        importlib.invalidate_caches()
        formats, turns = (importlib.import_module(f"{name}_of_tests") for name in ("formats", "turns"))
        env = RewardEnvironment(make_reward(turns.reward, num_agents=2), [formats.formatter] * 2, turns.transition)
        before = fingerprint.of_reward(env)
        formats.formatter({"prompt": "a"})
        assert fingerprint.of_reward(env) == before
        return before

    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    one, other = written(MODULES), written(MODULES | {file: MODULES[file].replace(old, new)})
    assert named in fingerprint.difference("reward", one, other).removeprefix("reward: ").split(", ")


def test_a_new_function_that_calls_the_old_one_is_a_change():
    """The old reward or formatter is then in both fingerprints."""

    def halved(a, b):
        return [x / 2 for x in by_length(a, b)]

    def polite(item):
        return "Please: " + default_formatter(item)

    def env(reward, formatter=default_formatter):
        return fingerprint.of_reward(RewardEnvironment(make_reward(reward, num_agents=2), [formatter] * 2))

    changes = [fingerprint.difference("reward", env(by_length), new) for new in (env(halved), env(by_length, polite))]
    assert "reward functions (changed)" in changes[0] and "formatters and transition (changed)" in changes[1]


def test_how_errors_of_rewards_are_handled_is_no_part_of_the_fingerprint():
    """An error of a reward advises `on_error`, so a resumed run may have another one."""
    assert reward_of(by_length) == reward_of(by_length, on_error="mask", timeout=3, max_error_share=1)


def test_wrappers_of_another_version_are_no_change():
    now = reward_of(by_length)
    wrapper = "jmarl.envs.reward_environment.bind_formatter.<locals>.prompt"
    before = {name: digest for name, digest in now.items() if not name.startswith("jmarl.envs.calls")}
    before |= {wrapper: "0", "jmarl.envs.rewards.bind_completions.<locals>.call": "1"}
    before |= {"jmarl.models.config.ModelConfig(row_parts=)": "1"}  # of a reward that holds a team
    assert wrapper in now and fingerprint.difference("reward", before, now) == ""
    assert "by_length (changed)" in fingerprint.difference("reward", before | {f"{__name__}.by_length": "2"}, now)


def test_data_differ_by_any_item_and_their_order():
    items = [{"prompt": "a"}, {"prompt": "b"}]
    assert fingerprint.of_data(items) == fingerprint.of_data([dict(item) for item in items])
    others = (items[::-1], [*items, {}], [{"prompt": "a"}, {"prompt": "c"}], [{"prompt": "a"}, {"prompt": "b", "answer": 1}])
    assert all(fingerprint.of_data(x) != fingerprint.of_data(items) for x in others)


class Indexed:
    """A data set of torch: a length and an index."""

    def __len__(self):
        return 3

    def __getitem__(self, i):
        return {"prompt": "abc"[i]}


@pytest.mark.filterwarnings("ignore:3 rows were read from a generator")
@pytest.mark.parametrize("kind", ["file", "generator", "indexed"])
def test_the_fingerprint_of_a_run_has_the_rows_whatever_holds_them(kind, tmp_path, tiny_config, tiny_tokenizer, random_agent):
    items = [{"prompt": text} for text in "abc"]
    file = tmp_path / "items.jsonl"
    file.write_text("".join(json.dumps(item) + "\n" for item in items), encoding="utf-8")
    settings = dict(compute_dtype="float32", remat="none", micro_batches=1, num_generations=2, max_new_tokens=4)
    cfg = TrainConfig.of(**settings, progress=False)

    def given():
        return {"file": str(file), "generator": (item for item in items), "indexed": Indexed()}[kind]

    def reward(texts):
        return [1.0] * len(texts)

    team = Team.of([random_agent(tiny_config(), tiny_tokenizer, 0)])
    expected = fingerprint.of_data(items)
    assert prepare(cfg, team, Task(reward, given()))[0].identity["data"] == expected
    assert prepare(cfg, team, Task(reward, given()), kind=several([0, 1]))[0].identity["data"] == expected


def test_where_calls_run_is_no_difference():
    """Runs of earlier versions, whose fingerprints had the class of the engine, resume too."""
    env, earlier = make("grid"), {"jmarl.envs.vector.InProcess": "a", "jmarl.envs.pool.Pool(timeout=)": "b"}
    local, pool = (fingerprint.of_reward(LockStep(engine)) for engine in (env, Pool(env)))
    assert local == pool and fingerprint.difference("reward", local | earlier, pool) == ""
    reward, in_pool = (make_reward(by_length, num_agents=2, timeout=1, pool=kind) for kind in (None, Pool))
    assert fingerprint.of_reward(reward) == fingerprint.of_reward(in_pool)
