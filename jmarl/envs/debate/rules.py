"""A judge of debates by rules: what it counts in a speech, and why stuffing and repeating earn nothing.

A sentence *counts* if it is prose, new and to the point:
  it has 5 words or more, and 3 or more different content words (neither function words nor markers);
  at least 15 % of its words are function words (a list has hardly any) and at most a third are markers;
  fewer than 3/4 of its content words stand together in one earlier sentence, and fewer than 2/5 of its runs of three words
  occurred before, and no earlier sentence has the same function words and markers in the same order (if they are 5 or more):
  a template. Earlier are motion, background, the side's own key points and what the side itself said;
  it is no copy of what the opponent said before: not 9/10 of its content words stand in one sentence of that, in that order.
  No lesser likeness counts, so a side cannot use up the other's words by saying them first;
  it, or the sentence before it, has a content word of motion, background or either side's key points.
Everything below is of the sentences that count: what is copied, repeated, listed or beside the point is worth nothing. And it
costs: an argument is multiplied by min(1, share / .8), `share` being that of the speech's characters which count.

    argument = min(1, share / .8) * (.2 length + .25 evidence + .25 reasoning + .15 structure + .15 relevance)
      length      characters / 100 below 100; 1 from 100 to 500; then down to .5 at 2,000, where speeches are cut
      evidence    min(1, n / 2), n sentences with a marker of evidence (a study, an example, a number) new in the speech
      reasoning   the same with markers of reasoning (because, therefore, …)
      structure   .5 min(1, sentences / 3) + .5 min(1, n / 2), n of markers of order (first, finally, …)
      relevance   min(1, used / half of them, rounded up), of the motion's content words
    debate = .6 mean argument + .2 consistency + .2 coverage
      consistency mean over the speeches from the second on of link(share of its content words that the side used before);
                  link rises from 0 to 1 at .1, and falls from 1 at .7 to 0 at 1 (the same again is no debate). Of a single
                  speech 1 if a sentence counts. 0 if the side gives up ("I agree with my opponent") or changes sides.
      coverage    mean over the side's own key points of min(1, share / .6), of the point's content words in one speech. A
                  side without key points has none: its score is then (.6 argument + .2 consistency) / .8.

Left out: whether anything is true or makes sense, what is good English, and other languages than English (their sentences
do not count). Nonsense can win: invented syllables and words of the motion and of the notes between function words drawn at
random, with two markers a sentence, scored 0.91 on this project's motions (mean; the script 0.76), and 0.53 where the function
words stay nearly the same. Reading out three whole ends of the script takes up to .33 from it, and is itself worth .15 to .27.
Content words are compared by crude stems. The time it takes is that of a speech's sentences times those before it.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

SIDES = ("pro", "con")
SPEECH_CHARS = 2000
MIN_WORDS, MIN_CONTENT, MIN_FUNCTION, MAX_MARKERS = 5, 3, 0.15, 1 / 3
REPEATED_WORDS, REPEATED_RUNS = 3 / 4, 2 / 5
MIN_TEMPLATE = 5  # function words and markers
COPIED = 0.9
FREE = 0.8  # share of a speech that has to count
ARGUMENT = {"length": 0.2, "evidence": 0.25, "reasoning": 0.25, "structure": 0.15, "relevance": 0.15}
DEBATE = {"argument": 0.6, "consistency": 0.2, "coverage": 0.2}

_WORD = re.compile(r"\w+(?:['’]\w+)*")

EVIDENCE = (
    *("study", "studies", "research", "data", "survey", "surveys", "evidence", "statistics", "according to", "for example"),
    *("for instance", "percent", "per cent", "experiment", "experiments", "found that"),
)
REASONING = (
    *("because", "therefore", "thus", "hence", "consequently", "as a result", "so that", "which means", "this means"),
    *("leads to", "follows that", "for this reason", "although", "even if", "even though", "unless", "whereas", "however"),
    *("on the other hand", "in contrast", "otherwise"),
)
ORDER = (
    *("first", "firstly", "to begin with", "second", "secondly", "third", "thirdly", "next", "finally", "lastly"),
    *("in addition", "moreover", "furthermore", "above all", "in conclusion", "to conclude", "in summary", "to sum up"),
)
GIVES_UP = ("i agree with my opponent", "my opponent is right", "you are right", "i concede", "i was wrong")
STANCE = {
    "pro": ("i oppose the motion", "i am against the motion", "i argue against the motion", "i speak against the motion"),
    "con": ("i support the motion", "i am for the motion", "i argue for the motion", "i speak for the motion"),
}
FUNCTION = frozenset(
    _WORD.findall(
        "a an the this that these those some any each every all both no not nor none such other another same own "
        "i me my we us our you your he him his she her it its they them their who whom whose which what when where why how "
        "and or but so if than then as at by for from in into of off on onto out over under up down to with without within "
        "about above after again against before below between through during until while since too very more most much many "
        "few less least only just also even still yet ever never always often here there now is are was were be been being "
        "am do does did done doing have has had having will would shall should can could may might must let get gets got one "
        "ones because although though unless whereas however therefore thus hence otherwise "
        "don't doesn't didn't isn't aren't wasn't can't cannot won't it's that's i'm we're they're"
    )
)
MARKERS = frozenset(word for marker in (*EVIDENCE, *REASONING, *ORDER) for word in marker.split()) - frozenset(
    _WORD.findall(
        "the a to for in if on so that this which as up other all above with even by "
        "found means leads follows reason result hand begin sum"
    )
)
_END = re.compile(r"(?<=[.!?])\s+|\n+")
_NUMBER = re.compile(r"\d\d|\d+ ?%")


class Transcript(NamedTuple):
    """A debate so far; also the state of an episode."""

    motion: str
    background: str
    points: dict[str, tuple[str, ...]]  # of each side; may be empty
    speeches: tuple[tuple[str, str], ...] = ()  # side and text, in the order of speaking
    swapped: bool = False  # agent 0 is con
    at_once: bool = False  # both sides speak in every turn, pro's speech stands first

    def said_by(self, side: str) -> list[str]:
        return [text for of, text in self.speeches if of == side]


class Verdict(NamedTuple):
    """Scores in [0, 1], and numbers for the log. A judge is `judge(transcript, rng) -> Verdict`."""

    pro: float
    con: float
    info: Mapping[str, float] = {}


class Sentence(NamedTuple):
    text: str
    words: tuple[str, ...]
    content: frozenset[str]  # stems
    order: tuple[str, ...]  # the same as they first occur
    template: tuple[str, ...]  # the words that are no content


@lru_cache(maxsize=1 << 16)
def stem(word: str) -> str:
    """voting, votes and vote are vot; families and family famil."""
    word = word.replace("’", "'").removesuffix("'s")
    for ending in ("ings", "ing", "ies", "ied", "ed", "es", "s"):
        if word.endswith(ending) and len(word) - len(ending) >= 3:
            word = word[: -len(ending)]
            word = word[:-1] if word[-1] == word[-2] else word
            break
    return word[:-1] if word[-1:] in ("e", "y") and len(word) > 3 else word


def content(words: Iterable[str]) -> frozenset[str]:
    return frozenset(_in_order(words))


def _in_order(words: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(stem(w) for w in words if len(w) > 2 and w not in FUNCTION and w not in MARKERS))


@lru_cache(maxsize=1 << 10)  # motions and notes are read at every judgement, a speech several times
def sentences_of(text: str) -> tuple[Sentence, ...]:
    """What ends with a full stop and a space, an exclamation or question mark, or a line."""
    found = []
    for piece in _END.split(text[:SPEECH_CHARS]):
        if piece := " ".join(piece.split()):
            words = tuple(_WORD.findall(piece.lower()))
            order, template = _in_order(words), tuple(word for word in words if word in FUNCTION or word in MARKERS)
            found.append(Sentence(piece, words, frozenset(order), order, template))
    return tuple(found)


class Memory:
    """What a side said before, and what it was given."""

    def __init__(self, sentences: Iterable[Sentence]):
        self.contents: list[frozenset[str]] = []
        self.runs: set[tuple[str, ...]] = set()
        self.templates: set[tuple[str, ...]] = set()
        for sentence in sentences:
            self.add(sentence)

    def add(self, sentence: Sentence) -> None:
        if sentence.content:
            self.contents.append(sentence.content)
        self.runs.update(_runs(sentence.words))
        if len(sentence.template) >= MIN_TEMPLATE:
            self.templates.add(sentence.template)

    def has(self, sentence: Sentence) -> bool:
        """Whether the sentence says it again, or says one thing over and over itself."""
        if sentence.template in self.templates:
            return True
        needed = REPEATED_WORDS * len(sentence.content)
        if any(len(sentence.content & other) >= needed for other in self.contents):
            return True
        runs = _runs(sentence.words)
        return bool(runs) and len(set(runs) - self.runs) <= (1 - REPEATED_RUNS) * len(runs)


def _runs(words: Sequence[str]) -> list[tuple[str, ...]]:
    return list(zip(words, words[1:], words[2:], strict=False))


def is_copy(sentence: Sentence, others: Iterable[Sentence]) -> bool:
    """Whether nearly all of its content words stand in one of the others, in the same order."""
    needed = COPIED * len(sentence.order)
    return any(
        len(sentence.content & other.content) >= needed and _common(sentence.order, other.order) >= needed for other in others
    )


def _common(one: Sequence[str], other: Sequence[str]) -> int:
    """Length of the longest common subsequence of two sequences without repeats."""
    places, ends = {word: i for i, word in enumerate(other)}, list[int]()
    for place in (places[word] for word in one if word in places):
        at = bisect_left(ends, place)
        ends[at : at + 1] = [place]
    return len(ends)


def is_prose(sentence: Sentence) -> bool:
    """No list, and no more markers than an argument has."""
    words = sentence.words
    if len(words) < MIN_WORDS or len(sentence.content) < MIN_CONTENT:
        return False
    markers = sum(word in MARKERS for word in words)
    return sum(word in FUNCTION for word in words) >= MIN_FUNCTION * len(words) and markers <= MAX_MARKERS * len(words)


def that_count(
    sentences: Sequence[Sentence], memory: Memory, subject: frozenset[str], theirs: Sequence[Sentence] = ()
) -> list[Sentence]:
    """Sentences of a speech; all of them are remembered. subject: content words. theirs: what the opponent said before."""
    counting, before = [], frozenset[str]()
    for sentence in sentences:
        to_the_point = subject & (sentence.content | before) and is_prose(sentence)
        if to_the_point and not memory.has(sentence) and not is_copy(sentence, theirs):
            counting.append(sentence)
        memory.add(sentence)
        before = sentence.content
    return counting


def length_score(characters: int) -> float:
    if characters < 100:
        return characters / 100
    return 1.0 if characters <= 500 else max(0.5, 1 - 0.5 * (characters - 500) / (SPEECH_CHARS - 500))


def marked(sentences: Sequence[Sentence], markers: Sequence[str], numbers: bool = False) -> int:
    """Sentences with a marker that none before them had; numbers: one of two digits or of percents is a marker too."""
    used: set[str] = set()
    count = 0
    for sentence in sentences:
        text = f" {' '.join(sentence.words)} "
        here = {marker for marker in markers if f" {marker} " in text}
        here |= {"a number"} if numbers and _NUMBER.search(sentence.text) else set()
        count += bool(here - used)
        used |= here
    return count


def argument(sentences: Sequence[Sentence], counting: Sequence[Sentence], topic: frozenset[str]) -> dict[str, float]:
    """The parts of a speech's argument and their sum. topic: the motion's content words."""
    own = len(" ".join(sentence.text for sentence in counting))
    share = own / max(len(" ".join(sentence.text for sentence in sentences)), 1)
    used = topic & frozenset[str]().union(*(sentence.content for sentence in counting))
    parts = {
        "length": length_score(own),
        "evidence": min(1.0, marked(counting, EVIDENCE, numbers=True) / 2),
        "reasoning": min(1.0, marked(counting, REASONING) / 2),
        "structure": 0.5 * min(1.0, len(counting) / 3) + 0.5 * min(1.0, marked(counting, ORDER) / 2),
        "relevance": min(1.0, len(used) / math.ceil(len(topic) / 2)) if topic else 0.0,
    }
    kept = min(1.0, share / FREE)
    total = kept * sum(weight * parts[name] for name, weight in ARGUMENT.items())
    return parts | {"kept": kept, "argument": total}


def link(share: float) -> float:
    """How well a speech goes on from the earlier ones, by the share of its content words that they had."""
    return min(1.0, share / 0.1) if share <= 0.7 else (1 - share) / 0.3


def consistency(contents: Sequence[frozenset[str]], said: Sequence[Sentence], side: str) -> float:
    """contents: of each speech, of the sentences that count; said: all sentences of the side."""
    gives_up = (*GIVES_UP, *STANCE[side])
    if any(f" {phrase} " in f" {' '.join(sentence.words)} " for sentence in said for phrase in gives_up):
        return 0.0
    before, links = frozenset[str](), []
    for words in contents:
        links.append(link(len(words & before) / len(words)) if words else 0.0)
        before |= words
    return sum(links[1:]) / (len(links) - 1) if len(links) > 1 else float(any(contents))


def coverage(contents: Sequence[frozenset[str]], points: Sequence[str]) -> float:
    """NaN without points."""
    shares = []
    for point in points:
        wanted = content(_WORD.findall(point.lower()))
        best = max((len(wanted & words) for words in contents), default=0)
        shares.append(min(1.0, best / max(len(wanted), 1) / 0.6))
    return sum(shares) / len(shares) if shares else math.nan


class RuleBasedJudge:
    """The rules above: `judge(transcript, rng) -> Verdict`; draws nothing. info has the parts of each side: of arguments the
    mean over its speeches."""

    def __call__(self, debate: Transcript, rng: np.random.Generator | None = None) -> Verdict:
        info: dict[str, float] = {}
        scores = {}
        for side in SIDES:
            parts = self.parts(debate, side)
            scores[side] = parts.pop("score")
            info |= {f"{side}_{name}": value for name, value in parts.items()}
        return Verdict(scores["pro"], scores["con"], info)

    def parts(self, debate: Transcript, side: str) -> dict[str, float]:
        """A side's score and what it is made of."""
        known = [debate.motion, debate.background, *debate.points.get(side, ())]
        memory = Memory(sentence for text in known for sentence in sentences_of(text))
        topic = content(_WORD.findall(debate.motion.lower()))
        about = (debate.background, *(point for points in debate.points.values() for point in points))
        subject = topic | content(_WORD.findall(" ".join(about).lower()))
        said, theirs, contents, arguments = list[Sentence](), list[Sentence](), [], []
        for of, text in heard(debate, side):
            sentences = sentences_of(text)
            if of != side:
                theirs += sentences
                continue
            counting = that_count(sentences, memory, subject, theirs)
            said += sentences
            contents.append(frozenset[str]().union(*(sentence.content for sentence in counting)))
            arguments.append(argument(sentences, counting, topic))
        if not arguments:
            raise ValueError(f"{side} has not spoken: a debate is judged when it is over")
        parts = {name: sum(of[name] for of in arguments) / len(arguments) for name in arguments[0]}
        parts["consistency"] = consistency(contents, said, side)
        parts["coverage"] = coverage(contents, debate.points.get(side, ()))
        there = {name: weight for name, weight in DEBATE.items() if not math.isnan(parts[name])}
        score = sum(weight * parts[name] for name, weight in there.items()) / sum(there.values())
        return parts | {"score": min(1.0, score)}

    def describe(self) -> dict[str, Any]:
        return {"class": type(self).__name__}


def heard(debate: Transcript, side: str) -> list[tuple[str, str]]:
    """The speeches in the order in which the side made or read them: its own first of those made at once."""
    if not debate.at_once:
        return list(debate.speeches)
    numbered = enumerate(debate.speeches)
    return [speech for _, speech in sorted(numbered, key=lambda pair: (pair[0] // 2, pair[1][0] != side))]
