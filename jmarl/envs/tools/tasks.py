"""Generate questions that need tools, with their answers, from templates and a seed; nothing is downloaded.

    kind                tools                       question
    arithmetic          calculator                  products, purchases, remainders of powers, shares, distances, choices
    lookup              web_search                  a fact of the corpus (`corpus.py`)
    two_hops            web_search                  a fact of the town or person that another document names
    lookup_difference   web_search, calculator      the difference between facts of two things of one kind
    lookup_product      web_search, calculator      a fact times a number, plus another number
    program             python_repl                 counts of primes and of digit sums, recurrences, multiples
    file                file_system                 an amount in one of three files
    file_sum            file_system, calculator     the sum of the amounts in one of three files
    file_program        file_system, python_repl    the sum of squares of some of forty numbers in a file of unknown name

A task is a dict with `question`, `answer`, `tools` (those that the reward asks for), `kind`, `calls` (turn by turn, the calls
that find the answer; for tests and demonstrations, in no prompt), and if needed `files` (path -> text) and `tolerance` (of a
rounded number). A task is in `train` or `eval` by a hash of its question and files, so the splits share no task.

Left out: questions without an answer, and questions for which the tools must be used in an unusual way.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Sequence
from typing import Any

from jmarl.envs import data
from jmarl.envs.tools.calculator import calculate
from jmarl.envs.tools.corpus import KINDS, MONTHS, Thing, things

ROUNDED = 0.0051  # tolerance of answers with two decimals
MAX_TRIES = 500  # to draw another task of a kind, until the kind counts as exhausted
ITEMS = ("rope", "nails", "paint", "timber", "glass", "canvas", "tar", "brushes", "lamps", "hinges")
Call = dict[str, Any]
Task = dict[str, Any]


def _call(tool: str, parameters: dict[str, str]) -> Call:
    return {"name": tool, "parameters": parameters}


def _task(
    question: str,
    answer: str,
    tools: list[str],
    calls: list[list[Call]],
    files: dict[str, str] | None = None,
    tolerance: float | None = None,
) -> Task:
    task: Task = {"question": question, "answer": answer, "tools": tools}
    if files is not None:
        task["files"] = files
    if tolerance is not None:
        task["tolerance"] = tolerance
    return task | {"calls": calls}


# Calculator


def _arithmetic(rng: random.Random) -> Task:
    a, b, c, d = rng.randint(100, 9999), rng.randint(100, 9999), rng.randint(11, 99), rng.randint(100, 9999)
    small, percent = rng.randint(5, 9), rng.randint(2, 95)
    templates = [
        (f"What is ({a} + {b}) * {c} - {d}?", f"({a} + {b}) * {c} - {d}", 0.0),
        (
            f"A shop sells {a} crates of {c} apples and {b} crates of {small} pears. How many pieces of fruit is that?",
            f"{a} * {c} + {b} * {small}",
            0.0,
        ),
        (
            f"What is the remainder of {c} to the power of {small} when it is divided by {a}?",
            f"{c}^{small} % {a}",
            0.0,
        ),
        (f"What is {percent} percent of {a}.{c}, rounded to two decimals?", f"{percent} * {a}.{c} / 100", ROUNDED),
        (
            f"How far is the point ({a}, {b}) from the origin, rounded to two decimals?",
            f"sqrt({a}^2 + {b}^2)",
            ROUNDED,
        ),
        (f"In how many ways can {small} people be chosen out of {c}?", f"comb({c}, {small})", 0.0),
    ]
    question, expression, tolerance = rng.choice(templates)
    value = calculate(expression)
    answer = f"{float(value):.2f}" if tolerance else value
    return _task(question, answer, ["calculator"], [[_call("calculator", {"expression": expression})]], tolerance=tolerance)


# Search, also with the calculator


def _search(*questions: str) -> list[Call]:
    return [_call("web_search", {"query": question}) for question in questions]


def _lookup(rng: random.Random) -> Task:
    thing = rng.choice(things())
    fact = rng.choice(sorted(KINDS[thing.kind].questions))
    question = thing.question(fact)
    return _task(question, thing.facts[fact], ["web_search"], [_search(question)])


HOPS = {  # kind of the second thing -> how the question refers to it, and the facts that it asks for
    "town": ("the town that is named in what is known about {}", ("founded", "people", "craft")),
    "person": ("the person who is named in what is known about {}", ("born", "works", "trade")),
}


def _two_hops(rng: random.Random) -> Task:
    kind = rng.choice(sorted(HOPS))
    first = rng.choice([e for e in things() if kind in e.facts and e.kind != "person"])
    second = next(e for e in things() if e.kind == kind and e.name == first.facts[kind])
    reference, facts = HOPS[kind]
    fact = rng.choice(facts)
    template = KINDS[kind].questions[fact].replace("the town of {name}", "{name}")
    question = template.format(name=reference.format(first.name))
    first_query = first.question(kind) if kind in KINDS[first.kind].questions else first.name
    calls = [_search(first_query), _search(second.question(fact))]
    return _task(question, second.facts[fact], ["web_search"], calls)


def _measured_fact(rng: random.Random) -> tuple[Thing, str, str]:
    """Draw a thing, one of its facts that is a number, and what the number counts."""
    thing = rng.choice(things())
    fact, unit = rng.choice(sorted(KINDS[thing.kind].units.items()))
    return thing, fact, unit


def _lookup_difference(rng: random.Random) -> Task:
    first, fact, unit = _measured_fact(rng)
    second = rng.choice([e for e in things() if e.kind == first.kind and e.facts[fact] != first.facts[fact]])
    questions = first.question(fact), second.question(fact)
    high, low = sorted((int(first.facts[fact]), int(second.facts[fact])), reverse=True)
    question = f"By how many {unit} do the answers to these two questions differ? {questions[0]} {questions[1]}"
    calls = [_search(*questions), [_call("calculator", {"expression": f"{high} - {low}"})]]
    return _task(question, str(high - low), ["web_search", "calculator"], calls)


def _lookup_product(rng: random.Random) -> Task:
    thing, fact, _ = _measured_fact(rng)
    factor, summand = rng.randint(12, 98), rng.randint(101, 999)
    query = thing.question(fact)
    expression = f"{thing.facts[fact]} * {factor} + {summand}"
    calls = [_search(query), [_call("calculator", {"expression": expression})]]
    question = f"Multiply the answer to this question by {factor} and add {summand}: {query}"
    return _task(question, calculate(expression), ["web_search", "calculator"], calls)


# Programs


def _evaluate(code: str) -> str:
    """Return the value of the last line of a program. It comes from the templates below, so it runs without a sandbox."""
    body, _, last_line = code.rpartition("\n")
    names: dict[str, Any] = {}
    exec(body, names)
    return str(eval(last_line, names))


def _program(rng: random.Random) -> Task:
    a, b, n = rng.randint(2, 19), rng.randint(20, 39), rng.randint(1000, 4000)
    s = rng.randint(5, 20)
    templates = [
        (
            f"How many prime numbers are there from {10 * a} to {n}?",
            f"sum(all(n % d for d in range(2, int(n ** 0.5) + 1)) for n in range({10 * a}, {n} + 1))",
        ),
        (
            f"How many of the numbers from 1 to {n} have digits that add up to {s}?",
            f"sum(sum(map(int, str(n))) == {s} for n in range(1, {n} + 1))",
        ),
        (
            f"What is the sum of the numbers from 1 to {n} that are divisible by {a} or by {b}, but not by both?",
            f"sum(n for n in range(1, {n} + 1) if (n % {a} == 0) != (n % {b} == 0))",
        ),
        (
            f"A sequence begins with {a}, and each number after that is the square of the one before plus {b}, modulo {n}. "
            f"Which number is the {s}th?",
            f"x = {a}\nfor _ in range({s} - 1):\n    x = (x * x + {b}) % {n}\nx",
        ),
    ]
    question, code = rng.choice(templates)
    return _task(question, _evaluate(code), ["python_repl"], [[_call("python_repl", {"code": code})]])


# Files


def _draw_costs(rng: random.Random) -> tuple[dict[str, str], str, dict[str, int]]:
    """Draw three files of costs; return the files, the month of one of them, and its costs."""
    months = rng.sample(MONTHS, 3)
    costs = {month: {item: rng.randint(11, 999) for item in rng.sample(ITEMS, 5)} for month in months}
    files = {_costs_path(month): "".join(f"{item}: {n}\n" for item, n in costs[month].items()) for month in months}
    return files, months[0], costs[months[0]]


def _costs_path(month: str) -> str:
    return f"costs/{month.lower()}.txt"


def _read_costs(month: str) -> Call:
    return _call("file_system", {"action": "read", "path": _costs_path(month)})


def _file(rng: random.Random) -> Task:
    files, month, costs = _draw_costs(rng)
    item = rng.choice(sorted(costs))
    question = f"There is a directory costs with a file for each month. What did {item} cost in {month}?"
    return _task(question, str(costs[item]), ["file_system"], [[_read_costs(month)]], files=files)


def _file_sum(rng: random.Random) -> Task:
    files, month, costs = _draw_costs(rng)
    calls = [[_read_costs(month)], [_call("calculator", {"expression": " + ".join(map(str, costs.values()))})]]
    question = f"There is a directory costs with a file for each month. What do the costs of {month} add up to?"
    return _task(question, str(sum(costs.values())), ["file_system", "calculator"], calls, files=files)


def _file_program(rng: random.Random) -> Task:
    numbers = [rng.randint(100, 999) for _ in range(40)]
    path, bound = f"series/{rng.choice(ITEMS)}{rng.randint(10, 99)}.txt", rng.randint(200, 800)
    code = f"sum(int(n) ** 2 for n in open('{path}') if int(n) > {bound})"
    calls = [[_call("file_system", {"action": "list", "path": "series"})], [_call("python_repl", {"code": code})]]
    question = (
        "The only file in the directory series has a number on each line. "
        f"What is the sum of the squares of those above {bound}?"
    )
    answer = str(sum(n**2 for n in numbers if n > bound))
    files = {path: "".join(f"{n}\n" for n in numbers)}
    return _task(question, answer, ["file_system", "python_repl"], calls, files=files)


MAKERS: dict[str, Callable[[random.Random], Task]] = {  # kind -> function that draws a task
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
TOOLS_NEEDED = {kind: frozenset(make(random.Random(0))["tools"]) for kind, make in MAKERS.items()}


def kinds_for(tools: Collection[str]) -> list[str]:
    """Return the kinds of tasks that can be solved with these tools."""
    return [kind for kind, needed in TOOLS_NEEDED.items() if needed <= set(tools)]


def split_of(task: Task) -> str:
    """Return the split that a task is in."""
    return data.split_of(repr((task["question"], sorted(task.get("files", {}).items()))))


def generate_tasks(kinds: Collection[str], split: str, count: int, seed: int) -> list[Task]:
    """Generate distinct tasks, taking the kinds in turn.

    Args:
        kinds: names in `MAKERS`.
        split: train or eval.
        count: number of tasks; fewer are returned if the kinds do not have so many.
        seed: the same seed gives the same tasks.

    Raises:
        ValueError: an unknown split or kind, or no kind.
    """
    data.check_split(split)
    if not kinds or not set(kinds) <= set(MAKERS):
        raise ValueError(f"kinds={list(kinds)}: choose some of {', '.join(MAKERS)}")
    rng, tasks = random.Random(f"{seed} {split}"), dict[str, Task]()
    remaining = [kind for kind in MAKERS if kind in kinds]
    while remaining and len(tasks) < count:
        kind = remaining[len(tasks) % len(remaining)]
        for _ in range(MAX_TRIES):
            task = {"kind": kind} | MAKERS[kind](rng)
            key = repr((task["question"], task.get("files")))
            if split_of(task) == split and key not in tasks:
                tasks[key] = task
                break
        else:
            remaining.remove(kind)
    return list(tasks.values())


def check_task(task: Task, tool_names: Collection[str]) -> None:
    """Raise ValueError if a task lacks a field or has a bad one."""
    for name in ("question", "answer"):
        if not isinstance(task.get(name), str) or not task[name].strip():
            raise ValueError(f"task {task!r:.80} has no {name}: a task is a dict with question, answer and tools")
    tools = task.get("tools")
    if isinstance(tools, str) or not isinstance(tools, Sequence) or len(set(tools)) < len(tools):
        raise ValueError(f"task {task!r:.80} has no tools: give a list of the tools that it needs, each once")
    if unknown := [name for name in tools if name not in tool_names]:
        raise ValueError(f"task {task!r:.80} needs {', '.join(map(str, unknown))}, but the tools are {', '.join(tool_names)}")
    files = task.get("files", {})
    if not isinstance(files, dict) or not all(isinstance(text, str) for pair in files.items() for text in pair):
        raise ValueError(f"task {task!r:.80} has bad files: give a dict from path to text")
    tolerance = task.get("tolerance", 0.0)
    if not isinstance(tolerance, int | float) or not 0 <= tolerance < float("inf"):
        raise ValueError(f"tolerance={tolerance!r}: use a finite number of at least 0")
