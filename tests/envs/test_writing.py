"""Two texts that belong together: the gated reward by hand at every gate and edge, its published values, the single writer."""

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
from jmarl.envs.vector import LockStep
from jmarl.envs.writing.score import ARXIV, TLDR, WordLists, categories_in, levels, measure, ramp, transition_score
from jmarl.envs.writing.story import HELD_OUT, TOPICS
from jmarl.envs.writing.words import STOP_WORDS, TRANSITIONS
from jmarl.envs.writing.writing import SEPARATOR, Arxiv, Tldr

RNG = np.random.default_rng(0)
ONE_EACH = " ".join(phrases[0] for phrases in TRANSITIONS.values())
FINE = {"tokens_1": 128, "tokens_2": 128, "length_ratio": 1.6, "unique_ratio": 1.0, "categories": 12, "jaccard": 1.0}


def row(count: int, name: str = "alpha", start: int = 0) -> str:
    return " ".join(f"{name}{i}" for i in range(start, start + count))


def played(env, *messages):
    state, _ = env.reset(env.tasks("train", 1)[0], RNG)
    step = env.step(state, list(messages), RNG)
    low, high = env.reward_range
    assert step.done and low <= step.reward <= high
    return step


def earned(gates, **changes) -> list[float]:
    """The four levels of texts that are fine (2.98, in tldr only from a unique ratio of 2 on) but for some numbers."""
    found = FINE | ({"unique_ratio": 2.0} if gates is TLDR else {}) | changes
    return list(levels(found, gates).values())


# The published values, and ours for the same texts


PUBLISHED = [
    ("tldr", row(10), row(22), 2.6),
    ("tldr", row(10), row(22, "beta") + " however", 2.18),
    ("tldr", row(10), row(14), 1.8989648),
    ("tldr", row(10), row(60), 0.5),
    ("arxiv", row(130), row(180), 2.49423),
]


@pytest.mark.parametrize("name, first, second, value", PUBLISHED)
def test_published_values_with_the_published_lists(name, first, second, value, data_dir):
    path = data_dir / "writing_words" / "words.json"
    if not path.is_file():
        pytest.skip(f"no published word lists at {path}")
    words = json.loads(path.read_text())
    assert len(words["transition_words"]) == 12
    env = make(name, stop_words=words["stopwords"], transitions=words["transition_words"])
    assert played(env, first, second).reward == pytest.approx(value, abs=1e-5)
    substring = make(name, stop_words=words["stopwords"], transitions=words["transition_words"], substring=True)
    assert played(substring, first, second).reward == pytest.approx(value, abs=1e-5)


def test_own_lists_give_the_published_values_but_for_however():
    """It is in one category here, in two of the published ones."""
    rewards = [played(make(name), first, second).reward for name, first, second, _ in PUBLISHED]
    assert rewards == pytest.approx([2.6, 0.5 + 1 + 0.5 + 0.4 * 0.4, 1.8989648, 0.5, 2.49423], abs=1e-5)


def test_published_lists_find_words_inside_of_words_only_if_asked(data_dir):
    path = data_dir / "writing_words" / "words.json"
    if not path.is_file():
        pytest.skip(f"no published word lists at {path}")
    lists = WordLists.of((), json.loads(path.read_text())["transition_words"])
    assert categories_in("Some gifts.", lists) == []
    assert categories_in("Some gifts.", lists, substring=True) == ["cause_effect", "condition"]  # s-o-me, g-if-ts


# Every gate and edge


@pytest.mark.parametrize("gates, least", [(TLDR, 8), (ARXIV, 128)])
@pytest.mark.parametrize("which", ["tokens_1", "tokens_2"])
def test_level_1_both_lengths(gates, least, which):
    for tokens in (least, 256):
        assert sum(earned(gates, **{which: tokens})) == pytest.approx(2.98)
    for tokens in (0, least - 1, 257):
        assert earned(gates, **{which: tokens}) == [0, 0, 0, 0]


