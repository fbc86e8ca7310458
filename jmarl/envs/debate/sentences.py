"""Sentences of a speech for the rule-based judge: content words, repetitions, copies, and what is prose.

A *marker* is a word or phrase that shows evidence, reasoning or order. *Function words* carry no subject (the, and, is). All
other words of three letters or more are *content words*; they are compared by crude stems. Only English is covered.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

from jmarl.envs.debate.transcript import SPEECH_CHARS

MIN_WORDS, MIN_CONTENT = 5, 3  # of a sentence that is prose
MIN_FUNCTION_SHARE, MAX_MARKER_SHARE = 0.15, 1 / 3  # of its words
REPEATED_CONTENT, REPEATED_TRIGRAMS = 3 / 4, 2 / 5  # from these shares on, a sentence is a repetition
MIN_TEMPLATE = 5  # function words and markers
COPIED_CONTENT = 0.9  # from this share on, a sentence is a copy

WORD = re.compile(r"\w+(?:['’]\w+)*")
SENTENCE_END = re.compile(r"(?<=[.!?])\s+|\n+")

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
FUNCTION_WORDS = frozenset(
    WORD.findall(
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
MARKER_WORDS = frozenset(word for marker in (*EVIDENCE, *REASONING, *ORDER) for word in marker.split()) - frozenset(
    WORD.findall(  # too common to count as markers alone
        "the a to for in if on so that this which as up other all above with even by "
        "found means leads follows reason result hand begin sum"
    )
)


class Sentence(NamedTuple):
    """A sentence and what is compared of it."""

    text: str
    words: tuple[str, ...]
    content: frozenset[str]  # stems of the content words
    ordered_content: tuple[str, ...]  # the same in the order of their first occurrence
    template: tuple[str, ...]  # the function words and markers


@lru_cache(maxsize=1 << 16)
def stem(word: str) -> str:
    """Return a crude stem: voting, votes and vote give vot; families and family give famil."""
    word = word.replace("’", "'").removesuffix("'s")
    for ending in ("ings", "ing", "ies", "ied", "ed", "es", "s"):
        if word.endswith(ending) and len(word) - len(ending) >= 3:
            word = word[: -len(ending)]
            word = word[:-1] if word[-1] == word[-2] else word
            break
    return word[:-1] if word[-1:] in ("e", "y") and len(word) > 3 else word


def split_words(text: str) -> list[str]:
    """Return the words of a text in lower case."""
    return WORD.findall(text.lower())


def content_stems(words: Iterable[str]) -> tuple[str, ...]:
    """Return the stems of the content words without repetitions, in the order of their first occurrence."""
    content = (w for w in words if len(w) > 2 and w not in FUNCTION_WORDS and w not in MARKER_WORDS)
    return tuple(dict.fromkeys(map(stem, content)))


def content_of(text: str) -> frozenset[str]:
    """Return the stems of the content words of a text."""
    return frozenset(content_stems(split_words(text)))


def union_of_content(sentences: Iterable[Sentence]) -> frozenset[str]:
    """Return the stems of the content words of several sentences."""
    return frozenset[str]().union(*(sentence.content for sentence in sentences))


@lru_cache(maxsize=1 << 10)  # motions and notes are split for every judgment, a speech several times
def split_sentences(text: str) -> tuple[Sentence, ...]:
    """Split a text after full stops with a space, exclamation marks, question marks, and lines."""
    sentences = []
    for piece in SENTENCE_END.split(text[:SPEECH_CHARS]):
        piece = " ".join(piece.split())
        if piece:
            words = tuple(split_words(piece))
            stems = content_stems(words)
            template = tuple(word for word in words if word in FUNCTION_WORDS or word in MARKER_WORDS)
            sentences.append(Sentence(piece, words, frozenset(stems), stems, template))
    return tuple(sentences)


class EarlierSentences:
    """The sentences that a side has said or read in its task; tells whether a new one repeats them."""

    def __init__(self, sentences: Iterable[Sentence]):
        self.contents: list[frozenset[str]] = []
        self.trigrams: set[tuple[str, ...]] = set()
        self.templates: set[tuple[str, ...]] = set()
        for sentence in sentences:
            self.add(sentence)

    def add(self, sentence: Sentence) -> None:
        """Add a sentence."""
        if sentence.content:
            self.contents.append(sentence.content)
        self.trigrams.update(_trigrams(sentence.words))
        if len(sentence.template) >= MIN_TEMPLATE:
            self.templates.add(sentence.template)

    def repeats(self, sentence: Sentence) -> bool:
        """Return whether a sentence repeats earlier ones, or itself over and over."""
        if sentence.template in self.templates:
            return True
        limit = REPEATED_CONTENT * len(sentence.content)
        if any(len(sentence.content & earlier) >= limit for earlier in self.contents):
            return True
        trigrams = _trigrams(sentence.words)
        num_new = len(set(trigrams) - self.trigrams)
        return bool(trigrams) and num_new <= (1 - REPEATED_TRIGRAMS) * len(trigrams)


def _trigrams(words: Sequence[str]) -> list[tuple[str, ...]]:
    return list(zip(words, words[1:], words[2:], strict=False))


def is_copy(sentence: Sentence, originals: Iterable[Sentence]) -> bool:
    """Return whether one of the originals has nearly all content words of the sentence in the same order."""
    limit = COPIED_CONTENT * len(sentence.ordered_content)
    return any(
        len(sentence.content & original.content) >= limit
        and _common_length(sentence.ordered_content, original.ordered_content) >= limit
        for original in originals
    )


def _common_length(first: Sequence[str], second: Sequence[str]) -> int:
    """Return the length of the longest common subsequence of two sequences without repetitions."""
    position = {word: i for i, word in enumerate(second)}
    ends = list[int]()  # ends[k]: the least position at which a common subsequence of length k + 1 ends
    for i in (position[word] for word in first if word in position):
        k = bisect_left(ends, i)
        ends[k : k + 1] = [i]
    return len(ends)


def is_prose(sentence: Sentence) -> bool:
    """Return whether a sentence has enough words and content, is no list, and has no more markers than an argument has."""
    words = sentence.words
    if len(words) < MIN_WORDS or len(sentence.content) < MIN_CONTENT:
        return False
    num_function = sum(word in FUNCTION_WORDS for word in words)
    num_markers = sum(word in MARKER_WORDS for word in words)
    return num_function >= MIN_FUNCTION_SHARE * len(words) and num_markers <= MAX_MARKER_SHARE * len(words)
