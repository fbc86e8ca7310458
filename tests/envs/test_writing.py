"""The writing environments: the single writer, the story, tasks and prompts, hostile texts."""

from __future__ import annotations

import json
import math
import pickle
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jmarl.envs import make
from jmarl.envs.data import SPLITS, split_of
from jmarl.envs.rewards import RewardProcessors
from jmarl.envs.vector import LockStep, Step
from jmarl.envs.writing.story import HELD_OUT, TOPICS
from jmarl.envs.writing.tldr_arxiv import Arxiv, Tldr
from jmarl.envs.writing.two_texts import SEPARATOR, TwoTexts

RNG = np.random.default_rng(0)


def words(count: int, name: str = "alpha", start: int = 0) -> str:
    """Return alpha0 alpha1 …"""
    return " ".join(f"{name}{i}" for i in range(start, start + count))


def play(env: TwoTexts, *messages: str) -> Step:
    state, _ = env.reset(env.tasks("train", 1)[0], RNG)
    step = env.step(state, list(messages), RNG)
    low, high = env.reward_range
    assert step.done and low <= step.reward <= high
    return step


# The single writer


def test_a_single_writer_earns_what_two_writers_of_the_same_texts_earn():
    both = f"\n{words(10)} \n\n{SEPARATOR}\n\n{words(22)}\n"
    step = play(Tldr(single=True), both)
    assert step.reward == pytest.approx(2.6) and step.info["form"] == 1
    assert step.state.texts == (words(10), words(22))
    assert set(step.info) == set(play(Tldr(), words(10), words(22)).info) | {"form"}
    assert play(Arxiv(single=True), f"{words(130)}{SEPARATOR}{words(180)}").reward == pytest.approx(2.49423, abs=1e-5)
    assert play(make("story", single=True), f"a{SEPARATOR}bb").reward == 1


@pytest.mark.parametrize("name", ["tldr", "arxiv", "story"])
@pytest.mark.parametrize(
    "text", ["", words(200), SEPARATOR.lower(), "[PARAGRAPH SPLIT]", SEPARATOR, f"{SEPARATOR} a", "a" * 100_000]
)
def test_without_a_separator_or_a_first_text_the_reward_is_0(name, text):
    step = play(make(name, single=True), text)
    assert step.reward == 0 and step.info["form"] == float(SEPARATOR in text)


def test_everything_after_the_first_separator_is_text_two():
    step = play(Tldr(single=True), f"{words(10)} {SEPARATOR} {words(11)} {SEPARATOR} {words(11, start=11)}")
    assert step.info["form"] == 0 and step.state.texts == (words(10), f"{words(11)} {SEPARATOR} {words(11, start=11)}")
    assert (
        step.info["tokens_2"] == 23
        and step.info["unique_ratio"] == pytest.approx(23 / 10)
        and step.reward == pytest.approx(2.6)
    )


def test_prompts_contain_the_source_and_what_the_other_agent_writes():
    for name, keywords in (("tldr", ("concise", "longer")), ("arxiv", ("background", "implications"))):
        env, single = make(name), make(name, single=True)
        task = env.tasks("train", 1)[0]
        (source,) = task.values()
        prompts, (one,) = env.reset(task, RNG)[1], single.reset(task, RNG)[1]
        assert all(word in prompt for word in keywords for prompt in [*prompts, one]) and len(set(prompts)) == 2
        assert all(source in prompt for prompt in [*prompts, one]) and all("nother writer" in prompt for prompt in prompts)
        assert SEPARATOR in one and not any(SEPARATOR in prompt for prompt in prompts)
        assert single.num_agents == 1 and env.num_agents == 2


# Story


@pytest.mark.parametrize(
    "first, second, value",
    [
        ("ab", "abcd", 1), ("ab", "abcdef", 1), ("ab", "abc", math.exp(-0.5)), ("ab", "", math.exp(-2)),
        ("ab", "abcdefgh", math.exp(-1)), ("", "abc", 0), ("", "", 0),
        ("a", "b" * 100_000, 0), ("a" * 100_000, "", math.exp(-2)),
    ],
)  # fmt: skip
def test_story_rewards_equal_those_computed_by_hand(first, second, value):
    step = play(make("story"), first, second)
    assert step.reward == pytest.approx(value)
    assert step.info["length_ratio"] == (len(second) / len(first) if first else pytest.approx(math.nan, nan_ok=True))


def test_story_rewards_can_be_scaled_to_a_hundred():
    lockstep = LockStep(make("story"), processor=RewardProcessors.scale(100))
    states, _ = lockstep.reset(make("story").tasks("train", 2), RNG)
    result = lockstep.step(states, [["ab", "ab"], ["abcd", "abc"]], RNG).result
    assert result.total.tolist() == pytest.approx([100, 60.653], abs=1e-3)


def test_story_has_the_topics_of_its_experiment():
    from experiments import story_length

    env = make("story")
    assert {t["prompt"] for t in env.tasks("train")} == set(TOPICS) == set(story_length.TOPICS) and len(TOPICS) == 32
    assert {t["prompt"] for t in env.tasks("eval")} == set(HELD_OUT) and len(HELD_OUT) == 16
    task = {"prompt": "a lost umbrella"}
    assert env.reset(task, RNG)[1] == [story_length.setup_prompt(task), story_length.story_prompt(task)]
    assert env.reset(task, RNG)[1][1] == "Tell a story about a lost umbrella."


# Tasks


