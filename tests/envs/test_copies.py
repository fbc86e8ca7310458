"""Functions of the user read each row as it was given, in every call, whatever an earlier call did to it (host only)."""

from __future__ import annotations

import copy
import dataclasses
from collections import defaultdict, deque
from typing import Any, NamedTuple

import numpy as np
import pytest

from jmarl.comlrl.environment import TrainerEnvironment
from jmarl.comlrl.roles import Roles
from jmarl.envs.calls.copies import copied, copies
from jmarl.envs.reward_environment import RewardEnvironment
from jmarl.envs.rewards import RewardFunction
from jmarl.envs.tools.registry import Tool, ToolRegistry


class Pair(NamedTuple):
    left: list
    right: int


@dataclasses.dataclass(frozen=True)
class Record:
    tags: list
    name: str = "r"


class Plain:
    """An object of the user, which has a list."""

    def __init__(self):
        self.items = [1]


def row() -> dict[str, Any]:
    """Return a row with a container of each kind, also inside others."""
    return {
        "prompt": "q",
        "answers": [1, 2, 3],
        "nested": {"a": ([1, {"b": [2]}], 3)},
        "array": np.arange(3.0),
        "objects": np.array([[1], None], dtype=object),
        "record": Record([1]),
        "pair": Pair([1], 2),
        "set": {1},
        "deque": deque([[1]]),
        "defaults": defaultdict(list, {"a": [1]}),
        "bytes": bytearray(b"ab"),
        "messages": [{"role": "user", "content": "hello"}],
    }


def spoil(value: Any) -> None:
    """Change every container in a value in place."""
    if isinstance(value, dict):
        for x in value.values():
            spoil(x)
        value["seen"] = True
    elif isinstance(value, list | deque):
        for x in value:
            spoil(x)
        value.append("seen")
    elif isinstance(value, tuple):
        for x in value:
            spoil(x)
    elif isinstance(value, np.ndarray):
        for x in value.flat if value.dtype == object else ():
            spoil(x)
        value[...] = 7
    elif isinstance(value, set):
        value.add("seen")
    elif isinstance(value, bytearray):
        value[:] = b""
    elif isinstance(value, Record):
        spoil(value.tags)


def text_of(value: Any) -> str:
    return repr(value)


GIVEN = text_of(row())


class Reader:
    """Notes what it is given, and spoils it."""

    def __init__(self):
        self.seen: list[str] = []

    def __call__(self, *values: Any) -> None:
        self.seen += map(text_of, values)
        for value in values:
            spoil(value)


def test_a_copy_shares_no_container_with_the_row():
    given = row()
    own = copied(given)
    assert text_of(own) == GIVEN and own is not given
    spoil(own)
    assert text_of(own) != GIVEN and text_of(given) == GIVEN


def test_types_and_objects_of_the_user_stay():
    item = Plain()
    own = copied({"a": item, "pair": Pair([item], 2), "d": defaultdict(list, {"b": [1]}), "r": Record([item])})
    assert own["a"] is item and own["pair"].left[0] is item and own["r"].tags[0] is item
    assert type(own["pair"]) is Pair and type(own["d"]) is defaultdict and own["d"]["new"] == []


def test_a_container_that_is_there_twice_or_in_itself_is_so_in_the_copy():
    twice: list = [1]
    given: dict = {"a": twice, "b": twice}
    given["self"] = given
    own = copied(given)
    assert own["a"] is own["b"] is not twice and own["self"] is own


def test_a_row_that_is_there_twice_becomes_two():
    given = row()
    first, second = copies([given, given])
    spoil(first)
    assert text_of(second) == text_of(given) == GIVEN


def test_a_row_of_fixed_values_costs_one_copy_of_the_row():
    given = {"prompt": "x" * 10_000, "n": 1, "pair": (1, "a")}
    own = copied(given)
    assert own == given and own is not given and own["pair"] is given["pair"]


