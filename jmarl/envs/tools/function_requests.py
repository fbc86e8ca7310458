"""Requests that need several function calls, made from a table of functions: any number of them, nothing downloaded.

A request names, in plain words, the arguments of 2 to 5 calls, of different functions or of one called several times; no two of
its calls are equal. The functions that are offered are those and up to two more. An argument with a default is named in about
half of the calls, and may be left out of the others. Schemas and wanted calls have the form of BFCL's.
"""

from __future__ import annotations

import random
from typing import Any, NamedTuple


def _list(text: str) -> list[str]:
    return text.split("|")


CITIES = _list("Oslo|Lima|Cairo|Hanoi|Quito|Porto|Kyoto|Dakar|Turin|Perth|Boston|Leeds|Zagreb|Malmo|Accra|Bergen")
PEOPLE = _list("Ana|Ben|Chloe|David|Elif|Farid|Grace|Hugo|Ines|Jonas|Kofi|Lena|Mateo|Nora|Omar|Priya")
THINGS = _list("coffee|rice|paper|soap|honey|batteries|lamps|pencils|towels|apples|nails|candles|olives|cables")
WORDS = _list("river|window|bread|garden|winter|letter|bridge|morning|teacher|kitchen|island|holiday|forest|ticket")
ROOMS = _list("kitchen|bedroom|office|hall|bathroom|garage|attic|cellar")
SONGS = _list("Blue Harbour|Paper Moon Road|Slow Train|Green Lanterns|Northern Rain|Little Engines|Salt and Stars")
FILES = _list("notes.txt|plan.md|budget.csv|report.pdf|photo.png|letter.docx|songs.m3u|draft.tex")
HOURS = [f"{hour}:{minute:02}" for hour in range(7, 22) for minute in (0, 15, 30, 45)]
DATES = [f"2026-{month:02}-{day:02}" for month in range(1, 13) for day in (2, 9, 17, 26)]
MONEY = _list("USD|EUR|GBP|JPY|CHF|NOK|INR|BRL")
LANGUAGES = _list("French|German|Spanish|Polish|Turkish|Swahili|Welsh|Hindi")


class Default(NamedTuple):
    """An argument with a default, and how a request names another value."""

    name: str
    values: list
    default: Any
    words: str


class Function(NamedTuple):
    description: str
    arguments: dict[str, Any]  # name -> values that it may have
    words: tuple[str, ...]  # ways to ask for it
    optional: Default | None = None


FUNCTIONS = {
    "get_weather": Function("weather forecast of a city", {"city": CITIES, "days": range(1, 11)}, ("get the forecast of {city} for {days} days", "check the weather in {city} over {days} days"), Default("unit", ["celsius", "fahrenheit"], "celsius", "in {unit}")),
    "convert_money": Function("amount of money in another currency", {"amount": range(5, 995, 5), "source": MONEY, "target": MONEY}, ("convert {amount} {source} to {target}", "work out what {amount} {source} are in {target}")),
    "send_message": Function("sends a text to a person", {"person": PEOPLE, "text": [f"see you at {hour}" for hour in HOURS]}, ('send {person} the message "{text}"', 'write "{text}" to {person}'), Default("urgent", [True], False, "as urgent")),
    "set_alarm": Function("sets an alarm", {"time": HOURS}, ("set an alarm for {time}", "wake me at {time}"), Default("repeat", ["once", "daily", "weekly"], "once", "and repeat it {repeat}")),
    "book_table": Function("books a table in a restaurant", {"city": CITIES, "date": DATES, "guests": range(2, 13)}, ("book a table in {city} for {guests} guests on {date}", "reserve a table for {guests} on {date} in {city}")),
    "find_flights": Function("flights between two cities", {"origin": CITIES, "destination": CITIES, "date": DATES}, ("find flights from {origin} to {destination} on {date}", "look for a flight on {date} from {origin} to {destination}"), Default("max_stops", [0, 1, 3], 2, "with at most {max_stops} stops")),
    "translate_word": Function("a word in another language", {"word": WORDS, "language": LANGUAGES}, ('translate "{word}" into {language}', 'say what "{word}" is in {language}')),
    "order_item": Function("orders things from the shop", {"item": THINGS, "count": range(1, 40)}, ("order {count} packs of {item}", "buy {count} packs of {item}"), Default("express", [True], False, "by express")),
    "set_temperature": Function("sets the heating of a room", {"room": ROOMS, "degrees": [d / 2 for d in range(30, 50)]}, ("set the {room} to {degrees} degrees", "heat the {room} to {degrees} degrees")),
    "switch_light": Function("switches the light of a room", {"room": ROOMS, "on": [True, False]}, ("switch the light in the {room} {on}", "turn the {room} light {on}")),
    "play_song": Function("plays a song", {"title": SONGS}, ('play "{title}"', 'put on the song "{title}"'), Default("volume", list(range(1, 11)), 5, "at volume {volume}")),
    "area_of_rectangle": Function("area of a rectangle", {"width": range(2, 60), "height": range(2, 60)}, ("compute the area of a rectangle of width {width} and height {height}",)),
    "greatest_divisor": Function("greatest common divisor of two numbers", {"first": range(10, 400), "second": range(10, 400)}, ("find the greatest common divisor of {first} and {second}",)),
    "loan_payment": Function("monthly payment of a loan", {"amount": range(1000, 50000, 500), "years": range(1, 31), "rate": [r / 4 for r in range(2, 33)]}, ("work out the payment for a loan of {amount} over {years} years at {rate} percent",)),
    "delete_file": Function("deletes a file", {"path": FILES}, ("delete the file {path}", "remove {path}")),
    "copy_file": Function("copies a file", {"path": FILES, "folder": ["backup", "archive", "shared", "old"]}, ("copy {path} to the folder {folder}",)),
    "add_event": Function("adds an event to the calendar", {"title": ["dentist", "choir", "meeting", "training", "exam", "party"], "date": DATES, "time": HOURS}, ("put {title} into the calendar on {date} at {time}", "add the event {title} on {date} at {time}")),
    "average": Function("mean of numbers", {"numbers": [[a, b, a + b - 7] for a in range(3, 30, 3) for b in range(8, 90, 9)]}, ("compute the average of {numbers}",)),
}  # fmt: skip
TYPES = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array"}


