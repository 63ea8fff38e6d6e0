"""Requests and responses of every HTTP server: bodies, tokens, answers.

Bodies are JSON in UTF-8, uncompressed, of bounded size, and arrive within bounded time; together they stay
within a budget of bytes. Tokens are compared in constant time.
"""

from __future__ import annotations

import asyncio
import functools
import hmac
import math
import re
from collections.abc import Awaitable, Callable, Mapping
from contextvars import ContextVar
from typing import Any, TypeVar

from aiohttp import web

from ludus.remote.threads import run_sync
from ludus.serve.admission import SMALL, ByteBudget, ByteShare, RequestError
from ludus.serve.service import ServerConfig
from ludus.tools.remote_http import is_loopback
from ludus.tools.wire import JSON_TYPE, ErrorKind, dump

T = TypeVar("T")

_share: ContextVar[ByteShare | None] = ContextVar("share", default=None)
"""The request's share of the byte budget, once its body is read."""


class Bodies:
    """Reads the bodies of a server's requests."""

    def __init__(self, config: ServerConfig) -> None:
        self._config, self._bytes = config, ByteBudget(config.held_bytes)

    async def read(self, request: web.Request) -> bytearray:
        """The body of a JSON request; `RequestError` if it is too large, too slow, or something else.

        Its bytes count until the request is answered, and for a call until that has ended too (`held_share`).
        """
        if request.content_type != JSON_TYPE:
            # Also keeps web pages out: a browser sends a CORS preflight before JSON across origins.
            message = f"send {JSON_TYPE}, not {request.content_type}"
            raise RequestError(ErrorKind.UNSUPPORTED_TYPE, message)
        check_utf8(request)
        packing = request.headers.get("Content-Encoding", "identity")
        if packing.lower() != "identity":
            message = f"send the body as it is, without Content-Encoding: {packing[:40]}"
            raise RequestError(ErrorKind.UNSUPPORTED_TYPE, message)
        most, size = self._config.max_body_bytes, request.content_length
        if size is not None and size > most:
            raise too_large(most)
        share = self._bytes.share()
        _share.set(share)
        try:
            return await _read(request, share, most, self._config.client_seconds)
        except TimeoutError:
            request.protocol.keep_alive(False)
            raise RequestError(ErrorKind.SLOW_CLIENT, "the request took too long to arrive") from None
        except (web.RequestPayloadError, ConnectionError) as error:
            raise RequestError(ErrorKind.BAD_REQUEST, f"the body could not be read: {error}") from None

    @staticmethod
    def release() -> None:
        """Give back the share of the request that has been answered."""
        if (share := _share.get()) is not None:
            share.release()
            _share.set(None)


async def taken(request: web.Request, seconds: float, writing: Awaitable[None]) -> None:
    """Write to the client; one that does not take it in time is disconnected (`ConnectionAbortedError`)."""
    try:
        async with asyncio.timeout(seconds):
            await writing
    except TimeoutError:
        if request.transport is not None:
            request.transport.abort()
        raise ConnectionAbortedError("the client does not read its stream") from None


def held_share() -> ByteShare:
    """The share of the byte budget that the request's body has, for who needs it longer."""
    share = _share.get()
    assert share is not None, "the body is read first"
    return share


async def beside_the_loop(size: int, function: Callable[..., T], *args: Any) -> T:
    """Run a function of a request's data, in a thread where there is much of it: others need not wait."""
    return function(*args) if size <= SMALL else await run_sync(function, *args)


async def _read(request: web.Request, share: ByteShare, most: int, seconds: float) -> bytearray:
    """The body; `TimeoutError` if the client takes longer, not counting the wait for memory.

    Not by `request.read`, which keeps a copy for as long as the request lasts.
    """
    loop = asyncio.get_running_loop()
    data, left = bytearray(), seconds
    if request.content.is_eof():  # it came together with the headers, as small ones do
        data += request.content.read_nowait()
        if len(data) > most:
            raise too_large(most)
        await share.grow(len(data), seconds)
        return data
    while True:
        started = loop.time()
        async with asyncio.timeout(left):
            chunk = await request.content.readany()
        left -= loop.time() - started
        if not chunk:
            return data
        data += chunk
        if len(data) > most:
            raise too_large(most)
        await share.grow(len(data), seconds)


def too_large(most: int) -> RequestError:
    return RequestError(ErrorKind.TOO_LARGE, f"a request may have {most:,} bytes at most")


def check_utf8(request: web.Request) -> None:
    """`RequestError` for a body in another encoding."""
    if (request.charset or "utf-8").lower() not in ("utf-8", "utf8"):
        message = f"send UTF-8, not charset={request.charset!s:.40}"
        raise RequestError(ErrorKind.UNSUPPORTED_TYPE, message)


# Who may ask


def bearer_token(headers: Mapping[str, str]) -> str:
    """The token in the header Authorization; empty where there is none."""
    scheme, _, given = headers.get("Authorization", "").partition(" ")
    return given.strip() if scheme.lower() == "bearer" else ""


def is_token(given: str, token: str) -> bool:
    """Whether it is the token, in a time that does not depend on how much of it is right."""
    return hmac.compare_digest(given.encode("utf-8", "replace"), token.encode())


def check_host(request: web.Request) -> None:
    """`RequestError` unless the request came by a loopback name, for servers without a token.

    DNS rebinding: a web page whose name points here would otherwise pass for a local client.
    """
    if not _is_loopback_name(request.host):
        message = "without a token this server answers to loopback names only"
        raise RequestError(ErrorKind.FORBIDDEN, message)


def check_token(request: web.Request, given: str, token: str | None) -> None:
    """`RequestError` unless the token is right; without one, unless the request came by a loopback name."""
    if token is None:
        check_host(request)
    elif not is_token(given.strip(), token):
        message = "send the header 'Authorization: Bearer TOKEN' with this server's token"
        raise RequestError(ErrorKind.UNAUTHORIZED, message)


@functools.lru_cache(maxsize=64)
def _is_loopback_name(host: str) -> bool:
    name = host.rpartition(":")[0] if re.search(r":[0-9]+$", host) else host
    return is_loopback(name.strip("[]").lower())


# Answers


def json_response(body: Any, status: int = 200, *, retry_after: float | None = None) -> web.Response:
    """JSON; with the header Retry-After in whole seconds."""
    headers = None if retry_after is None else {"Retry-After": str(math.ceil(retry_after))}
    return web.Response(body=dump(body), status=status, content_type=JSON_TYPE, headers=headers)
