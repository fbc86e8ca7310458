"""Templates of word problems: 25 stories, each with one, two or three parts (the difficulty).

A part adds sentences, and the formula of its question in the numbers so far: a, b, c, … in the order of the text. A problem
ends with the question of its last part. Numbers are drawn until the answer of every part is positive and an integer (a multiple
of 0.1 where nothing is counted). People and things depend only on the template, the difficulty and the numbers.
"""

import random
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from typing import NamedTuple

from jmarl.envs.math.templates import MathProblem, Template

NAMES = (
    "Ada", "Bruno", "Chiara", "Deniz", "Elif", "Farid", "Greta", "Hugo", "Ines", "Jonas", "Kaya", "Lena", "Mateo", "Nora",
    "Omar", "Petra", "Quinn", "Rosa", "Samir", "Tilda", "Umut", "Vera", "Wanja", "Xenia", "Yusuf", "Zoe",
)  # fmt: skip
THINGS = (
    "marbles", "stickers", "shells", "stamps", "beads", "buttons", "coins", "cards", "pencils", "apples", "pears", "nuts",
    "balloons", "candles", "feathers", "badges", "dice", "ribbons", "cookies", "plums",
)  # fmt: skip


class Part(NamedTuple):
    """What one level of difficulty adds to a story."""

    text: str
    question: str
    formula: Callable[..., Fraction | int]  # of all numbers so far


class ProblemTemplate(NamedTuple):
    """A template of word problems: a story of one, two or three parts."""

    ranges: tuple[tuple[int, int], ...]  # of the numbers, both ends included
    parts: tuple[Part, Part, Part]
    unit: str = ""
    scale: int = 1  # an answer times this is an integer


def ratio(a: Fraction | int, b: int) -> Fraction:
    """Return a / b."""
    return Fraction(a, b)


