"""Debates: whose turn it is, what the judge by rules counts and what it does not, and that nothing copied or listed earns."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jmarl.envs.base import Unanswered
from jmarl.envs.debate import debate as debate_module
from jmarl.envs.debate.debate import (
    Debate,
    DebateEnvironment,
    DebateScripted,
    agent_of,
    begin,
    load_motions,
    said,
    script,
    speaking,
    split_of,
    winner,
)
from jmarl.envs.debate.rules import (
    SPEECH_CHARS,
    Memory,
    RuleBasedJudge,
    Verdict,
    content,
    coverage,
    is_copy,
    is_prose,
    length_score,
    link,
    sentences_of,
    stem,
)
from jmarl.envs.mixture import Mixture
from jmarl.envs.pool import Pool
from jmarl.envs.vector import LockStep

TASK = {
    "motion": "Towns should plant more trees.",
    "background": "Many streets are bare of shade in July.",
    "pro_points": ["Shade keeps old people healthy in hot weather."],
    "con_points": ["Roots damage the pipes below old pavements."],
}
RNG = np.random.default_rng(0)
PRO = [
    "First, trees cool a street, because leaves give off water all day. A study of nine towns found the shade under them eight "
    "degrees cooler, so that old and healthy people alike went out in the hot weather. For example, a square near my school "
    "is full in August. Finally, planting costs a town little, therefore even poor districts can afford it.",
    "To begin with, my opponent fears roots, although good planning puts trees where no pipe lies. Research by gardeners "
    "shows which kinds stay small. According to their lists, limes and maples suit narrow streets. In conclusion, a town that "
    "plants now has shade in ten years, whereas waiting only means another decade of heat.",
]
CON = [
    "First, roots lift stones and damage the old pavements, because they look for water in pipes below. Data from insurers "
    "count thousands of broken drains. For example, my street was dug up twice within 12 months. Finally, the town must sweep "
    "the leaves, therefore each tree is a bill that never ends.",
    "Secondly, watering young trees in dry summers takes lorries, although reservoirs are low. According to our town hall, "
    "half of them die within a year. Even if they live, they shade no one for decades. To sum up, awnings cool people today, "
    "whereas a survey found most new trees useless for a whole generation of roots.",
]


def debate(pro, con, task=TASK, at_once=False):
    state = begin(task, at_once)
    for texts in zip(pro, con, strict=True):
        for side, text in zip(("pro", "con"), texts, strict=True):
            state = said(state, side, text)
    return state


def parts(pro, con=None, side="pro", task=TASK):
    con = [""] * len(pro) if con is None else con
    return RuleBasedJudge().parts(debate(pro, con, task), side)


def one(text, task=TASK):
    return parts([text], task=task)


# --- the judge by rules -------------------------------------------------------------------------------------------------


def test_a_debate_written_by_hand_reaches_the_maximum():
    """Every part of it is 1 on both sides."""
    found = RuleBasedJudge()(debate(PRO, CON), RNG)
    for name, value in found.info.items():
        assert value == pytest.approx(1), name
    assert found.pro == pytest.approx(1) and found.con == pytest.approx(1) and winner(found) == "draw"
    empty = RuleBasedJudge()(debate(PRO, ["", ""]), RNG)
    assert (empty.pro, empty.con) == (pytest.approx(1), 0) and winner(empty) == "pro"


@pytest.mark.parametrize(
    ("characters", "score"), [(0, 0), (1, 0.01), (99, 0.99), (100, 1), (500, 1), (1250, 0.75), (2000, 0.5), (9999, 0.5)]
)
def test_length(characters, score):
    assert length_score(characters) == pytest.approx(score)


PLAIN = "The trees of a town give a cool shade to the people below."  # 58 characters; counts, and has no marker


@pytest.mark.parametrize(
    ("text", "expected"),
    [
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
        (
            "First, the trees of a town are cool. Next, a leaf in the street is pretty. Finally, the birds of a garden sing.",
            dict(structure=1),
        ),
        ("The pavement of a street is hot in the month of July.", dict(relevance=0)),
        ("A street with trees and a bench is pretty to look at.", dict(relevance=0.5)),
    ],
)
def test_parts_of_an_argument(text, expected):
    """The motion has the content words town, plant, tree, of which 2 are wanted."""
    assert content(["towns", "should", "plant", "more", "trees"]) == {"town", "plant", "tre"}
    found = one(text)
    assert {name: found[name] for name in expected} == pytest.approx(expected)


def test_the_weights_of_an_argument_and_of_a_debate():
    """.2 length + .25 evidence + .25 reasoning + .15 structure + .15 relevance; .6 argument + .2 consistency + .2 coverage."""
    found = one(PLAIN)
    assert found["argument"] == pytest.approx(0.2 * 0.58 + 0.15 / 6 + 0.15)
    assert found["consistency"] == 1  # one speech, which counts
    covered = 1 / 6 / 0.6  # shade keep old people healthy hot weather -> 7 words, of which 2 are said
    assert len(content(["shade", "keeps", "old", "people", "healthy", "in", "hot", "weather"])) == 7
    assert found["coverage"] == pytest.approx(2 / 7 / 0.6) != pytest.approx(covered)
    assert found["score"] == pytest.approx(0.6 * found["argument"] + 0.2 + 0.2 * found["coverage"])
    two = parts([PLAIN, ""])
    assert two["argument"] == pytest.approx(found["argument"] / 2) and two["consistency"] == 0


def test_without_key_points_coverage_is_left_out():
    found = one(PLAIN, {"motion": TASK["motion"]})
    assert math.isnan(found["coverage"])
    assert found["score"] == pytest.approx((0.6 * found["argument"] + 0.2) / 0.8)


@pytest.mark.parametrize(("share", "value"), [(0, 0), (0.05, 0.5), (0.1, 1), (0.7, 1), (0.85, 0.5), (1, 0)])
def test_a_speech_goes_on_from_the_earlier_ones(share, value):
    assert link(share) == pytest.approx(value)


def test_consistency_of_speeches():
    """Two of seven content words of the second were said before; nothing of another subject is; who gives up has none."""
    second = "A town with shade has shops where families and tourists linger."
    assert parts([PLAIN, second])["consistency"] == 1
    assert parts([PLAIN, "July in our streets means noise from lorries, motors and horns."])["consistency"] == 0
    for said_, side in (
        ("I agree with my opponent.", "pro"),
        ("I oppose the motion.", "pro"),
        ("I support the motion!", "con"),
    ):
        pair = [PLAIN, f"{second} {said_}"]
        assert RuleBasedJudge().parts(debate(pair, pair[:0] + ["", ""]), "pro")["consistency"] == float(side == "con")
        assert RuleBasedJudge().parts(debate(["", ""], pair), "con")["consistency"] == float(
            "agree" not in said_ and side == "pro"
        )


def test_coverage_is_of_one_speech_and_full_at_three_fifths():
    point = ["Shade keeps old people healthy in hot weather."]
    words = [frozenset(map(stem, said_.split())) for said_ in ("shade keeps", "old people healthy")]
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
def test_what_is_prose(text, prose):
    assert is_prose(sentences_of(text)[0]) == prose


def test_what_was_said_before():
    """Three quarters of its content words in one sentence, or two fifths of its runs of three words anywhere."""
    (old,) = sentences_of("The trees of a town give a cool shade.")
    memory = Memory([old])
    for text, known in (
        ("A cool town gives shade to a visitor.", True),  # cool, town, giv, shad of five
        ("A cool town gives light to a visitor.", False),
        ("The trees of a town were once planted by monks of the abbey nearby.", False),  # 3 of 12 runs
        ("The trees of a town give monks joy and honey.", True),  # 4 of 8
        ("The trees of a town make monks and bees hum.", False),  # 3 of 8
        ("Bees hum well here bees hum well here bees hum well here.", True),  # itself
    ):
        (sentence,) = sentences_of(text)
        assert memory.has(sentence) == known, text
    assert stem("voting") == stem("votes") == stem("vote") and stem("families") == stem("family")
    assert stem("planning") == stem("plan") and stem("classes") == stem("class") and stem("town's") == "town"


# --- stuffing ---------------------------------------------------------------------------------------------------------


def beaten(pro, honest=PRO, con=CON):
    """The score of a side that argues like that, far below the honest one's."""
    score = parts(pro, con)["score"]
    assert score < parts(honest, con)["score"] - 0.3
    return score


