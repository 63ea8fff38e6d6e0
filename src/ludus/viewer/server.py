"""Starts the viewer: checks who could reach it, listens, says where it is, and stops on Ctrl-C."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ludus.serve.app import AppServer, check_exposure, is_on_loopback, serve_until_told
from ludus.serve.service import ServerConfig
from ludus.training.config.parts import Parts
from ludus.training.config.recipe import Recipe
from ludus.viewer.http import ViewerApi
from ludus.viewer.play import PlayRoom
from ludus.viewer.workspace import Workspace

_MOST_BODY = 1_000_000


@dataclass(frozen=True, slots=True)
class ViewerConfig:
    """Settings of the viewer: the folder, the address, access, what can be played."""

    root: Path
    host: str = "127.0.0.1"
    port: int = 0
    """0 is any free port."""
    token: str | None = None
    """Required from every client; generated where other machines reach the address, or tools can be called."""
    play: tuple[Recipe, Parts] | None = None
    sync_seconds: float = 1.5
    """How often to look for new episodes."""


class ViewerServer(AppServer):
    """The viewer in this event loop: `start`, then `drain_and_stop`; or `async with`."""

    def __init__(self, config: ViewerConfig) -> None:
        super().__init__(ServerConfig(host=config.host, port=config.port, max_body_bytes=_MOST_BODY))
        self.token = config.token
        if self.token is None and (config.play is not None or not is_on_loopback(config.host)):
            self.token = secrets.token_urlsafe(24)
        check_exposure(config.host, self.token)
        self._room = PlayRoom(*config.play) if config.play is not None else None
        self._api = ViewerApi(
            Workspace(config.root),
            self._config,
            token=self.token,
            play=self._room,
            every=config.sync_seconds,
        )

    async def start(self) -> str:
        """Load what is to be played, listen, and return the address to open."""
        if self._room is not None:
            await self._room.open()
        try:
            address = await self._listen(self._api)
        except BaseException:
            if self._room is not None:
                await self._room.close()
            raise
        return address if self.token is None else f"{address}/?token={self.token}"

    async def drain_and_stop(self) -> None:
        if self._room is not None:
            await self._room.close()
        await self._hang_up()


async def serve_viewer(config: ViewerConfig, on_ready: Callable[[str], None]) -> None:
    """Serve until SIGINT or SIGTERM; `on_ready` gets the address to open."""
    await serve_until_told(ViewerServer(config), on_ready)
