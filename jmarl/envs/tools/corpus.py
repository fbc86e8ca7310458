"""A corpus of short documents about invented things: what a search has to find, among others that look alike.

560 documents of ten kinds (bridges, towns, lakes, firms, people, fairs, gauges, museums, ships, mountains), made from
templates with a fixed seed. Every name is shared by several: there is an Upper and a Lower Tarn Bridge, a Great and a Little
Lake Tarn, East and West Tarn, and the ship Pride of Tarn; towns, rivers and people are named in documents about other
things. So the words of a question hit many documents, and exactly one has its answer: the one whose title the question names.
"""

from __future__ import annotations

import functools
import random
from typing import Any, NamedTuple

SEED, STEMS_A_KIND = 20, 28

STEMS = (
    "Tarn", "Velm", "Osk", "Brindle", "Corrow", "Dask", "Ehlin", "Farrow", "Gresh", "Hollin", "Irven", "Jask", "Kelmar", "Lorrin",
    "Maskel", "Norrow", "Orlin", "Pell", "Quarn", "Rusk", "Selwin", "Tolver", "Umbrel", "Vasken", "Wendle", "Yarrow", "Zellin",
    "Ardel", "Bexen", "Cullin", "Dorvel", "Eskar", "Fenwil", "Garrin", "Hesk", "Ilvar", "Jorwin", "Karsk",
)  # fmt: skip
GIVEN = (
    "Ada", "Bram", "Cela", "Doran", "Edda", "Falk", "Greta", "Hanno", "Ines", "Joris", "Klara", "Leif", "Mira", "Nils", "Odile",
    "Pavo", "Runa", "Sven", "Thea", "Ulf", "Vera", "Wim",
)  # fmt: skip
RIVERS = ("Amble", "Brock", "Cray", "Dove", "Erk", "Flint", "Gavel", "Harn", "Iss", "Kell", "Lune", "Mease")
FISH = ("perch", "trout", "pike", "char", "bream", "eel")
CRAFTS = ("glass", "lace", "clocks", "pottery", "saddles", "organs", "paper", "knives")
GOODS = ("ladders", "kettles", "bicycles", "mirrors", "violins", "scales", "ropes", "lanterns")
TRADES = ("painter", "botanist", "composer", "surveyor", "astronomer", "poet")
MEASURED = ("humidity", "salt", "wind speed", "light", "pressure", "noise", "grain size", "tension")
KEPT = ("maps", "coins", "looms", "fossils", "toys", "stamps", "masks", "clocks")
MONTHS = ("March", "April", "May", "June", "August", "September", "October")


class Document(NamedTuple):
    title: str
    text: str


class Kind(NamedTuple):
    """A kind of thing: two names a stem, a sentence or two about it, and questions about its facts."""

    names: tuple[str, str]
    text: str
    facts: dict[str, Any]  # name -> from and to of a number, or a choice of texts
    questions: dict[str, str]  # fact -> question
    unit: dict[str, str]  # of facts that are numbers whose difference or product makes sense: what they count


