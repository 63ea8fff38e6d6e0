"""A scripted OpenAI-compatible server in a thread, over real sockets, that can also misbehave.

`serving(reply)` starts one: `reply` makes the answer of a request's body, mostly with `chat(text)`. Faults are
answers too: `error(429, Retry_After="0")`, `garbage()`, `cut_off()`, `hang(event)`. They come from `reply`, or
from `server.faults`, which go first. `server.bodies` has what was asked.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Json = dict[str, Any]


@dataclass
class Raw:
    """An answer byte by byte. `pieces` are sent one after the other; `hold` keeps the line open at the end."""

    status: int = 200
    pieces: Sequence[bytes] = (b"{}",)
    headers: Mapping[str, str] = field(default_factory=dict)
    length: int | None = None
    hold: threading.Event | None = None


def error(status: int, message: str = "no", **headers: str) -> Raw:
    body = json.dumps({"error": {"message": message}}).encode()
    return Raw(status, [body], {name.replace("_", "-"): value for name, value in headers.items()})


def garbage(data: bytes = b"<html>it works!</html>") -> Raw:
    """A body that is no JSON."""
    return Raw(pieces=[data])


def cut_off(data: bytes = b'{"choices": [') -> Raw:
    """A connection that breaks in the middle of its body."""
    return Raw(pieces=[data], length=len(data) + 100)


def hang(until: threading.Event) -> Raw:
    """Headers and then nothing, until the event (at most 30 seconds)."""
    return Raw(pieces=[b"{"], length=100, hold=until)


def chat(content: Any, finish: str | None = "stop", **more: Any) -> Json:
    message = {"role": "assistant", "content": content}
    return {"choices": [{"message": message, "finish_reason": finish, **more}]}


def text(said: Any, finish: str | None = "stop", **more: Any) -> Json:
    return {"choices": [{"text": said, "finish_reason": finish, **more}]}


@dataclass
class Asked:
    path: str
    headers: dict[str, str]
    body: Json


class OpenAIServer(ThreadingHTTPServer):
    """`reply` answers every POST; what is in `faults` comes first, in order."""

    daemon_threads = True
    request_queue_size = 256

    def __init__(
        self, reply: Callable[[Json], Json | Raw], models: Sequence[str], key: str | None
    ) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.reply, self.models, self.key = reply, models, key
        self.asked: list[Asked] = []
        self.faults: list[Raw] = []
        self.guard = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"

    @property
    def bodies(self) -> list[Json]:
        return [asked.body for asked in self.asked]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away in the middle is what some tests are about."""


class _Handler(BaseHTTPRequestHandler):
    server: OpenAIServer
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # a body would wait for the client to acknowledge its headers

    def do_GET(self) -> None:
        if self._is_allowed():
            self._send({"data": [{"id": name} for name in self.server.models]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not self._is_allowed():
            return
        with self.server.guard:
            self.server.asked.append(Asked(self.path, dict(self.headers), body))
            fault = self.server.faults.pop(0) if self.server.faults else None
        self._send(fault or self.server.reply(body))

    def _is_allowed(self) -> bool:
        key = self.server.key
        if key is None or self.headers.get("Authorization") == f"Bearer {key}":
            return True
        self._send(error(401, "who are you?"))
        return False

    def _send(self, answer: Json | Raw) -> None:
        raw = answer if isinstance(answer, Raw) else Raw(pieces=[json.dumps(answer).encode()])
        self.send_response(raw.status)
        for name, value in raw.headers.items():
            self.send_header(name, value)
        length = sum(map(len, raw.pieces)) if raw.length is None else raw.length
        self.send_header("Content-Length", str(length))
        self.end_headers()
        for piece in raw.pieces:
            self.wfile.write(piece)
            self.wfile.flush()
        if raw.hold is not None:
            raw.hold.wait(30)
        if length != sum(map(len, raw.pieces)):
            self.close_connection = True

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet."""


@contextmanager
def serving(
    reply: Callable[[Json], Json | Raw] = lambda body: chat("yes"),
    models: Sequence[str] = ("tiny",),
    key: str | None = None,
) -> Iterator[OpenAIServer]:
    server = OpenAIServer(reply, models, key)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
