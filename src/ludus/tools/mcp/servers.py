"""MCP servers as transports of the SDK: a command's process over stdio, an address over streamable HTTP.

The SDK's own stdio transport reads lines of any length into memory, leaves a server's children behind when we
are killed, and says nothing of why a server ended. This one bounds a line, runs the command below a guardian,
keeps the end of its standard error for messages, and counts what is not JSON-RPC. Three tasks read lines,
write messages and read standard error, and none waits for another. Leaving the block closes standard input,
gives the server a moment, then has the guardian kill everything below it. HTTP is the SDK's, with bounds and
with what HTTP itself said.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import re
import shutil
import sys
import tempfile
import zlib
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import httpx2
import mcp_types as types
from anyio.abc import ByteReceiveStream, ObjectReceiveStream, Process
from anyio.streams.memory import MemoryObjectSendStream
from mcp.client.stdio import get_default_environment
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.message import SessionMessage

from ludus.remote.threads import run_sync
from ludus.tools.mcp import MCPServerConfig, guardian

_log = logging.getLogger(__name__)

TOO_LARGE = -32050
"""JSON-RPC code for an answer that was too large to be read, in the range that is free for clients."""
NO_JSON_RPC = -32051
"""JSON-RPC code for an answer that the protocol does not allow, such as `"result": null`."""
_CHUNK = 1 << 16
_MOST_STDERR = 4_000
_GRACE_SECONDS = 1.0
_KILL_SECONDS = 5.0
_ID_FIRST = re.compile(
    rb'^\s*\{\s*"jsonrpc"\s*:\s*"2\.0"\s*,\s*"id"\s*:\s*(\d{1,15})\s*,\s*"(?:result|error)"'
)
_ID_LAST = re.compile(rb'\}\s*,\s*"jsonrpc"\s*:\s*"2\.0"\s*,\s*"id"\s*:\s*(\d{1,15})\s*\}\s*$')
_KEPT = 256


class ServerProcess:
    """A server that a command starts, and what is known of its process, while it runs and after."""

    _process: Process

    def __init__(self, config: MCPServerConfig) -> None:
        self.config = config
        self.ended = asyncio.Event()
        """Set when its output has ended: it is dead, or as good as."""
        self._stray_lines = 0
        """Lines on its standard output that are no JSON-RPC."""
        self._first_stray = ""
        self._status: int | None = None
        self._stderr = b""

    @property
    def could_not_run(self) -> bool:
        return self._status == guardian.CANNOT_RUN

    def last_words(self) -> str:
        """The exit status, and the end of standard error."""
        told = []
        if self._status is not None:
            how = f"signal {self._status - 128}" if self._status > 128 else f"status {self._status}"
            told.append(f"it exited with {how}")
        if self._stray_lines:
            told.append(
                f"it wrote {self._stray_lines} line(s) to its standard output that are no JSON-RPC, first "
                f"{self._first_stray!r}"
            )
        if text := self._stderr.decode("utf-8", "replace").strip():
            told.append(f"its standard error ends: {text[-1000:]}")
        return "; ".join(told)

    @asynccontextmanager
    async def streams(self) -> AsyncIterator[Any]:
        """The server's streams, as the SDK's client takes them."""
        config = self.config
        async with _working_folder(config) as folder:
            files = folder or ""
            program = [sys.executable, "-I", "-S", guardian.__file__, str(os.getpid())]
            self._process = await anyio.open_process(
                [*program, *config.command(files)],
                env=get_default_environment() | config.variables(files),
                cwd=folder,
                start_new_session=True,
            )
            to_session, from_server = anyio.create_memory_object_stream[SessionMessage | Exception](0)
            to_server, from_session = anyio.create_memory_object_stream[SessionMessage](0)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._read, to_session)
                tasks.start_soon(self._write, from_session)
                tasks.start_soon(self._read_stderr)
                try:
                    yield from_server, to_server
                finally:
                    with anyio.CancelScope(shield=True):
                        await self._stop()
                    tasks.cancel_scope.cancel()
                    for stream in (to_session, from_server, to_server, from_session):
                        stream.close()

    async def _read(self, session: MemoryObjectSendStream[SessionMessage | Exception]) -> None:
        splitter = LineSplitter(self.config.max_message_bytes)
        try:
            async for data in _chunks(self._process.stdout):
                for line in splitter.feed(data):
                    if (message := self._message(line)) is not None:
                        await session.send(message)
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
            _log.debug("%s: the session has ended", self.config.label)
        finally:
            self._status = self._process.returncode
            with anyio.CancelScope(shield=True), anyio.move_on_after(_GRACE_SECONDS):
                self._status = await self._process.wait()  # for messages about its end
            self.ended.set()
            session.close()

    def _message(self, line: bytes | LongLine) -> SessionMessage | None:
        if isinstance(line, LongLine):
            limit = self.config.max_message_bytes
            text = f"the answer has {line.size:,} bytes, and may have {limit:,}"
            _log.warning(
                "the MCP server %r: %s; it is dropped (max_message_bytes)", self.config.label, text
            )
            return None if line.request is None else _error(line.request, TOO_LARGE, text)
        if not line.strip():
            return None
        try:
            return SessionMessage(types.jsonrpc_message_adapter.validate_json(line, by_name=False))
        except (ValueError, RecursionError):
            shown = line[:200].decode("utf-8", "replace")
            if (request := _answered(line)) is not None:
                return _error(request, NO_JSON_RPC, shown.strip())
        self._stray_lines += 1  # many servers print a banner, which is against the protocol
        if self._stray_lines == 1:
            self._first_stray = shown
            _log.warning(
                "the MCP server %r writes to its standard output what is no JSON-RPC; it is ignored: %r",
                *(self.config.label, shown),
            )
        return None

    async def _write(self, messages: Any) -> None:
        assert self._process.stdin is not None
        try:
            async for one in messages:
                text = one.message.model_dump_json(by_alias=True, exclude_unset=True)
                await self._process.stdin.send(text.encode("utf-8", "replace") + b"\n")
        except (anyio.BrokenResourceError, anyio.ClosedResourceError, OSError) as error:
            _log.debug("the server reads no more: %r", error)
        finally:
            messages.close()  # later writers get an error, since there is no reader

    async def _read_stderr(self) -> None:
        async for data in _chunks(self._process.stderr):
            self._stderr = (self._stderr + data)[-_MOST_STDERR:]
            _log.debug("%s: %s", self.config.label, data.decode("utf-8", "replace").rstrip())

    async def _stop(self) -> None:
        """Close its input, give it a moment, then kill it with everything it started."""
        process = self._process
        assert process.stdin is not None
        with contextlib.suppress(anyio.BrokenResourceError, anyio.ClosedResourceError, OSError):
            await process.stdin.aclose()
        with anyio.move_on_after(_GRACE_SECONDS):
            await self.ended.wait()
        for end in (process.terminate, process.kill):  # the guardian, which kills all below it
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    end()
                with anyio.move_on_after(_KILL_SECONDS):
                    await process.wait()
        await process.aclose()


@asynccontextmanager
async def _working_folder(config: MCPServerConfig) -> AsyncIterator[str | None]:
    """Where the command runs: a fresh copy of its files, which vanishes afterwards, or the folder it names."""
    if config.files is None:
        yield config.cwd
        return
    made = await run_sync(tempfile.mkdtemp, None, "ludus-mcp-")
    copy = Path(made) / "files"
    try:
        await run_sync(lambda: shutil.copytree(config.files or "", copy, symlinks=True))
        yield str(copy)
    finally:
        with anyio.CancelScope(shield=True):
            await run_sync(lambda: shutil.rmtree(made, ignore_errors=True))


async def _chunks(stream: ByteReceiveStream | None) -> AsyncIterator[bytes]:
    assert stream is not None
    with contextlib.suppress(anyio.EndOfStream, ConnectionError, OSError):
        while True:
            yield await stream.receive(_CHUNK)


def _answered(line: bytes) -> int | None:
    """The id of the request that a line means to answer: its caller should not wait for another answer."""
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(message, dict) or not ("result" in message or "error" in message):
        return None
    request = message.get("id")
    return request if isinstance(request, int) and not isinstance(request, bool) else None


def _error(request: int, code: int, text: str) -> SessionMessage:
    error = types.ErrorData(code=code, message=text)
    return SessionMessage(types.JSONRPCError(jsonrpc="2.0", id=request, error=error))


# Standard output as lines, in memory that does not grow with what the server writes


@dataclass(frozen=True, slots=True)
class LongLine:
    """A line that was too long to be kept."""

    size: int
    request: int | None
    """The request that it answers, where its beginning or its end says so."""


class LineSplitter:
    """Cuts a stream of bytes into lines; of a line over `limit` only its size and its request are kept."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._start()

    def _start(self) -> None:
        self._line, self._tail, self._size = bytearray(), b"", 0

    def feed(self, data: bytes) -> list[bytes | LongLine]:
        """The lines that `data` completes."""
        *ended, rest = data.split(b"\n")
        lines: list[bytes | LongLine] = []
        for piece in ended:
            self._add(piece)
            lines.append(self._ended())
        self._add(rest)
        return lines

    def _add(self, piece: bytes) -> None:
        self._size += len(piece)
        self._line += piece[: self._limit - len(self._line)]
        self._tail = (self._tail + piece[-_KEPT:])[-_KEPT:]

    def _ended(self) -> bytes | LongLine:
        line, tail, size = bytes(self._line), self._tail, self._size
        self._start()
        if size <= self._limit:
            return line
        found = _ID_FIRST.search(line[:_KEPT]) or _ID_LAST.search(tail)
        return LongLine(size, int(found[1]) if found else None)


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


