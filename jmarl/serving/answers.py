"""The answers of /v1/models, /v1/chat/completions and /v1/completions, whole and in pieces, as OpenAI's clients read them.

Beyond OpenAI's fields, where `logprobs` or `return_token_ids` asks for it: `prompt_token_ids` of an answer (of a stream: of its
first piece), and `token_ids` of a choice. A completion's tokens include the one that ends it, and those of a stop string; its
text does not. `logprobs` are over the whole vocabulary at the temperature of the request (at 1 where that is 0), as training
scores them. `top_logprobs` of a chat, and `logprobs` above 0 of a text, ask for the likeliest tokens in the place of each: they
are scored anew when the completion, or a piece of a stream, is there, and sampling is the same.
"""

from __future__ import annotations

import dataclasses
import secrets
import time
from collections.abc import Iterable, Sequence
from typing import Any

from jmarl.models.hub.tokenize import decode
from jmarl.serving.prompts import read_tool_calls
from jmarl.serving.requests import ChatRequest, TextRequest
from jmarl.serving.text import UNFINISHED, Piece

TOOL_CALLS = "tool_calls"


def models(names: Sequence[str], created: int) -> dict[str, Any]:
    """Return the list of models."""
    return {"object": "list", "data": [model(name, created) for name in names]}


def model(name: str, created: int) -> dict[str, Any]:
    """Return one model."""
    return {"id": name, "object": "model", "created": created, "owned_by": "jmarl"}


@dataclasses.dataclass
class HttpAnswer:
    """The answer to one request, while it is written."""

    request: ChatRequest | TextRequest
    tools: Sequence[Any]
    tokenizer: Any
    prompt_ids: Sequence[int]
    id: str = dataclasses.field(default_factory=lambda: f"chatcmpl-{secrets.token_hex(12)}")
    created: int = dataclasses.field(default_factory=lambda: int(time.time()))

    @property
    def is_text(self) -> bool:
        """Whether a prompt is completed, not a chat."""
        return isinstance(self.request, TextRequest)

    @property
    def tells_ids(self) -> bool:
        """Whether the ids of tokens are asked for."""
        return self.request.top is not None or self.request.return_token_ids

    # --- whole ---------------------------------------------------------------------------------------------------------

    def completion(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        """Return the whole answer. pieces: of each choice, from its first token to its last."""
        choices = [self._choice(i, piece) for i, piece in enumerate(pieces)]
        extra = {"prompt_token_ids": [*self.prompt_ids]} if self.tells_ids else {}
        kind = "text_completion" if self.is_text else "chat.completion"
        return self._envelope(kind, choices) | {"usage": self.usage(sum(len(x.ids) for x in pieces))} | extra

    def _choice(self, index: int, piece: Piece) -> dict[str, Any]:
        if self.is_text:
            return self._text(index, piece)
        fields, finish = self._message(piece)
        message = {"role": "assistant", "content": None, "refusal": None} | fields
        return {"index": index, "message": message, "finish_reason": finish} | self._tokens(piece)

    # --- in pieces -----------------------------------------------------------------------------------------------------

    def opening(self) -> dict[str, Any] | None:
        """Return the first piece of a stream: every choice begins. None for a text, of which none is without text."""
        if self.is_text:
            return None
        delta = {"role": "assistant", "content": ""}
        choices = [{"index": i, "delta": delta, "finish_reason": None} for i in range(self.request.n)]
        extra = {"prompt_token_ids": [*self.prompt_ids]} if self.tells_ids else {}
        return self._chunk(choices) | extra

    def chunk(self, index: int, piece: Piece) -> dict[str, Any]:
        """Return a piece of a choice."""
        if self.is_text:
            return self._chunk([self._text(index, piece)])
        fields: dict[str, Any] = {"content": piece.text}
        finish = piece.finish
        if finish:
            fields, finish = self._message(piece)
        if TOOL_CALLS in fields:
            calls = [{"index": i, **call} for i, call in enumerate(fields[TOOL_CALLS])]
            fields = {TOOL_CALLS: calls}
        delta = {name: value for name, value in fields.items() if value}
        return self._chunk([{"index": index, "delta": delta, "finish_reason": finish} | self._tokens(piece)])

    def usage_chunk(self, completion_tokens: int) -> dict[str, Any]:
        """Return the last piece of a stream that asks for `include_usage`."""
        return self._chunk([]) | {"usage": self.usage(completion_tokens)}

    # --- parts ---------------------------------------------------------------------------------------------------------

    def usage(self, completion_tokens: int) -> dict[str, int]:
        """Return the numbers of tokens. The prompt counts once, the completions of all choices count."""
        prompt = len(self.prompt_ids)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt + completion_tokens,
        }

    def _envelope(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        head = {"id": self.id, "object": kind, "created": self.created, "model": self.request.model}
        return head | {"choices": choices}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        kind = "text_completion" if self.is_text else "chat.completion.chunk"
        return self._envelope(kind, choices) | ({"usage": None} if self.request.tells_usage else {})

    def _text(self, index: int, piece: Piece) -> dict[str, Any]:
        """Return a choice of /v1/completions. The log-probabilities of tokens are lists there."""
        fields = self._tokens(piece)
        if content := (fields["logprobs"] or {}).get("content"):
            tokens, logprobs = [x["token"] for x in content], [x["logprob"] for x in content]
            top = None
            if self.request.top:  # and the token itself; of equal texts the likeliest
                top = [{y["token"]: y["logprob"] for y in (x, *reversed(x["top_logprobs"]))} for x in content]
            fields["logprobs"] = {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": top, "text_offset": None}
        return {"index": index, "text": piece.text, "finish_reason": piece.finish} | fields

    def _message(self, piece: Piece) -> tuple[dict[str, Any], str | None]:
        """Return the fields of a message, and why it ended. A text with tool calls that can be read is no content."""
        calls = read_tool_calls(piece.text, self.tools) if self.tools else []
        if not calls:
            return {"content": piece.text}, piece.finish
        functions = ({"name": name, "arguments": arguments} for name, arguments in calls)
        written = [{"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": f} for f in functions]
        return {TOOL_CALLS: written}, TOOL_CALLS

    def _tokens(self, piece: Piece) -> dict[str, Any]:
        """Return the log-probabilities and ids of tokens, where the request asks for them."""
        fields: dict[str, Any] = {"logprobs": None}
        if self.request.top is not None:
            entries = self._entries(zip(piece.ids, piece.logprobs, strict=True))
            top = [self._entries(likeliest.items()) for likeliest in piece.top or [{}] * len(entries)]
            content = [entry | {"top_logprobs": others} for entry, others in zip(entries, top, strict=True)]
            fields["logprobs"] = {"content": content, "refusal": None}
        return fields | ({"token_ids": piece.ids} if self.tells_ids else {})

    def _entries(self, logprobs: Iterable[tuple[int, float]]) -> list[dict[str, Any]]:
        """Return tokens, given by their ids, with their log-probabilities."""
        ids, values = zip(*logprobs, strict=True) if (logprobs := [*logprobs]) else ((), ())
        texts = decode(self.tokenizer, [[i] for i in ids], skip=False)
        return [{"token": x, "logprob": value, "bytes": _bytes_of(x)} for x, value in zip(texts, values, strict=True)]


def _bytes_of(text: str) -> list[int] | None:
    """Return the bytes of a token; None for a part of a character, whose bytes its text does not tell."""
    return None if UNFINISHED in text else [*text.encode("utf-8", "surrogatepass")]