def schema(name: str) -> dict:
    """In the form of BFCL's."""
    function = FUNCTIONS[name]
    properties: dict[str, dict] = {argument: _typed(list(values)) for argument, values in function.arguments.items()}
    if of := function.optional:
        properties[of.name] = _typed([*of.values, of.default]) | {"default": of.default}
    parameters = {"type": "dict", "properties": properties, "required": list(function.arguments)}
    return {"name": name, "description": function.description, "parameters": parameters}


def _typed(values: list) -> dict:
    kind = {"type": TYPES[type(values[0])]}
    return kind | {"enum": list(dict.fromkeys(values))} if kind["type"] == "string" and len(set(values)) <= 4 else kind


def draw(rng: random.Random, count: int) -> dict:
    """A request that needs so many calls, in the fields of BFCL."""
    names = rng.sample(sorted(FUNCTIONS), rng.randint(1, count))
    chosen = names + [rng.choice(names) for _ in range(count - len(names))]
    rng.shuffle(chosen)
    parts, calls = list[str](), list[dict]()
    for name in chosen:
        words, call = _call(rng, name)
        while call in calls:
            words, call = _call(rng, name)
        parts.append(words)
        calls.append(call)
    others = rng.sample(sorted(FUNCTIONS.keys() - names), rng.randint(0, 2))
    offered = rng.sample([*names, *others], len(names) + len(others))
    if rng.random() < 0.5:
        text = " ".join(f"{part[0].upper()}{part[1:]}." for part in parts)
    else:
        text = f"Please {', '.join(parts[:-1])}{' and ' if parts[1:] else ''}{parts[-1]}."
    return {"user_prompt": text, "function": [schema(name) for name in offered], "ground_truth": calls}


def _call(rng: random.Random, name: str) -> tuple[str, dict]:
    """What is asked in words, and the call that is wanted."""
    function = FUNCTIONS[name]
    while True:  # until no two arguments are equal: no flight from Oslo to Oslo
        values = {argument: rng.choice(list(of)) for argument, of in function.arguments.items()}
        if len({repr(value) for value in values.values()}) == len(values):
            break
    words, wanted = rng.choice(function.words), {argument: [value] for argument, value in values.items()}
    if of := function.optional:
        value = rng.choice([v for v in of.values if v != of.default])
        named = rng.random() < 0.5
        words += f" {of.words}" * named
        values[of.name] = value
        wanted[of.name] = [value] if named else [of.default, ""]
    said = {argument: {True: "on", False: "off"}[v] if isinstance(v, bool) else v for argument, v in values.items()}
    return words.format(**said), {name: wanted}