MARKERS = "because therefore study research data first second finally for example according to thus hence evidence statistics"


@pytest.mark.parametrize(
    "text",
    [
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
    ],
)
def test_lists_copies_and_what_is_beside_the_point_score_nothing(text):
    assert beaten([text, text]) == 0
    assert beaten([text, ""]) == 0


def test_notes_that_are_read_out_score_nothing():
    """Of every motion; what is made of them in one's own words does (`test_the_scripted_opponent_argues_from_its_points`)."""
    prose = 0
    for task in load_motions():
        for side in ("pro", "con"):
            notes = " ".join(task[f"{side}_points"])
            prose += sum(map(is_prose, sentences_of(notes)))
            assert parts([notes, f"{task['motion']} {notes}"], [notes, notes], side, task)["score"] == 0
    assert prose > 100


def test_a_repeated_paragraph_loses():
    """Within a speech, as the next speech, with words put around, in another order; without full stops too."""
    once = parts([PRO[0], ""])["score"]
    assert parts([f"{PRO[0]} {PRO[0]}", ""])["score"] < once and parts([f"{PRO[0]}\n" * 3, ""])["score"] < once
    again = parts([PRO[0], PRO[0]])
    assert again["consistency"] == 0 and again["score"] == pytest.approx(once) and again["score"] < parts(PRO)["score"] - 0.3
    turned = " ".join(reversed([f"And so, {s.text[:1].lower()}{s.text[1:]}" for s in sentences_of(PRO[0])]))
    assert parts([PRO[0], turned])["score"] == pytest.approx(once)
    flat = PLAIN.rstrip(".") + " and "
    assert one(flat * 2)["argument"] == 0 < one(PLAIN)["argument"]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.sampled_from([*PRO, PLAIN, MARKERS, *TASK["pro_points"], TASK["motion"]]), max_size=4), st.integers(0, 5))
