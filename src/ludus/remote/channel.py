"""Frames between processes, and numbered requests over them.

A frame is two lengths (8-byte numbers), a head in JSON, and a body of bytes as they are:

    | length of head | length of body | head | body |

Nothing that is read is executed. A side that goes away is a `ChannelClosed`; bytes that are no frame are a
`FrameError`, after which the connection is of no use. Requests run side by side, and each awaits its own
reply, which one task reads; when the other side is gone, all of them fail at once. A request that is cancelled
is cancelled over there. Frames are written into the connection's buffer: the caller bounds how many requests
there are.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import struct
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

from ludus.core.messages import Json

Frame: TypeAlias = tuple[Json, bytes]

MAX_FRAME = 1 << 36
"""Bytes; what claims to be longer is not a frame but a broken connection."""
PING = "ping"

_LENGTHS = struct.Struct("!QQ")


class ChannelClosed(ConnectionError):
    """The other side closed the connection, or died."""


class FrameError(ValueError):
    """The received bytes are not a frame."""


class AnswerFailed(Exception):
    """The other side could not answer: a mistake in its program, with its message."""


def pack_frame(head: Json, body: bytes = b"") -> bytes:
    """A frame in one piece."""
    text = json.dumps(head, separators=(",", ":")).encode()
    return _LENGTHS.pack(len(text), len(body)) + text + body


def unpack_frame(frame: bytes) -> tuple[Json, memoryview]:
    """Inverse of `pack_frame`; the body is a view, not a copy."""
    if len(frame) < _LENGTHS.size:
        raise FrameError(f"{len(frame)} bytes are too few for a frame")
    head, body = _LENGTHS.unpack_from(frame)
    start = _LENGTHS.size + head
    if start + body != len(frame):
        raise FrameError(f"a frame of {start + body} bytes came as {len(frame)}")
    return _parsed(frame[_LENGTHS.size : start]), memoryview(frame)[start:]


async def read_frame(reader: asyncio.StreamReader, limit: int = MAX_FRAME) -> Frame:
    """The next frame; `ChannelClosed` when the other side is gone."""
    try:
        head, body = _LENGTHS.unpack(await reader.readexactly(_LENGTHS.size))
        if head + body > limit:
            raise FrameError(f"a frame of {head + body} bytes is longer than {limit}")
        return _parsed(await reader.readexactly(head)), await reader.readexactly(body)
    except (asyncio.IncompleteReadError, ConnectionError) as error:
        raise ChannelClosed("the other side closed the connection") from error


def _parsed(text: bytes) -> Json:
    try:
        head = json.loads(text)
    except ValueError as error:
        raise FrameError(f"the head of a frame is not JSON: {error}") from error
    if not isinstance(head, dict):
        raise FrameError(f"the head of a frame is {type(head).__name__}, not an object")
    return head


class RequestChannel:
    """The side that asks."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self._waiting: dict[int, asyncio.Future[Frame]] = {}
        self._numbers = itertools.count(1)
        self._problem: str | None = None
        self.last_heard = time.monotonic()
        self._reading = asyncio.create_task(self._read(reader))

    async def request(self, head: Json, body: bytes = b"") -> Frame:
        """The reply; `ChannelClosed` when the other side goes away first."""
        if self._problem is not None:
            raise ChannelClosed(self._problem)
        number = next(self._numbers)
        future: asyncio.Future[Frame] = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        try:
            self._send({**head, "number": number}, body)
            reply, found = await future
        except asyncio.CancelledError:
            self._send({"number": number, "cancel": True})
            raise
        finally:
            self._waiting.pop(number, None)
        if "failed" in reply:
            raise AnswerFailed(reply["failed"])
        return reply, found

    async def closed(self) -> None:
        """Return when the other side is gone, or has sent what is no frame."""
        await asyncio.wait((self._reading,))

    def ping(self) -> None:
        """Ask for a sign of life; `last_heard` tells when the last one came."""
        self._send({"number": 0, "operation": PING})

    def fail(self, problem: str) -> None:
        """Fail the requests that wait, and every later one, with this reason."""
        self._problem = self._problem or problem
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(ChannelClosed(self._problem))

    async def close(self) -> None:
        """Close the connection; requests that still wait fail."""
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)
        self.fail("the connection is closed")
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()

    def _send(self, head: Json, body: bytes = b"") -> None:
        if not self._writer.is_closing():
            write_frame(self._writer, head, body)

    async def _read(self, reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(ChannelClosed, FrameError):
            while True:
                head, body = await read_frame(reader)
                self.last_heard = time.monotonic()
                future = self._waiting.get(head.pop("number", 0))
                if future is not None and not future.done():
                    future.set_result((head, body))


def write_frame(writer: asyncio.StreamWriter, head: Json, body: bytes = b"") -> None:
    """Put a frame into the buffer of a connection; a long body is not copied into another string first."""
    text = json.dumps(head, separators=(",", ":")).encode()
    writer.write(_LENGTHS.pack(len(text), len(body)) + text)
    if body:
        writer.write(body)


async def serve_requests(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    answer: Callable[[Json, bytes], Awaitable[Frame]],
) -> None:
    """Answer requests, each in a task of its own, until the other side closes the connection.

    `answer` tells its errors in the reply. What it raises nevertheless is a `AnswerFailed` over there.
    """
    tasks: dict[int, asyncio.Task[None]] = {}

    async def perform(number: int, head: Json, body: bytes) -> None:
        try:
            reply, found = await answer(head, body)
            write_frame(writer, {**reply, "number": number}, found)
        except Exception as error:  # noqa: BLE001 - else the request would wait for ever
            write_frame(writer, {"failed": f"{type(error).__name__}: {error}", "number": number})
        await writer.drain()

    try:
        while True:
            head, body = await read_frame(reader)
            number = head.pop("number")
            if head.pop("cancel", False):
                if number in tasks:
                    tasks[number].cancel()
                continue
            task = tasks[number] = asyncio.create_task(perform(number, head, body))
            task.add_done_callback(_forgetting(tasks, number))
    except (ChannelClosed, FrameError):
        return
    finally:
        for task in tasks.values():  # no one is left to read their replies
            task.cancel()


def _forgetting(tasks: dict[int, Any], number: int) -> Callable[[asyncio.Task[None]], None]:
    def forget(task: asyncio.Task[None]) -> None:
        if tasks.get(number) is task:  # pings share the number 0
            del tasks[number]

    return forget
