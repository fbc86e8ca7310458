"""The HTTP interface: /health, /v1/models, /v1/chat/completions and /v1/completions, with the shapes and errors of OpenAI's.

Every request is checked in one place, `Guard`: the server stops, the host, the token. Clients read a code, a sentence and a
request id (header `x-request-id`); what an error was stands in the server's log under this id. Left out: every other path of
OpenAI's (embeddings, files, responses, ...).
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import urlsplit

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from jmarl.remote.access import LOOPBACK, Access, Strangers
from jmarl.serving import answers
from jmarl.serving.errors import HttpRefusal, gone, stopping
from jmarl.serving.requests import ChatRequest, RequestLimits, read_chat, read_text, unknown_model
from jmarl.serving.service import Answering, TeamService
from jmarl.serving.text import Piece, joined

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
HEALTH = "/health"
LOCAL_NAMES = (LOOPBACK, "localhost", "::1")
BODY_TIMEOUT_S = 30.0
CODES = {404: "not_found", 405: "method_not_allowed"}


def make_app(service: TeamService) -> Starlette:
    """Return the paths of a service."""

    async def health(request: Request) -> Response:
        return Json({"status": "ok"})

    async def models(request: Request) -> Response:
        return Json(answers.models([*service.agents], service.created))

    async def model(request: Request) -> Response:
        name = request.path_params["name"]
        if name not in service.agents:
            raise unknown_model(name, [*service.agents])
        return Json(answers.model(name, service.created))

    async def chat(request: Request) -> Response:
        return await answer(request, read_chat)

    async def text(request: Request) -> Response:
        return await answer(request, read_text)

    async def answer(request: Request, read: Callable[[bytes, RequestLimits], ChatRequest]) -> Response:
        answering = await service.answer(read(await read_body(request, service.limits.body), service.limits))
        gone = asyncio.ensure_future(request.receive())  # after the body: returns when the client has gone, or has its answer
        gone.add_done_callback(lambda _: answering.leave())
        if not answering.answer.request.stream:
            return Json(await whole_answer(answering))
        headers = {"cache-control": "no-store"}
        return StreamingResponse(events(answering, request), media_type="text/event-stream", headers=headers)

    routes = [
        Route(HEALTH, health, methods=["GET"]),
        Route("/v1/models", models, methods=["GET"]),
        Route("/v1/models/{name:path}", model, methods=["GET"]),
        Route("/v1/chat/completions", chat, methods=["POST"]),
        Route("/v1/completions", text, methods=["POST"]),
    ]
    handlers: Any = {HttpRefusal: on_refusal, HTTPException: on_http_error, Exception: on_failure}
    return Starlette(routes=routes, exception_handlers=handlers)


async def read_body(request: Request, limit: int) -> bytes:
    """Return the body of a request. Raises `HttpRefusal` if it is too large, too slow, or no JSON by its type."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":  # a page in a browser may send other types to this machine unasked
        raise HttpRefusal(415, "send JSON with the header Content-Type: application/json", "unsupported_media_type")
    too_large = HttpRefusal(413, f"the body is larger than {limit} bytes: shorten the messages", "request_too_large")
    length = request.headers.get("content-length", "0")
    if length.isdigit() and int(length) > limit:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for part in request.stream():
                body += part
                if len(body) > limit:
                    raise too_large
    except TimeoutError:
        raise HttpRefusal(408, f"the body did not come within {BODY_TIMEOUT_S:.0f} s", "request_timeout") from None
    return bytes(body)


async def whole_answer(answering: Answering) -> dict[str, Any]:
    """Return an answer when all its choices have ended."""
    parts: list[list[Piece]] = [[] for _ in answering.texts]
    async for choice, piece in answering.pieces():
        parts[choice].append(piece)
    return answering.answer.completion([await answering.with_top(i, joined(pieces)) for i, pieces in enumerate(parts)])


async def events(answering: Answering, request: Request) -> AsyncIterator[bytes]:
    """Yield an answer as server-sent events. An error after the beginning is the last event."""
    answer = answering.answer
    try:
        if opening := answer.opening():
            yield event(opening)
        async for choice, piece in answering.pieces():
            if piece.text or piece.finish or (piece.ids and answer.request.token_ids):
                yield event(answer.chunk(choice, await answering.with_top(choice, piece)))
        if answer.request.stream_usage:
            yield event(answer.usage_chunk(answering.num_tokens()))
        yield b"data: [DONE]\n\n"
    except HttpRefusal as refusal:
        yield event(refusal.body())
    except Exception as error:
        request.state.log(describe(error))
        yield event(failure(request).body())
    finally:
        answering.request.cancel()