@pytest.mark.parametrize("batched", [True, False])
def test_rewards_get_copies(batched):
    """Two joint actions of one row, three functions, two calls: by row, by column, as **kwargs, and prompts of messages."""
    reader, given = Reader(), row()

    def by_row(completions, batch_items, prompts):
        reader(*batch_items, *prompts)
        return [0.0] * len(completions)

    def by_column(completions, answers, nested, array):
        reader(*answers, *nested, *array)
        return [0.0] * len(completions)

    async def by_keyword(completions, **kwargs):
        reader(*kwargs["answers"], *kwargs["batch_items"])
        return [0.0] * len(completions)

    reward = RewardFunction([by_row, by_column, by_keyword], num_agents=1, batched=batched)
    for _ in range(2):
        reward([["a", "b"]], [given["messages"]] * 2, [given] * 2, np.random.default_rng(0))
    known = {text_of(x) for x in (given, given["messages"], *(given[k] for k in ("answers", "nested", "array")))}
    assert text_of(given) == GIVEN and len(reader.seen) > 20
    # A column and the row that has it are one object within a call, as they were given.
    assert {x for x in reader.seen if "seen" not in x} <= known
    assert [x for x in reader.seen if x == GIVEN] and text_of(given["answers"]) in reader.seen


def test_a_row_is_the_same_for_each_joint_action_and_each_call():
    seen = []

    def reward(completions, batch_items):
        for item in batch_items:
            seen.append(text_of(item))
            spoil(item)
        return [0.0] * len(completions)

    function = RewardFunction([reward, reward], num_agents=1)
    given = row()
    for _ in range(2):
        function([["a", "b", "c"]], ["q"] * 3, [given] * 3, np.random.default_rng(0))
    assert seen == [GIVEN] * 12


@pytest.mark.parametrize("kind", [RewardEnvironment, TrainerEnvironment])
def test_formatters_and_transitions_get_copies(kind):
    """In the first turn and in later ones, of two agents that have one formatter."""
    seen, prompts, given = [], [], row() | {"prompt": [{"role": "user", "content": "hello"}]}
    whole = text_of(given)

    def formatter(item, external_prompts=None):
        seen.append(text_of({name: item[name] for name in given if name != "prompt"}))
        spoil(item)
        return "prompt"

    def transition(prompt, agent_completions, **histories):
        prompts.append(text_of(prompt))
        for value in (prompt, agent_completions, histories):
            spoil(value)
        return ["later", "later"]

    options = {} if kind is RewardEnvironment else dict(passthrough=False, prompt_per_agent=False)
    reward = RewardFunction(lambda a, b: [0.0] * len(a), num_agents=2)
    env = kind(reward, [formatter, formatter], transition, **options)
    rng = np.random.default_rng(0)
    for _ in range(2):
        states, _ = env.reset([given, given], rng)
        for _ in range(2):
            states, _ = env.observe(env.step(states, [["a", "b"], ["c", "d"]], rng).after)
    assert seen == [text_of({name: x for name, x in given.items() if name != "prompt"})] * len(seen) and len(seen) == 24
    assert prompts == [text_of(given["prompt"])] * 8 and text_of(given) == whole


def test_adapters_of_one_model_get_copies():
    reader, given = Reader(), row()

    class Adapter:
        def build_prompt(self, batch_item, agent_prompts):
            reader(batch_item)
            return "prompt"

        def parse_completion(self, completion, batch_item, num_agents):
            reader(batch_item)
            return [completion] * num_agents

    roles = Roles(2, Adapter())
    for _ in range(2):
        roles.join(["a", "b"], given)
        roles.split("text", given)
    assert reader.seen == [GIVEN] * 4


def test_tools_get_copies():
    parameters = {"values": [1, 2]}
    schema = {"type": "object", "properties": {"values": {"type": "array"}}}
    registry = ToolRegistry([Tool("last", "of a list", schema, lambda values: str(values.pop()), copy.deepcopy(parameters))])
    assert [registry.call("last", parameters).text for _ in range(2)] == ["2", "2"]