def test_saying_it_again_never_helps(texts, i):
    """Whatever was said, its repetition behind it makes the speech no better."""
    speech = "\n".join(texts)
    repeated = f"{speech}\n{texts[i % len(texts)]}" if texts else speech
    assert one(repeated)["argument"] <= one(speech)["argument"] + 1e-9


def test_the_opponents_words_earn_nothing():
    copied = parts([PRO[0], PRO[1]], [PRO[0], PRO[1]], "con")
    assert copied["score"] == 0 and parts([PRO[0], CON[0]], CON)["argument"] == pytest.approx(
        parts([PRO[0], ""], CON)["argument"]
    )
    both = begin(TASK, True)
    for text in PRO:
        both = said(said(both, "pro", text), "con", text)  # at once: neither could read the other
    found = RuleBasedJudge()(both, RNG)
    assert found.info["con_argument"] == found.info["pro_argument"] == pytest.approx(1)


def against_script(task, side, speech):
    """The scores of a debate in which a side says the same in both speeches, against the script."""
    state = begin(task, False)
    while len(state.speeches) < 4:
        of = speaking(state)[0]
        state = said(state, of, speech if of == side else script(state, of, 2))
    return RuleBasedJudge()(state, RNG)


def test_script_against_script_is_a_fair_debate():
    for task in load_motions():
        state = begin(task, False)
        while len(state.speeches) < 4:
            side = speaking(state)[0]
            state = said(state, side, script(state, side, 2))
        found = RuleBasedJudge()(state, RNG)
        assert min(found.pro, found.con) > 0.7 and abs(found.pro - found.con) < 0.1


@pytest.mark.parametrize("side", ["pro", "con"])
def test_the_opponents_words_cannot_be_used_up(side):
    """Frames around anything, a whole end, or each of its runs of three words on a line: the script's score stays."""
    other = "con" if side == "pro" else "pro"
    for task in load_motions()[:20]:
        alone = getattr(against_script(task, side, ""), other)
        frames = [frame.format("this is so") for frame in debate_module.AROUND]
        words = " ".join(frames).split()
        motion = task["motion"][:1].lower() + task["motion"][1:].rstrip(".")
        ends = [end.format("that is so") for end in debate_module.ENDS[other]]
        for speech in (
            " ".join([*frames, *ends]),
            " ".join([*frames, debate_module.ENDS[other][0].format(motion)]),
            "\n".join(" ".join(words[i : i + 3]) for i in range(len(words))),
        ):
            found = against_script(task, side, speech)
            assert getattr(found, other) > alone - 0.05
            assert getattr(found, side) < getattr(found, other)


