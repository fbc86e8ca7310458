"""The rule-based judge of debates: every term, and that keyword stuffing, repetition and copying earn nothing."""

from __future__ import annotations

import math

import numpy as np
import pytest
from debates import CON, PRO, TASK
from hypothesis import given, settings
from hypothesis import strategies as st

from jmarl.envs.debate.debate import find_winner, load_motions
from jmarl.envs.debate.rule_judge import RuleBasedJudge, coverage, length_score, link
from jmarl.envs.debate.script import ENDINGS, FRAMES, scripted_speech
from jmarl.envs.debate.sentences import EarlierSentences, content_of, is_copy, is_prose, split_sentences, stem
from jmarl.envs.debate.transcript import add_speech, begin_debate, speaking_sides

RNG = np.random.default_rng(0)


def debate(pro, con, task=TASK):
    """Return a debate of these speeches."""
    state = begin_debate(task, False)
    for texts in zip(pro, con, strict=True):
        for side, text in zip(("pro", "con"), texts, strict=True):
            state = add_speech(state, side, text)
    return state


def terms(pro, con=None, side="pro", task=TASK):
    """Return the terms of a side's score."""
    con = [""] * len(pro) if con is None else con
    return RuleBasedJudge().score_side(debate(pro, con, task), side)


def terms_of_speech(text, task=TASK):
    return terms([text], task=task)


def test_a_debate_written_by_hand_reaches_the_maximum():
    """Every term is 1 on both sides."""
    verdict = RuleBasedJudge()(debate(PRO, CON), RNG)
    for name, value in verdict.info.items():
        assert value == pytest.approx(1), name
    assert verdict.pro == pytest.approx(1) and verdict.con == pytest.approx(1) and find_winner(verdict) == "draw"
    empty = RuleBasedJudge()(debate(PRO, ["", ""]), RNG)
    assert (empty.pro, empty.con) == (pytest.approx(1), 0) and find_winner(empty) == "pro"


@pytest.mark.parametrize(
    ("characters", "score"), [(0, 0), (1, 0.01), (99, 0.99), (100, 1), (500, 1), (1250, 0.75), (2000, 0.5), (9999, 0.5)]
)
def test_the_length_score_depends_on_the_characters(characters, score):
    assert length_score(characters) == pytest.approx(score)


PLAIN = "The trees of a town give a cool shade to the people below."  # 58 characters; counts, and has no marker


@pytest.mark.parametrize(("text", "expected"), [
    (PLAIN, dict(length=0.58, evidence=0, reasoning=0, structure=1 / 6, relevance=1, kept=1)),
    ("A study shows that the trees of a town give cool shade.", dict(evidence=0.5, reasoning=0)),
    ("A study shows that trees cool. " + PLAIN.replace("The", "For example the"), dict(evidence=1)),
    ("A study of trees in a town helps. Another study of cheap trams in a city helps as well.", dict(evidence=0.5)),
    ("The trees of a town make a street 12 degrees cooler.", dict(evidence=0.5)),
    ("The trees of a town make a street 5 % cooler.", dict(evidence=0.5)),
    ("The trees of a town make a street 5 degrees cooler.", dict(evidence=0)),
    ("The trees of a town are good because the shade is cool, therefore everyone likes them.", dict(reasoning=0.5)),
    ("The trees are good because the shade is cool. Therefore the people in a town like to walk.", dict(reasoning=1)),
    (f"First, {PLAIN.lower()}", dict(structure=1 / 6 + 1 / 4)),
    ("First, the trees of a town are cool. Next, a leaf in the street is pretty. Finally, the birds of a garden sing.",
     dict(structure=1)),
    ("The pavement of a street is hot in the month of July.", dict(relevance=0)),
    ("A street with trees and a bench is pretty to look at.", dict(relevance=0.5)),
])  # fmt: skip
def test_terms_of_an_argument_equal_those_computed_by_hand(text, expected):
    """The motion has the content words town, plant, tree; 2 of them give full relevance."""
    assert content_of("Towns should plant more trees") == {"town", "plant", "tre"}
    actual = terms_of_speech(text)
    assert {name: actual[name] for name in expected} == pytest.approx(expected)


