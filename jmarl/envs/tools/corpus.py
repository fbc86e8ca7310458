"""A corpus of short documents about invented things, for the search tool.

560 documents of ten kinds (bridges, towns, lakes, firms, people, fairs, gauges, museums, ships, mountains) are generated from
`corpus.json` with a fixed seed, so the corpus is always the same. It is full of distractors: names share their parts (Upper and
Lower Tarn Bridge, Great and Little Lake Tarn, East and West Tarn, the ship Pride of Tarn), and towns, rivers and people are
named in documents about other things. So many documents share words with a question, but only one answers it: the one whose
title is in the question.
"""

import functools
import json
import random
from importlib.resources import files
from typing import NamedTuple

SEED, STEMS_PER_KIND = 20, 28


class Document(NamedTuple):
    """A document as the search tool returns it."""

    title: str
    text: str


class Fact(NamedTuple):
    """How to draw a fact of a thing (one of three ways), and what to ask about it."""

    choices: tuple[str, ...] = ()  # draw one of these,
    name_of: str = ""  # or the name of a thing of this kind,
    low: int = 0  # or a number from low to high
    high: int = 0
    question: str = ""  # empty: not asked for
    unit: str = ""  # what the number counts, if differences and products of it make sense


class ThingKind(NamedTuple):
    """A kind of thing: two name patterns for each stem, a text about it, and its facts."""

    names: tuple[str, str]
    text: str
    facts: dict[str, Fact]

    @property
    def questions(self) -> dict[str, str]:
        """Questions by the name of the fact."""
        return {name: fact.question for name, fact in self.facts.items() if fact.question}

    @property
    def units(self) -> dict[str, str]:
        """Units by the name of the fact."""
        return {name: fact.unit for name, fact in self.facts.items() if fact.unit}


_DATA = json.loads(files("jmarl.envs.tools").joinpath("corpus.json").read_text(encoding="utf-8"))
MONTHS: list[str] = _DATA["months"]
KINDS: dict[str, ThingKind] = {
    name: ThingKind(tuple(kind["names"]), kind["text"], {fact: Fact(**fields) for fact, fields in kind["facts"].items()})
    for name, kind in _DATA["kinds"].items()
}


class Thing(NamedTuple):
    """A thing and its facts."""

    kind: str
    name: str
    facts: dict[str, str]

    def document(self) -> Document:
        """Return the document about it."""
        return Document(self.name, KINDS[self.kind].text.format(name=self.name, **self.facts))

    def question(self, fact: str) -> str:
        """Return the question about one of its facts."""
        return KINDS[self.kind].facts[fact].question.format(name=self.name)


@functools.cache
def things() -> tuple[Thing, ...]:
    """Return all things, always the same."""
    rng = random.Random(SEED)
    names = {}
    for kind in KINDS:
        stems = rng.sample(_DATA["stems"], STEMS_PER_KIND)
        names[kind] = [name for stem in stems for name in _draw_names(kind, stem, rng)]
    return tuple(Thing(kind, name, _draw_facts(kind, names, rng)) for kind in KINDS for name in names[kind])


def _draw_names(kind: str, stem: str, rng: random.Random) -> list[str]:
    first, second = rng.sample(_DATA["given_names"], 2)  # used in the names of people only
    return [pattern.format(stem, first=first, second=second) for pattern in KINDS[kind].names]


def _draw_facts(kind: str, names: dict[str, list[str]], rng: random.Random) -> dict[str, str]:
    facts = {}
    for name, fact in KINDS[kind].facts.items():
        if fact.name_of:
            facts[name] = rng.choice(names[fact.name_of])
        elif fact.choices:
            facts[name] = rng.choice(fact.choices)
        else:
            facts[name] = str(rng.randint(fact.low, fact.high))
    return facts


@functools.cache
def corpus() -> tuple[Document, ...]:
    """Return the documents."""
    return tuple(thing.document() for thing in things())
