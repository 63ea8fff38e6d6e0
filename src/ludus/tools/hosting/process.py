"""Worker processes: heavy tools side by side, each process with its own event loop and tool set.

Who waits for whom. A request awaits its own future; one reader task per worker settles them, and ends when the
worker does. A ping goes out every few seconds: a worker that has said nothing at all for `hang_seconds` (an
async tool that blocks its event loop) is killed, and its host replaces it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence

from ludus.core.failures import ConfigError
from ludus.core.messages import Json
from ludus.tools.hosting import frames
from ludus.tools.hosting.encoding import error_from_json
from ludus.tools.hosting.loading import ToolReference
from ludus.tools.hosting.pool import PooledHost, WorkerDied

_START_SECONDS = 120.0
_PING_SECONDS = 5.0


class ProcessHost(PooledHost):
    """A host of `workers` processes. Tools are given by reference, because each process builds its own."""

    def __init__(
        self, references: Sequence[ToolReference], workers: int = 2, *, hang_seconds: float = 60.0
    ) -> None:
        super().__init__(lambda: ProcessWorker(references, hang_seconds), workers)


class ProcessWorker:
    """One worker process, and the socket to it."""

    def __init__(self, references: Sequence[ToolReference], hang_seconds: float) -> None:
        self._references, self._hang_seconds = list(references), hang_seconds
        self._process: subprocess.Popen[bytes] | None = None
        self._lifeline = -1
        self._writer: asyncio.StreamWriter | None = None
        self._waiting: dict[int, asyncio.Future[Json]] = {}
        self._numbers = itertools.count(1)
        self._tasks: list[asyncio.Task[None]] = []
        self._ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._heard = time.monotonic()

    async def start(self) -> Json:
        ours = self._spawn()
        try:
            self._reader, self._writer = await asyncio.open_connection(sock=ours)
        except BaseException:
            ours.close()
            raise
        path = [entry for entry in sys.path if isinstance(entry, str)]
        self._send({"path": path, "references": self._references})
        try:
            async with asyncio.timeout(_START_SECONDS):
                head, _ = await frames.read(self._reader)
        except (asyncio.IncompleteReadError, ConnectionError):
            raise ConfigError(f"{self._obituary()} before it was ready") from None
        except TimeoutError:
            raise ConfigError(
                f"a worker process was not ready within {_START_SECONDS:g} seconds"
            ) from None
        if "error" in head:
            raise error_from_json(head["error"])
        self._heard = time.monotonic()
        self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._watch())]
        reply: Json = head["reply"]
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
        self._bury()
        if self._process is not None:
            self._signal()
            self._process.wait()
            self._process = None
            os.close(self._lifeline)
        if self._writer is not None:
            self._writer.close()
            with contextlib.suppress(OSError):
                await self._writer.wait_closed()

    def _spawn(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        watched, self._lifeline = os.pipe()
        module = "ludus.tools.hosting.worker"
        command = [sys.executable, "-P", "-m", module, str(theirs.fileno()), str(watched)]
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=2,  # what tools print is for people to read; the server's own output is for programs
                pass_fds=(theirs.fileno(), watched),
                start_new_session=True,
            )
        except OSError as error:
            ours.close()
            os.close(self._lifeline)
            raise ConfigError(f"a worker process could not be started: {error}") from error
        finally:
            theirs.close()
            os.close(watched)
        return ours

    def _send(self, head: Json) -> None:
        """Written to a buffer that admission bounds; the reader notices when nobody reads it any more."""
        if self._writer is not None and not self._writer.is_closing():
            for piece in frames.packed(head):
                self._writer.write(piece)

    async def _read(self) -> None:
        try:
            while True:
                head, text = await frames.read(self._reader)
                self._heard = time.monotonic()
                self._settle(head, text)
        except (asyncio.IncompleteReadError, ConnectionError):
            self._bury()

    def _settle(self, head: Json, text: str | None) -> None:
        future = self._waiting.get(head["number"])
        if future is None or future.done():
            return
        if "error" in head:
            future.set_exception(error_from_json(head["error"]))
        else:
            future.set_result(head["reply"] if text is None else {**head["reply"], "content": text})

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(min(_PING_SECONDS, self._hang_seconds / 2))
            if time.monotonic() - self._heard > self._hang_seconds:
                self._signal()
            self._send({"number": 0, "operation": "ping"})

    def _signal(self) -> None:
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def _bury(self) -> None:
        if self._ended.done():
            return
        obituary = self._obituary()
        self._ended.set_result(obituary)
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(WorkerDied(obituary))

    def _obituary(self) -> str:
        """How it ended; one that closed its socket and lives on is ended here."""
        if self._process is None:
            return "a worker process never started"
        try:
            code = self._process.wait(0.2)
        except subprocess.TimeoutExpired:
            self._signal()
            code = self._process.wait()
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with status {code}"
        return f"a worker process {how}"