@pytest.mark.parametrize(
    "gates, rho, value",
    [
        (TLDR, 1.1, 0.0), (TLDR, 1.35, 0.5), (TLDR, 1.6, 1.0), (TLDR, 2.4, 1.0), (TLDR, 3.2, 1.0), (TLDR, 4.1, 0.5),
        (TLDR, 5.0, 0.0), (TLDR, 1.0999, None), (TLDR, 5.0001, None), (TLDR, 0.0, None), (TLDR, math.nan, None),
        (ARXIV, 0.8, 0.0), (ARXIV, 1.05, 0.5), (ARXIV, 1.3, 1.0), (ARXIV, 1.45, 1.0), (ARXIV, 1.6, 1.0), (ARXIV, 1.8, 0.5),
        (ARXIV, 2.0, 0.0), (ARXIV, 0.7999, None), (ARXIV, 2.0001, None),
    ],
)  # fmt: skip
def test_level_2_ratio_of_lengths(gates, rho, value):
    """On a bound it is worth nothing and the next levels are reached; beyond it they are not."""
    rest = [0, 0] if value is None else [0.5, 0.98]
    assert earned(gates, length_ratio=rho) == pytest.approx([0.5, value or 0.0, *rest])


@pytest.mark.parametrize(
    "gates, u, value",
    [
        (TLDR, 1.3, 0.0), (TLDR, 1.65, 0.25), (TLDR, 2.0, 0.5), (TLDR, 50.0, 0.5), (TLDR, 1.2999, None), (TLDR, math.nan, None),
        (ARXIV, 0.5, 0.0), (ARXIV, 0.6, 0.25), (ARXIV, 0.7, 0.5), (ARXIV, 1.3, 0.5), (ARXIV, 1.5, 0.25), (ARXIV, 1.7, 0.0),
        (ARXIV, 0.4999, None), (ARXIV, 1.7001, None), (ARXIV, math.nan, None),
    ],
)  # fmt: skip
def test_level_3_ratio_of_vocabularies(gates, u, value):
    assert earned(gates, unique_ratio=u) == pytest.approx([0.5, 1.0, value or 0.0, 0.0 if value is None else 0.98])


@pytest.mark.parametrize("categories, score", [(0, 0), (1, 0.4), (2, 0.45), (7, 0.7), (12, 0.95), (13, 1.0), (40, 1.0)])
def test_level_4_transitions(categories, score):
    assert transition_score(categories) == pytest.approx(score)
    for gates in (TLDR, ARXIV):
        assert earned(gates, categories=categories, jaccard=0)[3] == pytest.approx(0.4 * score)


@pytest.mark.parametrize("gates, cap", [(TLDR, 0.03), (ARXIV, 0.23)])
def test_level_4_jaccard(gates, cap):
    of = {share: earned(gates, categories=0, jaccard=share * cap)[3] for share in (0, 0.5, 1, 1.01, 3)}
    assert of == pytest.approx({0: 0, 0.5: 0.3, 1: 0.6, 1.01: 0.6, 3: 0.6})


def test_ramp_at_its_corners():
    assert [ramp(x, (0, 2, 4, 8)) for x in (-1, 0, 1, 2, 3, 4, 6, 8, 9)] == [None, 0, 0.5, 1, 1, 1, 0.5, 0, None]


# From texts to those numbers


def test_what_is_measured_by_hand():
    """Stop words count in the ratio of vocabularies and not in the Jaccard index."""
    lists = WordLists.of({"the", "a"}, {"contrast": ["however"], "addition": ["in addition"]})
    first, second = "The cat, the CAT; a dog!", "A dog. However: the bird-song in  \n addition"
    assert measure(first, second, TLDR, lists) == {
        "tokens_1": 6, "tokens_2": 7,
        "length_ratio": 44 / 24,
        "unique_ratio": 8 / 4,  # a dog however the bird song in addition / the cat a dog
        "categories": 2,
        "jaccard": 1 / 7,  # dog / cat dog however bird song in addition
    }  # fmt: skip


def test_white_space_counts_as_length_and_not_as_tokens():
    found = measure("a b", " a\t\n\u00a0b   ", TLDR, WordLists.of((), {}))
    assert (found["tokens_1"], found["tokens_2"], found["length_ratio"]) == (2, 2, 9 / 3)


