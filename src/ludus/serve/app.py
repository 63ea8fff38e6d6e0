"""Base of every HTTP server of Ludus: from start to stop, around each request, and what is read and answered.

A server is an `HttpApi` (its routes, and the form in which its kind of API reports errors) behind an
`AppServer` (listening, draining):

    ToolApi     serve/tool_server    tools and environments       {"error": {"kind": ..., "message": ...}}
    ModelApi    serve/model/server   OpenAI's and Anthropic's APIs, each with errors of its own form
    ViewerApi   viewer/http          pages of runs                {"error": "..."}
    McpApi      serve/mcp            MCP over streamable HTTP     errors of JSON-RPC

Bodies are JSON in UTF-8, uncompressed, of bounded size, and arrive within bounded time; together they stay
within a budget of bytes. Tokens are compared in constant time.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import hmac
import logging
import math
import os
import re
import signal
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextvars import ContextVar
from ipaddress import ip_address
from typing import Any, Self, TypeVar

from aiohttp import web

from ludus.core.failures import ConfigError
from ludus.remote import user_log
from ludus.remote.threads import run_sync
from ludus.serve.admission import SMALL, ByteBudget, ByteShare, RequestError
from ludus.serve.service import ServerConfig
from ludus.tools.remote_http import is_loopback
from ludus.tools.wire import JSON_TYPE, ErrorKind, dump

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_log = logging.getLogger(__name__)
_COLLECT_AFTER = 10_000
"""Allocations between garbage collections, each of which visits all waiting requests."""

T = TypeVar("T")


class HttpApi(ABC):
    """The routes of a server. Around every handler: `admit`, `problem` for errors, `answered` at the end."""

    def __init__(self, config: ServerConfig) -> None:
        self._config, self.bodies = config, Bodies(config)

    def application(self) -> web.Application:
        app = web.Application(middlewares=[self._around], client_max_size=self._config.max_body_bytes)
        app.add_routes(self.routes())
        return app

    @abstractmethod
    def routes(self) -> Iterable[web.RouteDef]:
        """Routes and their handlers."""

    def admit(self, request: web.Request) -> web.StreamResponse | None:
        """Raise where the caller may not ask this; an answer returned here takes the handler's place."""
        return None

    @abstractmethod
    def problem(self, request: web.Request, error: Exception) -> web.StreamResponse | None:
        """The response to an error; None for the server's own, which aiohttp logs (status 500)."""

    def answered(self, request: web.Request, answer: web.StreamResponse, seconds: float) -> None:  # noqa: B027 - optional
        """Note how a request ended."""

    @web.middleware
    async def _around(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        started = time.monotonic()
        try:
            answer = self.admit(request)
            if answer is None:
                answer = await handler(request)
        except Exception as error:
            told = self.problem(request, error)
            if told is None:
                raise
            answer = told
        finally:
            self.bodies.release()
        self.answered(request, answer, time.monotonic() - started)
        return answer


class AppServer(ABC):
    """A server in this event loop: `start`, then `drain_and_stop`; or `async with`."""

    def __init__(self, config: ServerConfig | None = None) -> None:
        self._config = config or ServerConfig()
        self._runner: web.AppRunner | None = None
        self.address = ""
        """Where it can be reached, as `http://host:port`, once it listens."""

    @abstractmethod
    async def start(self) -> str:
        """Listen, and return the address."""

    @abstractmethod
    async def drain_and_stop(self) -> None:
        """Let what runs finish, and close."""

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.drain_and_stop()

    async def _listen(self, api: HttpApi) -> str:
        """Serve an API at the configured address; `ConfigError` where that cannot be had."""
        config = self._config
        runner = web.AppRunner(
            api.application(),
            access_log=None,
            handler_cancellation=True,
            keepalive_timeout=config.keepalive_seconds,
            shutdown_timeout=1.0,
            lingering_time=1.0,  # for the rest of a request body that is already answered
            auto_decompress=False,  # compressed bodies are refused without unpacking them
        )
        try:
            await runner.setup()
            site = web.TCPSite(runner, config.host, config.port, backlog=4096, reuse_address=True)
            await site.start()
        except OSError as error:
            await runner.cleanup()
            where = f"{config.host}:{config.port}"
            raise ConfigError(f"cannot listen on {where}: {error.strerror or error}") from error
        self._runner, self.address = runner, _address_of(runner)
        return self.address

    async def _hang_up(self) -> None:
        """Listen no longer, and close the connections."""
        if self._runner is not None:
            await self._runner.cleanup()


async def serve_until_told(server: AppServer, on_ready: Callable[[str], Awaitable[None] | None]) -> None:
    """Serve until SIGTERM or SIGINT, then drain; a second signal ends the process at once."""
    loop = asyncio.get_running_loop()
    told = asyncio.Event()

    def on_signal(number: int) -> None:
        if told.is_set():
            _log.warning("second signal received: stopping without waiting for running calls")
            os._exit(128 + number)
        told.set()

    def listen() -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, on_signal, number)

    listen()
    user_log.refuse()  # a tool that is served logs into no run
    address = await server.start()
    listen()  # again: tools and hosts may have installed their own signal handlers
    gc.collect()
    gc.freeze()  # collections skip what is loaded now
    gc.set_threshold(_COLLECT_AFTER)
    try:
        announced = on_ready(address)
        if announced is not None:
            await announced
        await told.wait()
    finally:
        await server.drain_and_stop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


def check_exposure(host: str, token: str | None) -> None:
    """`ConfigError` for an address that other machines can reach without a token."""
    if token is not None:
        if len(token) < 16 or not token.isascii() or not token.isprintable() or " " in token:
            raise ConfigError("a token is at least 16 printable ASCII characters without spaces")
        return
    if not is_on_loopback(host):
        raise ConfigError(
            f"{host} can be reached from other machines: set a token (LUDUS_TOKEN, or --token-file), "
            "or listen on 127.0.0.1"
        )


def is_on_loopback(host: str) -> bool:
    """Whether no other machine can reach what listens on `host`."""
    if is_loopback(host):
        return True
    try:
        found = socket.getaddrinfo(host, None)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}: {error.strerror or error}") from error
    return all(ip_address(str(entry[4][0])).is_loopback for entry in found)


def _address_of(runner: web.AppRunner) -> str:
    """Where it can be reached, as `http://host:port`."""
    host, port, *_ = runner.addresses[0]
    if ip_address(host).is_unspecified:
        host = _own_address(host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _own_address(everywhere: str) -> str:
    """The address by which other machines reach this one, if it listens on all of them."""
    family, outside, loopback = socket.AF_INET, "192.0.2.1", "127.0.0.1"
    if ":" in everywhere:
        family, outside, loopback = socket.AF_INET6, "2001:db8::1", "::1"
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((outside, 9))  # sends nothing: the kernel only chooses the route
        except OSError:
            return loopback
        return str(probe.getsockname()[0])


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
