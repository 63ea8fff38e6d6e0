"""HTTP to one tool server: pooled connections, whole or streamed answers, and what a broken one means.

There is one aiohttp session per event loop, made when first needed. It is closed by `close`, or with the event
loop: an async generator holds it, and event loops close their async generators when they shut down.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import secrets
import weakref
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ludus.core.failures import MissingExtraError
from ludus.core.messages import Json
from ludus.tools.remote.wire import DEADLINE_HEADER, INSTANCE_HEADER, JSON_TYPE, STREAM_TYPE

if TYPE_CHECKING:
    import aiohttp

_CONNECT_SECONDS = 5.0
_MOST_BYTES = 256 * 1024 * 1024


def own_token() -> tuple[str, Path]:
    """The token by which servers and clients of one user on one machine know each other, and its file.

    Other users of the machine reach our loopback too. The file is made at first need, for its owner alone;
    `OSError` where that cannot be done.
    """
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    path = Path(state, "ludus", "token")
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not path.exists():
        made = path.with_name(f"token.{secrets.token_hex(8)}")
        made.touch(mode=0o600, exist_ok=False)
        try:
            made.write_text(secrets.token_urlsafe(32))
            with contextlib.suppress(FileExistsError):  # somebody else was first
                path.hardlink_to(made)  # whole, or not at all
        finally:
            made.unlink()
    status = path.stat()
    if status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise PermissionError(f"{path} is not a file that its owner alone can read")
    return path.read_text(encoding="ascii").strip(), path


class NotSent(Exception):
    """No connection was made, so nothing was sent."""


class Broken(Exception):
    """The request may have arrived, but its answer did not."""


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer. `content` is the text of a result that came as a stream."""

    status: int
    body: Json
    instance: str
    content: str | None = None


class Transport:
    """Sends requests, each once. Whether to send again is decided by who knows what it was."""

    def __init__(self, token: str | None, connections: int) -> None:
        """`connections` are the most at a time; requests beyond wait for one of them."""
        self._connections = connections
        self._headers = {"Accept": f"{JSON_TYPE}, {STREAM_TYPE}", "Content-Type": JSON_TYPE}
        if token:
            self._headers["Authorization"] = f"Bearer {token}"
        self._clients: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, AsyncGenerator[Any, None]]
        self._clients = weakref.WeakKeyDictionary()
        self._sessions: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, aiohttp.ClientSession]
        self._sessions = weakref.WeakKeyDictionary()

    async def send(self, method: str, url: str, data: bytes | None, seconds: float | None) -> Reply:
        """One attempt; `TimeoutError` when the answer takes longer than `seconds`."""
        aiohttp = _aiohttp()
        session = self._sessions.get(asyncio.get_running_loop()) or await self._session()
        headers = {} if seconds is None else {DEADLINE_HEADER: str(max(0, int(seconds * 1000)))}
        try:
            async with (
                asyncio.timeout(seconds),
                session.request(
                    method, url, data=data, headers=headers, allow_redirects=False
                ) as response,
            ):
                return await _read(response)
        except aiohttp.ClientConnectorError as error:
            raise NotSent(f"{url}: {error}") from error
        except aiohttp.ConnectionTimeoutError as error:
            raise NotSent(f"{url}: no connection within {_CONNECT_SECONDS:g} seconds") from error
        except (aiohttp.ClientError, ConnectionError) as error:
            raise Broken(f"{url}: {type(error).__name__}: {error}") from error

    async def close(self) -> None:
        """Close the connections of this event loop."""
        client = self._clients.get(asyncio.get_running_loop())
        if client is not None:
            await client.aclose()

    async def _session(self) -> aiohttp.ClientSession:
        loop = asyncio.get_running_loop()
        client = self._client()
        session: aiohttp.ClientSession = await anext(client)
        self._clients[loop], self._sessions[loop] = client, session
        return session

    async def _client(self) -> AsyncGenerator[Any, None]:
        aiohttp, loop = _aiohttp(), asyncio.get_running_loop()
        session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=_affordable(self._connections), keepalive_timeout=30.0),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS),
            headers=self._headers,
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        try:
            yield session
        finally:
            # Kept, it would keep its event loop alive, which is what lets go of it.
            self._clients.pop(loop, None)
            self._sessions.pop(loop, None)
            await session.close()


async def _read(response: aiohttp.ClientResponse) -> Reply:
    instance = response.headers.get(INSTANCE_HEADER, "")
    if response.content_type == STREAM_TYPE:
        body, content = await _read_stream(response)
        return Reply(response.status, body, instance, content)
    data = bytearray()
    async for piece in response.content.iter_any():
        data += piece
        _check_size(len(data))
    try:
        body = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise Broken(f"status {response.status} with a body that is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise Broken(f"status {response.status} with a body that is no object")
    if response.status >= 500 and not isinstance(body.get("error"), dict):
        raise Broken(f"status {response.status} from something that is no tool server: a proxy, perhaps")
    return Reply(response.status, body, instance)


async def _read_stream(response: aiohttp.ClientResponse) -> tuple[Json, str]:
    """A result in lines: a head, pieces of text, and an end that says how much there was."""
    head: Json | None = None
    pieces: list[str] = []
    rest, size = b"", 0
    try:
        async for data in response.content.iter_any():
            size += len(data)
            _check_size(size)
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                message = json.loads(line)
                if "result" in message:
                    head = message["result"]
                elif "text" in message:
                    pieces.append(message["text"])
                elif message.get("end") == sum(map(len, pieces)) and head is not None:
                    return head, "".join(pieces)
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise Broken(f"a stream that could not be read: {error}") from error
    raise Broken("a stream that ended too early")


def _check_size(size: int) -> None:
    if size > _MOST_BYTES:
        raise Broken(f"an answer of more than {_MOST_BYTES:,} bytes")


def _affordable(connections: int) -> int:
    """At most half as many as this process may have open files."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return connections if soft == resource.RLIM_INFINITY else min(connections, max(1, soft // 2))


def _aiohttp() -> Any:
    with contextlib.suppress(ImportError):
        import aiohttp

        return aiohttp
    raise MissingExtraError("aiohttp", "serve", "calling tools on a server")