def test_scores_are_weighted_sums_of_their_terms():
    """.2 length + .25 evidence + .25 reasoning + .15 structure + .15 relevance; .6 argument + .2 consistency + .2 coverage."""
    single = terms_of_speech(PLAIN)
    assert single["argument"] == pytest.approx(0.2 * 0.58 + 0.15 / 6 + 0.15)
    assert single["consistency"] == 1  # one speech, which counts
    assert len(content_of(TASK["pro_points"][0])) == 7
    assert single["coverage"] == pytest.approx(2 / 7 / 0.6)  # shade and people
    assert single["score"] == pytest.approx(0.6 * single["argument"] + 0.2 + 0.2 * single["coverage"])
    two = terms([PLAIN, ""])
    assert two["argument"] == pytest.approx(single["argument"] / 2) and two["consistency"] == 0


def test_without_key_points_coverage_is_left_out():
    single = terms_of_speech(PLAIN, {"motion": TASK["motion"]})
    assert math.isnan(single["coverage"])
    assert single["score"] == pytest.approx((0.6 * single["argument"] + 0.2) / 0.8)


@pytest.mark.parametrize(("share", "value"), [(0, 0), (0.05, 0.5), (0.1, 1), (0.7, 1), (0.85, 0.5), (1, 0)])
def test_the_link_to_earlier_speeches_depends_on_the_share_of_known_words(share, value):
    assert link(share) == pytest.approx(value)


def test_consistency_needs_known_words_and_no_change_of_side():
    """1 if two of seven content words were used before; 0 if none was, or if the side concedes or changes sides."""
    second = "A town with shade has shops where families and tourists linger."
    assert terms([PLAIN, second])["consistency"] == 1
    assert terms([PLAIN, "July in our streets means noise from lorries, motors and horns."])["consistency"] == 0
    for phrase, side in (
        ("I agree with my opponent.", "pro"),
        ("I oppose the motion.", "pro"),
        ("I support the motion!", "con"),
    ):
        pair = [PLAIN, f"{second} {phrase}"]
        assert RuleBasedJudge().score_side(debate(pair, ["", ""]), "pro")["consistency"] == float(side == "con")
        assert RuleBasedJudge().score_side(debate(["", ""], pair), "con")["consistency"] == float(
            "agree" not in phrase and side == "pro"
        )


def test_coverage_counts_one_speech_and_is_full_at_three_fifths():
    point = ["Shade keeps old people healthy in hot weather."]
    words = [frozenset(map(stem, text.split())) for text in ("shade keeps", "old people healthy")]
    assert coverage(words, point) == pytest.approx(3 / 7 / 0.6)
    assert coverage([words[0] | words[1]], point) == 1 and coverage([], point) == 0
    assert math.isnan(coverage(words, []))


@pytest.mark.parametrize(
    ("text", "prose"),
    [
        (PLAIN, True),
        ("Trees cool the streets.", False),  # four words
        ("Trees are good and so are trees.", False),  # two content words
        ("Trees cool streets squares gardens shops.", False),  # no function word
        ("Trees cool streets squares gardens the shops.", False),  # 1 of 7, below .15
        ("Trees cool streets squares the shops.", True),  # 1 of 6
        ("Because research data therefore shows trees of the town cool streets.", False),  # 4 markers of 11 words
        ("Because research therefore shows trees of the town cool streets.", True),  # 3 of 10
    ],
)
def test_sentences_are_told_from_lists_of_words(text, prose):
    assert is_prose(split_sentences(text)[0]) == prose


