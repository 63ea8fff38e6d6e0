"""The HTTP client: pooled connections, typed failures, and requests that are sent again while that helps.

Who waits for whom: a request has one deadline over all its attempts. At most `limit` connections are open at
once; requests beyond wait for one of them, within their deadline. Nothing runs in the background. Connections
belong to the event loop that uses them. Redirects are not followed: they would carry keys somewhere else.

A failure says what is known of the request: `NotConnected` was not sent, `ResponseLost` may have been acted on.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from ludus.core.failures import MissingExtraError
from ludus.core.messages import Json

if TYPE_CHECKING:
    import aiohttp

T = TypeVar("T")
Timeout = Callable[[float], AbstractAsyncContextManager[asyncio.Timeout]]

LONGEST_RETRY_AFTER = 60.0
"""The longest that a server can make a client wait."""
_LONGEST_PAUSE = 30.0
_SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS", "PUT", "DELETE"})
_RETRIED_STATUS = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})
_NOT_RUN_STATUS = frozenset({425, 429, 503})
"""Refusals of a server that has not begun: what was refused can be sent again, whatever it is."""


class ConnectionFailed(Exception):
    """No usable response: no connection, a broken one, or a body that cannot be read."""


class NotConnected(ConnectionFailed):
    """No connection was made, so nothing was sent."""


class UnknownHost(NotConnected):
    """The name of the host has no address."""


class ResponseLost(ConnectionFailed):
    """The request may have arrived, but its answer did not."""


class BadResponse(Exception):
    """The server answered, and the answer is not what the interface promises."""


@dataclass(frozen=True, slots=True)
class ServerReply:
    """An HTTP status and its JSON object, if any."""

    status: int
    body: Json
    retry_after: float = 0.0
    """Seconds that the server asked to wait."""

    @property
    def problem(self) -> str:
        """The server's error text, cut to fit in a message."""
        error = self.body.get("error", self.body.get("detail", self.body.get("message", "")))
        if isinstance(error, dict):
            error = error.get("message", "")
        said = " ".join(str(error).split())
        return f"status {self.status}{': ' if said else ''}{said:.300}"


class RequestFailed(Exception):
    """A request that was answered by a refusal (`reply`), or by nothing usable however often it was sent."""

    def __init__(self, message: str, reply: ServerReply | None = None, attempts: int = 1) -> None:
        super().__init__(message)
        self.reply, self.attempts = reply, attempts


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How long and how often to try."""

    seconds: float = 600.0
    """One request with all its attempts."""
    retries: int = 6
    """How often a request is sent again after an overload (429), an error of the server's, or none at all."""
    first_pause: float = 0.5
    """Seconds before the second attempt; the pause doubles, and a random share of it is taken."""
    unusable: int | None = None
    """How many of the retries may follow answers that are not what the interface promises; all if None."""

    def pause(self, attempt: int, reply: ServerReply | None) -> float:
        """Seconds to wait after this attempt, counted from 0."""
        wait = reply.retry_after if reply else 0.0
        return backoff(attempt, self.first_pause, _LONGEST_PAUSE, wait)


def backoff(attempt: int, first: float = 0.05, longest: float = 5.0, at_least: float = 0.0) -> float:
    """Seconds to wait after an attempt, from 0: what a server asked for, and some of a doubling pause."""
    pause = min(longest, first * 2 ** min(attempt, 20))
    return at_least + random.uniform(pause / 2, pause)


def retry_after(said: str | float | None) -> float:
    """The seconds that a server asks to wait, within reason; a date, which it may also send, is ignored."""
    with contextlib.suppress(ValueError):
        return min(max(0.0, float(said or 0.0)), LONGEST_RETRY_AFTER)
    return 0.0


