"""Questions that need tools, made from templates: any number of them, with their answers, nothing downloaded.

    arithmetic          calculator                  six templates: products, purchases, remainders of powers, shares, distances, …
    lookup              web_search                  a fact of the corpus (`tool_corpus`)
    two_hops            web_search                  a fact of the town, or the person, that is named in another document
    lookup_difference   web_search, calculator      between facts of two things of one kind
    lookup_product      web_search, calculator      a fact times a number, plus another
    program             python_repl                 counts of primes and of sums of digits, recurrences, multiples
    file                file_system                 an amount in one of three files
    file_sum            file_system, calculator     what the amounts in one of them add up to
    file_program        file_system, python_repl    the sum of squares of forty numbers in a file of unknown name

A task is a dict with `question`, `answer`, `tools` (those that the reward asks for), `kind`, where there are such `files` (path
-> text) and `tolerance` (of a number that is rounded), and `calls`: turn by turn calls that find the answer, for tests and
demonstrations, which no prompt shows. Tasks are split by a hash of the question: none of `eval` is ever in `train`.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Collection
from decimal import Decimal
from typing import Any

from jmarl.envs import data
from jmarl.envs.tools.calculator import calculate
from jmarl.envs.tools.corpus import KINDS, MONTHS, Entry, entries

ROUNDED = 0.0051  # tolerance of answers with two decimals
MAX_ANSWER = 200
TRIES = 500  # to draw another task of a kind, until it counts as used up
NUMBER = re.compile(r"[-+]?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?")
CURRENCY = re.compile(r"^([-+]?)[$€£]")
COUNTED = re.compile(r"\bhow many (\w+)")
AROUND = " *_`'\"“”‘’"
PARTS = ("rope", "nails", "paint", "timber", "glass", "canvas", "tar", "brushes", "lamps", "hinges")


def _call(name: str, **parameters: Any) -> dict[str, Any]:
    return {"name": name, "parameters": parameters}


def _arithmetic(rng: random.Random) -> dict[str, Any]:
    a, b, c, d = rng.randint(100, 9999), rng.randint(100, 9999), rng.randint(11, 99), rng.randint(100, 9999)
    small, percent = rng.randint(5, 9), rng.randint(2, 95)
    question, expression, tolerance = rng.choice(
        [
            (f"What is ({a} + {b}) * {c} - {d}?", f"({a} + {b}) * {c} - {d}", 0.0),
            (f"A shop sells {a} crates of {c} apples and {b} crates of {small} pears. How many pieces of fruit is that?", f"{a} * {c} + {b} * {small}", 0.0),
            (f"What is the remainder of {c} to the power of {small} when it is divided by {a}?", f"{c}^{small} % {a}", 0.0),
            (f"What is {percent} percent of {a}.{c}, rounded to two decimals?", f"{percent} * {a}.{c} / 100", ROUNDED),
            (f"How far is the point ({a}, {b}) from the origin, rounded to two decimals?", f"sqrt({a}^2 + {b}^2)", ROUNDED),
            (f"In how many ways can {small} people be chosen out of {c}?", f"comb({c}, {small})", 0.0),
        ]
    )  # fmt: skip
    answer = calculate(expression)
    task = {"question": question, "answer": f"{float(answer):.2f}" if tolerance else answer, "tools": ["calculator"]}
    return task | {"tolerance": tolerance, "calls": [[_call("calculator", expression=expression)]]}


def _search(*questions: str) -> list[dict[str, Any]]:
    return [_call("web_search", query=question) for question in questions]


def _fact(rng: random.Random) -> tuple[Entry, str]:
    entry = rng.choice(entries())
    return entry, rng.choice(sorted(KINDS[entry.kind].questions))


def _lookup(rng: random.Random) -> dict[str, Any]:
    entry, fact = _fact(rng)
    question = entry.question(fact)
    return {"question": question, "answer": entry.facts[fact], "tools": ["web_search"], "calls": [_search(question)]}


HOPS = {
    "town": ("the town that is named in what is known about {}", ("founded", "people", "craft")),
    "person": ("the person who is named in what is known about {}", ("born", "works", "trade")),
}


def _two_hops(rng: random.Random) -> dict[str, Any]:
    through = rng.choice(sorted(HOPS))
    first = rng.choice([e for e in entries() if through in e.facts and e.kind != "person"])
    second = next(e for e in entries() if e.kind == through and e.name == first.facts[through])
    who, facts = HOPS[through]
    fact = rng.choice(facts)
    named = KINDS[through].questions[fact].replace("the town of {name}", "{name}").format(name=who.format(first.name))
    calls = [_search(first.question(through) if through in KINDS[first.kind].questions else first.name)]
    calls.append(_search(second.question(fact)))
    return {"question": named, "answer": second.facts[fact], "tools": ["web_search"], "calls": calls}


def _measured(rng: random.Random) -> tuple[Entry, str, str]:
    """A thing, a fact that is a number, and what it counts."""
    entry = rng.choice(entries())
    fact, unit = rng.choice(sorted(KINDS[entry.kind].unit.items()))
    return entry, fact, unit


def _lookup_difference(rng: random.Random) -> dict[str, Any]:
    first, fact, unit = _measured(rng)
    second = rng.choice([e for e in entries() if e.kind == first.kind and e.facts[fact] != first.facts[fact]])
    asked = first.question(fact), second.question(fact)
    high, low = sorted((int(first.facts[fact]), int(second.facts[fact])), reverse=True)
    question = f"By how many {unit} do the answers to these two questions differ? {asked[0]} {asked[1]}"
    calls = [_search(*asked), [_call("calculator", expression=f"{high} - {low}")]]
    return {"question": question, "answer": str(high - low), "tools": ["web_search", "calculator"], "calls": calls}


def _lookup_product(rng: random.Random) -> dict[str, Any]:
    entry, fact, _ = _measured(rng)
    times, more = rng.randint(12, 98), rng.randint(101, 999)
    asked = entry.question(fact)
    expression = f"{entry.facts[fact]} * {times} + {more}"
    calls = [_search(asked), [_call("calculator", expression=expression)]]
    question = f"Multiply the answer to this question by {times} and add {more}: {asked}"
    return {"question": question, "answer": calculate(expression), "tools": ["web_search", "calculator"], "calls": calls}


def _value(code: str) -> str:
    """What a program of these templates gives; it is this module's own."""
    body, _, last = code.rpartition("\n")
    names: dict[str, Any] = {}
    exec(body, names)
    return str(eval(last, names))


