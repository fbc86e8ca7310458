"""The HTTP interface: /health, /v1/models, /v1/chat/completions and /v1/completions, with the shapes and errors of OpenAI's.

Every request is checked in one place before its body is read, `Guard`: the server stops, the host, the token, the size and time
of the body; its kind is checked by `JsonRoute`. What bodies may say stands in `requests`. Clients read a code, a sentence and a
request id (header `x-request-id`); what an error was stands in the server's log under this id. Left out: every other path of
OpenAI's (embeddings, files, responses, ...).
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, MutableMapping
from typing import Any
from urllib.parse import urlsplit

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from jmarl.remote import Access, Door
from jmarl.serving import answers
from jmarl.serving.errors import HttpRefusal, gone, stopping
from jmarl.serving.requests import ChatRequest, TextRequest, read_object, refusal_of, unknown_model
from jmarl.serving.service import Answering, TeamService
from jmarl.serving.text import Piece, joined

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
HEALTH = "/health"
LOCAL_NAMES = (Access.host, "localhost", "::1")
READ = ["GET", "HEAD"]
BODY_TIMEOUT_S = 30.0
CODES = {404: "not_found", 405: "method_not_allowed"}


class JsonRequest(Request):
    """A request whose body is read by `read_object`."""

    async def json(self) -> Any:
        return read_object(await self.body())


class JsonRoute(APIRoute):
    """A path that gets a `JsonRequest`, of a POST only with JSON."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_json(request: Request) -> Response:
            kinds = [kind_of(value) for value in request.headers.getlist("content-type")]
            if request.method == "POST" and kinds != ["application/json"]:  # pages in a browser may send others unasked
                text = "send JSON with one header Content-Type: application/json"
                raise HttpRefusal(415, text, "unsupported_media_type")
            return await handle(JsonRequest(request.scope, request.receive))

        return handle_json


def make_app(service: TeamService) -> FastAPI:
    """Return the paths of a service."""
    handlers: Any = {HttpRefusal: on_refusal, RequestValidationError: on_wrong_body, HTTPException: on_http_error}
    app = FastAPI(openapi_url=None, exception_handlers=handlers | {Exception: on_failure})
    app.router.route_class = JsonRoute

    @app.api_route(HEALTH, methods=READ)
    async def health() -> Response:
        return Json({"status": "ok"})

    @app.api_route("/v1/models", methods=READ)
    async def models() -> Response:
        return Json(answers.models([*service.agents], service.created))

    @app.api_route("/v1/models/{name:path}", methods=READ)
    async def model(name: str) -> Response:
        if name not in service.agents:
            raise unknown_model(name, [*service.agents])
        return Json(answers.model(name, service.created))

    @app.post("/v1/chat/completions")
    async def chat(asked: ChatRequest, request: Request) -> Response:
        return await answer(asked, request)

    @app.post("/v1/completions")
    async def text(asked: TextRequest, request: Request) -> Response:
        return await answer(asked, request)

    async def answer(asked: ChatRequest | TextRequest, request: Request) -> Response:
        answering = await service.answer(asked)
        gone = asyncio.ensure_future(request.receive())  # after the body: returns when the client has gone, or has its answer
        gone.add_done_callback(lambda _: answering.leave())
        if not asked.stream:
            return Json(await whole_answer(answering))
        headers = {"cache-control": "no-store"}
        return StreamingResponse(events(answering, request), media_type="text/event-stream", headers=headers)

    return app


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
            if piece.text or piece.finish or (piece.ids and answer.tells_ids):
                yield event(answer.chunk(choice, await answering.with_top(choice, piece)))
        if answer.request.tells_usage:
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
    return Json(refusal.body(), refusal.status_code, refusal.headers)


async def on_refusal(request: Request, error: HttpRefusal) -> Response:
    return respond(error)


async def on_wrong_body(request: Request, error: RequestValidationError) -> Response:
    return respond(refusal_of(error.errors()))


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


def kind_of(content_type: str) -> str:
    """Return the media type in a header Content-Type."""
    return content_type.partition(";")[0].strip(" \t").lower()


def header(scope: Any, name: str) -> str | None:
    """Return the last header of a name in a request; None if it has none."""
    values = [value for key, value in scope["headers"] if key == name.encode()]
    return values[-1].decode("latin-1") if values else None


class Guard:
    """Checks every request before the application reads it, counts those under way, and writes the log.

    Args:
        app: the application.
        access: who may connect.
        door: knows the connections without a request that has the token.
        max_body: bytes of a body.
        log: prints a text that is not for clients.
    """

    def __init__(self, app: Any, access: Access, door: Door, max_body: int, log: Callable[[str], None]):
        self.app, self.access, self.door, self.max_body, self.log = app, access, door, max_body, log
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
            self.door.strangers.remove(tuple(scope["client"]))
        else:  # who shows no token keeps no connection
            ending = [(b"connection", b"close")]
        scope.setdefault("state", {}).update(request_id=request_id, log=lambda text: self.log(f"{request_id} {text}"))
        self.running += 1
        try:
            refusal = self.refusal(scope)
            await (self.app if refusal is None else respond(refusal))(scope, self.limited(receive), send_with_id)
        except ClientDisconnect:
            status = gone().status_code
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
        if scope["method"] == "POST":
            length = header(scope, "content-length") or "0"
            if length.isdecimal() and int(length[:20]) > self.max_body:
                return too_large(self.max_body)
        return None

    def limited(self, receive: Receive) -> Receive:
        """Return `receive` for a body that is neither too large nor too slow. Raises `HttpRefusal`, also if the client goes."""
        size, end, is_whole = 0, time.monotonic() + BODY_TIMEOUT_S, False

        async def limited_receive() -> Message:
            nonlocal size, is_whole
            if is_whole:
                return await receive()
            try:
                async with asyncio.timeout(end - time.monotonic()):
                    message = await receive()
            except TimeoutError:
                raise HttpRefusal(408, f"the body did not come within {BODY_TIMEOUT_S:.0f} s", "request_timeout") from None
            if message["type"] == "http.disconnect":
                raise gone()
            size += len(message.get("body", b""))
            if size > self.max_body:
                raise too_large(self.max_body)
            is_whole = not message.get("more_body")
            return message

        return limited_receive


def too_large(limit: int) -> HttpRefusal:
    """Return the refusal of a body."""
    return HttpRefusal(413, f"the body is larger than {limit} bytes: shorten the messages", "request_too_large")