def test_a_repetition_has_the_words_or_trigrams_of_an_earlier_sentence():
    """Three quarters of the content words in one sentence, or two fifths of the trigrams anywhere."""
    (old,) = split_sentences("The trees of a town give a cool shade.")
    earlier = EarlierSentences([old])
    for text, repeated in (
        ("A cool town gives shade to a visitor.", True),  # cool, town, giv, shad: four of five
        ("A cool town gives light to a visitor.", False),
        ("The trees of a town were once planted by monks of the abbey nearby.", False),  # 3 of 12 trigrams
        ("The trees of a town give monks joy and honey.", True),  # 4 of 8
        ("The trees of a town make monks and bees hum.", False),  # 3 of 8
        ("Bees hum well here bees hum well here bees hum well here.", True),  # itself
    ):
        (sentence,) = split_sentences(text)
        assert earlier.repeats(sentence) == repeated, text
    assert stem("voting") == stem("votes") == stem("vote") and stem("families") == stem("family")
    assert stem("planning") == stem("plan") and stem("classes") == stem("class") and stem("town's") == "town"


# --- keyword stuffing, repetition and copying ---


def low_score(pro):
    """Return the score of pro, which must be far below that of the honest speeches."""
    score = terms(pro, CON)["score"]
    assert score < terms(PRO, CON)["score"] - 0.3
    return score


MARKERS = "because therefore study research data first second finally for example according to thus hence evidence statistics"


@pytest.mark.parametrize("text", [
    MARKERS,
    ". ".join(MARKERS.split()) + ".",
    f"{MARKERS} towns plant trees shade weather " * 8,
    "Because of this, therefore, for example, as a study of the data shows, it is so. " * 3,
    " ".join(TASK["pro_points"] * 5),
    f"{TASK['motion']} {TASK['background']} {TASK['pro_points'][0]}",
    "Shade keeps, old people healthy, in hot weather. " * 4,
    "",
    "ну да " * 100,
    "trees " * 300,
    "The recipe needs eggs because the dough is dry. A study shows that 12 cooks liked the cake, therefore try it at home.",
])  # fmt: skip
def test_lists_copies_and_off_topic_speeches_score_nothing(text):
    assert low_score([text, text]) == 0
    assert low_score([text, ""]) == 0


def test_reading_out_the_notes_scores_nothing():
    """On every motion. The script, which puts words around its notes, scores above 0.7 (test_debate.py)."""
    prose = 0
    for task in load_motions():
        for side in ("pro", "con"):
            notes = " ".join(task[f"{side}_points"])
            prose += sum(map(is_prose, split_sentences(notes)))
            assert terms([notes, f"{task['motion']} {notes}"], [notes, notes], side, task)["score"] == 0
    assert prose > 100


def test_repeating_a_paragraph_lowers_the_score():
    """In the same speech, in the next one, with words around it, in another order, and without full stops."""
    once = terms([PRO[0], ""])["score"]
    assert terms([f"{PRO[0]} {PRO[0]}", ""])["score"] < once and terms([f"{PRO[0]}\n" * 3, ""])["score"] < once
    twice = terms([PRO[0], PRO[0]])
    assert twice["consistency"] == 0 and twice["score"] == pytest.approx(once) and twice["score"] < terms(PRO)["score"] - 0.3
    reordered = " ".join(reversed([f"And so, {s.text[:1].lower()}{s.text[1:]}" for s in split_sentences(PRO[0])]))
    assert terms([PRO[0], reordered])["score"] == pytest.approx(once)
    unpunctuated = PLAIN.rstrip(".") + " and "
    assert terms_of_speech(unpunctuated * 2)["argument"] == 0 < terms_of_speech(PLAIN)["argument"]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.sampled_from([*PRO, PLAIN, MARKERS, *TASK["pro_points"], TASK["motion"]]), max_size=4), st.integers(0, 5))
def test_a_repetition_never_improves_a_speech(texts, i):
    speech = "\n".join(texts)
    repeated = f"{speech}\n{texts[i % len(texts)]}" if texts else speech
    assert terms_of_speech(repeated)["argument"] <= terms_of_speech(speech)["argument"] + 1e-9