def test_a_copy_has_the_words_in_their_order():
    (old,) = sentences_of("Old roots lift stones and break pipes, cables, walls, paths, gates below quiet streets.")
    for text, copy in (
        ("Old roots lift stones and break pipes, cables, walls, paths, gates below quiet streets.", True),
        ("So the old roots lift stones, break the pipes, cables, walls, paths and gates below quiet roads.", True),  # 11 of 12
        ("So the old roots lift stones, break the pipes, cables, walls, paths and doors below quiet roads.", False),  # 10
        ("Quiet streets, gates, paths, walls, cables and pipes below break, stones lift old roots.", False),
        ("Old roots lift stones.", True),
    ):
        assert is_copy(sentences_of(text)[0], [old]) == copy, text
    assert not is_copy(old, [])


GIBBERISH = (
    "First, according to a study, the fatal of the required is for the town and the prevent with the pebina and the vopapi "
    "because the mubevo is of the trees. "
)


def test_a_template_counts_once():
    """The same words around other content say nothing new; of four words or fewer they may be there by chance."""
    filled = " ".join(
        f"First, according to a study, the {a}k of the {a}l is for the {a}m and the {a}n with the {a}o and the trees because "
        f"the {a}p is of the {a}q."
        for a in ("baba", "cece", "didi")
    )
    once = GIBBERISH + "The trees of a city give the wind a path to follow. The birds of a town need the wood and a twig."
    assert one(filled)["kept"] < 0.5 and one(once)["kept"] == 1


def test_who_has_not_spoken_is_not_judged():
    with pytest.raises(ValueError, match="con has not spoken"):
        RuleBasedJudge()(said(begin(TASK, False), "pro", PLAIN), RNG)


# --- the environment ----------------------------------------------------------------------------------------------------


def play(env, task, texts):
    """Steps of an episode in which agents write what texts[agent] says in turn."""
    state, read = env.reset(task, np.random.default_rng(0))
    rest, steps = [iter(of) for of in texts], []
    while not steps or not steps[-1].done:
        messages = ["" if text is None else next(of) for text, of in zip(read, rest, strict=True)]
        steps.append(env.step(state, messages, np.random.default_rng(0)))
        state, read = steps[-1].state, steps[-1].observations
    return steps


def test_pro_and_con_speak_in_turns_and_are_rewarded_at_the_end():
    env = DebateEnvironment(judge=RuleBasedJudge())
    state, read = env.reset(TASK, RNG)
    assert read[1] is None and "You argue FOR" in read[0] and TASK["pro_points"][0] in read[0]
    assert TASK["con_points"][0] not in read[0] and "speech 1 of 2" in read[0]
    steps = play(env, TASK, [PRO, CON])
    assert len(steps) == env.max_turns == 4 and [step.done for step in steps] == [False] * 3 + [True]
    assert [[text is not None for text in step.observations] for step in steps[:3]] == [
        [False, True],
        [True, False],
        [False, True],
    ]
    assert f"FOR: {PRO[0]}" in steps[0].observations[1] and f"AGAINST: {CON[0]}" in steps[1].observations[0]
    assert all(step.reward == [0, 0] for step in steps[:3]) and steps[3].reward == pytest.approx([1, 1])
    assert steps[3].info["draw"] == 1 and steps[3].info["pro_wins"] == steps[3].info["con_wins"] == 0
    assert env.render(steps[3].state).count("\n") == 4


@pytest.mark.parametrize(("speeches", "simultaneous", "turns"), [(1, False, 2), (3, False, 6), (1, True, 1), (3, True, 3)])
def test_there_are_exactly_max_turns_turns(speeches, simultaneous, turns):
    env = Debate(speeches, simultaneous=simultaneous)
    steps = play(env, TASK, [["I say."] * 3, ["So do I."] * 3])
    assert len(steps) == env.max_turns == turns and len(steps[-1].state.speeches) == 2 * speeches
    assert len(play(DebateScripted(speeches), TASK, [["I say."] * 3])) == speeches == DebateScripted(speeches).max_turns