class HttpClient:
    """Requests to servers over connections that are kept open."""

    def __init__(
        self,
        headers: Mapping[str, str] | None = None,
        *,
        purpose: str,
        extra: str = "serve",
        connect_seconds: float = 10.0,
        most_bytes: int = 32 * 1024 * 1024,
        unpacks: bool = True,
        trust_env: bool = False,
        **connector: Any,
    ) -> None:
        """`headers` go with every request. `purpose` and `extra` are for the error where aiohttp is missing.

        `most_bytes` bounds an answer. `unpacks` reads compressed answers. `trust_env` takes the proxy of the
        environment. `connector` are aiohttp's options of connections (`limit`, `keepalive_timeout`).
        """
        self._headers = dict(headers or {})
        self._purpose, self._extra = purpose, extra
        self._connect_seconds, self._most_bytes = connect_seconds, most_bytes
        self._unpacks, self._trust_env, self._connector = unpacks, trust_env, connector
        self._sessions = PerLoop(self._session)

    @asynccontextmanager
    async def open(self, method: str, url: str, **sent: Any) -> AsyncIterator[aiohttp.ClientResponse]:
        """One attempt, its answer not yet read; `ConnectionFailed`. The caller has a deadline."""
        http = load_aiohttp(self._extra, self._purpose)
        session = await self._sessions.get()
        try:
            async with session.request(method, url, allow_redirects=False, **sent) as response:
                yield response
        except http.ClientConnectorDNSError as error:
            raise UnknownHost(f"{error!s:.300}") from error
        except http.ClientConnectorError as error:
            raise NotConnected(f"{error!s:.300}") from error
        except http.ConnectionTimeoutError as error:
            raise NotConnected(f"no connection within {self._connect_seconds:g} seconds") from error
        except (http.ClientError, ConnectionError) as error:
            raise ResponseLost(f"{type(error).__name__}: {error!s:.300}") from error

    async def read(self, response: aiohttp.ClientResponse) -> bytes:
        """The body; `ResponseLost` if it is too large."""
        data = bytearray()
        async for piece in response.content.iter_any():
            data += piece
            self.check_size(len(data))
        return bytes(data)

    def check_size(self, size: int) -> None:
        if size > self._most_bytes:
            raise ResponseLost(f"an answer of more than {self._most_bytes:,} bytes")

    async def send(
        self,
        method: str,
        url: str,
        body: Json | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> ServerReply:
        """One attempt at a request in JSON; `ConnectionFailed`. The caller has a deadline over all attempts."""
        try:
            async with self.open(method, url, json=body, headers=headers) as response:
                return _json_reply(response, await self.read(response))
        except ValueError as error:
            raise ConnectionFailed(f"{type(error).__name__}: {error!s:.300}") from error

    async def request(
        self,
        method: str,
        url: str,
        body: Json | None,
        policy: RetryPolicy,
        read: Callable[[Json], T],
        *,
        repeatable: bool = False,
        headers: Mapping[str, str] | None = None,
        timeout: Timeout = asyncio.timeout,
    ) -> T:
        """What `read` makes of the answer, with retries while that may help and there is time.

        What the server may have acted on is sent again only if that does no harm: by its method (a GET), or
        because the caller says that it is `repeatable`. `read` raises `BadResponse` for an answer that is no
        use. Raises `RequestFailed`. `timeout` makes the deadline over all attempts.
        """
        may_repeat = repeatable or method in _SAFE_METHODS
        problem, attempts, unusable = "no answer", 0, 0
        try:
            async with timeout(policy.seconds) as deadline:
                for attempt in range(policy.retries + 1):
                    reply: ServerReply | None = None
                    attempts, has_run = attempt + 1, True
                    try:
                        reply = await self.send(method, url, body, headers)
                        if reply.status == 200:
                            return read(reply.body)
                        problem, has_run = reply.problem, reply.status not in _NOT_RUN_STATUS
                    except ConnectionFailed as error:
                        problem, has_run = str(error), not isinstance(error, NotConnected)
                    except BadResponse as error:
                        problem, unusable = str(error), unusable + 1
                        if policy.unusable is not None and unusable > policy.unusable:
                            break
                    if reply is not None and reply.status not in (200, *_RETRIED_STATUS):
                        raise RequestFailed(f"{url} refuses ({reply.problem})", reply, attempts)
                    if has_run and not may_repeat:
                        break
                    if attempt < policy.retries:
                        await asyncio.sleep(policy.pause(attempt, reply))
        except TimeoutError as error:
            if not deadline.expired():
                raise
            message = f"{url} gave no answer within {policy.seconds:g} seconds (last: {problem})"
            raise RequestFailed(message, attempts=attempts) from error
        message = f"{url} gave no usable answer in {attempts} attempts: {problem}"
        raise RequestFailed(message, attempts=attempts)

    async def websocket(self, url: str) -> aiohttp.ClientWebSocketResponse:
        """A connection for messages."""
        session = await self._sessions.get()
        return await session.ws_connect(url, max_msg_size=self._most_bytes)

    async def close(self) -> None:
        """Close the connections of this event loop."""
        await self._sessions.close()

    def _session(self) -> aiohttp.ClientSession:
        http = load_aiohttp(self._extra, self._purpose)
        made: aiohttp.ClientSession = http.ClientSession(
            connector=http.TCPConnector(**self._connector),
            timeout=http.ClientTimeout(total=None, sock_connect=self._connect_seconds),
            headers=self._headers,
            cookie_jar=http.DummyCookieJar(),
            auto_decompress=self._unpacks,
            trust_env=self._trust_env,
        )
        return made


def _json_reply(response: aiohttp.ClientResponse, data: bytes) -> ServerReply:
    wait = retry_after(response.headers.get("Retry-After"))
    try:
        body = json.loads(data) if data else {}
    except (ValueError, RecursionError) as error:
        if response.status == 200:
            raise ResponseLost(f"an answer that is not JSON: {error!s:.200}") from error
        body = {"error": data[:300].decode("utf-8", errors="replace")}
    if not isinstance(body, dict):
        if response.status == 200:
            raise ResponseLost(f"an answer that is no JSON object but {type(body).__name__}")
        body = {}
    return ServerReply(response.status, body, wait)


def load_aiohttp(extra: str = "serve", purpose: str = "a model behind an address") -> Any:
    """The package aiohttp, or an error that says what has to be installed for it."""
    with contextlib.suppress(ImportError):
        import aiohttp

        return aiohttp
    raise MissingExtraError("aiohttp", extra, purpose)


# What belongs to an event loop, such as connections


class AsyncClosable(Protocol):
    """A resource that has to be closed in the event loop that made it."""

    def close(self) -> Any:
        """Release it; an awaitable."""


R = TypeVar("R", bound=AsyncClosable)
_Opened = weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, tuple[R, AsyncGenerator[R, None]]]


