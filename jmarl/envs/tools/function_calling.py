"""Parallel function calling in the manner of BFCL: two agents together write the calls that a request needs.

Task: a request that needs 2 to 5 calls, and functions with JSON schemas, up to two more than are needed.
Roles: both agents read the request and the functions and write calls at the same time (`function_calls.py` has the formats).
The calls of both are merged; equal calls count once. sharing="halves" asks agent 1 for the first half of the calls (the larger
one) and agent 2 for the second; sharing="self_select" lets each agent choose.

Reward, the same for both agents. n calls are expected, m are made (merged, without repetitions); each term is in [0, 1]:

    + 0.05 · parse       1 if m > 0
    + 0.25 · names       F1 of the function names as multisets: 2 · (common names) / (m + n)
    + 0.35 · arguments   sum of similarities / n over the best one-to-one pairing of made and expected calls. The similarity is
                         (right arguments) / (arguments of either call); 0 for different functions
    + 0.10 · count       max(0, 1 - |m - n| / n)
    + 0.15 · balance     max(0, 1 - (sum over agents of |own calls - an even share of n|) / n); for odd n either agent may
                         have one more
    + 0.20 · exact       1 if m = n and every call is as expected
    - 0.20 · overlap     min(1, calls that both agents made / n)
    - 0.15 · lazy        agents without a call / 2
    - 0.05 · extra       (m - n) / n, clipped to [0, 1]
    - 0.05 · duplicate   min(1, calls written beyond m / n); a call that both agents made counts here too

The sum is clamped to [-0.4, 1.2] as published, which has no effect: the sum is at most 1.10 (all right and evenly shared) and
at least -0.25 (both agents write the same 2n wrong calls). Two empty answers earn -0.15. So reward_range is [-0.25, 1.10].

Data: generated requests (`function_requests.py`), or a JSON Lines file (`data=`) with the fields of
OpenMLRL/BFCL-V4-Parallel-Native: user_prompt, function, ground_truth.
Parts of the reward: each term times its weight. Measures: `solved` (exact), `made` (m).
Left out: running the functions; requests over several turns; requests that need no call.
"""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jmarl.config.paths import expand_home
from jmarl.envs.base import Step, TextEnvironment
from jmarl.envs.data import check_split, split_of, split_rows
from jmarl.envs.tools.function_calls import ATTAINABLE, WEIGHTS, ExpectedCall, FunctionCall, read_calls, reward_of, score
from jmarl.envs.tools.function_requests import draw
from jmarl.envs.tools.tool_calls import SPECIAL_TOKENS

