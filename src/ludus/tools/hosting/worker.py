"""The program of a worker process: one event loop, one tool set, requests over a socket.

Who waits for whom. The main coroutine reads frames; each request is a task of its own, which writes its reply
when it is done. The server's admission bounds how many there are. The process ends, with all it started, when
its parent does.
"""

from __future__ import annotations

import asyncio
import socket
import sys

from ludus.core.failures import ConfigError
from ludus.core.messages import Json, ToolCall, ToolContext
from ludus.core.registry import load_reference
from ludus.remote import process_worker
from ludus.tools.hosting.host import FACTS, LOADER, ToolReference, ask_tools, error_to_json, facts_of
from ludus.tools.hosting.process_host import pack_frame, read_frame
from ludus.tools.wire import result_to_json, spec_to_json, task_from_json


class HostedTools:
    """A tool set that is asked in JSON. Worker processes and Ray actors both hold one."""

    def __init__(self, references: list[ToolReference], loader: str = LOADER) -> None:
        self._references, self._loader = references, loader
        self._contexts: dict[str, ToolContext] = {}

    async def load(self) -> Json:
        """Build the tools; the answer holds their facts, or an error for people to read."""
        try:
            self._tools = load_reference(self._loader)(self._references)
            return {"reply": {"tools": FACTS.dump_python(await facts_of(self._tools))}}
        except ConfigError as error:
            return {"error": error_to_json(error)}
        except Exception as error:  # noqa: BLE001 - told to the host, which says it to people
            message = f"the tools could not be loaded: {type(error).__name__}: {error}"
            return {"error": error_to_json(ConfigError(message))}

    async def answer(self, operation: str, body: Json) -> tuple[Json, str | None]:
        """The answer to a request, `{"reply": ...}` or `{"error": ...}`, and the text that belongs to it."""
        try:
            reply, text = await self._perform(operation, body)
        except Exception as error:  # noqa: BLE001 - raised again where the host is
            return {"error": error_to_json(error)}, None
        return {"reply": reply}, text

    async def _perform(self, operation: str, body: Json) -> tuple[Json, str | None]:
        if operation == "open":
            context = ToolContext(body["episode"], task_from_json(body["task"]))
            await self._tools.open(context)
            self._contexts[context.episode] = context
            return {}, None
        if operation == "close":
            closing = self._contexts.pop(body["episode"], None)
            if closing is not None:
                await self._tools.close(closing)
            return {}, None
        if operation == "ask" and body["episode"] is None:
            return await ask_tools(self._tools, body["what"], None, body["body"]), None
        context = self._contexts[body["episode"]]
        if operation == "ask":
            return await ask_tools(self._tools, body["what"], context, body["body"]), None
        if operation == "list":
            return {"tools": [spec_to_json(spec) for spec in await self._tools.list(context)]}, None
        call = body["call"]
        result = await self._tools.call(ToolCall(call["name"], call["arguments"], call["id"]), context)
        return result_to_json(result, content=False), result.content


class _Program:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._tasks: dict[int, asyncio.Task[None]] = {}

    async def run(self) -> None:
        setup, _ = await read_frame(self._reader)
        sys.path[:] = setup["path"]
        tools = HostedTools(setup["references"], setup["loader"])
        loaded = await tools.load()
        self._send(loaded)
        if "error" in loaded:
            await self._writer.drain()
            return
        while True:
            try:
                head, _ = await read_frame(self._reader)
            except (asyncio.IncompleteReadError, ConnectionError):
                return
            self._take(tools, head)

    def _take(self, tools: HostedTools, head: Json) -> None:
        number, operation = head["number"], head["operation"]
        if operation == "cancel":
            if number in self._tasks:
                self._tasks[number].cancel()
        elif operation == "ping":
            self._send({"number": number, "reply": {}})
        else:
            work = self._answer(tools, number, operation, head["body"])
            self._tasks[number] = asyncio.create_task(work)
            self._tasks[number].add_done_callback(lambda _: self._tasks.pop(number, None))

    async def _answer(self, tools: HostedTools, number: int, operation: str, body: Json) -> None:
        answer, text = await tools.answer(operation, body)
        self._send({"number": number, **answer}, text)
        await self._writer.drain()

    def _send(self, head: Json, text: str | None = None) -> None:
        for piece in pack_frame(head, text):
            self._writer.write(piece)


async def _main(connection: socket.socket) -> None:
    reader, writer = await asyncio.open_connection(sock=connection)
    try:
        await _Program(reader, writer).run()
    finally:
        writer.close()


def main() -> None:
    """Serve until the host closes the connection or dies."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    process_worker.end_with_parent(int(sys.argv[2]))
    asyncio.run(_main(connection))


if __name__ == "__main__":
    main()
