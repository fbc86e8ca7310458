"""The gated reward: published values, every gate and edge computed by hand, measures of texts, extremes."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jmarl.envs import make
from jmarl.envs.vector import Step
from jmarl.envs.writing.gated_reward import (
    ARXIV,
    TLDR,
    Gates,
    WordLists,
    categories_in,
    measure,
    ramp,
    score_levels,
    transition_score,
)
from jmarl.envs.writing.tldr_arxiv import Arxiv, Tldr
from jmarl.envs.writing.two_texts import TwoTexts
from jmarl.envs.writing.word_lists import STOP_WORDS, TRANSITIONS

RNG = np.random.default_rng(0)
ONE_EACH = " ".join(phrases[0] for phrases in TRANSITIONS.values())
FULL_MEASURES = {"tokens_1": 128, "tokens_2": 128, "length_ratio": 1.6, "unique_ratio": 1.0, "categories": 12, "jaccard": 1.0}


def words(count: int, name: str = "alpha", start: int = 0) -> str:
    """Return alpha0 alpha1 …"""
    return " ".join(f"{name}{i}" for i in range(start, start + count))


def play(env: TwoTexts, *messages: str) -> Step:
    state, _ = env.reset(env.tasks("train", 1)[0], RNG)
    step = env.step(state, list(messages), RNG)
    low, high = env.reward_range
    assert step.done and low <= step.reward <= high
    return step


def levels_of(gates: Gates, **changes: float) -> list[float]:
    """Return the four levels of texts with the full reward (2.98), except for some changed measures."""
    measures = FULL_MEASURES | ({"unique_ratio": 2.0} if gates is TLDR else {}) | changes
    return list(score_levels(measures, gates).values())


# Published values, and those of the project's word lists


PUBLISHED = [
    ("tldr", words(10), words(22), 2.6),
    ("tldr", words(10), words(22, "beta") + " however", 2.18),
    ("tldr", words(10), words(14), 1.8989648),
    ("tldr", words(10), words(60), 0.5),
    ("arxiv", words(130), words(180), 2.49423),
]


@pytest.fixture
def published(data_dir):
    """The published word lists."""
    path = data_dir / "writing_words" / "words.json"
    if not path.is_file():
        pytest.skip(f"no published word lists at {path}")
    return json.loads(path.read_text())


@pytest.mark.parametrize("name, first, second, value", PUBLISHED)
def test_published_lists_give_the_published_values(name, first, second, value, published):
    assert len(published["transition_words"]) == 12
    for options in ({}, {"substring": True}):
        env = make(name, stop_words=published["stopwords"], transitions=published["transition_words"], **options)
        assert play(env, first, second).reward == pytest.approx(value, abs=1e-5)


def test_default_lists_give_the_published_values_except_for_however():
    """The word is in one category here, in two of the published lists."""
    rewards = [play(make(name), first, second).reward for name, first, second, _ in PUBLISHED]
    assert rewards == pytest.approx([2.6, 0.5 + 1 + 0.5 + 0.4 * 0.4, 1.8989648, 0.5, 2.49423], abs=1e-5)


def test_published_lists_match_inside_words_only_with_substring(published):
    lists = WordLists.create((), published["transition_words"])
    assert categories_in("Some gifts.", lists) == []
    assert categories_in("Some gifts.", lists, substring=True) == ["cause_effect", "condition"]  # s-o-me, g-if-ts


# Every gate and edge


@pytest.mark.parametrize("gates, least", [(TLDR, 8), (ARXIV, 128)])
@pytest.mark.parametrize("which", ["tokens_1", "tokens_2"])
def test_level_1_requires_a_number_of_tokens_of_both_texts(gates, least, which):
    for tokens in (least, 256):
        assert sum(levels_of(gates, **{which: tokens})) == pytest.approx(2.98)
    for tokens in (0, least - 1, 257):
        assert levels_of(gates, **{which: tokens}) == [0, 0, 0, 0]


@pytest.mark.parametrize(
    "gates, rho, value",
    [
        (TLDR, 1.1, 0.0), (TLDR, 1.35, 0.5), (TLDR, 1.6, 1.0), (TLDR, 2.4, 1.0), (TLDR, 3.2, 1.0), (TLDR, 4.1, 0.5),
        (TLDR, 5.0, 0.0), (TLDR, 1.0999, None), (TLDR, 5.0001, None), (TLDR, 0.0, None), (TLDR, math.nan, None),
        (ARXIV, 0.8, 0.0), (ARXIV, 1.05, 0.5), (ARXIV, 1.3, 1.0), (ARXIV, 1.45, 1.0), (ARXIV, 1.6, 1.0), (ARXIV, 1.8, 0.5),
        (ARXIV, 2.0, 0.0), (ARXIV, 0.7999, None), (ARXIV, 2.0001, None),
    ],
)  # fmt: skip
def test_level_2_is_a_ramp_of_the_ratio_of_lengths(gates, rho, value):
    """A ratio on a bound earns 0 and opens the next levels; a ratio beyond it does not."""
    later_levels = [0, 0] if value is None else [0.5, 0.98]
    assert levels_of(gates, length_ratio=rho) == pytest.approx([0.5, value or 0.0, *later_levels])


@pytest.mark.parametrize(
    "gates, u, value",
    [
        (TLDR, 1.3, 0.0), (TLDR, 1.65, 0.25), (TLDR, 2.0, 0.5), (TLDR, 50.0, 0.5), (TLDR, 1.2999, None), (TLDR, math.nan, None),
        (ARXIV, 0.5, 0.0), (ARXIV, 0.6, 0.25), (ARXIV, 0.7, 0.5), (ARXIV, 1.3, 0.5), (ARXIV, 1.5, 0.25), (ARXIV, 1.7, 0.0),
        (ARXIV, 0.4999, None), (ARXIV, 1.7001, None), (ARXIV, math.nan, None),
    ],
)  # fmt: skip
def test_level_3_is_a_ramp_of_the_ratio_of_vocabularies(gates, u, value):
    assert levels_of(gates, unique_ratio=u) == pytest.approx([0.5, 1.0, value or 0.0, 0.0 if value is None else 0.98])


@pytest.mark.parametrize("categories, score", [(0, 0), (1, 0.4), (2, 0.45), (7, 0.7), (12, 0.95), (13, 1.0), (40, 1.0)])
def test_level_4_scores_categories_of_transition_words(categories, score):
    assert transition_score(categories) == pytest.approx(score)
    for gates in (TLDR, ARXIV):
        assert levels_of(gates, categories=categories, jaccard=0)[3] == pytest.approx(0.4 * score)


@pytest.mark.parametrize("gates, cap", [(TLDR, 0.03), (ARXIV, 0.23)])
def test_level_4_scores_the_jaccard_index_up_to_the_cap(gates, cap):
    styles = {share: levels_of(gates, categories=0, jaccard=share * cap)[3] for share in (0, 0.5, 1, 1.01, 3)}
    assert styles == pytest.approx({0: 0, 0.5: 0.3, 1: 0.6, 1.01: 0.6, 3: 0.6})


def test_a_ramp_is_0_and_1_at_its_corners_and_linear_between():
    assert [ramp(x, (0, 2, 4, 8)) for x in (-1, 0, 1, 2, 3, 4, 6, 8, 9)] == [None, 0, 0.5, 1, 1, 1, 0.5, 0, None]


# From texts to measures


def test_measures_equal_those_computed_by_hand():
    """Stop words count in the ratio of vocabularies and not in the Jaccard index."""
    lists = WordLists.create({"the", "a"}, {"contrast": ["however"], "addition": ["in addition"]})
    first, second = "The cat, the CAT; a dog!", "A dog. However: the bird-song in  \n addition"
    assert measure(first, second, TLDR, lists) == {
        "tokens_1": 6, "tokens_2": 7,
        "length_ratio": 44 / 24,
        "unique_ratio": 8 / 4,  # a dog however the bird song in addition / the cat a dog
        "categories": 2,
        "jaccard": 1 / 7,  # dog / cat dog however bird song in addition
    }  # fmt: skip


def test_white_space_counts_as_length_and_not_as_tokens():
    measures = measure("a b", " a\t\n\u00a0b   ", TLDR, WordLists.create((), {}))
    assert (measures["tokens_1"], measures["tokens_2"], measures["length_ratio"]) == (2, 2, 9 / 3)


def test_transition_words_count_in_the_second_text_of_tldr_and_in_both_of_arxiv():
    first, second = "however " + words(9), words(20)
    assert (play(Tldr(), first, second).info["categories"], play(Tldr(), second, first).info["categories"]) == (0, 1)
    assert [play(Arxiv(), *texts).info["categories"] for texts in ((first, second), (second, first))] == [1, 1]


@pytest.mark.parametrize("text, categories", [
    ("However, it rained", ["contrast"]),
    ("it rained HOWEVER", ["contrast"]),
    ("whatsoever howevers however2 _however", []),
    ("in\n  addition", ["addition"]),
    ("in, addition", []),
    ("so-and-so butter thusly", []),
    ("but", ["contrast"]),
    ("first (but) then-if", ["contrast", "order", "condition"]),
    ("", []),
])  # fmt: skip
def test_transitions_are_whole_words(text, categories):
    assert categories_in(text, WordLists.create((), TRANSITIONS)) == categories


def test_substrings_count_with_substring():
    lists = WordLists.create((), {"cause": ["so"], "pairs": ["in fact"]})
    assert categories_in("some IN FACTories", lists, substring=True) == ["cause", "pairs"]
    assert categories_in("in  fact", lists, substring=True) == [] and categories_in("in  fact", lists) == ["pairs"]


def test_lists_are_lower_cased_and_checked():
    lists = WordLists.create(["The"], {"x": ["On  The OTHER hand"]})
    assert lists.stop_words == {"the"} and categories_in("on the other hand", lists) == ["x"]
    for bad in ({"x": "however"}, {"x": ["", "y"]}, {"x": [3]}):
        with pytest.raises(ValueError, match="transitions of 'x' are .*: give a list"):
            Tldr(transitions=bad)


def test_no_text_without_words_divides_by_zero():
    no_words, text = "! " * 10, words(10)
    step = play(Tldr(), no_words, text)
    assert math.isnan(step.info["unique_ratio"]) and step.reward == 0.5 + step.parts["structure"]
    assert play(Tldr(), text, "! " * 70).reward == pytest.approx(1.5)  # no words: a ratio of 0
    assert play(Tldr(), "", "").reward == 0 and math.isnan(play(Tldr(), "", text).info["length_ratio"])
    only_stop_words = play(
        Tldr(), "the of and to in on at by", "a an the of and to in on at by for with from is are was were be been"
    )
    assert only_stop_words.info["jaccard"] == 0


def test_default_lists_are_well_formed():
    phrases = [phrase for category in TRANSITIONS.values() for phrase in category]
    assert len(TRANSITIONS) == 12 and min(map(len, TRANSITIONS.values())) >= 10
    assert len(set(phrases)) == len(phrases), "no phrase in two categories"
    assert all(phrase == " ".join(phrase.lower().split()) for phrase in phrases) and len(STOP_WORDS) > 100
    lists = WordLists.create((), TRANSITIONS)
    assert all(categories_in(phrase, lists) == [name] for name, phrases in TRANSITIONS.items() for phrase in phrases)


# Extremes


def test_the_largest_reward_is_2_98():
    """Twelve categories of transition words reach 0.95."""
    twelve = f"{words(12)} {ONE_EACH}"
    step = play(Tldr(), words(12), twelve)
    assert step.reward == pytest.approx(2.98) == Tldr().reward_range[1] and step.info["normalised"] == pytest.approx(2.98 / 3)
    step = play(Arxiv(), words(130), f"{words(145)} {ONE_EACH} {ONE_EACH}")
    assert step.reward == pytest.approx(2.98) == Arxiv().reward_range[1]
    assert [step.parts[name] for name in ("length", "structure", "vocabulary")] == [0.5, 1.0, 0.5]
    assert Tldr(transitions={}).reward_range == (0, pytest.approx(2.6))
    assert Tldr(transitions={str(i): [f"w{i}"] for i in range(13)}).reward_range == (0, pytest.approx(3.0))


def test_the_reward_does_not_depend_on_the_source():
    """Lists of words earn the maximum, as the docstring of the module says."""
    tasks = Tldr().tasks("train", 2)
    rewards = {Tldr().step(Tldr().reset(t, RNG)[0], [words(12), f"{words(12)} {ONE_EACH}"], RNG).reward for t in tasks}
    assert len(rewards) == 1


@settings(max_examples=150, deadline=None)
@given(
    tokens=st.tuples(*[st.integers(0, 300)] * 2),
    ratios=st.tuples(*[st.floats(0, 10) | st.just(math.nan)] * 2),
    categories=st.integers(0, 12),
    jaccard=st.floats(0, 1),
    gates=st.sampled_from([TLDR, ARXIV]),
)
def test_levels_are_in_range_and_need_level_1(tokens, ratios, categories, jaccard, gates):
    names = ("tokens_1", "tokens_2", "length_ratio", "unique_ratio", "categories", "jaccard")
    levels = list(score_levels(dict(zip(names, (*tokens, *ratios, categories, jaccard), strict=True)), gates).values())
    assert all(-1e-12 <= level <= most + 1e-9 for level, most in zip(levels, (0.5, 1.0, 0.5, 0.98), strict=True))
    assert levels[0] or not any(levels)