KINDS = {
    "bridge": Kind(("Upper {} Bridge", "Lower {} Bridge"), "The {name} crosses the river {river} near {town}. It was opened in {opened}, is {length} metres long and was planned by {person}.",
        dict(river=RIVERS, town="town", opened=(1780, 1990), length=(40, 900), person="person"),
        dict(river="Which river does the {name} cross?", opened="In which year was the {name} opened?", length="How many metres long is the {name}?", person="Who planned the {name}?"), dict(opened="years", length="metres")),
    "town": Kind(("East {}", "West {}"), "{name} is a town on the river {river}. It was founded in {founded}, has {people} inhabitants and is known for its {craft}.",
        dict(river=RIVERS, founded=(1100, 1700), people=(900, 60000), craft=CRAFTS),
        dict(river="On which river is the town of {name}?", founded="In which year was the town of {name} founded?", people="How many inhabitants has the town of {name}?", craft="For what is the town of {name} known?"), dict(founded="years", people="inhabitants")),
    "lake": Kind(("Great Lake {}", "Little Lake {}"), "{name} is a lake north of {town}. It is {depth} metres deep, covers {area} hectares and is fished for {fish}.",
        dict(town="town", depth=(8, 300), area=(30, 4000), fish=FISH),
        dict(depth="How many metres deep is {name}?", area="How many hectares does {name} cover?", fish="Which fish is caught in {name}?"), dict(depth="metres", area="hectares")),
    "firm": Kind(("{} Brothers", "{} and Daughters"), "{name} is a firm in {town} that makes {goods}. It was founded by {person} in {founded} and has {workers} workers.",
        dict(town="town", goods=GOODS, person="person", founded=(1820, 1995), workers=(12, 900)),
        dict(town="In which town is the firm {name}?", goods="What does the firm {name} make?", founded="In which year was the firm {name} founded?", workers="How many workers has the firm {name}?", person="Who founded the firm {name}?"), dict(founded="years", workers="workers")),
    "person": Kind(("{given} {}", "{other} {}"), "{name} was a {trade} from {town}, born in {born}. The works number {works}, most of them made in {later}.",
        dict(trade=TRADES, town="town", born=(1700, 1960), works=(20, 700), later="town"),
        dict(trade="What was the profession of {name}?", town="From which town was {name}?", born="In which year was {name} born?", works="How many works are there by {name}?"), dict(born="years", works="works")),
    "fair": Kind(("{} Spring Fair", "{} Harvest Fair"), "The {name} is held in {town} every {month}. It was first held in {since} and has about {guests} guests.",
        dict(town="town", month=MONTHS, since=(1650, 1990), guests=(300, 40000)),
        dict(month="In which month is the {name} held?", since="In which year was the {name} first held?", guests="How many guests has the {name}?", town="In which town is the {name} held?"), dict(since="years", guests="guests")),
    "gauge": Kind(("{} gauge Mark One", "{} gauge Mark Two"), "The {name} is an instrument that measures {quantity}. It was devised by {person} in {devised}, weighs {grams} grams and cost {price} crowns.",
        dict(quantity=MEASURED, person="person", devised=(1850, 1999), grams=(90, 5000), price=(15, 900)),
        dict(quantity="What does the {name} measure?", devised="In which year was the {name} devised?", grams="How many grams does the {name} weigh?", price="How many crowns did the {name} cost?", person="Who devised the {name}?"), dict(devised="years", grams="grams", price="crowns")),
    "museum": Kind(("Old {} Museum", "New {} Museum"), "The {name} in {town} keeps {kept}. It has {rooms} rooms, {pieces} pieces, and has been open since {since}.",
        dict(town="town", kept=KEPT, rooms=(3, 60), pieces=(200, 30000), since=(1830, 2005)),
        dict(kept="What does the {name} keep?", rooms="How many rooms has the {name}?", pieces="How many pieces has the {name}?", since="Since which year has the {name} been open?"), dict(rooms="rooms", pieces="pieces", since="years")),
    "ship": Kind(("Star of {}", "Pride of {}"), "The {name} is a ship built in {town} and launched in {launched}. It is {length} metres long and sailed with a crew of {crew}.",
        dict(town="town", launched=(1790, 1960), length=(18, 220), crew=(6, 400)),
        dict(launched="In which year was the ship {name} launched?", length="How many metres long is the ship {name}?", crew="How large was the crew of the ship {name}?", town="In which town was the ship {name} built?"), dict(launched="years", length="metres", crew="people")),
    "mountain": Kind(("Mount {} North", "Mount {} South"), "{name} is a mountain above {town}. It is {height} metres high and was first climbed in {climbed} by {person}.",
        dict(town="town", height=(700, 4800), climbed=(1760, 1960), person="person"),
        dict(height="How many metres high is {name}?", climbed="In which year was {name} first climbed?", person="Who first climbed {name}?"), dict(height="metres", climbed="years")),
}  # fmt: skip


class Entry(NamedTuple):
    """A thing and what is to be known of it."""

    kind: str
    name: str
    facts: dict[str, str]

    def document(self) -> Document:
        return Document(self.name, KINDS[self.kind].text.format(name=self.name, **self.facts))

    def question(self, fact: str) -> str:
        return KINDS[self.kind].questions[fact].format(name=self.name)


@functools.cache
def entries() -> tuple[Entry, ...]:
    """All of them, always the same."""
    rng = random.Random(SEED)
    names = {kind: [name for stem in rng.sample(STEMS, STEMS_A_KIND) for name in _pair(kind, stem, rng)] for kind in KINDS}
    return tuple(Entry(kind, name, _facts(kind, names, rng)) for kind in KINDS for name in names[kind])


def _pair(kind: str, stem: str, rng: random.Random) -> list[str]:
    given, other = rng.sample(GIVEN, 2)
    return [pattern.format(stem, given=given, other=other) for pattern in KINDS[kind].names]


def _facts(kind: str, names: dict[str, list[str]], rng: random.Random) -> dict[str, str]:
    found = {}
    for fact, of in KINDS[kind].facts.items():
        if isinstance(of, str):
            found[fact] = rng.choice(names[of])
        else:
            found[fact] = str(rng.randint(*of) if isinstance(of[0], int) else rng.choice(of))
    return found


@functools.cache
def corpus() -> tuple[Document, ...]:
    return tuple(entry.document() for entry in entries())