def test_copying_the_opponent_earns_nothing():
    copied = terms([PRO[0], PRO[1]], [PRO[0], PRO[1]], "con")
    assert copied["score"] == 0 and terms([PRO[0], CON[0]], CON)["argument"] == pytest.approx(
        terms([PRO[0], ""], CON)["argument"]
    )
    both = begin_debate(TASK, True)
    for text in PRO:
        both = add_speech(add_speech(both, "pro", text), "con", text)  # neither could read the other
    info = RuleBasedJudge()(both, RNG).info
    assert info["con_argument"] == info["pro_argument"] == pytest.approx(1)


def against_script(task, side, speech):
    """Return the verdict on a debate in which a side gives the same speech twice, against the script."""
    state = begin_debate(task, False)
    while len(state.speeches) < 4:
        speaker = speaking_sides(state)[0]
        text = speech if speaker == side else scripted_speech(state, speaker, 2)
        state = add_speech(state, speaker, text)
    return RuleBasedJudge()(state, RNG)


def test_script_against_script_is_a_fair_debate():
    for task in load_motions():
        state = begin_debate(task, False)
        while len(state.speeches) < 4:
            side = speaking_sides(state)[0]
            state = add_speech(state, side, scripted_speech(state, side, 2))
        verdict = RuleBasedJudge()(state, RNG)
        assert min(verdict.pro, verdict.con) > 0.7 and abs(verdict.pro - verdict.con) < 0.1


@pytest.mark.parametrize("side", ["pro", "con"])
def test_saying_the_opponents_words_first_does_not_lower_its_score(side):
    """The script's frames around other text, a whole ending, or each of its trigrams on a line: its score stays."""
    other = "con" if side == "pro" else "pro"
    for task in load_motions()[:20]:
        alone = getattr(against_script(task, side, ""), other)
        frames = [frame.format("this is so") for frame in FRAMES]
        words = " ".join(frames).split()
        motion = task["motion"][:1].lower() + task["motion"][1:].rstrip(".")
        endings = [ending.format("that is so") for ending in ENDINGS[other]]
        for speech in (
            " ".join([*frames, *endings]),
            " ".join([*frames, ENDINGS[other][0].format(motion)]),
            "\n".join(" ".join(words[i : i + 3]) for i in range(len(words))),
        ):
            verdict = against_script(task, side, speech)
            assert getattr(verdict, other) > alone - 0.05
            assert getattr(verdict, side) < getattr(verdict, other)


def test_a_copy_has_the_content_words_in_the_same_order():
    (old,) = split_sentences("Old roots lift stones and break pipes, cables, walls, paths, gates below quiet streets.")
    for text, copy in (
        ("Old roots lift stones and break pipes, cables, walls, paths, gates below quiet streets.", True),
        ("So the old roots lift stones, break the pipes, cables, walls, paths and gates below quiet roads.", True),  # 11 of 12
        ("So the old roots lift stones, break the pipes, cables, walls, paths and doors below quiet roads.", False),  # 10
        ("Quiet streets, gates, paths, walls, cables and pipes below break, stones lift old roots.", False),
        ("Old roots lift stones.", True),
    ):
        assert is_copy(split_sentences(text)[0], [old]) == copy, text
    assert not is_copy(old, [])


GIBBERISH = (
    "First, according to a study, the fatal of the required is for the town and the prevent with the pebina and the vopapi "
    "because the mubevo is of the trees. "
)


def test_a_template_counts_once():
    """The same function words around other content say nothing new; four or fewer may coincide by chance."""
    filled = " ".join(
        f"First, according to a study, the {a}k of the {a}l is for the {a}m and the {a}n with the {a}o and the trees because "
        f"the {a}p is of the {a}q."
        for a in ("baba", "cece", "didi")
    )
    once = GIBBERISH + "The trees of a city give the wind a path to follow. The birds of a town need the wood and a twig."
    assert terms_of_speech(filled)["kept"] < 0.5 and terms_of_speech(once)["kept"] == 1


def test_a_side_that_has_not_spoken_is_an_error():
    with pytest.raises(ValueError, match="con has not spoken"):
        RuleBasedJudge()(add_speech(begin_debate(TASK, False), "pro", PLAIN), RNG)