@pytest.mark.parametrize("name, least, most", [("tldr", 60, 120), ("arxiv", 80, 150)])
def test_texts_of_the_project_are_distinct_and_of_similar_length(name, least, most):
    env = make(name)
    texts = [text for split in SPLITS for task in env.tasks(split, 1000) for text in task.values()]
    assert len(texts) == len(set(texts)) == 40 and 4 <= len(env.tasks("eval")) <= 12
    assert all(least <= len(text.partition("POST: ")[2].split() or text.split()) <= most for text in texts)
    assert len({" ".join(text.split()[:5]) for text in texts}) == 40


@pytest.mark.parametrize(
    "name, folder, file", [("tldr", "tldr", "train"), ("tldr", "tldr_sci", "test"), ("arxiv", "arxiv_abstract", "test")]
)
def test_real_data_sets_become_tasks_of_both_splits(name, folder, file, data_dir):
    path = data_dir / folder / f"{file}.jsonl.gz"
    if not path.is_file():
        pytest.skip(f"no data set at {path}")
    env = make(name, data=path)
    tasks = {split: env.tasks(split, 10_000) for split in SPLITS}
    assert 0.1 < len(tasks["eval"]) / len(tasks["train"]) < 0.45
    for task in tasks["train"] + tasks["eval"]:
        (text,) = task.values()
        prompts = env.reset(task, RNG)[1]
        assert all(prompt.endswith(text) and "TL;DR:" not in prompt[-20:] for prompt in prompts)
    assert env.tasks("train", 5, seed=3) == env.tasks("train", 5, seed=3) != env.tasks("train", 5, seed=4)
    pickle.loads(pickle.dumps(env))


@pytest.mark.parametrize(
    "name, hub, field", [("tldr", "trl-lib/tldr", "prompt"), ("arxiv", "OpenMLRL/arXiv_abstract", "abstract_text")]
)
def test_hub_data_is_loaded_by_its_id(name, hub, field, monkeypatch):
    calls = []

    def load_rows(*args, **kwargs):
        calls.append((args, kwargs))
        return [{field: "a text"}]

    monkeypatch.setattr("jmarl.envs.writing.tldr_arxiv.load_rows", load_rows)
    tasks = [task for split in SPLITS for task in make(name, data="hub").tasks(split)]
    assert calls == [((hub, (field,)), {"path": None})] * 2 and tasks == [{field: "a text"}]


def test_rows_of_the_data_set_are_tasks():
    """The marker after which the data set expects a summary is not part of the post."""
    row = {"prompt": "SUBREDDIT: r/test\n\nTITLE: x\n\nPOST: y\n\nTL;DR:", "completion": " hidden"}
    for prompt in Tldr().reset(row, RNG)[1]:
        assert prompt.endswith("POST: y") and "hidden" not in prompt
    assert Arxiv().reset({"article_id": "1", "abstract_text": " We do. ", "token_count": 2}, RNG)[1][0].endswith("We do.")


def test_the_split_of_a_text_does_not_depend_on_its_file(tmp_path):
    texts = [task["abstract_text"] for split in SPLITS for task in Arxiv().tasks(split)]
    for size in (40, 25):
        path = tmp_path / f"{size}.jsonl"
        path.write_text("".join(json.dumps({"abstract_text": text}) + "\n" for text in [*texts[:size], texts[0]]))
        env = Arxiv(data=path)
        assert {t["abstract_text"] for t in env.tasks("eval")} == {text for text in texts[:size] if split_of(text) == "eval"}
        assert len(env.tasks("eval")) + len(env.tasks("train")) == size, "the same text once"


@pytest.mark.parametrize("name, task", [
    ("tldr", {}),
    ("tldr", {"prompt": " "}),
    ("tldr", {"prompt": "TL;DR:"}),
    ("arxiv", {"prompt": "x"}),
    ("story", {"prompt": 3}),
])  # fmt: skip
def test_malformed_tasks_are_refused(name, task):
    with pytest.raises(ValueError, match=f"has no text in '{'abstract_text' if name == 'arxiv' else 'prompt'}'"):
        make(name).reset(task, RNG)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="none.jsonl does not exist.*; give a file"):
        Tldr(data=tmp_path / "none.jsonl").tasks("train", 1)


def test_render_shows_source_and_texts():
    step = play(Tldr(), "short one", "longer one")
    picture = Tldr().render(step.state)
    assert "TITLE:" in picture and "summary:\nshort one" in picture and "elaboration:\nlonger one" in picture


def test_the_experiment_refuses_invalid_settings():
    from experiments.writing import WritingConfig

    assert WritingConfig.of(environment="arxiv", single=True, output_dir="").episodes.num_turns == 1
    for wrong in ({"environment": "poem"}, {"environment": "story", "data": "hub"}, {"held_out": -1}, {"num_turns": 2}):
        with pytest.raises(ValueError, match="is not allowed"):
            WritingConfig.of(output_dir="", **wrong)


# Hostile texts


HOSTILE = ["so" * 500_000, "in " * 200_000, "\ud800\x00 " * 50, "İ" * 100_000, f"{SEPARATOR} " * 50_000, "in addition" * 20_000]


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
@pytest.mark.parametrize("options", [{}, {"single": True}, {"substring": True}], ids=str)
def test_hostile_texts_are_scored_quickly(text, options):
    start = time.process_time()
    for name in ("tldr", "arxiv"):
        play(make(name, **options), *[text] * (1 if "single" in options else 2))
    assert time.process_time() - start < 3


@settings(max_examples=60, deadline=None)
@given(st.lists(st.text(max_size=300), min_size=2, max_size=2), st.sampled_from(["tldr", "arxiv", "story"]))
def test_any_text_of_a_single_writer_is_scored_like_its_two_parts(texts, name):
    step = play(make(name, single=True), SEPARATOR.join(texts))
    assert step.reward == play(make(name), *step.state.texts).reward and step.info["form"] == float(
        SEPARATOR.join(texts).count(SEPARATOR) == 1
    )
