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
import os
import socket
import struct
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol, TypeAlias

from ludus.core.messages import Json
from ludus.core.registry import import_object
from ludus.remote import user_log
from ludus.remote.process_worker import end_with_parent
from ludus.remote.processes import WorkerProcess
from ludus.remote.supervisor import WorkerDied

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


# A child process that answers requests: the side of its parent (`ServiceProcess`), and its program
#
#     process = ServiceProcess("ludus.tools.hosting.host:HostedTools", hang_seconds=60.0)
#     reply, _ = await process.start({"references": [...]})
#     reply, body = await process.request("call", {...})
#
# The service is named, and made in the child without arguments; `answer(head, body)` is given each request, of
# which `head["operation"]` is "start" for the first and "ping" for a sign of life. A process that is silent for
# `hang_seconds` after its start is killed, and it ends, with all that it has started, when its parent does.

_PING_SECONDS = 5.0
_ENDING_SECONDS = 5.0
"""How long a process may live on that has closed its connection."""


class Service(Protocol):
    """A service in a child process."""

    async def answer(self, head: Json, body: bytes) -> Frame:
        """The reply to the operation `head["operation"]`. It never raises: errors are part of a reply."""


class ServiceProcess:
    """A service in a child process, as its parent sees it."""

    def __init__(
        self,
        service: str,
        *,
        hang_seconds: float,
        name: str = "a worker process",
        variables: Mapping[str, str] | None = None,
    ) -> None:
        """`service` is "module:name". `variables` are added to the environment of the process."""
        self._service, self._hang_seconds, self._name = service, hang_seconds, name
        self._variables = variables
        self._process: WorkerProcess | None = None
        self._channel: RequestChannel | None = None
        self._reaping: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    async def start(self, head: Json, body: bytes = b"") -> Frame:
        """Start the process and its service; returns the reply to the operation "start", whenever that comes.

        `WorkerError` where no process can be started, `WorkerDied` where it ends before it has replied.
        """
        # What its libraries print is for people to read; the output of this process may be for programs.
        self._process = WorkerProcess(
            *("-m", "ludus.remote.channel", self._service), stdout=2, variables=self._variables
        )
        reader, writer = await asyncio.open_connection(sock=self._process.connection)
        path = [entry for entry in sys.path if isinstance(entry, str)]
        writer.write(pack_frame({"path": path}))
        self._channel = RequestChannel(reader, writer)
        self._reaping = asyncio.create_task(self._notice_end(self._process, self._channel))
        reply = await self.request("start", head, body)
        self._watching = asyncio.create_task(self._notice_hang(self._process, self._channel))
        return reply

    async def request(self, operation: str, head: Json | None = None, body: bytes = b"") -> Frame:
        """The reply; `WorkerDied` when the process ends first. Cancelling it cancels the work over there."""
        if self._channel is None:
            raise WorkerDied(f"{self._name} is not running")
        try:
            return await self._channel.request({**(head or {}), "operation": operation}, body)
        except ChannelClosed:
            raise WorkerDied(await self.ended()) from None

    async def ended(self) -> str:
        """Return when it has ended, or was killed because it hung, with the reason in words."""
        return await asyncio.shield(self._ended)

    async def kill(self) -> None:
        """End it and everything it started, at once."""
        self._end(f"{self._name} was ended")
        process, self._process = self._process, None
        if process is None:
            return
        process.signal()
        if self._channel is None or self._reaping is None:
            process.connection.close()
            await asyncio.to_thread(process.kill)
            return
        if self._watching is not None:
            self._watching.cancel()
        await self._channel.close()  # which ends the wait in `_notice_end`
        await self._reaping

    async def _notice_end(self, process: WorkerProcess, channel: RequestChannel) -> None:
        await channel.closed()
        how = await asyncio.to_thread(process.ending, _ENDING_SECONDS)
        self._end(how.replace("a worker process", self._name, 1))

    async def _notice_hang(self, process: WorkerProcess, channel: RequestChannel) -> None:
        """Ask for a sign of life from time to time; kill a process that gives none."""
        asked = time.monotonic()
        while True:
            await asyncio.sleep(min(_PING_SECONDS, self._hang_seconds / 4))
            if time.monotonic() - max(asked, channel.last_heard) > self._hang_seconds:
                self._end(f"{self._name} did not answer for {self._hang_seconds:g} seconds")
                process.signal()
                return
            channel.ping()

    def _end(self, reason: str) -> None:
        if not self._ended.done():
            self._ended.set_result(reason)
        if self._channel is not None:
            self._channel.fail(reason)


async def _serve(service_name: str, connection: socket.socket) -> None:
    reader, writer = await asyncio.open_connection(sock=connection)
    setup, _ = await read_frame(reader)
    sys.path[:] = setup["path"]
    user_log.refuse()
    service: Service = import_object(service_name)()
    try:
        await serve_requests(reader, writer, service.answer)
    finally:
        writer.close()


def main() -> None:
    """Serve until the parent closes the connection or dies."""
    service, connection, lifeline = sys.argv[1], socket.socket(fileno=int(sys.argv[2])), int(sys.argv[3])
    end_with_parent(lifeline)
    asyncio.run(_serve(service, connection))
    os._exit(0)  # threads that still run have no caller


if __name__ == "__main__":
    main()
