"""HTTP to a model server: one attempt at a time, bounded in size, and what a broken one means."""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ludus.core.failures import MissingExtraError
from ludus.core.messages import Json

if TYPE_CHECKING:
    import aiohttp

_CONNECT_SECONDS = 10.0
_MOST_BYTES = 32 * 1024 * 1024
_LONGEST_RETRY_AFTER = 60.0


class Broken(Exception):
    """No usable answer: no connection, one that broke, or bytes that are not what was promised."""


@dataclass(frozen=True, slots=True)
class Reply:
    """A status, and a JSON object where there was one."""

    status: int
    body: Json
    retry_after: float = 0.0
    """How many seconds the server asked to wait."""

    @property
    def problem(self) -> str:
        """What the server says is wrong, cut to what fits in a message."""
        error = self.body.get("error", self.body.get("detail", self.body.get("message", "")))
        if isinstance(error, dict):
            error = error.get("message", "")
        said = " ".join(str(error).split())
        return f"status {self.status}{': ' if said else ''}{said:.300}"


class Transport:
    """One pool of connections. It is made in the event loop that uses it first, and closed by `close`."""

    def __init__(self, key: str, connections: int) -> None:
        self._headers = {"Accept": "application/json", "Accept-Encoding": "identity"}
        if key:
            self._headers["Authorization"] = f"Bearer {key}"
        self._connections = connections
        self._session: aiohttp.ClientSession | None = None

    async def send(self, method: str, url: str, body: Json | None = None) -> Reply:
        """One attempt. There is no deadline here: who calls has one over all attempts."""
        http = load_aiohttp()
        session = self._opened()
        try:
            # a redirect would carry the key somewhere else
            async with session.request(method, url, json=body, allow_redirects=False) as response:
                return await _read(response)
        except TimeoutError as error:  # the connection's own; a deadline outside is a cancellation here
            raise Broken(f"no connection within {_CONNECT_SECONDS:g} seconds") from error
        except (http.ClientError, ConnectionError, ValueError) as error:
            raise Broken(f"{type(error).__name__}: {error!s:.300}") from error

    async def close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            http = load_aiohttp()
            self._session = http.ClientSession(
                connector=http.TCPConnector(limit=self._connections),
                timeout=http.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS),
                headers=self._headers,
                cookie_jar=http.DummyCookieJar(),
                auto_decompress=False,  # a small body that unpacks to gigabytes
            )
        return self._session


async def _read(response: aiohttp.ClientResponse) -> Reply:
    data = bytearray()
    async for piece in response.content.iter_any():
        data += piece
        if len(data) > _MOST_BYTES:
            raise Broken(f"an answer of more than {_MOST_BYTES:,} bytes")
    wait = _retry_after(response.headers.get("Retry-After", ""))
    try:
        body = json.loads(data)
    except (ValueError, RecursionError) as error:
        if response.status == 200:
            raise Broken(f"an answer that is not JSON: {error!s:.200}") from error
        body = {"error": bytes(data[:300]).decode("utf-8", errors="replace")}
    if not isinstance(body, dict):
        if response.status == 200:
            raise Broken(f"an answer that is no JSON object but {type(body).__name__}")
        body = {}
    return Reply(response.status, body, wait)


def _retry_after(text: str) -> float:
    """In seconds; a date, which servers may also send, is taken as no wish."""
    with contextlib.suppress(ValueError):
        return min(max(0.0, float(text)), _LONGEST_RETRY_AFTER)
    return 0.0


def load_aiohttp() -> Any:
    """The package, or an error that says how to get it."""
    with contextlib.suppress(ImportError):
        import aiohttp

        return aiohttp
    raise MissingExtraError("aiohttp", "serve", "a model behind an address")
