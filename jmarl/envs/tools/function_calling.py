"""Parallel function calling in the manner of BFCL: two agents answer a request with the calls it needs, together.

Task: a request that needs 2 to 5 calls, and functions with JSON schemas, a few more than are needed. Roles: both agents read
the request and the functions, and write calls at the same time (`function_calls` says how); the calls of both are merged, equal
ones once. Told is who makes which part: with sharing="halves" agent 1 the first half (the odd one too) and agent 2 the second;
with "self_select" each chooses.

Reward, the same for both. n calls are wanted, m are made (merged, without repetitions); terms are shares of 0 to 1:

    + 0.05 · parse       1 if m > 0
    + 0.25 · names       F1 of the names of functions, as multisets: 2 · (names in common) / (m + n)
    + 0.35 · arguments   over the best pairing of made and wanted calls: the sum of their similarities / n. Similarity: 0 for
                         another function, else arguments as wanted / arguments that either call has
    + 0.10 · count       1 - |m - n| / n, at least 0
    + 0.15 · balance     1 - (sum over agents of |calls of its own - an even share of n|) / n, at least 0; either agent may
                         have the odd one
    + 0.20 · exact       1 if m = n and every call is as wanted
    - 0.20 · overlap     calls that both made / n, at most 1
    - 0.15 · lazy        agents without a call / 2
    - 0.05 · extra       (m - n) / n, between 0 and 1
    - 0.05 · duplicate   calls written beyond m / n, at most 1: a call that both made is one here too

clamped to [-0.4, 1.2] as published. The clamp is never felt: the terms add up to at most 1.10 (all right, shared out evenly)
and at least -0.25 (both agents write the same 2n wrong calls); two empty answers earn -0.15. reward_range is [-0.25, 1.10].

Data: requests made by `function_requests`, or a JSON Lines file (`data=`) with the fields of OpenMLRL/BFCL-V4-Parallel-Native:
user_prompt, function, ground_truth. Metrics: each term, weighted; `solved` (exact); `made`.
Left out: functions are not run; requests of several turns; requests that need no call.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any, NamedTuple

from jmarl.envs.base import Step, TextEnvironment
from jmarl.envs.data import check_split, split_of, split_rows
from jmarl.envs.tools.function_calls import REACHED, WEIGHTS, Call, Wanted, read_calls, reward_of, score
from jmarl.envs.tools.function_requests import draw

SHARING = {
    "halves": (
        "You are agent 1: make the first half of the calls, in the order of the request (the larger half, if their number is "
        "odd). Agent 2 makes the others.",
        "You are agent 2: make the second half of the calls, in the order of the request (the smaller half, if their number is "
        "odd). Agent 1 makes the others.",
    ),
    "self_select": (
        "You are agent 1. Agent 2 reads the same. Make some of the calls, not all, and not those that agent 2 makes.",
        "You are agent 2. Agent 1 reads the same. Make some of the calls, not all, and not those that agent 1 makes.",
    ),
}


class Request(NamedTuple):
    """The state of an episode."""

    task: dict
    made: tuple[Call, ...] = ()  # merged


def wanted_of(task: dict) -> list[Wanted]:
    """The calls of a task; refuses a malformed one with what is wrong."""
    if not isinstance(task.get("user_prompt"), str) or not task["user_prompt"].strip():
        raise ValueError(f"task {task!r:.80} has no text in user_prompt: it needs user_prompt, function, ground_truth")
    functions, truth = task.get("function"), task.get("ground_truth")
    named = isinstance(functions, list) and all(isinstance(of, dict) and isinstance(of.get("name"), str) for of in functions)
    if not isinstance(functions, list) or not named:
        raise ValueError(f"task {task!r:.80} has no list of functions with names in function")
    known = {of["name"] for of in functions}
    if not isinstance(truth, list) or not truth or not all(isinstance(of, dict) and len(of) == 1 for of in truth):
        raise ValueError(f"task {task!r:.80} has no calls in ground_truth: give a list of {{name: {{argument: [values]}}}}")
    wanted = [Wanted(name, arguments) for of in truth for name, arguments in of.items()]
    for name, arguments in wanted:
        if name not in known or not isinstance(arguments, dict):
            raise ValueError(f"task {task!r:.80}: the call of {name!r} is of no function it has, or has no arguments by name")
        if not all(isinstance(values, list) and values for values in arguments.values()):
            raise ValueError(f"task {task!r:.80}: the values of {name!r} are no lists of at least one")
    return wanted


def parameters_of(function: dict) -> dict[str, dict]:
    return (function.get("parameters") or {}).get("properties") or {}


def signature(function: dict) -> str:
    """A function's schema in one line."""
    required = (function.get("parameters") or {}).get("required") or []
    said = []
    for name, of in parameters_of(function).items():
        kind = "|".join(map(str, of["enum"])) if of.get("enum") else of.get("type", "any")
        default = "" if name in required else f" = {of['default']}" if "default" in of else " (may be left out)"
        said.append(f"{name}: {kind}{default}")
    return f"{function['name']}({', '.join(said)}): {function.get('description', '')}".rstrip(": ")


