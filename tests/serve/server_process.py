"""A real server process, and plain HTTP to it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import signal
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ludus.core import Task, ToolContext
from warm_python import WarmProcess

TOOLS = Path(__file__).parent / "served_tools.py"
_PROGRAM = (
    "import sys; from ludus.cli.main import run_command; from ludus.cli.serve_commands import serve_app; "
    "sys.exit(run_command(serve_app))"
)


class ServerProcess:
    """`ludus serve tools` with tools of `served_tools.py`, or `ludus serve env`, on a free port."""

    def __init__(
        self,
        *tools: str,
        options: tuple[str, ...] = (),
        env: dict[str, str | None] | None = None,
        what: str = "tools",
    ) -> None:
        """`env` adds to the environment; None takes a variable out of it."""
        references = [name if ":" in name or what != "tools" else f"{TOOLS}:{name}" for name in tools]
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        variables = {**os.environ, "LUDUS_TOKEN": "", **(env or {})}
        read, write = os.pipe()
        self._said = open(read, "rb")  # noqa: PTH123, SIM115 - a pipe, closed with the process
        try:
            self.process = WarmProcess(
                ["-c", _PROGRAM, what, *references, *options],
                {name: value for name, value in variables.items() if value is not None},
                stdout=write,
                stderr=self._errors.fileno(),
            )
        finally:
            os.close(write)
        line = self._said.readline()
        if not line:
            self.process.wait(20)
            errors = self._error_text()
            self.close()
            raise RuntimeError(errors)
        self.told: dict[str, Any] = json.loads(line)
        self.address: str = self.told["address"]
        self.port = int(self.address.rpartition(":")[2])

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(20)

    def logs(self) -> list[dict[str, Any]]:
        """Stop it, and read what it logged."""
        if self.process.poll() is None:
            self.signal(signal.SIGTERM)
        self.process.wait(30)
        return [json.loads(line) for line in self._error_text().splitlines()]

    def _error_text(self) -> str:
        self._errors.seek(0)
        return self._errors.read().decode()

    def close(self) -> None:
        if self.process.poll() is None:
            self.kill()
        self._said.close()
        self._errors.close()


@contextlib.contextmanager
def serving(
    *tools: str,
    options: tuple[str, ...] = (),
    env: dict[str, str | None] | None = None,
    what: str = "tools",
) -> Iterator[ServerProcess]:
    """A server for the length of a test."""
    server = ServerProcess(*tools, options=options, env=env, what=what)
    try:
        yield server
    finally:
        server.close()


def raw_exchange(port: int, data: bytes, seconds: float = 10.0) -> bytes:
    """Send bytes, and read until the server closes or says nothing for `seconds`."""
    with socket.create_connection(("127.0.0.1", port), timeout=seconds) as connection:
        connection.sendall(data)
        received = b""
        with contextlib.suppress(TimeoutError):
            while piece := connection.recv(65536):
                received += piece
        return received


def lines_of(file: Path) -> list[str]:
    return file.read_text().splitlines() if file.exists() else []


async def until(condition: Callable[[], Any], seconds: float = 20.0) -> None:
    """Wait until something is so; the limit is a hang guard."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - other processes make it so
            await asyncio.sleep(0.01)


def context(name: str = "episode") -> ToolContext:
    """An episode that nobody else has."""
    return ToolContext(f"{name}-{secrets.token_hex(4)}", Task.of("what?", "that", id="t1", level=(1, 2)))