def _program(rng: random.Random) -> dict[str, Any]:
    a, b, n = rng.randint(2, 19), rng.randint(20, 39), rng.randint(1000, 4000)
    s = rng.randint(5, 20)
    question, code = rng.choice(
        [
            (f"How many prime numbers are there from {10 * a} to {n}?", f"sum(all(n % d for d in range(2, int(n ** 0.5) + 1)) for n in range({10 * a}, {n} + 1))"),
            (f"How many of the numbers from 1 to {n} have digits that add up to {s}?", f"sum(sum(map(int, str(n))) == {s} for n in range(1, {n} + 1))"),
            (f"What is the sum of the numbers from 1 to {n} that are divisible by {a} or by {b}, but not by both?", f"sum(n for n in range(1, {n} + 1) if (n % {a} == 0) != (n % {b} == 0))"),
            (f"A sequence begins with {a}, and each number after that is the square of the one before plus {b}, modulo {n}. Which number is the {s}th?", f"x = {a}\nfor _ in range({s} - 1):\n    x = (x * x + {b}) % {n}\nx"),
        ]
    )  # fmt: skip
    calls = [[_call("python_repl", code=code)]]
    return {"question": question, "answer": _value(code), "tools": ["python_repl"], "calls": calls}


def _costs(rng: random.Random) -> tuple[dict[str, str], str, dict[str, int]]:
    """Three files, the month of one of them, and what is in it."""
    months = rng.sample(MONTHS, 3)
    costs = {month: {part: rng.randint(11, 999) for part in rng.sample(PARTS, 5)} for month in months}
    files = {f"costs/{month.lower()}.txt": "".join(f"{p}: {n}\n" for p, n in costs[month].items()) for month in months}
    return files, months[0], costs[months[0]]


def _file(rng: random.Random) -> dict[str, Any]:
    files, month, costs = _costs(rng)
    part = rng.choice(sorted(costs))
    task = {"question": f"There is a directory costs with a file for each month. What did {part} cost in {month}?"}
    return task | {"answer": str(costs[part]), "tools": ["file_system"], "files": files, "calls": [[_read(month)]]}


