"""A host whose workers are processes of this machine.

Frames between the two are a JSON head, and a text. A long result travels as the text, so that it is neither
quoted into JSON nor parsed out of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import struct
import sys
import time
from collections.abc import Sequence

from ludus.core.failures import ConfigError
from ludus.core.messages import Json
from ludus.remote.processes import WorkerProcess
from ludus.remote.threads import WorkerError
from ludus.tools.hosting.host import LOADER, ToolReference, error_from_json, reply_of
from ludus.tools.hosting.pool import PooledHost, WorkerDied
from ludus.tools.wire import dump

_START_SECONDS = 120.0
_PING_SECONDS = 5.0
_LENGTHS = struct.Struct("!QQ")


def pack_frame(head: Json, text: str | None = None) -> list[bytes]:
    """One frame, in pieces to be written one after the other."""
    head_bytes = dump(head if text is None else {**head, "text": True})
    text_bytes = b"" if text is None else text.encode("utf-8", "replace")
    return [_LENGTHS.pack(len(head_bytes), len(text_bytes)) + head_bytes, text_bytes]


async def read_frame(reader: asyncio.StreamReader) -> tuple[Json, str | None]:
    """The next frame; `IncompleteReadError` or `ConnectionError` when the other side is gone."""
    head_length, text_length = _LENGTHS.unpack(await reader.readexactly(_LENGTHS.size))
    head: Json = json.loads(await reader.readexactly(head_length))
    text = (await reader.readexactly(text_length)).decode() if text_length else ""
    return head, text if head.pop("text", False) else None


class ProcessHost(PooledHost):
    """A host of `workers` processes. Tools are given by reference, because each process builds its own."""

    def __init__(
        self,
        references: Sequence[ToolReference],
        workers: int = 2,
        *,
        hang_seconds: float = 60.0,
        loader: str = LOADER,
    ) -> None:
        """`loader` names the function that builds a tool set from the references."""
        super().__init__(lambda: ProcessWorker(references, hang_seconds, loader), workers)


class ProcessWorker:
    """One worker process with its own event loop and tool set, and the socket to it.

    A request awaits its own future; one reader task settles them, and ends when the worker does. A ping goes
    out every few seconds: a worker that says nothing at all for `hang_seconds` (an async tool blocks its
    event loop) is killed, and its host replaces it.
    """

    def __init__(
        self, references: Sequence[ToolReference], hang_seconds: float, loader: str = LOADER
    ) -> None:
        self._references, self._hang_seconds, self._loader = list(references), hang_seconds, loader
        self._process: WorkerProcess | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._waiting: dict[int, asyncio.Future[Json]] = {}
        self._numbers = itertools.count(1)
        self._tasks: list[asyncio.Task[None]] = []
        self._ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._last_heard = time.monotonic()

    async def start(self) -> Json:
        try:
            # What tools print is for people to read; the server's own output is for programs.
            self._process = WorkerProcess("-m", "ludus.tools.hosting.worker", stdout=2)
        except WorkerError as error:
            raise ConfigError(str(error)) from error
        try:
            self._reader, self._writer = await asyncio.open_connection(sock=self._process.connection)
        except BaseException:
            self._process.connection.close()
            raise
        path = [entry for entry in sys.path if isinstance(entry, str)]
        self._send({"path": path, "references": self._references, "loader": self._loader})
        try:
            async with asyncio.timeout(_START_SECONDS):
                head, _ = await read_frame(self._reader)
        except (asyncio.IncompleteReadError, ConnectionError):
            raise ConfigError(f"{self._process.ending(0.2)} before it was ready") from None
        except TimeoutError:
            raise ConfigError(
                f"a worker process was not ready within {_START_SECONDS:g} seconds"
            ) from None
        reply = reply_of(head)
        self._last_heard = time.monotonic()
        self._tasks = [
            asyncio.create_task(self._read()),
            asyncio.create_task(self._watch(self._process)),
        ]
        return reply

    async def request(self, operation: str, body: Json) -> Json:
        if self._ended.done():
            raise WorkerDied(self._ended.result())
        number = next(self._numbers)
        future: asyncio.Future[Json] = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        try:
            self._send({"number": number, "operation": operation, "body": body})
            return await future
        except asyncio.CancelledError:
            self._send({"number": number, "operation": "cancel"})
            raise
        finally:
            self._waiting.pop(number, None)

    async def ended(self) -> str:
        return await asyncio.shield(self._ended)

    async def kill(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._mark_dead()
        if self._process is not None:
            self._process.kill()
        if self._writer is not None:
            self._writer.close()
            with contextlib.suppress(OSError):
                await self._writer.wait_closed()

    def _send(self, head: Json) -> None:
        """Written to a buffer that admission bounds; the reader notices when nobody reads it any more."""
        if self._writer is not None and not self._writer.is_closing():
            for piece in pack_frame(head):
                self._writer.write(piece)

    async def _read(self) -> None:
        try:
            while True:
                head, text = await read_frame(self._reader)
                self._last_heard = time.monotonic()
                self._resolve(head, text)
        except (asyncio.IncompleteReadError, ConnectionError):
            self._mark_dead()

    def _resolve(self, head: Json, text: str | None) -> None:
        future = self._waiting.get(head["number"])
        if future is None or future.done():
            return
        if "error" in head:
            future.set_exception(error_from_json(head["error"]))
        else:
            future.set_result(head["reply"] if text is None else {**head["reply"], "content": text})

    async def _watch(self, process: WorkerProcess) -> None:
        while True:
            await asyncio.sleep(min(_PING_SECONDS, self._hang_seconds / 2))
            if time.monotonic() - self._last_heard > self._hang_seconds:
                process.signal()
            self._send({"number": 0, "operation": "ping"})

    def _mark_dead(self) -> None:
        if self._ended.done():
            return
        reason = "a worker process never started" if self._process is None else self._process.ending(0.2)
        self._ended.set_result(reason)
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(WorkerDied(reason))
