"""HTTP to OpenAI-compatible servers: pooled connections, and requests that are retried while that helps.

Who waits for whom: a request has one deadline over all its attempts. At most `connections` are on their way at
once; the rest wait for one of them, within their deadline. Nothing runs in the background.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from ludus.core.failures import ConfigError, MissingExtraError
from ludus.core.messages import Json
from ludus.llm.address import API_KEY, Address
from ludus.remote.per_loop import PerLoop

if TYPE_CHECKING:
    import aiohttp

T = TypeVar("T")
Timeout = Callable[[float], AbstractAsyncContextManager[asyncio.Timeout]]

_CONNECT_SECONDS = 10.0
_MOST_BYTES = 32 * 1024 * 1024
_LONGEST_RETRY_AFTER = 60.0
_LONGEST_PAUSE = 30.0
_CHECK_SECONDS = 30.0
_RETRIED_STATUS = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})
_BROKEN_OFF = ("abort", "error")


class ConnectionFailed(Exception):
    """No usable response: no connection, a broken one, or a body that is not JSON."""


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
        """What the server says is wrong, cut to what fits in a message."""
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
        """Seconds to wait after this attempt, counted from 0: what the server asked for, and some more."""
        longest = min(_LONGEST_PAUSE, self.first_pause * 2**attempt)
        return (reply.retry_after if reply else 0.0) + random.uniform(longest / 2, longest)


class HttpClient:
    """Requests to one server, with its key. Connections belong to the event loop that uses them."""

    def __init__(self, key: str | None, connections: int) -> None:
        """The key is `LUDUS_API_KEY` from the environment when it is None."""
        load_aiohttp()
        key = (key if key is not None else os.environ.get(API_KEY, "")).strip()
        self._headers = {"Accept": "application/json", "Accept-Encoding": "identity"}
        if key:
            self._headers["Authorization"] = f"Bearer {key}"
        self._connections = connections
        self._sessions = PerLoop(self._session)

    async def send(
        self,
        method: str,
        url: str,
        body: Json | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> ServerReply:
        """One attempt. The caller has a deadline over all attempts."""
        http = load_aiohttp()
        session = await self._sessions.get()
        try:
            # a redirect would carry the key somewhere else
            async with session.request(
                method, url, json=body, headers=headers, allow_redirects=False
            ) as response:
                return await _read_response(response)
        except TimeoutError as error:  # the connection's own; a deadline outside is a cancellation here
            raise ConnectionFailed(f"no connection within {_CONNECT_SECONDS:g} seconds") from error
        except (http.ClientError, ConnectionError, ValueError) as error:
            raise ConnectionFailed(f"{type(error).__name__}: {error!s:.300}") from error

    async def post(self, url: str, body: Json, policy: RetryPolicy, read: Callable[[Json], T]) -> T:
        """What `read` makes of the answer to a body that is posted; see `request`."""
        return await self.request("POST", url, body, policy, read)

    async def request(
        self,
        method: str,
        url: str,
        body: Json | None,
        policy: RetryPolicy,
        read: Callable[[Json], T],
        *,
        headers: Mapping[str, str] | None = None,
        timeout: Timeout = asyncio.timeout,
    ) -> T:
        """What `read` makes of the answer, with retries while that may help and there is time.

        `read` raises `BadResponse` for an answer that is no use. Raises `RequestFailed`. `timeout` makes the
        deadline over all attempts.
        """
        problem, attempts, unusable = "no answer", 0, 0
        try:
            async with timeout(policy.seconds) as deadline:
                for attempt in range(policy.retries + 1):
                    reply: ServerReply | None = None
                    attempts = attempt + 1
                    try:
                        reply = await self.send(method, url, body, headers)
                        if reply.status == 200:
                            return read(reply.body)
                        problem = reply.problem
                    except ConnectionFailed as error:
                        problem = str(error)
                    except BadResponse as error:
                        problem, unusable = str(error), unusable + 1
                        if policy.unusable is not None and unusable > policy.unusable:
                            break
                    if reply is not None and reply.status not in (200, *_RETRIED_STATUS):
                        raise RequestFailed(f"{url} refuses ({reply.problem})", reply, attempts)
                    if attempt < policy.retries:
                        await asyncio.sleep(policy.pause(attempt, reply))
        except TimeoutError as error:
            if not deadline.expired():
                raise
            message = f"{url} gave no answer within {policy.seconds:g} seconds (last: {problem})"
            raise RequestFailed(message, attempts=attempts) from error
        raise RequestFailed(
            f"{url} gave no usable answer in {attempts} attempts: {problem}", attempts=attempts
        )

    async def reach(self, address: Address) -> ServerReply:
        """What the server says of its models; `ConfigError` where there is none, or it wants another key."""
        try:
            async with asyncio.timeout(_CHECK_SECONDS):
                reply = await self.send("GET", f"{address.url}/models")
        except (ConnectionFailed, TimeoutError) as error:
            problem = str(error) or f"no answer within {_CHECK_SECONDS:g} seconds"
            raise ConfigError(f"there is no model server at {address.url}: {problem}") from error
        if reply.status in (401, 403):
            raise ConfigError(refusal(address, reply))
        return reply

    async def find_model(self, address: Address) -> tuple[Address, list[str]]:
        """The address with its model, the server's only one if none is named; and all that the server lists.

        Raises `ConfigError` where there is no server, it wants another key, or has several models.
        """
        reply = await self.reach(address)
        try:
            names = model_names(reply.body) if reply.status == 200 else []
        except BadResponse:
            names = []
        if address.model is not None:
            return address, names
        if len(names) != 1:
            listed = ", ".join(sorted(names)[:20]) or f"it does not say ({reply.problem})"
            raise ConfigError(
                f"which model of {address.url}? Put its name after a #, as in {address.url}#NAME. "
                f"It has: {listed}"
            )
        return Address(address.url, names[0]), names

    async def close(self) -> None:
        await self._sessions.close()

    def _session(self) -> aiohttp.ClientSession:
        http = load_aiohttp()
        made: aiohttp.ClientSession = http.ClientSession(
            connector=http.TCPConnector(limit=self._connections),
            timeout=http.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS),
            headers=self._headers,
            cookie_jar=http.DummyCookieJar(),
            auto_decompress=False,  # a small body that unpacks to gigabytes
        )
        return made


async def _read_response(response: aiohttp.ClientResponse) -> ServerReply:
    data = bytearray()
    async for piece in response.content.iter_any():
        data += piece
        if len(data) > _MOST_BYTES:
            raise ConnectionFailed(f"an answer of more than {_MOST_BYTES:,} bytes")
    wait = _retry_after(response.headers.get("Retry-After", ""))
    try:
        body = json.loads(data) if data else {}
    except (ValueError, RecursionError) as error:
        if response.status == 200:
            raise ConnectionFailed(f"an answer that is not JSON: {error!s:.200}") from error
        body = {"error": bytes(data[:300]).decode("utf-8", errors="replace")}
    if not isinstance(body, dict):
        if response.status == 200:
            raise ConnectionFailed(f"an answer that is no JSON object but {type(body).__name__}")
        body = {}
    return ServerReply(response.status, body, wait)


def _retry_after(text: str) -> float:
    """In seconds; a date, which servers may also send, is ignored."""
    with contextlib.suppress(ValueError):
        return min(max(0.0, float(text)), _LONGEST_RETRY_AFTER)
    return 0.0


def refusal(address: Address, reply: ServerReply) -> str:
    """What a refusal means, and what to do."""
    where = f"{address.url} refuses ({reply.problem})"
    if reply.status in (401, 403):
        return f"{where}: put the server's key into the environment as {API_KEY}"
    if reply.status == 404:
        return f"{where}: is the address right (most end in /v1), and the model {address.model!r}?"
    return where


def model_names(body: Json) -> list[str]:
    """The models that a server says it has."""
    listed = body.get("data")
    if not isinstance(listed, list):
        raise BadResponse("the list of models has no 'data'")
    return [m["id"] for m in listed if isinstance(m, dict) and isinstance(m.get("id"), str)]


def first_choice(body: Json) -> Json:
    """The first choice of a completion."""
    choices = body.get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        raise BadResponse("the answer has no choices")
    choice: Json = choices[0]
    reason = choice.get("finish_reason")
    if reason in _BROKEN_OFF:
        raise BadResponse(f"the server broke off: finish_reason is {reason!r}")
    return choice


def checked_text(text: object, max_tokens: int) -> str:
    """A completion's text, if it is one of at most about `max_tokens` tokens."""
    if not isinstance(text, str):
        raise BadResponse(f"the answer's text is {type(text).__name__}, not text")
    if len(text) > max_tokens * _CHARS_PER_TOKEN + _SPARE_CHARS:
        raise BadResponse(f"{len(text)} characters came for {max_tokens} tokens")
    return text.encode("utf-8", errors="replace").decode("utf-8")


_CHARS_PER_TOKEN = 64
_SPARE_CHARS = 4096


def token_count(body: Json, which: str) -> int | None:
    """`prompt_tokens` or `completion_tokens` as the server counts them, where it does."""
    usage = body.get("usage")
    count = usage.get(which) if isinstance(usage, dict) else None
    return count if isinstance(count, int) and not isinstance(count, bool) and count > 0 else None


def load_aiohttp(extra: str = "serve", purpose: str = "a model behind an address") -> Any:
    """The package aiohttp, or an error that says what has to be installed for it."""
    with contextlib.suppress(ImportError):
        import aiohttp

        return aiohttp
    raise MissingExtraError("aiohttp", extra, purpose)
