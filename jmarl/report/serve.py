"""Serve a report that follows runs.

`/` is the page, `/data?after=STEP,...` what is new since these steps, one for each run, and
`/step?run=N&name=NAME&kind=KIND&step=STEP` the completions of one step. `/what-if` is sent a message, and plays the step again
with it. It reads the files of a run that it follows, never a path of a request.

Only programs on this machine reach it, those of other users too: it listens on the loopback interface, and it answers only to a
browser that asked for this machine by name, so that no page from elsewhere can read it; only its own page may send a message.
It writes nothing and needs no network.
"""

from __future__ import annotations

import contextlib
import json
import re
import threading
import time
from collections.abc import Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, parse_qs, urlsplit

from jmarl.config import check
from jmarl.logs.completions_file import EVAL, NAME, TRAIN
from jmarl.report.completions import new_completions, recorded_step
from jmarl.report.load import RecordedRun, load_runs
from jmarl.report.page import load_content, render, summarize
from jmarl.report.what_if import Replays, WhatIf

HOST, NAMES = "127.0.0.1", ("127.0.0.1", "localhost")
MAX_BODY = 1 << 18  # bytes of a message that is sent
SHARE = 0.05  # of the time, at most, goes to reading the rows of the runs, which may need the processor themselves


class Follower:
    """Reads runs again whenever it is asked, but the rows not all the time if they are many."""

    def __init__(self, paths: Sequence[Path], max_mb: float):
        self.paths, self.max_mb = paths, max_mb
        self.lock = threading.Lock()
        self.numbers: dict[str, Any] = {}
        self.runs: list[RecordedRun] = []
        self.next_reading = 0.0  # `time.monotonic()` before which rows are not read again
        self.replays = Replays()

    def page(self) -> str:
        """Return the page with all that there is now."""
        return render(load_content(self.paths, self.max_mb), live=True)

    def news(self, after: Sequence[int]) -> dict[str, Any]:
        """Return the numbers of the page, and completions. after: the newest step of each run that the page has; -1: none."""
        with self.lock:
            start = time.monotonic()
            if start >= self.next_reading:
                self.runs = load_runs(self.paths)
                self.numbers = summarize(self.runs)
                now = time.monotonic()
                self.next_reading = now + (now - start) / SHARE
            return self.numbers | {"completions": new_completions(self.runs, after)}

    def record(self, run: int, name: str | None, kind: str, step: int) -> dict[str, Any] | None:
        """Return the completions of a step; None if there are none. run: its number on the page; name: its name
        there, if it is to be that one, which runs that came later may have moved."""
        path = self.directory(run, name)
        with self.lock:
            record = recorded_step(path / NAME, kind, step) if path else None
        return None if record is None else {"run": run, **record}

    def directory(self, run: int, name: str | None) -> Path | None:
        """Return the directory of a run, see `record`; None if there is none."""
        with self.lock:
            self.runs = self.runs or load_runs(self.paths)
            return self.runs[run].path if run < len(self.runs) and name in (None, self.runs[run].name) else None


class ReportServer(ThreadingHTTPServer):
    """A server whose replay ends with it."""

    def __init__(self, port: int, follower: Follower) -> None:
        self.follower = follower
        super().__init__((HOST, port), Handler)

    def server_close(self) -> None:
        super().server_close()
        self.follower.replays.close()


def open_server(paths: Sequence[Path], port: int, max_mb: float) -> ReportServer:
    """Return a server that follows runs and listens already; `serve_forever` answers. port: 0 for a free one."""
    check("port", port, 0 <= port < 1 << 16, "0, for a free one, or a number up to 65535")
    follower = Follower(paths, max_mb)
    load_runs(paths)  # what is no run is refused at once
    try:
        return ReportServer(port, follower)
    except OSError as error:
        raise ValueError(f"port={port} cannot be used: {error.strerror}; choose another one, or none for a free one") from error


def address_of(server: ThreadingHTTPServer) -> str:
    """Return the address for a browser."""
    return f"http://{HOST}:{server.server_address[1]}/"


