"""A host whose workers are processes of this machine."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from ludus.core.failures import ConfigError
from ludus.core.messages import Json
from ludus.remote.supervisor import WorkerDied
from ludus.remote.threads import WorkerError
from ludus.remote.worker import ServiceProcess
from ludus.tools.hosting.host import LOADER, ToolReference
from ludus.tools.hosting.pool import PooledHost
from ludus.tools.hosting.worker import reply_of

_START_SECONDS = 120.0


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
        super().__init__(lambda _: ProcessWorker(references, hang_seconds, loader), workers)


class ProcessWorker:
    """One worker process with its own event loop and tool set.

    One that gives no sign of life for `hang_seconds` (an async tool blocks its event loop) is killed, and its
    host replaces it.
    """

    def __init__(
        self, references: Sequence[ToolReference], hang_seconds: float, loader: str = LOADER
    ) -> None:
        self._references, self._loader = list(references), loader
        self._process = ServiceProcess(
            "ludus.tools.hosting.worker:HostedTools", hang_seconds=hang_seconds
        )

    async def start(self) -> Json:
        setup = {"references": self._references, "loader": self._loader}
        try:
            async with asyncio.timeout(_START_SECONDS):
                return reply_of(*await self._process.start(setup))
        except WorkerError as error:
            raise ConfigError(str(error)) from error
        except WorkerDied as death:
            raise ConfigError(f"{death} before it was ready") from None
        except TimeoutError:
            raise ConfigError(
                f"a worker process was not ready within {_START_SECONDS:g} seconds"
            ) from None

    async def request(self, operation: str, body: Json) -> Json:
        return reply_of(*await self._process.request(operation, {"body": body}))

    async def ended(self) -> str:
        return await self._process.ended()

    async def kill(self) -> None:
        await self._process.kill()