SHARING = {  # prompts of agent 1 and agent 2
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
    """State of an episode."""

    task: dict
    calls: tuple[FunctionCall, ...] = ()  # of both agents, merged; empty before the step


def expected_calls(task: dict) -> list[ExpectedCall]:
    """Return the calls that a task needs; raise ValueError for a malformed task."""
    if not isinstance(task.get("user_prompt"), str) or not task["user_prompt"].strip():
        raise ValueError(f"task {task!r:.80} has no text in user_prompt: it needs user_prompt, function, ground_truth")
    functions, truth = task.get("function"), task.get("ground_truth")
    if not isinstance(functions, list) or not all(isinstance(f, dict) and isinstance(f.get("name"), str) for f in functions):
        raise ValueError(f"task {task!r:.80} has no list of functions in function: give JSON schemas, each with a name")
    names = {function["name"] for function in functions}
    if not isinstance(truth, list) or not truth or not all(isinstance(call, dict) and len(call) == 1 for call in truth):
        raise ValueError(f"task {task!r:.80} has no calls in ground_truth: give a list of {{name: {{argument: [values]}}}}")
    calls = [ExpectedCall(name, arguments) for call in truth for name, arguments in call.items()]
    for name, arguments in calls:
        if name not in names or not isinstance(arguments, dict):
            raise ValueError(
                f"task {task!r:.80}: the call of {name!r} in ground_truth is not of one of its functions, or its arguments are "
                "no dict"
            )
        if not all(isinstance(values, list) and values for values in arguments.values()):
            raise ValueError(f"task {task!r:.80}: give a list of at least one value for each argument of {name!r}")
    return calls


def properties_of(function: dict) -> dict[str, dict]:
    """Return the schemas of a function's arguments by name."""
    return (function.get("parameters") or {}).get("properties") or {}


def signature(function: dict) -> str:
    """Return a function's schema in one line."""
    required = (function.get("parameters") or {}).get("required") or []
    arguments = []
    for name, schema in properties_of(function).items():
        kind = "|".join(map(str, schema["enum"])) if schema.get("enum") else schema.get("type", "any")
        default = ""
        if name not in required:
            default = f" = {schema['default']}" if "default" in schema else " (may be left out)"
        arguments.append(f"{name}: {kind}{default}")
    return f"{function['name']}({', '.join(arguments)}): {function.get('description', '')}".rstrip(": ")


def load_requests(path: str | Path) -> list[dict]:
    """Read the tasks of a JSON Lines file and check them.

    The `datasets` library is not used: an argument has allowed values of several types, which no column can hold.
    """
    rows = [json.loads(line) for line in Path(expand_home(path)).read_text(encoding="utf-8").splitlines() if line]
    tasks = [{name: row.get(name) for name in ("user_prompt", "function", "ground_truth")} for row in rows]
    for task in tasks:
        expected_calls(task)
    return tasks


class FunctionCalling(TextEnvironment):
    """The environment; see the module docstring.

    Args:
        data: JSON Lines file of requests; default: generated requests.
        sharing: halves or self_select.
        calls: least and greatest number of calls that a generated request needs.
    """

    roles = ("agent 1", "agent 2")
    reward_range = ATTAINABLE
    special_tokens = SPECIAL_TOKENS

    def __init__(self, data: str | Path | None = None, *, sharing: str = "halves", calls: tuple[int, int] = (2, 5)):
        if sharing not in SHARING:
            raise ValueError(f"sharing={sharing!r}: choose {' or '.join(SHARING)}")
        if not 1 <= calls[0] <= calls[1] <= 8:
            raise ValueError(f"calls={calls}: use (least, greatest), both between 1 and 8")
        self.sharing, self.calls = sharing, calls
        self.requests = load_requests(data) if data is not None else None

    def tasks(self, split: str = "train", count: int = 100, seed: int = 0) -> list[dict]:
        """Return up to `count` distinct tasks of a split, the same for the same seed."""
        check_split(split)
        rng = random.Random(f"function_calling {split} {seed}")
        if self.requests is not None:
            tasks = split_rows(self.requests, split, _identity)
            return rng.sample(tasks, min(count, len(tasks)))
        drawn = dict[str, dict]()
        for _ in range(20 * count + 100):
            if len(drawn) == count:
                break
            task = draw(rng, rng.randint(*self.calls))
            if split_of(_identity(task)) == split:
                drawn.setdefault(_identity(task), task)
        return list(drawn.values())

    def reset(self, task: dict, rng: np.random.Generator) -> tuple[Request, list[str]]:
        """Return the state and both prompts; raise ValueError for a malformed task."""
        del rng
        expected_calls(task)
        functions = "\n".join(map(signature, task["function"]))
        return Request(task), [
            f"Two agents answer a request with function calls. The functions:\n{functions}\n\n"
            f"The request: {task['user_prompt']}\n\n{instruction}\n"
            f'Write nothing but calls, one a line, arguments by name, such as: water_plants(room="hall", litres=3)'
            for instruction in SHARING[self.sharing]
        ]

    def step(self, state: Request, messages: Sequence[str], rng: np.random.Generator) -> Step:
        """Score the calls of both agents; the episode is over."""
        del rng
        task = state.task
        parameters = {function["name"]: list(properties_of(function)) for function in task["function"]}
        schemas = {function["name"]: function.get("parameters") or {} for function in task["function"]}
        terms, merged = score([read_calls(text, parameters, schemas) for text in messages], expected_calls(task))
        parts, reward = {name: WEIGHTS[name] * value for name, value in terms.items()}, reward_of(terms)
        measures = {"solved": terms["exact"], "made": float(len(merged))}
        return Step(Request(task, tuple(merged)), [], reward, True, measures, parts=parts)

    def render(self, state: Request) -> str:
        """Return the expected calls and those that were made as text."""
        expected = [f"  {name}({json.dumps(arguments)})" for name, arguments in expected_calls(state.task)]
        actual = [f"  {name}({json.dumps(arguments)})" for name, arguments in state.calls] or ["  none"]
        return "\n".join([state.task["user_prompt"], "wanted (values of which one is met):", *expected, "made:", *actual])

    def solve(self, state: Request) -> list[str]:
        """Return the first half of the calls, and the second. A call that is expected twice counts once."""
        lines = []
        for name, arguments in expected_calls(state.task):
            values = [f"{argument}={allowed[0]!r}" for argument, allowed in arguments.items() if allowed[0] != ""]
            lines.append(f"{name}({', '.join(values)})")
        middle = (len(lines) + 1) // 2
        return ["\n".join(lines[:middle]), "\n".join(lines[middle:])]

    def describe(self) -> dict[str, Any]:
        """Return what a resumed run must find unchanged."""
        return super().describe() | {"sharing": self.sharing}


def _identity(task: dict) -> str:
    """Return a key of the expected calls, whatever their order."""
    return json.dumps(sorted(json.dumps(call, sort_keys=True) for call in task["ground_truth"]))
