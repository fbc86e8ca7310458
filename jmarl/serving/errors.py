"""What a client reads when a request fails: a code and a sentence in the shape of OpenAI's errors, and no more."""

from __future__ import annotations

from typing import Any

from starlette.exceptions import HTTPException


class HttpRefusal(HTTPException):
    """A request that is not answered.

    Args:
        status_code: of HTTP.
        message: a sentence for the client: what was given, what is allowed, what to do.
        code: a word for programs.
        param: the field of the request.
        headers: of the answer.
    """

    def __init__(
        self, status_code: int, message: str, code: str, param: str | None = None, headers: dict[str, str] | None = None
    ):
        super().__init__(status_code, message, headers)
        self.code, self.param = code, param

    def body(self) -> dict[str, Any]:
        """Return the error in the shape of OpenAI's."""
        kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status_code, "invalid_request_error" if self.status_code < 500 else "server_error")
        return {"error": {"message": self.detail, "type": kind, "code": self.code, "param": self.param}}


def stopping() -> HttpRefusal:
    """Return what is answered while a server stops."""
    return HttpRefusal(503, "this server is stopping: try another one", "stopping", headers={"retry-after": "5"})


def gone() -> HttpRefusal:
    """Return what ends a request whose client has gone; for the log, as nginx writes it."""
    return HttpRefusal(499, "the client has gone", "client_closed_request")


def invalid(message: str, param: str | None = None, code: str = "invalid_value") -> HttpRefusal:
    """Return the refusal of a field, with status 400."""
    return HttpRefusal(400, message, code, param)
