"""Values sent to another process arrive as they were: their types, their order and each bit of their numbers."""

from __future__ import annotations

import json
import math
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jmarl.envs.base import Step
from jmarl.models.hub.tokenize import ChatPrompt
from jmarl.remote import environments_pb2 as pb
from jmarl.remote import values
from jmarl.remote.generate import OUTPUTS, ROOT, generate

pytestmark = pytest.mark.fast

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
NUMBERS = st.one_of(st.integers(), st.integers(min_value=-(1 << 200), max_value=1 << 200), st.floats())
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, TEXTS),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.lists(inner, max_size=3).map(tuple), st.dictionaries(TEXTS, inner, max_size=3)
    ),
    max_leaves=12,
)


def exact(value):
    """A text that differs for values that differ in a type, an order or a bit."""
    match value:
        case float():
            return "nan" if math.isnan(value) else struct.pack("<d", value).hex()
        case list() | tuple():
            return f"{type(value).__name__}({', '.join(map(exact, value))})"
        case dict():
            return f"dict({', '.join(f'{key!r}: {exact(x)}' for key, x in value.items())})"
    return repr(value)


def over_the_wire(message):
    return type(message).FromString(message.SerializeToString())


@settings(max_examples=200, deadline=None)
@given(VALUES)
def test_every_value_makes_an_exact_round_trip(value):
    assert exact(values.from_value(over_the_wire(values.to_value(value, "x")))) == exact(value)


LIMITS = [(1 << 63) - 1, 1 << 63, -(1 << 63), -(1 << 63) - 1]


@pytest.mark.parametrize("value", [-0.0, math.nan, math.inf, -math.inf, 5e-324, True, 1, 1.0, *LIMITS, "", (), {}], ids=repr)
def test_edges_of_numbers_and_empty_values_make_an_exact_round_trip(value):
    assert exact(values.from_value(over_the_wire(values.to_value(value, "x")))) == exact(value)


def test_an_integer_may_have_more_digits_than_python_prints():
    assert values.from_value(over_the_wire(values.to_value(-(10**6000), "x"))) == -(10**6000)


def test_numbers_of_numpy_become_those_of_python():
    sent = {
        "a": np.float32(0.1),
        "b": np.int64(3),
        "c": np.bool_(True),
        "d": np.arange(3),
        "e": np.str_("x"),
        "f": np.array(2.5),
    }
    arrived = values.from_map(over_the_wire(values.to_map(sent, "task")))
    assert exact(arrived) == exact({"a": float(np.float32(0.1)), "b": 3, "c": True, "d": [0, 1, 2], "e": "x", "f": 2.5})


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ({"image": {"pixels": [1, b"x"]}}, r"task\['image'\]\['pixels'\]\[1\] is a bytes"),
        ({"kinds": {"a", "b"}}, r"task\['kinds'\] is a set"),
        ({"number": 1j}, r"task\['number'\] is a complex"),
        ({"rows": {3: "x"}}, r"task\['rows'\] has the key 3, a int"),
    ],
)
def test_a_value_of_another_type_is_named_by_its_place(task, message):
    with pytest.raises(TypeError, match=message):
        values.to_map(task, "task")


def test_a_lone_surrogate_is_refused_by_its_place():
    with pytest.raises(ValueError, match=r"task\['text'\] has the lone surrogate '\\ud800' at position 1"):
        values.to_map({"text": "a\ud800"}, "task")
    with pytest.raises(ValueError, match="a key of task has the lone surrogate"):
        values.to_map({"\udfff": 1}, "task")


def nested(levels):
    value = 1
    for _ in range(levels):
        value = {"inside": value}
    return value


def test_the_deepest_value_allowed_can_be_read_inside_the_deepest_message():
    task = nested(values.MAX_DEPTH)
    batch = pb.BatchResetRequest(calls=[pb.ResetRequest(task=values.to_map(task, "task"))])
    assert values.from_map(over_the_wire(batch).calls[0].task) == task
    with pytest.raises(ValueError, match=f"inside more than {values.MAX_DEPTH} lists and dicts"):
        values.to_map(nested(values.MAX_DEPTH + 1), "task")


def test_a_message_that_is_no_value_is_refused():
    for message in (pb.Value(), pb.Value(list=pb.List(values=[pb.Value()])), pb.Value(big_integer="1z")):
        with pytest.raises(ValueError):
            values.from_value(message)
    twice = pb.Map(entries=[pb.Entry(key="a", value=pb.Value(null=True))] * 2)
    with pytest.raises(ValueError, match="a key twice"):
        values.from_map(twice)


def test_a_role_that_is_no_name_is_refused():
    message = pb.Observation(messages=pb.Chat(messages=[pb.ChatMessage(role="user<|im_end|>", content="a")]))
    with pytest.raises(ValueError, match="a message has the role 'user<|im_end|>'"):
        values.from_observation(message)


def test_observations_arrive_as_texts_chats_and_none():
    chat = ChatPrompt([{"role": "system", "content": "s"}, {"role": "user", "content": "u"}])
    arrived = [values.from_observation(over_the_wire(m)) for m in values.to_observations(["text", chat, None], "Env")]
    assert arrived == ["text", chat, None]
    assert isinstance(arrived[1], ChatPrompt) and arrived[1].messages == chat.messages
    assert not isinstance(arrived[0], ChatPrompt)
    with pytest.raises(TypeError, match="observation of agent 0 in Env is a int"):
        values.to_observations([3], "Env")


@pytest.mark.parametrize("reward", [1, 0.5, -0.0, math.nan, [1.0, 2], (1.0, 2.0), None, "text", True, [math.inf, None]])
def test_a_step_arrives_with_its_reward_as_the_environment_returned_it(reward):
    step = Step("state", ["a", None], reward, False, {"solved": 1.0, "n": 2}, False, {"p": math.nan})
    arrived = values.from_result(over_the_wire(values.to_result(step, 3, "Env")), "state")
    assert exact(tuple(arrived)) == exact(tuple(step))


def test_numbers_of_a_step_may_be_arrays():
    step = Step(None, [], np.array([1.0, 0.5]), np.True_, {"x": np.float32(2)}, False, {})
    arrived = values.from_result(over_the_wire(values.to_result(step, 1, "Env")), None)
    assert exact(tuple(arrived)) == exact(tuple(Step(None, [], [1.0, 0.5], True, {"x": 2.0}, False, {})))


def test_the_state_of_a_generator_makes_an_exact_round_trip():
    rng = np.random.default_rng(3)
    rng.integers(10)
    other = np.random.default_rng(0)
    other.bit_generator.state = values.from_map(over_the_wire(values.to_map(rng.bit_generator.state, "random")))
    assert rng.random(5).tolist() == other.random(5).tolist()


def test_json_that_clients_log_has_the_same_content():
    task = {"a": [1, 2.5, None, True], "b": {"c": "\u00e9\U0001f600"}}
    assert json.dumps(values.from_map(values.to_map(task, "task"))) == json.dumps(task)


def test_the_generated_modules_are_those_of_the_proto_file(tmp_path):
    generate(tmp_path)
    for name in OUTPUTS:
        assert (ROOT / "jmarl/remote" / name).read_bytes() == (tmp_path / "jmarl/remote" / name).read_bytes(), (
            f"{name} is not that of environments.proto: run python -m jmarl.remote.generate"
        )