STORIES = {
    "gift": ProblemTemplate(((3, 90), (2, 60), (2, 40), (2, 9)), (
        Part("{A} has {a} {thing} and gets {b} more from {B}.", "How many {thing} does {A} have now?", lambda a, b: a + b),
        Part("Then {A} gives {c} of them to {C}.", "How many {thing} does {A} have left?", lambda a, b, c: a + b - c),
        Part("{A} puts the rest into {d} boxes, the same number into each.", "How many {thing} are in each box?",
             lambda a, b, c, d: ratio(a + b - c, d)))),
    "lost": ProblemTemplate(((30, 120), (2, 29), (2, 9), (3, 24), (2, 8)), (
        Part("{A} had {a} {thing} and lost {b} of them.", "How many {thing} are left?", lambda a, b: a - b),
        Part("Then {A} bought {c} packs with {d} {thing} in each.", "How many {thing} does {A} have now?",
             lambda a, b, c, d: a - b + c * d),
        Part("In the end {A} and {e} others share all of them equally.", "How many {thing} does each of them get?",
             lambda a, b, c, d, e: ratio(a - b + c * d, e + 1)))),
    "crates": ProblemTemplate(((3, 40), (4, 48), (2, 11), (2, 9)), (
        Part("A shop gets {a} crates with {b} {thing} in each.", "How many {thing} does it get?", lambda a, b: a * b),
        Part("Of all these, {c} are broken and thrown away.", "How many {thing} can be sold?", lambda a, b, c: a * b - c),
        Part("All the others are sold for {d} dollars each.", "How many dollars does the shop take?",
             lambda a, b, c, d: (a * b - c) * d))),
    "sharing": ProblemTemplate(((12, 900), (3, 30), (2, 30), (2, 20)), (
        Part("A bag of {a} {thing} is shared equally among {b} children.", "How many {thing} does each child get?", ratio),
        Part("{A} is one of them and had {c} {thing} before.", "How many {thing} does {A} have now?",
             lambda a, b, c: ratio(a, b) + c),
        Part("Then {A} hands {d} of them to {B}.", "How many {thing} does {A} have in the end?",
             lambda a, b, c, d: ratio(a, b) + c - d))),
    "pens": ProblemTemplate(((2, 19), (3, 60), (2, 12), (3, 25), (50, 2000)), (
        Part("A pen costs {a} dollars, and {A} buys {b} of them.", "How many dollars does {A} pay?", lambda a, b: a * b),
        Part("{A} also buys {c} notebooks at {d} dollars each.", "How many dollars does all of it cost?",
             lambda a, b, c, d: a * b + c * d),
        Part("{A} pays with {e} dollars.", "How many dollars does {A} get back?", lambda a, b, c, d, e: e - a * b - c * d))),
    "train": ProblemTemplate(((30, 160), (2, 12), (2, 9), (40, 200), (500, 4000)), (
        Part("A train travels {a} kilometres an hour for {b} hours.", "How many kilometres does it travel?",
             lambda a, b: a * b),
        Part("Then it travels {c} more hours at {d} kilometres an hour.", "How many kilometres does it travel in all?",
             lambda a, b, c, d: a * b + c * d),
        Part("The whole way is {e} kilometres long.", "How many kilometres are left?",
             lambda a, b, c, d, e: e - a * b - c * d))),
    "book": ProblemTemplate(((80, 600), (5, 79), (3, 30), (4, 45)), (
        Part("A book has {a} pages, and {A} has read {b} of them.", "How many pages are left?", lambda a, b: a - b),
        Part("From now on {A} reads {c} pages a day.", "In how many days will {A} have read the rest?",
             lambda a, b, c: ratio(a - b, c)),
        Part("The pages of one day take {d} minutes.", "How many minutes does the rest of the book take?",
             lambda a, b, c, d: ratio(a - b, c) * d))),
    "garden": ProblemTemplate(((10, 90), (5, 60), (3, 40), (4, 30)), (
        Part("A rectangular garden is {a} metres long and {b} metres wide.", "How many square metres is it?",
             lambda a, b: a * b),
        Part("A pond in it takes up {c} square metres.", "How many square metres are not water?", lambda a, b, c: a * b - c),
        Part("Every square metre that is not water needs {d} grams of seed.", "How many grams of seed are needed?",
             lambda a, b, c, d: (a * b - c) * d))),
    "fence": ProblemTemplate(((10, 99), (5, 80), (2, 9), (3, 25)), (
        Part("A fence runs once around a rectangular field of {a} by {b} metres.", "How many metres long is the fence?",
             lambda a, b: 2 * (a + b)),
        Part("It then gets a gate of {c} metres, where the fence is taken away.", "How many metres of fence remain?",
             lambda a, b, c: 2 * (a + b) - c),
        Part("A metre of fence weighs {d} kilograms.", "How many kilograms does the fence that remains weigh?",
             lambda a, b, c, d: (2 * (a + b) - c) * d))),
    "sale": ProblemTemplate(((20, 600), (5, 75), (2, 9), (3, 40)), (
        Part("A coat costs {a} dollars before its price is lowered by {b} percent.", "How many dollars does it cost then?",
             lambda a, b: ratio(a * (100 - b), 100)),
        Part("A club buys {c} such coats at the lower price.", "How many dollars do they cost together?",
             lambda a, b, c: ratio(a * (100 - b), 100) * c),
        Part("Bringing them costs {d} dollars more.", "How many dollars does the club pay in all?",
             lambda a, b, c, d: ratio(a * (100 - b), 100) * c + d)), scale=10),
    "ages": ProblemTemplate(((2, 40), (2, 39), (3, 40), (2, 60)), (
        Part("{A} is {a} years old, and {B} is {b} years older.", "How many years old is {B}?", lambda a, b: a + b),
        Part("{C} is {c} years older than {B}.", "How many years old are {A}, {B} and {C} together?",
             lambda a, b, c: 3 * a + 2 * b + c),
        Part("Now think of the three of them {d} years later.", "How many years old will they be together then?",
             lambda a, b, c, d: 3 * a + 2 * b + c + 3 * d))),
    "saving": ProblemTemplate(((3, 60), (3, 52), (5, 300), (10, 900)), (
        Part("{A} saves {a} dollars a week for {b} weeks.", "How many dollars does {A} save?", lambda a, b: a * b),
        Part("There were {c} dollars in the box before.", "How many dollars are in the box now?", lambda a, b, c: a * b + c),
        Part("{A} takes out {d} dollars for a bicycle.", "How many dollars stay in the box?",
             lambda a, b, c, d: a * b + c - d))),
    "legs": ProblemTemplate(((20, 90), (2, 60), (2, 30), (2, 19)), (
        Part("On a farm there are {a} hens and {b} cows.", "How many legs do these animals have together?",
             lambda a, b: 2 * a + 4 * b),
        Part("There are also {c} goats.", "How many legs do all the animals have together?",
             lambda a, b, c: 2 * a + 4 * b + 4 * c),
        Part("Then {d} of the hens are sold.", "How many legs do the animals that stay have together?",
             lambda a, b, c, d: 2 * a + 4 * b + 4 * c - 2 * d))),
    "bus": ProblemTemplate(((15, 60), (2, 14), (2, 30), (2, 20), (2, 9)), (
        Part("A bus sets out with {a} passengers. At the first stop {b} get off and {c} get on.",
             "How many passengers are in the bus then?", lambda a, b, c: a - b + c),
        Part("At the second stop {d} more get on, and nobody gets off.", "How many passengers are in the bus now?",
             lambda a, b, c, d: a - b + c + d),
        Part("Those who are in the bus now pay {e} dollars each.", "How many dollars do they pay together?",
             lambda a, b, c, d, e: (a - b + c + d) * e))),
    "cakes": ProblemTemplate(((2, 9), (4, 150), (3, 12), (2, 12)), (
        Part("A cake takes {a} eggs, and a bakery makes {b} cakes.", "How many eggs does it need?", lambda a, b: a * b),
        Part("Eggs come in boxes of {c}.", "How many full boxes of eggs is that?", lambda a, b, c: ratio(a * b, c)),
        Part("A box costs {d} dollars.", "How many dollars do the eggs cost?", lambda a, b, c, d: ratio(a * b, c) * d))),
    "painters": ProblemTemplate(((2, 30), (2, 40), (2, 20), (5, 200)), (
        Part("There are {a} painters, and each paints {b} doors a day.", "How many doors do they paint in a day?",
             lambda a, b: a * b),
        Part("They work for {c} days.", "How many doors do they paint in all?", lambda a, b, c: a * b * c),
        Part("After that, {d} doors are still to be painted.", "How many doors were to be painted at first?",
             lambda a, b, c, d: a * b * c + d))),
    "hall": ProblemTemplate(((8, 60), (10, 50), (5, 79), (2, 9), (3, 30)), (
        Part("A hall has {a} rows with {b} seats in each.", "How many seats does it have?", lambda a, b: a * b),
        Part("People sit on {c} of the seats.", "How many seats are free?", lambda a, b, c: a * b - c),
        Part("Then {d} groups of {e} people come in and sit down.", "How many seats are free in the end?",
             lambda a, b, c, d, e: a * b - c - d * e))),
    "tank": ProblemTemplate(((20, 400), (2, 30), (2, 40), (5, 200), (3, 20)), (
        Part("There are {a} litres of water in a tank, and {b} litres flow in every minute, for {c} minutes.",
             "How many litres are in the tank then?", lambda a, b, c: a + b * c),
        Part("After that, {d} litres are taken out.", "How many litres are left in it?", lambda a, b, c, d: a + b * c - d),
        Part("The water that is left fills buckets of {e} litres, each to its brim.", "How many buckets does it fill?",
             lambda a, b, c, d, e: ratio(a + b * c - d, e)))),
    "red": ProblemTemplate(((20, 900), (3, 20), (2, 40), (2, 60)), (
        Part("{A} has {a} {thing}, and one in every {b} of them is red.", "How many of the {thing} are red?", ratio),
        Part("{A} gives {c} of the red ones to {B}.", "How many red {thing} does {A} have left?",
             lambda a, b, c: ratio(a, b) - c),
        Part("Then {A} finds {d} more that are red.", "How many red {thing} does {A} have now?",
             lambda a, b, c, d: ratio(a, b) - c + d))),
    "tickets": ProblemTemplate(((8, 30), (2, 12), (2, 20), (3, 40), (5, 60), (2, 12)), (
        Part("A ticket is {a} dollars for adults and {b} dollars for children. A group has {c} adults and {d} children.",
             "How many dollars do their tickets cost?", lambda a, b, c, d: a * c + b * d),
        Part("As a group they pay {e} dollars less in all.", "How many dollars does the group pay?",
             lambda a, b, c, d, e: a * c + b * d - e),
        Part("These costs are shared equally by {f} families.", "How many dollars does each family pay?",
             lambda a, b, c, d, e, f: ratio(a * c + b * d - e, f)))),
    "weather": ProblemTemplate(((1, 40), (2, 40), (2, 45), (2, 30)), (
        Part("In the morning it is {a} degrees, and until noon it becomes {b} degrees warmer.",
             "How many degrees is it at noon?", lambda a, b: a + b),
        Part("In the evening it is {c} degrees colder than at noon.", "How many degrees is it in the evening?",
             lambda a, b, c: a + b - c),
        Part("The next noon it is {d} degrees warmer than in that evening.", "How many degrees is it at the next noon?",
             lambda a, b, c, d: a + b - c + d))),
    "games": ProblemTemplate(((5, 90), (5, 90), (5, 90), (5, 90), (2, 60)), (
        Part("In three games {A} scores {a}, {b} and {c} points.", "How many points is that on average?",
             lambda a, b, c: ratio(a + b + c, 3)),
        Part("In a fourth game {A} scores {d} points.", "How many points does {A} score in all four games together?",
             lambda a, b, c, d: a + b + c + d),
        Part("{B} scores {e} points less than {A} in these four games.", "How many points do both score together?",
             lambda a, b, c, d, e: 2 * (a + b + c + d) - e))),
    "orchard": ProblemTemplate(((3, 30), (4, 40), (2, 30), (2, 30), (3, 40)), (
        Part("An orchard has {a} rows of {b} trees, and {c} trees beside the house.", "How many trees does it have?",
             lambda a, b, c: a * b + c),
        Part("A storm fells {d} of them.", "How many trees are still standing?",
             lambda a, b, c, d: a * b + c - d),
        Part("Each tree that still stands bears {e} kilograms of fruit.", "How many kilograms of fruit do they bear?",
             lambda a, b, c, d, e: (a * b + c - d) * e))),
    "school": ProblemTemplate(((40, 1500), (5, 90), (2, 30), (2, 12)), (
        Part("A school has {a} pupils, of whom {b} percent come by bus.", "How many pupils come by bus?",
             lambda a, b: ratio(a * b, 100)),
        Part("Today {c} of these are ill at home.", "How many pupils come by bus today?",
             lambda a, b, c: ratio(a * b, 100) - c),
        Part("Those who come are spread equally over {d} buses.", "How many pupils are in each bus?",
             lambda a, b, c, d: ratio(ratio(a * b, 100) - c, d)))),
    "share": ProblemTemplate(((20, 400), (3, 300), (2, 60), (2, 90)), (
        Part("A box has {a} {thing}, of which {b} are blue.", "What percentage of the {thing} is blue?",
             lambda a, b: ratio(100 * b, a) if b < a else ratio(0, 1)),
        Part("Then {c} of the blue ones get lost.", "What percentage of the {a} {thing} is still there and blue?",
             lambda a, b, c: ratio(100 * (b - c), a)),
        Part("After that, {d} that are not blue get lost as well.", "What percentage of the {a} {thing} is still there?",
             lambda a, b, c, d: ratio(100 * (a - c - d), a) if d < a - b else ratio(0, 1))), unit="%", scale=10),
}  # fmt: skip