def test_transitions_are_of_the_second_text_in_tldr_and_of_both_in_arxiv():
    first, second = "however " + row(9), row(20)
    assert (played(Tldr(), first, second).info["categories"], played(Tldr(), second, first).info["categories"]) == (0, 1)
    assert [played(Arxiv(), *texts).info["categories"] for texts in ((first, second), (second, first))] == [1, 1]


@pytest.mark.parametrize(
    "text, found",
    [
        ("However, it rained", ["contrast"]),
        ("it rained HOWEVER", ["contrast"]),
        ("whatsoever howevers however2 _however", []),
        ("in\n  addition", ["addition"]),
        ("in, addition", []),
        ("so-and-so butter thusly", []),
        ("but", ["contrast"]),
        ("first (but) then-if", ["contrast", "order", "condition"]),
        ("", []),
    ],
)
def test_transitions_are_whole_words(text, found):
    assert categories_in(text, WordLists.of((), TRANSITIONS)) == found


def test_substrings_count_if_asked():
    lists = WordLists.of((), {"cause": ["so"], "pairs": ["in fact"]})
    assert categories_in("some IN FACTories", lists, substring=True) == ["cause", "pairs"]
    assert categories_in("in  fact", lists, substring=True) == [] and categories_in("in  fact", lists) == ["pairs"]


def test_lists_are_lower_cased_and_checked():
    lists = WordLists.of(["The"], {"x": ["On  The OTHER hand"]})
    assert lists.stop_words == {"the"} and categories_in("on the other hand", lists) == ["x"]
    for bad in ({"x": "however"}, {"x": ["", "y"]}, {"x": [3]}):
        with pytest.raises(ValueError, match="transitions of 'x' are .*: give a list"):
            Tldr(transitions=bad)


def test_no_text_without_words_divides_by_zero():
    dots, words = "! " * 10, row(10)
    step = played(Tldr(), dots, words)
    assert math.isnan(step.info["unique_ratio"]) and step.reward == 0.5 + step.info["structure"]
    assert played(Tldr(), words, "! " * 70).reward == pytest.approx(1.5)  # no words: a ratio of 0
    assert played(Tldr(), "", "").reward == 0 and math.isnan(played(Tldr(), "", words).info["length_ratio"])
    stop = played(Tldr(), "the of and to in on at by", "a an the of and to in on at by for with from is are was were be been")
    assert stop.info["jaccard"] == 0  # nothing but stop words


def test_own_lists_are_well_formed():
    phrases = [phrase for category in TRANSITIONS.values() for phrase in category]
    assert len(TRANSITIONS) == 12 and min(map(len, TRANSITIONS.values())) >= 10
    assert len(set(phrases)) == len(phrases), "no phrase in two categories"
    assert all(phrase == " ".join(phrase.lower().split()) for phrase in phrases) and len(STOP_WORDS) > 100
    lists = WordLists.of((), TRANSITIONS)
    assert all(categories_in(phrase, lists) == [name] for name, of in TRANSITIONS.items() for phrase in of)


# The most and the least


def test_the_most_that_can_be_had():
    """Twelve categories of transitions reach 0.95."""
    twelve = f"{row(12)} {ONE_EACH}"
    step = played(Tldr(), row(12), twelve)
    assert step.reward == pytest.approx(2.98) == Tldr().reward_range[1] and step.info["normalised"] == pytest.approx(2.98 / 3)
    step = played(Arxiv(), row(130), f"{row(145)} {ONE_EACH} {ONE_EACH}")
    assert step.reward == pytest.approx(2.98) == Arxiv().reward_range[1]
    assert [step.info[name] for name in ("length", "structure", "vocabulary")] == [0.5, 1.0, 0.5]
    assert Tldr(transitions={}).reward_range == (0, pytest.approx(2.6))
    assert Tldr(transitions={str(i): [f"w{i}"] for i in range(13)}).reward_range == (0, pytest.approx(3.0))


def test_what_the_reward_does_not_see():
    """The source is not looked at, and rows of words earn the most: as published, and said in the module."""
    tasks = Tldr().tasks("train", 2)
    rewards = {Tldr().step(Tldr().reset(t, RNG)[0], [row(12), f"{row(12)} {ONE_EACH}"], RNG).reward for t in tasks}
    assert len(rewards) == 1