# Results with very many blocks are cut before the SDK reads them: it checks each block on the event loop

MOST_BLOCKS = 1_000
_LISTS = ("content", "contents", "messages")


@asynccontextmanager
async def with_short_results(transport: AbstractAsyncContextManager[Any]) -> AsyncIterator[Any]:
    """The streams of a transport; what is read has at most `MOST_BLOCKS` blocks in a result."""
    async with transport as (read, write):
        yield _ShortResults(read), write


class _ShortResults(ObjectReceiveStream[Any]):
    def __init__(self, inner: Any) -> None:
        self._inner = inner

    @property
    def last_context(self) -> Any:
        """Context of the message that was read last, which the SDK asks for. Streams of stdio have none."""
        return getattr(self._inner, "last_context", None)

    async def receive(self) -> Any:
        message = await self._inner.receive()
        if isinstance(message, SessionMessage) and isinstance(message.message, types.JSONRPCResponse):
            _shorten(message.message.result)
        return message

    async def aclose(self) -> None:
        await self._inner.aclose()


def _shorten(result: dict[str, Any]) -> None:
    for name in _LISTS:
        blocks = result.get(name)
        if isinstance(blocks, list) and len(blocks) > MOST_BLOCKS:
            left_out = len(blocks) - MOST_BLOCKS + 1
            del blocks[MOST_BLOCKS - 1 if name == "content" else MOST_BLOCKS :]
            if name == "content":
                note = f"... [{left_out:,} more blocks left out] ..."
                blocks.append({"type": "text", "text": note})
