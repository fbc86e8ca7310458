"""Completions by a service with an OpenAI-compatible address (host world, no jax).

Left out: streaming, tools and pictures. What a service writes is taken as it comes.
"""

from __future__ import annotations

import dataclasses
import http.client
import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

BUSY = (429, 500, 502, 503, 504)  # asked again; other refusals are final
TRIES, WAIT_S, TIMEOUT_S, AT_ONCE = 3, 0.5, 120.0, 8
MAX_BYTES = 1 << 24


class Unavailable(RuntimeError):
    """No answer from a model: not reached in so many tries, refused, or not to be understood."""


@dataclasses.dataclass(frozen=True)
class ChatAPI:
    """Where to ask, and how often.

    url: such as http://localhost:8000/v1; model: its name there, if it wants one; chat: as a chat, or (False) a text to go on
    from; key: the environment variable that holds the service's key, sent if it is set; tries: of each request, with wait_s,
    2 * wait_s, … between them; timeout_s: of each try; called: what errors call it.
    """

    url: str
    model: str = ""
    chat: bool = True
    key: str = ""
    tries: int = TRIES
    wait_s: float = WAIT_S
    timeout_s: float = TIMEOUT_S
    called: str = "service"

    def complete(self, prompt: str, count: int, **body: Any) -> list[tuple[str, bool]]:
        """`count` completions of a prompt, and whether each was ended, not cut off; body: max_tokens, temperature and so on."""
        base = self.url.rstrip("/")
        body = {"n": count} | body | ({"model": self.model} if self.model else {})
        body |= {"messages": [{"role": "user", "content": prompt}]} if self.chat else {"prompt": prompt}
        found = self.post(base + ("/chat/completions" if self.chat else "/completions"), body)
        try:
            texts = [choice["message"]["content"] if self.chat else choice["text"] for choice in found["choices"]]
            ended = [choice.get("finish_reason") != "length" for choice in found["choices"]]
        except (KeyError, TypeError, AttributeError) as error:
            raise Unavailable(
                f"{self.called} at {base} answered {str(found)[:120]!r}, without choices: is the address right?"
            ) from error
        if len(texts) != count or not all(isinstance(text, str) for text in texts):
            raise Unavailable(f"{self.called} at {base} was asked for {count} completions and gave {len(texts)}")
        texts = [text.encode("utf-8", "backslashreplace").decode() for text in texts]  # JSON can hold lone surrogates
        return list(zip(texts, ended, strict=True))

    def post(self, url: str, body: dict[str, Any]) -> Any:
        """The JSON that answers a JSON request. Tried again where the service is busy or away; refusals are errors at once."""
        key = os.environ.get(self.key) if self.key else None
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        for left in reversed(range(self.tries)):
            try:
                request = urllib.request.Request(url, json.dumps(body).encode(), headers)
                with urllib.request.urlopen(request, timeout=self.timeout_s) as response:
                    return json.loads(_read(response, self.timeout_s))
            except urllib.error.HTTPError as error:
                if left == 0 or error.code not in BUSY:
                    raise Unavailable(f"{self.called} at {url} refused with {error.code}: {_told(error)}") from error
            except (OSError, ValueError, http.client.HTTPException, RecursionError) as error:  # away, too late, or no JSON
                if left == 0:
                    raise Unavailable(f"{self.called} at {url} cannot be used: {error}; tried {self.tries} times") from error
            time.sleep(self.wait_s * (self.tries - left))
        raise AssertionError("unreachable")


def _read(response: http.client.HTTPResponse, timeout_s: float) -> bytes:
    """A whole body, however slowly it drips: urlopen's time-out is of each piece."""
    until, pieces, size = time.monotonic() + timeout_s, [], 0
    while piece := response.read1(1 << 16):
        pieces.append(piece)
        size += len(piece)
        if size > MAX_BYTES or time.monotonic() > until:
            raise OSError(f"the answer has more than {MAX_BYTES} bytes" if size > MAX_BYTES else "the answer takes too long")
    return b"".join(pieces)


def _told(error: urllib.error.HTTPError) -> str:
    """The beginning of what came with a refusal."""
    try:
        return error.read(200).decode(errors="replace")
    except (OSError, http.client.HTTPException):
        return "(and broke off)"


class ChatModel:
    """A service as a `TextModel`: model(prompts, num_samples, seed) -> texts [P][num_samples]. The prompts of a call are asked
    side by side, with the seed, which not every service heeds: what it writes may differ from call to call."""

    def __init__(self, api: ChatAPI, max_new_tokens: int = 64, temperature: float = 0.7, top_p: float = 1.0):
        self.api = api
        self.how = dict(max_tokens=max_new_tokens, temperature=temperature, top_p=top_p)

    def __call__(self, prompts: Sequence[str], num_samples: int, seed: int) -> list[list[str]]:
        with ThreadPoolExecutor(min(AT_ONCE, len(prompts))) as threads:
            asked = [threads.submit(self.api.complete, prompt, num_samples, seed=seed, **self.how) for prompt in prompts]
            return [[text for text, _ in one.result()] for one in asked]

    def describe(self) -> dict[str, Any]:
        return {"url": self.api.url, "model": self.api.model, **self.how}