@settings(max_examples=150, deadline=None)
@given(
    tokens=st.tuples(*[st.integers(0, 300)] * 2),
    ratios=st.tuples(*[st.floats(0, 10) | st.just(math.nan)] * 2),
    categories=st.integers(0, 12),
    jaccard=st.floats(0, 1),
    gates=st.sampled_from([TLDR, ARXIV]),
)
def test_levels_open_one_after_the_other(tokens, ratios, categories, jaccard, gates):
    names = ("tokens_1", "tokens_2", "length_ratio", "unique_ratio", "categories", "jaccard")
    parts = list(levels(dict(zip(names, (*tokens, *ratios, categories, jaccard), strict=True)), gates).values())
    assert all(-1e-12 <= part <= most + 1e-9 for part, most in zip(parts, (0.5, 1.0, 0.5, 0.98), strict=True))
    assert parts[0] or not any(parts)


# The single writer


def test_the_single_writer_earns_what_two_would():
    both = f"\n{row(10)} \n\n{SEPARATOR}\n\n{row(22)}\n"
    step = played(Tldr(single=True), both)
    assert step.reward == pytest.approx(2.6) and step.info["form"] == 1
    assert step.state.texts == (row(10), row(22))
    assert set(step.info) == set(played(Tldr(), row(10), row(22)).info) | {"form"}
    assert played(Arxiv(single=True), f"{row(130)}{SEPARATOR}{row(180)}").reward == pytest.approx(2.49423, abs=1e-5)
    assert played(make("story", single=True), f"a{SEPARATOR}bb").reward == 1


@pytest.mark.parametrize("name", ["tldr", "arxiv", "story"])
@pytest.mark.parametrize(
    "text", ["", row(200), SEPARATOR.lower(), "[PARAGRAPH SPLIT]", SEPARATOR, f"{SEPARATOR} a", "a" * 100_000]
)
def test_without_a_separator_or_a_first_text_there_is_nothing(name, text):
    step = played(make(name, single=True), text)
    assert step.reward == 0 and step.info["form"] == float(SEPARATOR in text)


def test_behind_the_first_separator_all_is_text_two():
    step = played(Tldr(single=True), f"{row(10)} {SEPARATOR} {row(11)} {SEPARATOR} {row(11, start=11)}")
    assert step.info["form"] == 0 and step.state.texts == (row(10), f"{row(11)} {SEPARATOR} {row(11, start=11)}")
    assert (
        step.info["tokens_2"] == 23
        and step.info["unique_ratio"] == pytest.approx(23 / 10)
        and step.reward == pytest.approx(2.6)
    )


def test_prompts_say_what_the_other_does_and_have_the_source():
    for name, words in (("tldr", ("concise", "longer")), ("arxiv", ("background", "implications"))):
        env, single = make(name), make(name, single=True)
        task = env.tasks("train", 1)[0]
        (source,) = task.values()
        prompts, (one,) = env.reset(task, RNG)[1], single.reset(task, RNG)[1]
        assert all(word in prompt for word in words for prompt in [*prompts, one]) and len(set(prompts)) == 2
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
def test_story_by_hand(first, second, value):
    step = played(make("story"), first, second)
    assert step.reward == pytest.approx(value)
    assert step.info["length_ratio"] == (len(second) / len(first) if first else pytest.approx(math.nan, nan_ok=True))


def test_story_scaled_to_a_hundred():
    world = LockStep(make("story"), processor=RewardProcessors.scale(100))
    states, _ = world.reset(make("story").tasks("train", 2), RNG)
    assert world.step(states, [["ab", "ab"], ["abcd", "abc"]], RNG).result.total.tolist() == pytest.approx(
        [100, 60.653], abs=1e-3
    )


