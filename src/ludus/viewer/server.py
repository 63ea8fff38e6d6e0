"""Starts the viewer: checks who could reach it, listens, says where it is, and stops on Ctrl-C."""

from __future__ import annotations

import asyncio
import secrets
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ludus.core.failures import MissingExtraError
from ludus.training.config.parts import Parts
from ludus.training.config.recipe import Recipe
from ludus.viewer.workspace import Workspace

if TYPE_CHECKING:
    from aiohttp import web


@dataclass(frozen=True, slots=True)
class ViewerConfig:
    """What to look at, and who may look."""

    root: Path
    host: str = "127.0.0.1"
    port: int = 0
    """0 is any free port."""
    token: str | None = None
    """Required from every client; generated where other machines reach the address, or tools can be called."""
    play: tuple[Recipe, Parts] | None = None
    sync_seconds: float = 1.5
    """How often to look for new episodes."""


class ViewerServer:
    """The viewer in this event loop: `start`, then `drain_and_stop`."""

    def __init__(self, config: ViewerConfig) -> None:
        try:
            import aiohttp  # noqa: F401 - an extra, looked for before anything is loaded
        except ImportError:
            raise MissingExtraError("aiohttp", "view", "the viewer") from None
        from ludus.serve.server import check_exposure, is_on_loopback
        from ludus.viewer.http import ViewerApi
        from ludus.viewer.play import PlayRoom

        self._config = config
        self.token = config.token
        if self.token is None and (config.play is not None or not is_on_loopback(config.host)):
            self.token = secrets.token_urlsafe(24)
        check_exposure(config.host, self.token)
        self._room = PlayRoom(*config.play) if config.play is not None else None
        self._api = ViewerApi(
            Workspace(config.root), token=self.token, play=self._room, every=config.sync_seconds
        )
        self._runner: web.AppRunner | None = None
        self.address = ""

    async def start(self) -> str:
        """Load what is to be played, listen, and return the address to open."""
        from ludus.serve.server import address_of, listening
        from ludus.serve.service import ServerConfig

        if self._room is not None:
            await self._room.open()
        listens = ServerConfig(host=self._config.host, port=self._config.port)
        try:
            self._runner = await listening(self._api.application(), listens)
        except BaseException:
            if self._room is not None:
                await self._room.close()
            raise
        self.address = address_of(self._runner)
        return self.address if self.token is None else f"{self.address}/?token={self.token}"

    async def drain_and_stop(self) -> None:
        if self._room is not None:
            await self._room.close()
        if self._runner is not None:
            await self._runner.cleanup()


async def serve_viewer(config: ViewerConfig, on_ready: Callable[[str], None]) -> None:
    """Serve until SIGINT or SIGTERM; `on_ready` gets the address to open."""
    server = ViewerServer(config)
    told = asyncio.Event()
    address = await server.start()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):  # after loading, which may set handlers of its own
        loop.add_signal_handler(number, told.set)
    try:
        on_ready(address)
        await told.wait()
    finally:
        await server.drain_and_stop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
