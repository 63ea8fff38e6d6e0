"""The program of a replica's process: one event loop, one `EmbeddedEngine`, requests over a socket.

Who waits for whom: the main coroutine reads frames; each request is a task of its own, which writes its reply
when it is done. The process ends, with all it has started, when its parent does.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys

from ludus.core.messages import Json
from ludus.engine.replicas.frames import pack_frame, read_frame
from ludus.engine.replicas.served import ServedEngine
from ludus.remote import process_worker


class _Program:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._served = ServedEngine()

    async def run(self) -> None:
        setup, _ = await read_frame(self._reader)
        sys.path[:] = setup["path"]
        while True:
            try:
                head, body = await read_frame(self._reader)
            except (asyncio.IncompleteReadError, ConnectionError):
                return
            self._take(head["number"], head, body)

    def _take(self, number: int, head: Json, body: bytes) -> None:
        if head["operation"] != "cancel":
            self._tasks[number] = asyncio.create_task(self._answer(number, head, body))
            self._tasks[number].add_done_callback(lambda _: self._tasks.pop(number, None))
        elif number in self._tasks:
            self._tasks[number].cancel()

    async def _answer(self, number: int, head: Json, body: bytes) -> None:
        reply, found = await self._served.answer(head, body)
        self._writer.write(pack_frame({"number": number, **reply}, found))
        await self._writer.drain()


async def _main(connection: socket.socket) -> None:
    reader, writer = await asyncio.open_connection(sock=connection)
    try:
        await _Program(reader, writer).run()
    finally:
        writer.close()


def main() -> None:
    """Serve until the parent closes the connection or dies."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    process_worker.end_with_parent(int(sys.argv[2]))
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # everything comes from folders
    asyncio.run(_main(connection))
    os._exit(0)  # requests that still run have nobody to answer to


if __name__ == "__main__":
    main()