class Json(JSONResponse):
    """A JSON value. Half characters (lone surrogates), which models and clients may write and UTF-8 has not, are escaped."""

    def render(self, content: Any) -> bytes:
        text = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        return text.encode("utf-8", "backslashreplace")


def event(value: dict[str, Any]) -> bytes:
    """Return a JSON value as a server-sent event."""
    return b"data: %b\n\n" % bytes(Json(value).body)


# --- errors ------------------------------------------------------------------------------------------------------------


def failure(request: Request) -> HttpRefusal:
    """Return what a client reads of an error that is the server's."""
    text = f"the server failed to answer; its log says why under the request id {request.state.request_id}"
    return HttpRefusal(500, text, "internal_error")


def describe(error: BaseException) -> str:
    """Return the traceback of an error, for the log."""
    return "".join(traceback.format_exception(error))


def respond(refusal: HttpRefusal) -> Json:
    """Return a refusal as a response."""
    return Json(refusal.body(), refusal.status, refusal.headers)


async def on_refusal(request: Request, error: HttpRefusal) -> Response:
    return respond(error)


async def on_http_error(request: Request, error: HTTPException) -> Response:
    """Answer for an unknown path or method."""
    text = "this server has GET /v1/models, POST /v1/chat/completions, POST /v1/completions and GET /health"
    code = CODES.get(error.status_code, "invalid_request")
    return respond(HttpRefusal(error.status_code, text, code, headers=dict(error.headers or {})))


async def on_failure(request: Request, error: Exception) -> Response:
    return respond(failure(request))


def hostname(host: str) -> str | None:
    """Return the name in the header Host; None if it has none."""
    try:
        return urlsplit(f"//{host}").hostname
    except ValueError:
        return None


def header(scope: Any, name: str) -> str | None:
    """Return the last header of a name in a request; None if it has none."""
    values = [value for key, value in scope["headers"] if key == name.encode()]
    return values[-1].decode("latin-1") if values else None


class Guard:
    """Checks every request before the application reads it, counts those under way, and writes the log.

    Args:
        app: the application.
        access: who may connect.
        strangers: connections without a request that has the token.
        log: prints a text that is not for clients.
    """

    def __init__(self, app: Any, access: Access, strangers: Strangers, log: Callable[[str], None]):
        self.app, self.access, self.strangers, self.log = app, access, strangers, log
        self.running, self.draining = 0, False

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        """Handle a connection, as ASGI defines it."""
        start, request_id, status = time.monotonic(), secrets.token_hex(8), 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id.encode()), *ending]
            await send(message)

        ending = []
        if self.access.allows(header(scope, "authorization")):
            self.strangers.remove(tuple(scope["client"]))
        else:  # who shows no token keeps no connection
            ending = [(b"connection", b"close")]
        scope.setdefault("state", {}).update(request_id=request_id, log=lambda text: self.log(f"{request_id} {text}"))
        self.running += 1
        try:
            refusal = self.refusal(scope)
            await (self.app if refusal is None else respond(refusal))(scope, receive, send_with_id)
        except ClientDisconnect:
            status = gone().status
        except Exception as error:
            self.log(f"{request_id} {describe(error)}")
        finally:
            self.running -= 1
            path = scope["path"][:100].encode("unicode_escape").decode()
            self.log(f"{request_id} {scope['method']} {path} {status} {time.monotonic() - start:.2f} s")

    def refusal(self, scope: Any) -> HttpRefusal | None:
        """Return why a request is not for the application; None if it is."""
        if self.access.token is None and hostname(header(scope, "host") or "") not in (*LOCAL_NAMES, self.access.host):
            text = f"without a token this server is for this machine only: call it as {' or '.join(LOCAL_NAMES)}"
            return HttpRefusal(403, text, "forbidden_host")
        if self.draining:
            return stopping()
        if scope["path"] != HEALTH and not self.access.allows(header(scope, "authorization")):
            text = "the token is missing or wrong: send the header Authorization: Bearer TOKEN (api_key= of openai's client)"
            return HttpRefusal(401, text, "invalid_api_key", headers={"www-authenticate": "Bearer"})
        return None
