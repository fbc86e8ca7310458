"""What bodies of requests cost that are wrong in very many places."""

import pytest
from pydantic import ValidationError

from jmarl.serving.errors import HttpRefusal
from jmarl.serving.requests import ChatRequest, RequestLimits, TextRequest, refusal_of

MANY = 300_000
MESSAGE = {"role": "user", "content": "-"}


def refused(kind, fields):
    """Return what pydantic has found in a body, and what a client reads of it."""
    with pytest.raises(ValidationError) as error:
        kind.model_validate({"model": "writer"} | fields)
    return error.value, refusal_of([x | {"loc": ("body", *x["loc"])} for x in error.value.errors()])


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (ChatRequest, {"messages": [MESSAGE | {"content": [1] * MANY}]}),
        (ChatRequest, {"messages": [MESSAGE | {"content": [{}] * MANY}]}),
        (ChatRequest, {"messages": [MESSAGE | {"role": "assistant", "tool_calls": [{}] * MANY}, MESSAGE]}),
        (ChatRequest, {"messages": [{}] * 2048}),
        (ChatRequest, {"messages": [MESSAGE], "tools": [1] * 128}),
        (ChatRequest, {"messages": [MESSAGE], "stop": [1] * 4}),
        (TextRequest, {"prompt": [{}] * MANY}),
    ],
)
def test_only_the_first_error_is_described(kind, fields):
    """Also when a body has room for very many: each takes time that the streams of all other clients wait for."""
    error, refusal = refused(kind, fields)
    assert error.error_count() <= 3  # of one item; the text that it might be instead, and two of its fields
    assert refusal.status_code == 400 and len(refusal.detail) < 200 and refusal.param in fields


@pytest.mark.parametrize("name", ["tool-calls", "0", "\ud83d", "x" * 60])
def test_only_the_first_unknown_field_of_a_message_is_named(name):
    unknown = {name: 1} | {f"{i}": 1 for i in range(MANY)}
    error, refusal = refused(ChatRequest, {"messages": [{"name": None} | MESSAGE | unknown]})
    sentence = f"messages[0] has {name[:40]!r}, which is not supported in a message of the role user"
    assert error.error_count() == 1 and refusal.detail == sentence
    error, refusal = refused(ChatRequest, {"messages": [MESSAGE | unknown | {"role": 1}]})
    assert error.error_count() == 1 and refusal.detail.startswith("messages[0].role must be 'system'")


def test_long_values_are_shortened():
    message = refused(ChatRequest, {"messages": [MESSAGE], "seed": 10**4000})[1].detail
    assert message.endswith(f"got 1{'0' * 39}...") and len(message) < 200
    with pytest.raises(HttpRefusal) as refusal:
        ChatRequest.model_validate({"model": "writer", "messages": [MESSAGE], "n": 10**4000}).check(RequestLimits(9, 9, 1, 1))
    assert refusal.value.detail == f"n=1{'0' * 39}... is not allowed: give an integer from 1 to 8"


def test_a_request_has_one_prompt():
    for empty in ("", [], [""], [[]]):
        message = refused(TextRequest, {"prompt": empty})[1].detail
        assert message == "prompt must be a text or a list of token ids, and not empty"
    for several in (["a", "b"], [[1], [2]], [""] * MANY):
        with pytest.raises(HttpRefusal, match=f"prompt is a list of {len(several)} prompts: give one prompt per request"):
            TextRequest.model_validate({"model": "writer", "prompt": several})
    for prompt in ("a", ["a"], [1, 2], [[1, 2]]):
        assert TextRequest.model_validate({"model": "writer", "prompt": prompt}).prompt in ("a", [1, 2])