def word_problem(name: str, level: int, rng: random.Random) -> MathProblem:
    """Draw a problem from the first `level` parts of a story."""
    story = STORIES[name]
    parts = story.parts[:level]
    numbers = _draw_numbers(story, parts, rng)
    words_rng = random.Random(f"{name} {level} {numbers}")
    words = dict(zip("ABC", words_rng.sample(NAMES, 3), strict=True)) | {"thing": words_rng.choice(THINGS)}
    words |= dict(zip("abcdef", map(str, numbers), strict=False))
    question = " ".join([*(part.text for part in parts), parts[-1].question]).format(**words)
    answer = Fraction(parts[-1].formula(*numbers))
    return MathProblem(question, str(answer), unit=story.unit, key=" ".join(map(str, numbers)))


def _draw_numbers(story: ProblemTemplate, parts: tuple[Part, ...], rng: random.Random) -> tuple[int, ...]:
    counts = [part.formula.__code__.co_argcount for part in parts]
    while True:
        numbers = [rng.randint(*ends) for ends in story.ranges[: counts[-1]]]
        answers = [Fraction(part.formula(*numbers[:count])) for part, count in zip(parts, counts, strict=True)]
        if all(answer > 0 and (answer * story.scale).denominator == 1 for answer in answers):
            return tuple(numbers)


WORD_PROBLEMS: dict[str, Template] = {name: partial(word_problem, name) for name in STORIES}
