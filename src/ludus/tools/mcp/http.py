"""A server behind an address: the SDK's streamable HTTP transport, with bounds and with what HTTP said."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import httpx2
from mcp.client.streamable_http import streamable_http_client

from ludus.tools.mcp.config import MCPServerConfig

_CONNECT_SECONDS = 10.0
_PIECE = 65_536
LARGER = "larger than max_message_bytes"


class HttpServer:
    """A server behind an address. Keeps what HTTP itself said last, which JSON-RPC errors leave out."""

    could_not_run = False

    def __init__(self, config: MCPServerConfig) -> None:
        self.config = config
        self.ended = asyncio.Event()
        """Never set: an address is asked, and has no end that could be seen."""
        self.refusal = ""
        self.problem = ""

    def last_words(self) -> str:
        return self.refusal or self.problem

    @asynccontextmanager
    async def streams(self) -> AsyncIterator[Any]:
        """The server's streams, as the SDK's client takes them."""
        config = self.config
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=config.concurrency)
        # a call's own deadline ends it; a response may be silent for as long
        timeout = httpx2.Timeout(_CONNECT_SECONDS, read=None)
        transport = _BoundedTransport(self, limits)
        headers = {**config.http_headers(), "Accept-Encoding": "gzip"}
        client = httpx2.AsyncClient(headers=headers, timeout=timeout, transport=transport)
        async with (
            client,
            streamable_http_client(
                config.mcp, http_client=client, max_sse_event_size=config.max_message_bytes
            ) as streams,
        ):
            yield streams


class _BoundedTransport(httpx2.AsyncHTTPTransport):
    """Reads at most so many bytes of a JSON answer, unpacked ones, and notes refusals.

    A stream of events has no end that could be counted to: the SDK bounds each event.
    """

    def __init__(self, server: HttpServer, limits: httpx2.Limits) -> None:
        super().__init__(limits=limits)
        self._server = server

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        try:
            response = await super().handle_async_request(request)
        except httpx2.TransportError as error:
            self._server.problem = f"{type(error).__name__}: {error}"
            raise
        self._server.problem = ""
        is_refused = response.status_code >= 400 and request.method == "POST"
        self._server.refusal = f"HTTP status {response.status_code}" if is_refused else ""
        is_endless = response.headers.get("content-type", "").startswith("text/event-stream")
        packing = response.headers.pop("content-encoding", "identity").lower()
        assert isinstance(response.stream, httpx2.AsyncByteStream)
        most = None if is_endless else self._server.config.max_message_bytes
        response.stream = _BoundedStream(response.stream, most, packing)
        return response


class _BoundedStream(httpx2.AsyncByteStream):
    """A body in pieces: a few kilobytes may unpack to gigabytes, which are never in memory together."""

    def __init__(self, inner: httpx2.AsyncByteStream, most: int | None, packing: str) -> None:
        self._inner, self._most, self._packing = inner, most, packing

    async def __aiter__(self) -> AsyncIterator[bytes]:
        if self._packing not in ("identity", "gzip", "x-gzip"):
            raise httpx2.StreamError(f"the answer is packed as {self._packing:.40}; gzip was asked for")
        unpacker = None if self._packing == "identity" else zlib.decompressobj(zlib.MAX_WBITS | 16)
        size = 0
        async for data in self._inner:
            for piece in [data] if unpacker is None else _unpacked(unpacker, data):
                size += len(piece)
                if self._most is not None and size > self._most:
                    raise httpx2.StreamError(f"the answer is {LARGER} = {self._most:,}")
                yield piece

    async def aclose(self) -> None:
        await self._inner.aclose()


def _unpacked(unpacker: Any, data: bytes) -> Iterator[bytes]:
    try:
        while data and not unpacker.eof:
            yield unpacker.decompress(data, _PIECE)
            data = unpacker.unconsumed_tail
    except zlib.error as error:
        raise httpx2.StreamError(f"the answer cannot be unpacked: {error}") from None
