"""Completions of a service with an OpenAI-compatible API, such as vLLM or a judge on the web (host code, no jax).

Requests go through urllib and not through `huggingface_hub.InferenceClient`: that client has no plain completions, sends the
user's Hub token to any address, refuses even local servers under HF_HUB_OFFLINE, and never ends a request whose answer drips.
Left out: streaming, tools and images.
"""

from __future__ import annotations

import dataclasses
import http.client
import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

BUSY = (429, 500, 502, 503, 504)  # status codes after which a request is repeated; others are final
TRIES, WAIT_S, TIMEOUT_S = 3, 0.5, 120.0
MAX_CONCURRENT = 8  # requests at once
MAX_BYTES = 1 << 24  # of an answer


class Unavailable(RuntimeError):
    """A model gave no usable answer: it was unreachable in every try, refused the request, or answered in another format."""


@dataclasses.dataclass(frozen=True)
class ChatAPI:
    """A service with an OpenAI-compatible API.

    Attributes:
        url: base address, such as http://localhost:8000/v1.
        model: its name there; "" sends none.
        chat: send prompts as the message of a user; False: as text to continue.
        api_key_env: the environment variable with the API key; sent only if it is set.
        tries: how often a request is tried; between tries it waits wait_s, 2 * wait_s, … seconds.
        wait_s: see `tries`.
        timeout_s: seconds that one try may take.
        name: what messages call the service.
    """

    url: str
    model: str = ""
    chat: bool = True
    api_key_env: str = ""
    tries: int = TRIES
    wait_s: float = WAIT_S
    timeout_s: float = TIMEOUT_S
    name: str = "service"

    def complete(
        self,
        prompt: str | Sequence[Mapping[str, str]],
        num_completions: int,
        *,
        max_tokens: int | None = None,
        temperature: float | None = None,
        top_p: float | None = None,
        seed: int | None = None,
    ) -> list[tuple[str, bool]]:
        """Return completions of a prompt, and for each whether the model ended it (True) or it was cut off at max_tokens.

        prompt: a text, or with `chat` also messages. Options that are None are left to the service.

        Raises:
            Unavailable: see there.
        """
        base = self.url.rstrip("/")
        options = {"max_tokens": max_tokens, "temperature": temperature, "top_p": top_p, "seed": seed}
        body: dict[str, Any] = {"n": num_completions} | {name: value for name, value in options.items() if value is not None}
        body |= {"model": self.model} if self.model else {}
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [*prompt]
        body |= {"messages": messages} if self.chat else {"prompt": prompt}
        answer = self._post(base + ("/chat/completions" if self.chat else "/completions"), body)
        try:
            choices = answer["choices"]
            texts = [choice["message"]["content"] if self.chat else choice["text"] for choice in choices]
            ended = [choice.get("finish_reason") != "length" for choice in choices]
        except (KeyError, TypeError, AttributeError) as error:
            raise Unavailable(
                f"{self.name} at {base} answered {str(answer)[:120]!r}, without choices: is the address right?"
            ) from error
        if len(texts) != num_completions or not all(isinstance(text, str) for text in texts):
            raise Unavailable(f"{self.name} at {base} was asked for {num_completions} completions and gave {len(texts)}")
        texts = [text.encode("utf-8", "backslashreplace").decode() for text in texts]  # JSON can hold lone surrogates
        return list(zip(texts, ended, strict=True))

    def _post(self, url: str, body: dict[str, Any]) -> Any:
        """Return the JSON that answers a JSON request. Repeat it if the service is busy or away; raise if it refuses."""
        key = os.environ.get(self.api_key_env) if self.api_key_env else None
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        attempt = 1
        while True:
            try:
                request = urllib.request.Request(url, json.dumps(body).encode(), headers)
                with urllib.request.urlopen(request, timeout=self.timeout_s) as response:
                    return json.loads(_read(response, self.timeout_s))
            except urllib.error.HTTPError as error:
                if attempt == self.tries or error.code not in BUSY:
                    raise Unavailable(f"{self.name} at {url} refused with {error.code}: {_reason(error)}") from error
            except (OSError, ValueError, http.client.HTTPException, RecursionError) as error:  # away, too late, or no JSON
                if attempt == self.tries:
                    raise Unavailable(f"{self.name} at {url} cannot be used: {error}; tried {self.tries} times") from error
            time.sleep(self.wait_s * attempt)
            attempt += 1


def _read(response: http.client.HTTPResponse, timeout_s: float) -> bytes:
    """Return the body of an answer. The timeout is for all of it; that of urlopen is for each piece."""
    deadline, pieces, size = time.monotonic() + timeout_s, [], 0
    while piece := response.read1(1 << 16):
        pieces.append(piece)
        size += len(piece)
        if size > MAX_BYTES:
            raise OSError(f"the answer has more than {MAX_BYTES} bytes")
        if time.monotonic() > deadline:
            raise OSError("the answer takes too long")
    return b"".join(pieces)


def _reason(error: urllib.error.HTTPError) -> str:
    """Return the beginning of the body of a refusal."""
    try:
        return error.read(200).decode(errors="replace")
    except (OSError, http.client.HTTPException):
        return "(the answer broke off)"


class ChatModel:
    """A service as a `TextModel`: model(prompts, num_samples, seed) -> texts [P][num_samples].

    The prompts of a call are sent at the same time. The seed goes with each request, but not every service uses it, so texts
    may differ from call to call.
    """

    def __init__(self, api: ChatAPI, max_new_tokens: int = 64, temperature: float = 0.7, top_p: float = 1.0):
        self.api = api
        self.max_new_tokens, self.temperature, self.top_p = max_new_tokens, temperature, top_p

    def __call__(self, prompts: Sequence[str], num_samples: int, seed: int) -> list[list[str]]:
        def texts(prompt: str) -> list[str]:
            completions = self.api.complete(
                prompt,
                num_samples,
                max_tokens=self.max_new_tokens,
                temperature=self.temperature,
                top_p=self.top_p,
                seed=seed,
            )
            return [text for text, _ in completions]

        with ThreadPoolExecutor(min(MAX_CONCURRENT, len(prompts))) as threads:
            futures = [threads.submit(texts, prompt) for prompt in prompts]  # map would cancel the others when one fails
            return [future.result() for future in futures]

    def describe(self) -> dict[str, Any]:
        return {
            "url": self.api.url,
            "model": self.api.model,
            "max_tokens": self.max_new_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
        }