def _read(month: str) -> dict[str, Any]:
    return _call("file_system", action="read", path=f"costs/{month.lower()}.txt")


def _file_sum(rng: random.Random) -> dict[str, Any]:
    files, month, costs = _costs(rng)
    calls = [[_read(month)], [_call("calculator", expression=" + ".join(map(str, costs.values())))]]
    task = {"question": f"There is a directory costs with a file for each month. What do the costs of {month} add up to?"}
    tools = ["file_system", "calculator"]
    return task | {"answer": str(sum(costs.values())), "tools": tools, "files": files, "calls": calls}


def _file_program(rng: random.Random) -> dict[str, Any]:
    numbers = [rng.randint(100, 999) for _ in range(40)]
    path, least = f"series/{rng.choice(PARTS)}{rng.randint(10, 99)}.txt", rng.randint(200, 800)
    code = f"sum(int(n) ** 2 for n in open('{path}') if int(n) > {least})"
    calls = [[_call("file_system", action="list", path="series")], [_call("python_repl", code=code)]]
    task = {"question": f"The only file in the directory series has a number on each line. What is the sum of the squares of those above {least}?"}  # fmt: skip
    answer, files = str(sum(n**2 for n in numbers if n > least)), {path: "".join(f"{n}\n" for n in numbers)}
    return task | {"answer": answer, "tools": ["file_system", "python_repl"], "files": files, "calls": calls}


MAKERS: dict[str, Callable[[random.Random], dict[str, Any]]] = {
    "arithmetic": _arithmetic,
    "lookup": _lookup,
    "two_hops": _two_hops,
    "lookup_difference": _lookup_difference,
    "lookup_product": _lookup_product,
    "program": _program,
    "file": _file,
    "file_sum": _file_sum,
    "file_program": _file_program,
}
NEEDS = {
    kind: frozenset(call["name"] for turn in make(random.Random(0))["calls"] for call in turn) for kind, make in MAKERS.items()
}


def kinds_for(tools: Collection[str]) -> list[str]:
    """Kinds of task that these tools suffice for."""
    return [kind for kind, needs in NEEDS.items() if needs <= set(tools)]


def split_of(task: dict) -> str:
    about = repr((task["question"], sorted(task.get("files", {}).items())))
    return data.split_of(about)


def generate(kinds: Collection[str], split: str, count: int, seed: int) -> list[dict]:
    """Distinct tasks of a split, of the kinds in turn; fewer where there are fewer."""
    data.check_split(split)
    if not kinds or not set(kinds) <= set(MAKERS):
        raise ValueError(f"kinds={list(kinds)}: choose some of {', '.join(MAKERS)}")
    rng, found = random.Random(f"{seed} {split}"), dict[str, dict]()
    order = [kind for kind in MAKERS if kind in kinds]
    while order and len(found) < count:
        kind = order[len(found) % len(order)]
        for _ in range(TRIES):
            task = {"kind": kind} | MAKERS[kind](rng)
            what = repr((task["question"], task.get("files")))
            if split_of(task) == split and what not in found:
                found[what] = task
                break
        else:
            order.remove(kind)
    return list(found.values())


def is_correct(given: str, expected: str, tolerance: float = 0.0, question: str = "") -> bool:
    """Whether an answer is the expected one: as a number where that is one (commas between thousands, a sign of currency before
    and the word that follows "how many" in the question behind are fine), else word by word without regard to case and a leading
    article. A last full stop and quotes, backticks and stars around all of it are fine too. All of the answer has to fit, so a
    list of answers is none."""
    given = " ".join(given[: MAX_ANSWER + 1].split()).strip(AROUND).removesuffix(".").strip(AROUND)
    if len(given) > MAX_ANSWER:
        return False
    if NUMBER.fullmatch(expected):
        given, _, unit = given.replace("−", "-").partition(" ")
        if unit and unit.casefold() not in COUNTED.findall(question.casefold()):
            return False
        given = CURRENCY.sub(r"\1", given)
        return bool(NUMBER.fullmatch(given)) and abs(_number(given) - _number(expected)) <= Decimal(str(tolerance))
    return _plain(given) == _plain(expected)


def _number(text: str) -> Decimal:
    return Decimal(text.replace(",", ""))


def _plain(text: str) -> str:
    return " ".join(text.split()).casefold().removesuffix(".").removeprefix("the ").strip()