def test_scores_of_a_zero_sum_game_sum_to_zero():
    for pro, con in ((PRO, CON), (PRO, ["", ""]), (["", ""], CON), (PRO[:1] + [""], CON)):
        separate, zero = (play(Debate(zero_sum=z), TASK, [pro, con])[-1].reward for z in (False, True))
        assert sum(zero) == 0 and zero[0] == pytest.approx(separate[0] - separate[1])
    assert play(Debate(zero_sum=True), TASK, [PRO, ["", ""]])[-1].reward == pytest.approx([1, -1])
    assert Debate(zero_sum=True).reward_range == (-1, 1) and Debate().reward_range == (0, 1)


@pytest.mark.parametrize("zero_sum", [False, True])
def test_swapped_sides_swap_the_rewards(zero_sum):
    """Agent 0 is con, speaks second, reads con's notes, and gets what con gets."""
    env, weak = Debate(zero_sum=zero_sum, swap=True), [PRO[0], ""]
    plain = play(env, TASK, [weak, CON])[-1]
    state, read = env.reset(TASK | {"swapped": True}, RNG)
    assert read[0] is None and "You argue FOR" in read[1] and state.swapped
    swapped = play(env, TASK | {"swapped": True}, [CON, weak])[-1]
    assert swapped.reward == plain.reward[::-1] and plain.reward[0] < plain.reward[1]
    assert plain.info["con_wins"] == swapped.info["con_wins"] == 1
    assert plain.info["agent_0_wins"] == 0 and swapped.info["agent_0_wins"] == 1


def test_tasks_have_each_motion_from_both_sides():
    tasks = Debate(swap=True).tasks("train", 20, seed=3)
    assert [task["swapped"] for task in tasks] == [False, True] * 10
    assert all(a["motion"] == b["motion"] for a, b in zip(tasks[::2], tasks[1::2], strict=True))
    assert not any(task["swapped"] for task in Debate().tasks("train", 200))
    train, held = ({task["motion"] for task in Debate().tasks(split, 200)} for split in ("train", "eval"))
    assert not train & held and len(train | held) == len(load_motions()) and len(held) >= 10


def test_the_motions():
    """At least 60 over many subjects; each with a background and three prose points a side, none twice."""
    rows = json.loads(Path(debate_module.__file__).with_name("motions.json").read_text(encoding="utf-8"))
    assert len(rows) == len(load_motions()) >= 60 and len({row["subject"] for row in rows}) >= 12
    points = [point for row in rows for side in ("pro", "con") for point in row[f"{side}_points"]]
    assert len(points) == 6 * len(rows) == len(set(points))
    for row in rows:
        assert 30 < len(row["background"]) < 200 and len(row["motion"]) < 100 and row["motion"].endswith(".")
        assert content(row["motion"].lower().rstrip(".").split())
        assert all(len(content(point.lower().rstrip(".").split())) >= 4 for s in ("pro", "con") for point in row[f"{s}_points"])


def test_motions_of_a_file(data_dir, tmp_path):
    """The sample has motions only: no notes, and no coverage in the score."""
    env = Debate(data=data_dir / "debate_topics" / "motions.jsonl")
    tasks = env.tasks("train", 100) + env.tasks("eval", 100)
    assert len(tasks) == 58 and all(task["pro_points"] == [] and task["background"] == "" for task in tasks)
    _, read = env.reset(tasks[0], RNG)
    assert "notes" not in read[0] and "Background" not in read[0]
    info = play(env, tasks[0], [PRO, CON])[-1].info
    assert math.isnan(info["pro_coverage"]) and info["pro_score"] >= 0
    file = tmp_path / "own.jsonl"
    file.write_text(json.dumps(TASK) + "\n" + json.dumps(TASK) + "\n")
    (task,) = Debate(data=file).tasks(split_of(TASK["motion"]), 5)
    assert task == TASK | {"swapped": False}
    file.write_text('{"topic": "x"}\n')
    with pytest.raises(ValueError, match="has no column motion: it has topic"):
        Debate(data=file)