class PerLoop(Generic[R]):
    """One resource per event loop, made when first needed.

    It is closed by `close`, with the event loop, or when this object is garbage. An async generator
    holds it, and event loops close their async generators when they shut down.
    """

    def __init__(self, make: Callable[[], R]) -> None:
        self._make = make
        self._opened: _Opened[R] = weakref.WeakKeyDictionary()
        weakref.finalize(self, _close_soon, self._opened)

    async def get(self) -> R:
        """This event loop's resource."""
        loop = asyncio.get_running_loop()
        if loop not in self._opened:
            owner = _owner(self._make(), self._opened)
            # nothing is awaited in between: two callers get the same one
            self._opened[loop] = await anext(owner), owner
        return self._opened[loop][0]

    async def close(self) -> None:
        """Close this event loop's resource."""
        opened = self._opened.get(asyncio.get_running_loop())
        if opened is not None:
            await opened[1].aclose()


async def _owner(resource: R, opened: _Opened[R]) -> AsyncGenerator[R, None]:
    """Holds a resource, and not the object that it is for, which may be collected before."""
    loop = asyncio.get_running_loop()
    try:
        yield resource
    finally:
        # Kept, it would keep its event loop alive, which is what lets go of it.
        opened.pop(loop, None)
        await resource.close()


def _close_soon(opened: _Opened[Any]) -> None:
    """Close all that is open, each on its event loop; a loop that has ended has closed its own."""
    for loop, (_, owner) in list(opened.items()):
        if not loop.is_closed():
            loop.call_soon_threadsafe(_close, loop, owner)


def _close(loop: asyncio.AbstractEventLoop, owner: AsyncGenerator[Any, None]) -> None:
    closing = loop.create_task(_closed(owner))
    _closing.add(closing)
    closing.add_done_callback(_closing.discard)


async def _closed(owner: AsyncGenerator[Any, None]) -> None:
    await owner.aclose()


_closing: set[asyncio.Task[None]] = set()
"""Event loops hold their tasks weakly."""
