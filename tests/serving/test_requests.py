"""What bodies of requests cost that are wrong in very many places."""

import pytest
from pydantic import ValidationError

from jmarl.serving.requests import ChatRequest, TextRequest, refusal_of

MANY = 300_000
MESSAGE = {"role": "user", "content": "-"}


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
    with pytest.raises(ValidationError) as error:
        kind.model_validate({"model": "writer"} | fields)
    assert error.value.error_count() <= 3  # of one item; the text that it might be instead, and two of its fields
    refusal = refusal_of([x | {"loc": ("body", *x["loc"])} for x in error.value.errors()])
    assert refusal.status_code == 400 and len(refusal.detail) < 200 and refusal.param in fields
