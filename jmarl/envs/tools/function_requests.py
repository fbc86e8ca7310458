"""Generate requests that need several function calls, from a table of functions and a seed; nothing is downloaded.

A request names, in plain words, the arguments of several calls, of different functions or of one function called several times;
no two of its calls are equal. It offers these functions and up to two more. Each call gives an optional argument in about half
of the cases; otherwise the argument may be left out. Schemas and expected calls have the form of BFCL's.

Left out: requests with arguments that must be inferred, computed or converted.
"""

import random
from collections.abc import Sequence
from typing import Any, NamedTuple

# fmt: off
CITIES = [
    "Oslo", "Lima", "Cairo", "Hanoi", "Quito", "Porto", "Kyoto", "Dakar", "Turin", "Perth", "Boston", "Leeds", "Zagreb",
    "Malmo", "Accra", "Bergen",
]
PEOPLE = [
    "Ana", "Ben", "Chloe", "David", "Elif", "Farid", "Grace", "Hugo", "Ines", "Jonas", "Kofi", "Lena", "Mateo", "Nora",
    "Omar", "Priya",
]
THINGS = [
    "coffee", "rice", "paper", "soap", "honey", "batteries", "lamps", "pencils", "towels", "apples", "nails", "candles",
    "olives", "cables",
]
WORDS = [
    "river", "window", "bread", "garden", "winter", "letter", "bridge", "morning", "teacher", "kitchen", "island",
    "holiday", "forest", "ticket",
]
ROOMS = ["kitchen", "bedroom", "office", "hall", "bathroom", "garage", "attic", "cellar"]
SONGS = ["Blue Harbour", "Paper Moon Road", "Slow Train", "Green Lanterns", "Northern Rain", "Little Engines", "Salt and Stars"]
FILES = ["notes.txt", "plan.md", "budget.csv", "report.pdf", "photo.png", "letter.docx", "songs.m3u", "draft.tex"]
HOURS = [f"{hour}:{minute:02}" for hour in range(7, 22) for minute in (0, 15, 30, 45)]
DATES = [f"2026-{month:02}-{day:02}" for month in range(1, 13) for day in (2, 9, 17, 26)]
MONEY = ["USD", "EUR", "GBP", "JPY", "CHF", "NOK", "INR", "BRL"]
LANGUAGES = ["French", "German", "Spanish", "Polish", "Turkish", "Swahili", "Welsh", "Hindi"]
# fmt: on


class Option(NamedTuple):
    """An argument with a default."""

    name: str
    values: list  # that a request may ask for; the default among them is never asked for
    default: Any
    phrase: str  # added to the request if it asks for a value


class RequestedFunction(NamedTuple):
    """A function that a request may need."""

    description: str
    arguments: dict[str, Sequence[Any]]  # required argument -> values that it may have
    phrases: tuple[str, ...]  # ways to ask for a call
    option: Option | None = None


FUNCTIONS: dict[str, RequestedFunction] = {
    "get_weather": RequestedFunction(
        "weather forecast of a city",
        {"city": CITIES, "days": range(1, 11)},
        ("get the forecast of {city} for {days} days", "check the weather in {city} over {days} days"),
        Option("unit", ["celsius", "fahrenheit"], "celsius", "in {unit}"),
    ),
    "convert_money": RequestedFunction(
        "amount of money in another currency",
        {"amount": range(5, 995, 5), "source": MONEY, "target": MONEY},
        ("convert {amount} {source} to {target}", "work out what {amount} {source} are in {target}"),
    ),
    "send_message": RequestedFunction(
        "sends a text to a person",
        {"person": PEOPLE, "text": [f"see you at {hour}" for hour in HOURS]},
        ('send {person} the message "{text}"', 'write "{text}" to {person}'),
        Option("urgent", [True], False, "as urgent"),
    ),
    "set_alarm": RequestedFunction(
        "sets an alarm",
        {"time": HOURS},
        ("set an alarm for {time}", "wake me at {time}"),
        Option("repeat", ["once", "daily", "weekly"], "once", "and repeat it {repeat}"),
    ),
    "book_table": RequestedFunction(
        "books a table in a restaurant",
        {"city": CITIES, "date": DATES, "guests": range(2, 13)},
        ("book a table in {city} for {guests} guests on {date}", "reserve a table for {guests} on {date} in {city}"),
    ),
    "find_flights": RequestedFunction(
        "flights between two cities",
        {"origin": CITIES, "destination": CITIES, "date": DATES},
        ("find flights from {origin} to {destination} on {date}", "look for a flight on {date} from {origin} to {destination}"),
        Option("max_stops", [0, 1, 3], 2, "with at most {max_stops} stops"),
    ),
    "translate_word": RequestedFunction(
        "a word in another language",
        {"word": WORDS, "language": LANGUAGES},
        ('translate "{word}" into {language}', 'say what "{word}" is in {language}'),
    ),
    "order_item": RequestedFunction(
        "orders things from the shop",
        {"item": THINGS, "count": range(1, 40)},
        ("order {count} packs of {item}", "buy {count} packs of {item}"),
        Option("express", [True], False, "by express"),
    ),
    "set_temperature": RequestedFunction(
        "sets the heating of a room",
        {"room": ROOMS, "degrees": [d / 2 for d in range(30, 50)]},
        ("set the {room} to {degrees} degrees", "heat the {room} to {degrees} degrees"),
    ),
    "switch_light": RequestedFunction(
        "switches the light of a room",
        {"room": ROOMS, "on": [True, False]},
        ("switch the light in the {room} {on}", "turn the {room} light {on}"),
    ),
    "play_song": RequestedFunction(
        "plays a song",
        {"title": SONGS},
        ('play "{title}"', 'put on the song "{title}"'),
        Option("volume", list(range(1, 11)), 5, "at volume {volume}"),
    ),
    "area_of_rectangle": RequestedFunction(
        "area of a rectangle",
        {"width": range(2, 60), "height": range(2, 60)},
        ("compute the area of a rectangle of width {width} and height {height}",),
    ),
    "greatest_divisor": RequestedFunction(
        "greatest common divisor of two numbers",
        {"first": range(10, 400), "second": range(10, 400)},
        ("find the greatest common divisor of {first} and {second}",),
    ),
    "loan_payment": RequestedFunction(
        "monthly payment of a loan",
        {"amount": range(1000, 50000, 500), "years": range(1, 31), "rate": [r / 4 for r in range(2, 33)]},
        ("work out the payment for a loan of {amount} over {years} years at {rate} percent",),
    ),
    "delete_file": RequestedFunction("deletes a file", {"path": FILES}, ("delete the file {path}", "remove {path}")),
    "copy_file": RequestedFunction(
        "copies a file",
        {"path": FILES, "folder": ["backup", "archive", "shared", "old"]},
        ("copy {path} to the folder {folder}",),
    ),
    "add_event": RequestedFunction(
        "adds an event to the calendar",
        {"title": ["dentist", "choir", "meeting", "training", "exam", "party"], "date": DATES, "time": HOURS},
        ("put {title} into the calendar on {date} at {time}", "add the event {title} on {date} at {time}"),
    ),
    "average": RequestedFunction(
        "mean of numbers",
        {"numbers": [[a, b, a + b - 7] for a in range(3, 30, 3) for b in range(8, 90, 9)]},
        ("compute the average of {numbers}",),
    ),
}

