"""A judge of debates by rules, built so that keyword stuffing, repetition and copying earn nothing.

A sentence *counts* if all of these hold:
  Prose: it has at least 5 words and 3 different content words (neither function words nor markers); at least 15 % of its words
    are function words (a list has hardly any), and at most a third are markers.
  New: fewer than 3/4 of its content words are in any one earlier sentence; fewer than 2/5 of its trigrams occurred before; and
    no earlier sentence has the same sequence of function words and markers, if these are 5 or more (a template). Earlier
    sentences are motion, background, the side's own key points, and what the side itself said.
  Not copied: no earlier sentence of the opponent has 9/10 of its content words in the same order. A lesser likeness is allowed,
    so that a side cannot use up the other's words by saying them first.
  To the point: it, or the sentence before it, has a content word of motion, background or either side's key points.

Only sentences that count are scored. Others also cost: an argument is multiplied by min(1, share / .8), where share is the
share of the speech's characters that count.

    argument = min(1, share / .8) * (.2 length + .25 evidence + .25 reasoning + .15 structure + .15 relevance)
      length      characters / 100 below 100; 1 from 100 to 500; then falling linearly to .5 at 2,000, where speeches are cut
      evidence    min(1, n / 2) for n sentences with a marker of evidence (study, for example, a number) new in the speech
      reasoning   the same with markers of reasoning (because, therefore, ...)
      structure   .5 min(1, sentences / 3) + .5 min(1, n / 2) for n sentences with a new marker of order (first, finally, ...)
      relevance   min(1, (content words of the motion that are used) / (half of them, rounded up))
    debate = .6 (mean argument of the speeches) + .2 consistency + .2 coverage
      consistency mean over the speeches from the second on of link(share of its content words that the side used before). link
                  rises from 0 to 1 at .1 and falls from 1 at .7 to 0 at 1 (saying the same again is no debate). With a single
                  speech: 1 if a sentence counts. 0 if the side concedes ("I agree with my opponent") or changes sides.
      coverage    mean over the side's own key points of min(1, share / .6), where share is the largest share of the point's
                  content words in one speech. Without key points the score is (.6 argument + .2 consistency) / .8.

Scores are in [0, 1]. Measures: the terms of each side, such as `pro_length`; `kept` is the factor min(1, share / .8).
Left out: whether a claim is true or makes sense, grammar, and languages other than English, whose sentences do not count.
Nonsense can win: invented syllables and words of motion and notes between random function words, with two markers per sentence,
scored 0.91 on this project's motions (mean; the script 0.76), and 0.53 where the function words hardly vary. Reading out three
whole endings of the script takes up to .33 from it and earns .15 to .27. The time per sentence is proportional to the number of
sentences before it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from jmarl.envs.debate.sentences import (
    EVIDENCE,
    ORDER,
    REASONING,
    EarlierSentences,
    Sentence,
    content_of,
    is_copy,
    is_prose,
    split_sentences,
    union_of_content,
)
from jmarl.envs.debate.transcript import SIDES, SPEECH_CHARS, DebateVerdict, Transcript

FREE_SHARE = 0.8  # share of a speech that must count for the full score
ARGUMENT_WEIGHTS = {"length": 0.2, "evidence": 0.25, "reasoning": 0.25, "structure": 0.15, "relevance": 0.15}
DEBATE_WEIGHTS = {"argument": 0.6, "consistency": 0.2, "coverage": 0.2}
NUMBER = re.compile(r"\d\d|\d+ ?%")
CONCESSIONS = ("i agree with my opponent", "my opponent is right", "you are right", "i concede", "i was wrong")
OPPOSITE_STANCE = {
    "pro": ("i oppose the motion", "i am against the motion", "i argue against the motion", "i speak against the motion"),
    "con": ("i support the motion", "i am for the motion", "i argue for the motion", "i speak for the motion"),
}


class RuleBasedJudge:
    """The judge by the rules above: judge(transcript, rng) -> Verdict. It draws nothing; arguments are means over speeches."""

    def __call__(self, debate: Transcript, rng: np.random.Generator | None = None) -> DebateVerdict:
        """Return the scores and their terms; raise ValueError if a side has not spoken."""
        del rng
        info: dict[str, float] = {}
        scores = {}
        for side in SIDES:
            terms = self.score_side(debate, side)
            scores[side] = terms.pop("score")
            info |= {f"{side}_{name}": value for name, value in terms.items()}
        return DebateVerdict(scores["pro"], scores["con"], info)

    def score_side(self, debate: Transcript, side: str) -> dict[str, float]:
        """Return the terms of a side's score, and the score itself as `score`."""
        topic = content_of(debate.motion)
        all_points = [point for points in debate.points.values() for point in points]
        subject = topic | content_of(" ".join([debate.background, *all_points]))
        own_texts = [debate.motion, debate.background, *debate.points.get(side, ())]
        earlier = EarlierSentences(sentence for text in own_texts for sentence in split_sentences(text))
        own, opponent = list[Sentence](), list[Sentence]()  # all sentences of both sides so far
        contents, arguments = [], []  # of each speech of the side
        for speaker, text in speech_order(debate, side):
            sentences = split_sentences(text)
            if speaker != side:
                opponent += sentences
                continue
            counting = counting_sentences(sentences, earlier, subject, opponent)
            own += sentences
            contents.append(union_of_content(counting))
            arguments.append(score_argument(sentences, counting, topic))
        if not arguments:
            raise ValueError(f"{side} has not spoken: judge a debate when it is over")
        terms = {name: sum(argument[name] for argument in arguments) / len(arguments) for name in arguments[0]}
        terms["consistency"] = consistency(contents, own, side)
        terms["coverage"] = coverage(contents, debate.points.get(side, ()))
        weights = {name: weight for name, weight in DEBATE_WEIGHTS.items() if not math.isnan(terms[name])}
        score = sum(weight * terms[name] for name, weight in weights.items()) / sum(weights.values())
        return terms | {"score": min(1.0, score)}

    def describe(self) -> dict[str, Any]:
        """Return what a resumed run must find unchanged."""
        return {"class": type(self).__name__}


