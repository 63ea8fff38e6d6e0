"""What the tests of recording share: a set with state, a Redis server, and programs to run beside."""

from __future__ import annotations

import asyncio
import random
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ludus.core import Boundary, Fault, InfraError, Task, ToolCall, ToolContext, ToolResult, ToolSpec
from ludus.core.messages import Json

REDIS_PROGRAM = shutil.which("redis-server")
"""The real server; without it, a stand-in that knows no passwords and chokes on megabytes."""

ANYTHING: Json = {"type": "object", "properties": {}}


def episode(name: str = "e", task: str = "1") -> ToolContext:
    return ToolContext(name, Task.of("go", id=task))


class Notebook:
    """A stateful set: `write` appends to the episode's lines, `read` shows them, `upper` has no state.

    `noise` makes its answers random, `pause` how long they take.
    """

    def __init__(
        self, *, noise: random.Random | None = None, pause: random.Random | None = None
    ) -> None:
        self.lines: dict[str, list[str]] = {}
        self.calls: list[tuple[str, str, Json]] = []
        self.opened: list[str] = []
        self.closed: list[str] = []
        self.fails = 0
        """How many of the next calls fail, after having had their effect."""
        self.extra: list[str] = []
        """Further tools, as a server may add them."""
        self._noise, self._pause = noise, pause

    async def open(self, context: ToolContext) -> None:
        self.opened.append(context.episode)
        self.lines[context.episode] = []

    async def list(self, context: ToolContext) -> Sequence[ToolSpec]:
        return [ToolSpec(name, "", ANYTHING) for name in ("write", "read", "upper", *self.extra)]

    async def call(self, call: ToolCall, context: ToolContext) -> ToolResult:
        if self._pause is not None:
            await asyncio.sleep(self._pause.random() / 500)
        self.calls.append((context.episode, call.name, call.arguments))
        if call.name == "upper":
            return ToolResult(str(call.arguments["text"]).upper())
        lines = self.lines[context.episode]
        if call.name == "write":
            lines.append(str(call.arguments["text"]))
        if self.fails:
            self.fails -= 1
            raise InfraError(Boundary.SERVER, "the notebook was lost")
        if self._pause is not None:
            await asyncio.sleep(self._pause.random() / 500)
        noise = f" {self._noise.random()}" if self._noise is not None else ""
        fault = Fault.TOOL_RAISED if call.arguments.get("text") == "bad" else None
        return ToolResult("|".join(lines) + noise, fault=fault)

    async def close(self, context: ToolContext) -> None:
        self.closed.append(context.episode)
        self.lines.pop(context.episode, None)


@contextmanager
def redis_server(folder: Path) -> Iterator[str]:
    """The address of a server of our own: the real one where it is installed."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    if REDIS_PROGRAM is None:
        yield from _fake_server(port)
        return
    options = ["--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(folder)]
    process = subprocess.Popen([REDIS_PROGRAM, *options], stdout=subprocess.DEVNULL)
    try:
        wait_for_port(port)
        yield f"redis://127.0.0.1:{port}/0"
    finally:
        process.kill()
        process.wait()


def _fake_server(port: int) -> Iterator[str]:
    from fakeredis import TcpFakeServer

    server = TcpFakeServer(("127.0.0.1", port), server_type="redis")
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"redis://127.0.0.1:{port}/0"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)


def wait_for_port(port: int) -> None:
    for _ in range(500):
        with socket.socket() as one:
            if one.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.02)
    raise AssertionError(f"nothing listens on port {port}")
