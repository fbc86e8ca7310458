"""The connections of a server over HTTP: those that send no request are closed after `HEADER_S` seconds.

uvicorn has no timer before the first request, nor for headers that come byte by byte. TLS handshakes have the same time, see
`http_server`; connections that send nothing do not come here, see `access.Door`.
"""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.h11_impl import H11Protocol

HEADER_S = 5.0  # in which the headers of a request must be there, from the first byte or the beginning of the connection


class HttpConnection(H11Protocol):
    """A connection that is closed if no whole request comes in time."""

    silence: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:  # type: ignore[override]
        super().connection_made(transport)  # type: ignore[arg-type]
        self._limit_silence()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is None or self.cycle.response_complete:  # these bytes are no whole request
            self._limit_silence()
        else:
            self._allow_silence()

    def connection_lost(self, exc: Exception | None) -> None:
        self._allow_silence()
        super().connection_lost(exc)

    def _limit_silence(self) -> None:
        if self.silence is None:
            self.silence = self.loop.call_later(HEADER_S, self.transport.abort)

    def _allow_silence(self) -> None:
        if self.silence is not None:
            self.silence.cancel()
            self.silence = None