def speech_order(debate: Transcript, side: str) -> list[tuple[str, str]]:
    """Return (side, text) of the speeches in the order in which a side made or read them. Of two simultaneous speeches, its own
    comes first."""
    if not debate.simultaneous:
        return list(debate.speeches)
    numbered = sorted(enumerate(debate.speeches), key=lambda pair: (pair[0] // 2, pair[1][0] != side))
    return [speech for _, speech in numbered]


def counting_sentences(
    sentences: Sequence[Sentence],
    earlier: EarlierSentences,
    subject: frozenset[str],
    opponent: Sequence[Sentence] = (),
) -> list[Sentence]:
    """Return the sentences of a speech that count.

    Args:
        sentences: of the speech; all of them are added to `earlier`.
        earlier: what the side said or read before.
        subject: content words of motion, background and key points.
        opponent: what the opponent said before.
    """
    counting, previous_content = [], frozenset[str]()
    for sentence in sentences:
        to_the_point = subject & (sentence.content | previous_content)
        if to_the_point and is_prose(sentence) and not earlier.repeats(sentence) and not is_copy(sentence, opponent):
            counting.append(sentence)
        earlier.add(sentence)
        previous_content = sentence.content
    return counting


def score_argument(sentences: Sequence[Sentence], counting: Sequence[Sentence], topic: frozenset[str]) -> dict[str, float]:
    """Return the terms of a speech's argument, and the argument itself as `argument`.

    Args:
        sentences: of the speech.
        counting: those that count.
        topic: content words of the motion.
    """
    num_counting = _num_characters(counting)
    share = num_counting / max(_num_characters(sentences), 1)
    topic_used = topic & union_of_content(counting)
    terms = {
        "length": length_score(num_counting),
        "evidence": min(1.0, count_marked(counting, EVIDENCE, numbers=True) / 2),
        "reasoning": min(1.0, count_marked(counting, REASONING) / 2),
        "structure": 0.5 * min(1.0, len(counting) / 3) + 0.5 * min(1.0, count_marked(counting, ORDER) / 2),
        "relevance": min(1.0, len(topic_used) / math.ceil(len(topic) / 2)) if topic else 0.0,
    }
    factor = min(1.0, share / FREE_SHARE)
    argument = factor * sum(weight * terms[name] for name, weight in ARGUMENT_WEIGHTS.items())
    return terms | {"kept": factor, "argument": argument}


def _num_characters(sentences: Sequence[Sentence]) -> int:
    return len(" ".join(sentence.text for sentence in sentences))


def length_score(characters: int) -> float:
    """Return the term for the length of an argument."""
    if characters < 100:
        return characters / 100
    return 1.0 if characters <= 500 else max(0.5, 1 - 0.5 * (characters - 500) / (SPEECH_CHARS - 500))


def count_marked(sentences: Sequence[Sentence], markers: Sequence[str], numbers: bool = False) -> int:
    """Return the number of sentences with a marker that no sentence before had.

    Args:
        sentences: to search.
        markers: words and phrases.
        numbers: whether a number of two digits or a percentage is also a marker.
    """
    used: set[str] = set()
    count = 0
    for sentence in sentences:
        text = f" {' '.join(sentence.words)} "
        present = {marker for marker in markers if f" {marker} " in text}
        if numbers and NUMBER.search(sentence.text):
            present.add("a number")
        count += bool(present - used)
        used |= present
    return count


def link(share: float) -> float:
    """Return how well a speech continues the earlier ones, from the share of its content words that they had."""
    return min(1.0, share / 0.1) if share <= 0.7 else (1 - share) / 0.3


def consistency(contents: Sequence[frozenset[str]], sentences: Sequence[Sentence], side: str) -> float:
    """Return the consistency of a side.

    Args:
        contents: content words of each speech, from the sentences that count.
        sentences: all sentences of the side.
        side: pro or con.
    """
    texts = [f" {' '.join(sentence.words)} " for sentence in sentences]
    if any(f" {phrase} " in text for text in texts for phrase in (*CONCESSIONS, *OPPOSITE_STANCE[side])):
        return 0.0
    used, links = frozenset[str](), []
    for words in contents:
        links.append(link(len(words & used) / len(words)) if words else 0.0)
        used |= words
    return sum(links[1:]) / (len(links) - 1) if len(links) > 1 else float(any(contents))


def coverage(contents: Sequence[frozenset[str]], points: Sequence[str]) -> float:
    """Return how much of the key points the speeches cover; NaN without key points.

    Args:
        contents: content words of each speech, from the sentences that count.
        points: key points of the side.
    """
    shares = []
    for point in points:
        point_content = content_of(point)
        best = max((len(point_content & words) for words in contents), default=0)
        shares.append(min(1.0, best / max(len(point_content), 1) / 0.6))
    return sum(shares) / len(shares) if shares else math.nan