def load_requests(path: str | Path) -> list[dict]:
    """The rows of a JSON Lines file, each checked. They are read as they are: an argument has values of several types, which
    a column of a data set cannot hold."""
    lines = Path(path).read_text(encoding="utf-8").splitlines()
    rows = [
        {name: json.loads(line).get(name) for name in ("user_prompt", "function", "ground_truth")} for line in lines if line
    ]
    for row in rows:
        wanted_of(row)
    return rows


class FunctionCalling(TextEnvironment):
    """The environment; see the module.

    data: a JSON Lines file of requests to draw tasks from. sharing: halves or self_select. calls: that a request made here
    needs, from and to.
    """

    roles = ("agent 1", "agent 2")
    reward_range = REACHED

    def __init__(self, data: str | Path | None = None, *, sharing: str = "halves", calls: tuple[int, int] = (2, 5)):
        if sharing not in SHARING:
            raise ValueError(f"sharing={sharing!r}: choose {' or '.join(SHARING)}")
        if not 1 <= calls[0] <= calls[1] <= 8:
            raise ValueError(f"calls={calls}: give from and to, between 1 and 8")
        self.sharing, self.calls = sharing, calls
        self.requests = load_requests(data) if data is not None else None

    def tasks(self, split: str = "train", count: int = 100, seed: int = 0) -> list[dict]:
        check_split(split)
        rng = random.Random(f"function_calling {split} {seed}")
        if self.requests is not None:
            known = split_rows(self.requests, split, _identity)
            return rng.sample(known, min(count, len(known)))
        found = dict[str, dict]()
        for _ in range(20 * count + 100):
            if len(found) == count:
                break
            task = draw(rng, rng.randint(*self.calls))
            if split_of(_identity(task)) == split:
                found.setdefault(_identity(task), task)
        return list(found.values())

    def reset(self, task, rng):
        wanted_of(task)
        functions = "\n".join(map(signature, task["function"]))
        return Request(task), [
            f"Two agents answer a request with function calls. The functions:\n{functions}\n\n"
            f"The request: {task['user_prompt']}\n\n{told}\n"
            f'Write nothing but calls, one a line, arguments by name, such as: water_plants(room="hall", litres=3)'
            for told in SHARING[self.sharing]
        ]

    def step(self, state, messages, rng):
        task = state.task
        parameters = {function["name"]: list(parameters_of(function)) for function in task["function"]}
        terms, made = score([read_calls(text, parameters) for text in messages], wanted_of(task))
        info = {name: WEIGHTS[name] * share for name, share in terms.items()}
        info |= {"solved": terms["exact"], "made": float(len(made))}
        return Step(Request(task, tuple(made)), [], reward_of(terms), True, info)

    def render(self, state: Any) -> str:
        """The calls that are wanted, and those that were made."""
        wanted = [f"  {name}({json.dumps(arguments)})" for name, arguments in wanted_of(state.task)]
        made = [f"  {name}({json.dumps(arguments)})" for name, arguments in state.made] or ["  none"]
        return "\n".join([state.task["user_prompt"], "wanted (values of which one is met):", *wanted, "made:", *made])

    def solve(self, state: Request) -> list[str]:
        """The first half of the calls, and the second. (A call that is wanted twice is counted once.)"""
        lines = []
        for name, arguments in wanted_of(state.task):
            given = [f"{argument}={values[0]!r}" for argument, values in arguments.items() if values[0] != ""]
            lines.append(f"{name}({', '.join(given)})")
        middle = (len(lines) + 1) // 2
        return ["\n".join(lines[:middle]), "\n".join(lines[middle:])]

    def describe(self) -> dict[str, Any]:
        return super().describe() | {"sharing": self.sharing}


def _identity(task: dict) -> str:
    """The calls that are wanted, in any order."""
    return json.dumps(sorted(json.dumps(call, sort_keys=True) for call in task["ground_truth"]))