JSON_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array"}


def schema(name: str) -> dict:
    """Return the JSON schema of a function, in the form of BFCL's."""
    function = FUNCTIONS[name]
    properties = {argument: _value_schema(list(values)) for argument, values in function.arguments.items()}
    if option := function.option:
        properties[option.name] = _value_schema([*option.values, option.default]) | {"default": option.default}
    parameters = {"type": "dict", "properties": properties, "required": list(function.arguments)}
    return {"name": name, "description": function.description, "parameters": parameters}


def _value_schema(values: list) -> dict[str, Any]:
    """Return the type of the values; strings with at most four values become an enum."""
    kind = JSON_TYPES[type(values[0])]
    if kind == "string" and len(set(values)) <= 4:
        return {"type": kind, "enum": list(dict.fromkeys(values))}
    return {"type": kind}


def draw(rng: random.Random, count: int) -> dict:
    """Draw a request that needs `count` calls, with the fields of BFCL."""
    names = rng.sample(sorted(FUNCTIONS), rng.randint(1, count))
    chosen = names + [rng.choice(names) for _ in range(count - len(names))]
    rng.shuffle(chosen)
    phrases, calls = list[str](), list[dict]()
    for name in chosen:
        phrase, call = _draw_call(rng, name)
        while call in calls:
            phrase, call = _draw_call(rng, name)
        phrases.append(phrase)
        calls.append(call)
    distractors = rng.sample(sorted(FUNCTIONS.keys() - names), rng.randint(0, 2))
    offered = rng.sample([*names, *distractors], len(names) + len(distractors))
    if rng.random() < 0.5:
        text = " ".join(f"{phrase[0].upper()}{phrase[1:]}." for phrase in phrases)
    else:
        text = f"Please {', '.join(phrases[:-1])}{' and ' if phrases[1:] else ''}{phrases[-1]}."
    return {"user_prompt": text, "function": [schema(name) for name in offered], "ground_truth": calls}


def _draw_call(rng: random.Random, name: str) -> tuple[str, dict]:
    """Draw a call of a function: return the phrase that asks for it, and the expected call."""
    function = FUNCTIONS[name]
    while True:  # until no two arguments are equal: no flight from Oslo to Oslo
        values = {argument: rng.choice(list(choices)) for argument, choices in function.arguments.items()}
        if len({repr(value) for value in values.values()}) == len(values):
            break
    phrase, expected = rng.choice(function.phrases), {argument: [value] for argument, value in values.items()}
    if option := function.option:
        value = rng.choice([v for v in option.values if v != option.default])
        is_requested = rng.random() < 0.5
        if is_requested:
            phrase += f" {option.phrase}"
        values[option.name] = value
        expected[option.name] = [value] if is_requested else [option.default, ""]
    words = {argument: _word_for(value) for argument, value in values.items()}
    return phrase.format(**words), {name: expected}


def _word_for(value: Any) -> Any:
    if isinstance(value, bool):
        return "on" if value else "off"
    return value