def test_story_has_the_topics_of_its_experiment():
    from experiments import story_length

    env = make("story")
    assert {t["prompt"] for t in env.tasks("train")} == set(TOPICS) == set(story_length.TOPICS) and len(TOPICS) == 32
    assert {t["prompt"] for t in env.tasks("eval")} == set(HELD_OUT) and len(HELD_OUT) == 16
    task = {"prompt": "a lost umbrella"}
    assert env.reset(task, RNG)[1] == [story_length.setup(task), story_length.story(task)]
    assert env.reset(task, RNG)[1][1] == "Tell a story about a lost umbrella."


# Tasks


@pytest.mark.parametrize("name, least, most", [("tldr", 60, 120), ("arxiv", 80, 150)])
def test_own_texts(name, least, most):
    env = make(name)
    texts = [text for split in SPLITS for task in env.tasks(split, 1000) for text in task.values()]
    assert len(texts) == len(set(texts)) == 40 and 4 <= len(env.tasks("eval")) <= 12
    assert all(least <= len(text.partition("POST: ")[2].split() or text.split()) <= most for text in texts)
    assert len({" ".join(text.split()[:5]) for text in texts}) == 40


@pytest.mark.parametrize(
    "name, folder, file", [("tldr", "tldr", "train"), ("tldr", "tldr_sci", "test"), ("arxiv", "arxiv_abstract", "test")]
)
def test_real_data_sets(name, folder, file, data_dir):
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
def test_the_hub_is_asked_for_by_name(name, hub, field, monkeypatch):
    asked = []
    monkeypatch.setattr(
        "jmarl.envs.writing.writing.load_rows", lambda *of, **how: asked.append((of, how)) or [{field: "a text"}]
    )
    tasks = [task for split in SPLITS for task in make(name, data="hub").tasks(split)]
    assert asked == [((hub, (field,)), {"path": None})] * 2 and tasks == [{field: "a text"}]


def test_rows_of_the_data_set_are_tasks():
    """With the marker behind which the data set wants a summary, which is not part of the post."""
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


@pytest.mark.parametrize(
    "name, task",
    [
        ("tldr", {}),
        ("tldr", {"prompt": " "}),
        ("tldr", {"prompt": "TL;DR:"}),
        ("arxiv", {"prompt": "x"}),
        ("story", {"prompt": 3}),
    ],
)
def test_malformed_tasks_are_refused(name, task):
    with pytest.raises(ValueError, match=f"has no text in '{'abstract_text' if name == 'arxiv' else 'prompt'}'"):
        make(name).reset(task, RNG)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="give a JSON Lines file with the fields prompt"):
        Tldr(data=tmp_path / "none.jsonl").tasks("train", 1)


def test_render_shows_source_and_texts():
    step = played(Tldr(), "short one", "longer one")
    shown = Tldr().render(step.state)
    assert "TITLE:" in shown and "summary:\nshort one" in shown and "elaboration:\nlonger one" in shown


def test_the_experiment_refuses_what_does_not_fit():
    from experiments.writing import WritingConfig

    assert WritingConfig(environment="arxiv", single=True, output_dir="").num_turns == 1
    for wrong in ({"environment": "poem"}, {"environment": "story", "data": "hub"}, {"held_out": -1}, {"num_turns": 2}):
        with pytest.raises(ValueError, match="is not allowed"):
            WritingConfig(output_dir="", **wrong)


# Hostile texts


HOSTILE = ["so" * 500_000, "in " * 200_000, "\ud800\x00 " * 50, "İ" * 100_000, f"{SEPARATOR} " * 50_000, "in addition" * 20_000]


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
@pytest.mark.parametrize("options", [{}, {"single": True}, {"substring": True}], ids=str)
def test_hostile_texts_are_quick(text, options):
    start = time.perf_counter()
    for name in ("tldr", "arxiv"):
        played(make(name, **options), *[text] * (1 if "single" in options else 2))
    assert time.perf_counter() - start < 3


@settings(max_examples=60, deadline=None)
@given(st.lists(st.text(max_size=300), min_size=2, max_size=2), st.sampled_from(["tldr", "arxiv", "story"]))
def test_any_text_of_a_single_writer(texts, name):
    step = played(make(name, single=True), SEPARATOR.join(texts))
    assert step.reward == played(make(name), *step.state.texts).reward and step.info["form"] == float(
        SEPARATOR.join(texts).count(SEPARATOR) == 1
    )
