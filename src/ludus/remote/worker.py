"""A child process that answers requests: the side of its parent (`ServiceProcess`), and its program.

    process = ServiceProcess("ludus.tools.hosting.host:HostedTools", hang_seconds=60.0)
    reply, _ = await process.start({"references": [...]})
    reply, body = await process.request("call", {...})

The service is named, and made in the child without arguments; `answer(head, body)` is given each request, of
which `head["operation"]` is "start" for the first and "ping" for a sign of life. Many requests run at once,
each in a task of the child's event loop. A process that is silent for `hang_seconds` after its start is
killed, and it ends, with all that it has started, when its parent does.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import time
from collections.abc import Mapping
from typing import Protocol

from ludus.core.messages import Json
from ludus.core.registry import load_reference
from ludus.remote.channel import (
    ChannelClosed,
    Frame,
    RequestChannel,
    pack_frame,
    read_frame,
    serve_requests,
)
from ludus.remote.process_worker import end_with_parent
from ludus.remote.processes import WorkerProcess
from ludus.remote.supervisor import WorkerDied

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
            *("-m", "ludus.remote.worker", self._service), stdout=2, variables=self._variables
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
    service: Service = load_reference(service_name)()
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
