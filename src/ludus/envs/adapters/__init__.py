"""Environments and task sets of other libraries; here what adapters of their servers share.

Each request is sent once, and failures have types. What such a server gets wrong (it is gone, slow, answers
with errors or with something else) is an infrastructure failure, and the episode is played again; a step is
never sent twice, because neither protocol can tell a repeated one from a new one. A server that has no room for
another session is `ServerFull`, and the pool waits for one.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from ludus.core.failures import Boundary, ConfigError, InfraError
from ludus.core.messages import Json
from ludus.envs.env import ServerFull
from ludus.remote.client import (
    ConnectionFailed,
    HttpClient,
    NotConnected,
    UnknownHost,
    load_aiohttp,
)
from ludus.tools.remote_http import normalized

if TYPE_CHECKING:
    import aiohttp


_PURPOSE = "an environment on a server"
_MOST_BYTES = 64 * 1024 * 1024
_CONNECT_SECONDS = 5.0
CLOSE_SECONDS = 5.0
"""How long the end of a session may take."""
_PROBE_PAUSE = 0.2
_FULL_STATUS = (429, 503)


class ForeignServer:
    """Requests to a server of others, each sent once, and failures with types."""

    def __init__(self, address: str, timeout: float) -> None:
        self.address, self._timeout = normalized(address), timeout
        self._http = HttpClient(
            purpose=_PURPOSE,
            connect_seconds=_CONNECT_SECONDS,
            most_bytes=_MOST_BYTES,
            limit=0,
            keepalive_timeout=3.0,  # uvicorn's is 5 seconds
        )

    async def json(self, method: str, path: str, body: Json | None = None, **query: Any) -> Any:
        """The server's answer, decoded from JSON."""
        async with self.failures(path):
            url = f"{self.address}{path}"
            async with self._http.open(method, url, json=body, params=query) as response:
                data = await self._http.read(response)
        if response.status != 200:
            shown = data[:300].decode("utf-8", "replace")
            if path == "/create" and response.status in _FULL_STATUS:
                raise self.full(path, f"status {response.status}: {shown}")
            raise self.failure(path, f"status {response.status}: {shown}", response.status)
        return self.decoded(path, data)

    async def probe(self, path: str, seconds: float) -> Any:
        """Refuse an address where nothing answers within `seconds`; a server that is starting is waited for."""
        loop = asyncio.get_running_loop()
        end, is_starting = loop.time() + seconds, True
        while is_starting:
            try:
                async with asyncio.timeout_at(end):
                    return await self.json("GET", path)
            except TimeoutError:
                problem, is_starting = f"{path}: no answer within {seconds:g} seconds", False
            except InfraError as error:
                problem, why = str(error).removeprefix(self.address), error.__cause__
                is_refused, is_unknown = isinstance(why, NotConnected), isinstance(why, UnknownHost)
                is_starting = is_refused and not is_unknown and loop.time() + _PROBE_PAUSE < end
            await asyncio.sleep(_PROBE_PAUSE if is_starting else 0)
        raise ConfigError(
            f"no environment server at {self.address}: {problem}; is the address right, and was it started?"
        )

    async def websocket(self, path: str) -> aiohttp.ClientWebSocketResponse:
        """A connection for messages of text."""
        async with self.failures(path):
            try:
                return await self._http.websocket(f"{self.address}{path}")
            except load_aiohttp().WSServerHandshakeError as error:
                if error.status in _FULL_STATUS:
                    raise self.full(path, f"status {error.status}: {error.message}") from error
                raise

    @asynccontextmanager
    async def failures(self, what: str) -> AsyncIterator[None]:
        """Deadline and failures of what is done in here."""
        aiohttp = load_aiohttp(purpose=_PURPOSE)
        try:
            async with asyncio.timeout(self._timeout):
                yield
        except TimeoutError as error:
            raise self.failure(what, f"no answer within {self._timeout:g} seconds") from error
        except ConnectionFailed as error:
            raise self.failure(what, str(error)) from error
        except (aiohttp.ClientError, ConnectionError) as error:  # of a WebSocket
            raise self.failure(what, f"{type(error).__name__}: {error}") from error

    def failure(self, what: str, message: str, status: int = 0) -> InfraError:
        """A failure of the server; the episode can be played again, unless the server does not know us."""
        replay = status not in (401, 403, 404, 405)
        text = f"{self.address}{what}: {message}"
        return InfraError(Boundary.SERVER, text, retriable=False, replay=replay, kind="ForeignServer")

    def full(self, what: str, message: str) -> ServerFull:
        """That the server has no room for another session."""
        return ServerFull(f"{self.address}{what}: {message}")

    def decoded(self, what: str, data: bytes | bytearray | str) -> Any:
        try:
            return json.loads(data)
        except (ValueError, RecursionError) as error:
            shown = data[:200] if isinstance(data, str) else data[:200].decode("utf-8", "replace")
            raise self.failure(what, f"an answer that is no JSON ({error}): {shown}") from error


_servers: dict[tuple[str, float], ForeignServer] = {}


def server_at(address: str, timeout: float) -> ForeignServer:
    """One for all instances, which share its connections."""
    if (address, timeout) not in _servers:
        _servers[address, timeout] = ForeignServer(address, timeout)
    return _servers[address, timeout]


def as_reward(value: Any, server: ForeignServer, what: str) -> float | None:
    if value is None or isinstance(value, int | float):
        return None if value is None else float(value)
    raise server.failure(what, f"a reward that is no number: {value!r:.100}")


def as_text(seen: Any, field: str | None = None) -> str:
    """An observation in words: its only text, the field asked for, or all of it as JSON."""
    if isinstance(seen, dict):
        parts = {name: one for name, one in seen.items() if one not in (None, "", [], {})}
        if field is not None:
            return as_text(seen.get(field))
        parts.pop("metadata", None)
        if len(parts) == 1 and isinstance(only := next(iter(parts.values())), str):
            return only
        seen = parts or ""
    return seen if isinstance(seen, str) else json.dumps(seen, ensure_ascii=False)
