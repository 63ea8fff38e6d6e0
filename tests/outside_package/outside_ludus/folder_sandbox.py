"""A sandbox backend of another package: a folder and an interpreter for each session, without any isolation."""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Sequence
from pathlib import Path

from ludus.sandbox import (
    Execution,
    Layers,
    Limits,
    Outcome,
    SandboxBackend,
    SandboxConfig,
    SandboxUnavailable,
    Session,
    SessionEnded,
    SessionLost,
)

_INTERPRETER = """
import contextlib, io, json, sys, traceback
own = {"__name__": "__main__"}
for line in sys.stdin:
    out, error = io.StringIO(), None
    with contextlib.redirect_stdout(out):
        try:
            exec(json.loads(line), own)
        except Exception:
            error = traceback.format_exc(limit=0)
    print(json.dumps([out.getvalue(), error]), file=sys.__stdout__, flush=True)
"""


class FolderBackend(SandboxBackend):
    """For code that is trusted. `options.parent` is where the folders are made."""

    async def start(self) -> Layers:
        unknown = self.config.options.keys() - {"parent"}
        if unknown:
            raise SandboxUnavailable(f"sandbox.options of the tier folder has no {min(unknown)!r}")
        return Layers({"a folder for each session": True})

    async def session(self, limits: Limits, image: str | None) -> Session:
        return FolderSession(self.config, limits)


class FolderSession(Session):
    """Files in a folder, variables in an interpreter that starts at its first use."""

    def __init__(self, config: SandboxConfig, limits: Limits) -> None:
        self.limits = limits
        self._folder = tempfile.TemporaryDirectory(dir=config.options.get("parent"))
        self._python: Process | None = None
        self._outcome: Outcome | None = None

    @property
    def alive(self) -> bool:
        return not self.closed and self._outcome is None

    @property
    def was_ended_inside(self) -> bool:
        return self._outcome is not None and not self.closed

    async def python(
        self, code: str, *, stdin: str = "", wall_seconds: float | None = None
    ) -> Execution:
        if self.closed:
            raise SessionLost("the session is closed")
        if self._outcome is not None:
            return Execution(self._outcome, lost=True)
        if self._python is None:
            self._python = await self._spawned([sys.executable, "-c", _INTERPRETER])
        assert self._python.stdin is not None and self._python.stdout is not None
        self._python.stdin.write(json.dumps(code).encode() + b"\n")
        started, line = time.monotonic(), b""
        try:
            async with asyncio.timeout(wall_seconds or self.limits.wall_seconds):
                line = await self._python.stdout.readline()
            self._outcome = None if line else Outcome.EXITED
        except TimeoutError:
            self._outcome = Outcome.TIMEOUT
        if self._outcome is not None:
            return Execution(self._outcome, lost=True, seconds=time.monotonic() - started)
        stdout, error = json.loads(line)
        return Execution(Outcome.RAISED if error else Outcome.OK, stdout, error=error)

    async def shell(
        self, command: str, *, stdin: str = "", wall_seconds: float | None = None
    ) -> Execution:
        return await self.run(["bash", "-c", command], stdin=stdin, wall_seconds=wall_seconds)

    async def run(
        self, argv: Sequence[str], *, stdin: str = "", wall_seconds: float | None = None
    ) -> Execution:
        process = await self._spawned(argv)
        try:
            async with asyncio.timeout(wall_seconds or self.limits.wall_seconds):
                out, _ = await process.communicate(stdin.encode())
        except TimeoutError:
            process.kill()
            return Execution(Outcome.TIMEOUT)
        ended = Outcome.RAISED if process.returncode else Outcome.OK
        return Execution(ended, out.decode(), exit_code=process.returncode)

    async def write(self, path: str, data: bytes | str) -> None:
        file = self._file(path)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data.encode() if isinstance(data, str) else data)

    async def read(self, path: str, *, max_bytes: int = 1_000_000) -> bytes:
        return self._file(path).read_bytes()[:max_bytes]

    async def end(self) -> None:
        if self._python is not None and self._python.returncode is None:
            self._python.kill()
            await self._python.wait()
        self._folder.cleanup()

    def _file(self, path: str) -> Path:
        if not self.alive:
            raise SessionEnded("the code in the session has ended it")
        return Path(self._folder.name, path)

    async def _spawned(self, argv: Sequence[str]) -> Process:
        return await asyncio.create_subprocess_exec(
            *argv, cwd=self._folder.name, stdin=PIPE, stdout=PIPE, stderr=DEVNULL
        )
