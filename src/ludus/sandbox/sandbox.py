"""The sandbox: one way to run code, whatever backend its config names."""

from __future__ import annotations

import asyncio
import atexit
from collections.abc import Sequence
from typing import Self

from ludus.sandbox.config import Limits, SandboxConfig, SandboxError
from ludus.sandbox.result import Execution
from ludus.sandbox.session import ClosedAtExit, Files, Layers, Session, make_backend


class Sandbox(ClosedAtExit):
    """Isolated execution of Python, shell commands and programs. Starts at its first use."""

    def __init__(self, config: SandboxConfig | None = None) -> None:
        self.config = config or SandboxConfig()
        self.backend = make_backend(self.config)
        self.layers: Layers | None = None
        """Which layers of isolation are active; None before the start."""
        self.closed = False
        self._starting = asyncio.Lock()

    async def start(self) -> Layers:
        """Start it now rather than at the first use; returns which layers hold."""
        async with self._starting:
            if self.closed:
                raise SandboxError("the sandbox is closed", retriable=False)
            if self.layers is None:
                self.layers = await self.backend.start()
            return self.layers

    @property
    def alive(self) -> int:
        """How many sessions and executions there are now."""
        return self.backend.alive

    @property
    def replaced(self) -> int:
        """How many workers died and were replaced."""
        return self.backend.replaced

    async def python(
        self, code: str, *, stdin: str = "", files: Files | None = None, limits: Limits | None = None
    ) -> Execution:
        """Run a Python program in a fresh environment."""
        await self.start()
        return await self.backend.once("python", code, stdin, files, limits or self.config.limits)

    async def shell(
        self, command: str, *, stdin: str = "", files: Files | None = None, limits: Limits | None = None
    ) -> Execution:
        """Run a bash command in a fresh environment."""
        await self.start()
        return await self.backend.once("shell", command, stdin, files, limits or self.config.limits)

    async def run(
        self,
        argv: Sequence[str],
        *,
        stdin: str = "",
        files: Files | None = None,
        limits: Limits | None = None,
    ) -> Execution:
        """Run a program in a fresh environment."""
        await self.start()
        return await self.backend.once("run", argv, stdin, files, limits or self.config.limits)

    async def session(
        self,
        *,
        files: Files | None = None,
        limits: Limits | None = None,
        image: str | None = None,
    ) -> Session:
        """An environment that keeps its state until it is closed; `image` where it is to be a container."""
        await self.start()
        session = await self.backend.open(limits or self.config.limits, image)
        try:
            await session.put(files)
        except BaseException:
            await session.close()
            raise
        return session

    async def close(self) -> None:
        """End everything, and wait until it is gone."""
        self.closed = True
        async with self._starting:
            await self.backend.close()

    def abandon(self) -> None:
        """End everything without an event loop: it is closed, or the interpreter is about to exit."""
        self.closed = True
        self.backend.abandon()

    async def __aenter__(self) -> Self:
        await self.start()
        return self


_shared: dict[asyncio.AbstractEventLoop, dict[SandboxConfig, Sandbox]] = {}


def shared_sandbox(config: SandboxConfig | None = None) -> Sandbox:
    """The sandbox that everything on this event loop shares, one for each config."""
    loop = asyncio.get_running_loop()
    for other in [other for other in _shared if other.is_closed()]:
        _abandon(_shared.pop(other))
    boxes = _shared.setdefault(loop, {})
    config = config or SandboxConfig()
    if config not in boxes or boxes[config].closed:
        boxes[config] = Sandbox(config)
    return boxes[config]


async def close_shared_sandboxes() -> None:
    """Close those of this event loop; a later `shared_sandbox` starts a new one."""
    boxes = _shared.pop(asyncio.get_running_loop(), {})
    await asyncio.gather(*(box.close() for box in boxes.values()))


def _abandon(boxes: dict[SandboxConfig, Sandbox]) -> None:
    for box in boxes.values():
        box.abandon()


@atexit.register
def _abandon_all() -> None:
    for boxes in _shared.values():
        _abandon(boxes)