class Handler(BaseHTTPRequestHandler):
    """Answers the requests of a `ReportServer`."""

    @property
    def follower(self) -> Follower:
        assert isinstance(self.server, ReportServer)
        return self.server.follower

    def do_GET(self) -> None:
        if self.is_local():
            with contextlib.suppress(ConnectionError):  # the browser has closed or reloaded the page
                self.answer(*self.response(urlsplit(self.path)))

    def do_POST(self) -> None:
        """Play a step again with another message; the answer comes line by line."""
        host, size = self.headers.get("Host", ""), self.headers.get("Content-Length", "")
        if not self.is_local():
            return
        if self.headers.get("Origin") != f"http://{host}" or self.headers.get("Content-Type") != "application/json":
            self.answer(403, "text/plain", "Only the page that is served here may send a message.")
        elif self.path != "/what-if" or not re.fullmatch("[0-9]{1,7}", size) or int(size) > MAX_BODY:
            self.answer(400, "text/plain", f"Send a message to /what-if, of at most {MAX_BODY} bytes.")
        else:
            with contextlib.suppress(ConnectionError):
                self.play(self.rfile.read(int(size)))

    def play(self, body: bytes) -> None:
        """Answer what would have come if an agent had said something else: lines of JSON, see `Replays.answers`."""
        try:
            asked = WhatIf.of(body)
        except (ValueError, RecursionError) as error:
            self.answer(400, "text/plain", f"This is no message: {error}.")
            return
        try:
            path = self.follower.directory(asked.run, asked.name)
        except (OSError, ValueError) as error:
            self.answer(503, "text/plain", f"The runs cannot be read: {error}.")
            return
        if path is None:
            self.answer(404, "text/plain", f"There is no run {asked.run} here, or no longer.")
            return
        self.send_response(200)
        self.send_header("Content-Type", "application/x-ndjson; charset=utf-8")
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        with contextlib.closing(self.follower.replays.answers(asked, path)) as answers:
            try:
                for answer in answers:
                    self.wfile.write(json.dumps(answer).encode() + b"\n")
            except ValueError as error:  # what the process has printed is no JSON
                self.wfile.write(json.dumps({"error": f"jmarl replay: {error}"}).encode() + b"\n")

    def is_local(self) -> bool:
        """Return whether the browser asked for this machine by name; answer if not."""
        is_local = self.headers.get("Host", "").split(":")[0] in NAMES
        if not is_local:
            self.answer(403, "text/plain", f"This page is for this machine only: open it as {NAMES[0]} or {NAMES[1]}.")
        return is_local

    def response(self, address: SplitResult) -> tuple[int, str, str]:
        """Return the status, the type and the text of the answer."""
        after = parse_qs(address.query).get("after", [""])[0]
        if not re.fullmatch(r"[-\d,]*", after):
            return 400, "text/plain", f"after={after!r} is not allowed: give steps, such as after=3,-1."
        try:
            if address.path == "/":
                return 200, "text/html", self.follower.page()
            if address.path == "/data":
                news = self.follower.news([int(step) for step in after.split(",") if step])
                return 200, "application/json", json.dumps(news, ensure_ascii=False, allow_nan=False)
            if address.path == "/step":
                return self.step(parse_qs(address.query))
        except (OSError, ValueError) as error:  # such as of a directory that was moved: the page asks again
            return 503, "text/plain", f"The runs cannot be read: {error}."
        return 404, "text/plain", f"There is no {address.path} here, only /, /data and /step."

    def step(self, asked: Mapping[str, Sequence[Any]]) -> tuple[int, str, str]:
        """Return the answer with the completions of a step."""
        run, kind, step = (asked.get(name, [""])[0] for name in ("run", "kind", "step"))
        if not (re.fullmatch("[0-9]{1,6}", run) and re.fullmatch("[0-9]{1,15}", step) and kind in (TRAIN, EVAL)):
            return 400, "text/plain", f"Give a run, a kind and a step, such as run=0&kind={TRAIN}&step=3."
        record = self.follower.record(int(run), asked.get("name", [None])[0], kind, int(step))
        if record is None:
            return 404, "text/plain", f"Run {run} has no completions of {kind} step {step}, or no longer."
        return 200, "application/json", json.dumps(record, ensure_ascii=False, allow_nan=False)

    def answer(self, code: int, kind: str, text: str) -> None:
        body = text.encode("utf-8", "replace")
        self.send_response(code)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Print no line for each request."""