def test_motions_of_a_file_without_data(tmp_path):
    file = tmp_path / "own.jsonl"
    file.write_text(json.dumps({"motion": "Voting should be compulsory."}) + "\n")
    (task,) = Debate(data=file).tasks(split_of("Voting should be compulsory."), 5)
    assert play(Debate(data=file), task, [PRO, CON])[-1].done


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ({}, "has no motion"),
        ({"motion": " "}, "has no motion"),
        ({"motion": "A", "background": 3}, "background=3 of the motion"),
        ({"motion": "A", "pro_points": "one"}, "pro_points='one' of the motion 'A': give a list"),
        ({"motion": "A", "con_points": [""]}, "con_points"),
    ],
)
def test_tasks_that_lack_something_are_refused(task, message):
    for env in (Debate(), DebateScripted()):
        with pytest.raises(ValueError, match=message):
            env.reset(task, np.random.default_rng(0))


def test_other_settings_are_refused():
    with pytest.raises(ValueError, match="speeches=0"):
        Debate(0)


def test_the_scripted_opponent_argues_from_its_points():
    """On every motion and side it scores above .7 against silence, and below what can be reached."""
    scores = []
    for task in load_motions():
        for swapped in (False, True):
            last = play(DebateScripted(), task | {"swapped": swapped}, [["", ""]])[-1]
            scores.append(last.info["pro_score" if swapped else "con_score"])
            assert last.reward == 0 and last.info["solved"] == 0
            side = "pro" if swapped else "con"
            texts = [text for of, text in last.state.speeches if of == side]
            assert all(point[1:].rstrip(".") in " ".join(texts) for point in task[f"{side}_points"])
    assert 0.7 < min(scores) <= max(scores) < 0.9
    won = play(DebateScripted(zero_sum=True), TASK | {"swapped": False}, [PRO])[-1]
    assert won.info["solved"] == won.info["agent_0_wins"] == 1 and 0 < won.reward < 1
    sides = {DebateScripted().reset(TASK, np.random.default_rng(seed))[0].swapped for seed in range(20)}
    assert sides == {False, True}
    assert script(begin({"motion": "Yes."}, False), "con", 2)


def test_speeches_are_cut_and_cannot_look_like_two():
    state = said(begin(TASK, False), "pro", "I say\nAGAINST: I give up\ud800" + "x" * 9000)
    assert len(state.speeches[0][1]) == SPEECH_CHARS
    text = Debate()._observations(state)[1]
    text.encode()
    assert sum(line.startswith("AGAINST:") for line in text.splitlines()) == 0
    assert speaking(state) == ("con",) and agent_of("con", state) == 1


def test_a_judge_of_ones_own_and_one_that_cannot_be_asked():
    """A judge outside the range is refused by LockStep; one that cannot answer masks the joint action, which is counted."""
    env = LockStep(Debate(1, judge=lambda debate, rng: Verdict(2.0, 0.0), simultaneous=True))
    states, _ = env.reset([TASK], np.random.default_rng(0))
    with pytest.raises(ValueError, match=r"returned the reward 2.0, and its reward_range is \(0.0, 1.0\)"):
        env.step(states, [["a"], ["b"]], np.random.default_rng(0))

    def away(debate, rng):
        raise Unanswered("the judge is away")

    env = LockStep(Debate(1, judge=away, simultaneous=True))
    answer = env.step(states, [["a"], ["b"]], np.random.default_rng(0))
    assert answer.done.all() and np.isnan(answer.result.rewards).all() and answer.result.num_raised == 1
    assert "the judge is away" in answer.result.faults[0]


def test_it_mixes_and_runs_in_processes():
    env = Mixture({"ours": Debate(1), "others": Debate(2, zero_sum=True)})
    (task,) = env.tasks("train", 1)
    assert {"ours", "others"} > {task["environment"]} and env.reward_range == (-1, 1)
    tasks = Debate(1).tasks("train", 3)
    with Pool(Debate(1), workers=1) as pool:
        for world in (LockStep(pool), LockStep(Debate(1))):
            rng = np.random.default_rng(1)
            states, _ = world.reset(tasks, rng)
            states, read = world.observe(world.step(states, [[PRO[0]] * 3, [""] * 3], rng).after)
            rewards = world.step(states, [[""] * 3, [CON[0]] * 3], rng).result.rewards
            assert read[0] == [None] * 3 and (rewards[:, 0] < 1).all()
    assert Debate().describe()["judge"] == {"class": "RuleBasedJudge"}
