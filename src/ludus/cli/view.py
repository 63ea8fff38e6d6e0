"""`ludus view`: start the viewer, and say where it is."""

from __future__ import annotations

import asyncio
import webbrowser
from importlib import import_module
from pathlib import Path

from rich.console import Console
from rich.text import Text

from ludus.core.failures import ConfigError, MissingExtraError


def run_viewer(
    folder: Path,
    overrides: list[str],
    play: Path | None,
    model: str | None,
    host: str,
    port: int,
    token: str | None,
    browser: bool,
) -> None:
    """Serve until Ctrl-C."""
    for package in ("aiohttp", "duckdb"):
        try:
            import_module(package)
        except ImportError:
            raise MissingExtraError(package, "view", "the viewer") from None
    if overrides and play is None:
        raise ConfigError(f"{overrides[0]} is for --play, which names a recipe or a run")
    console = Console()
    from ludus.viewer import ViewerConfig, serve_viewer

    loaded = None
    if play is not None:
        from ludus.cli.eval import load

        console.print(Text(f"loading {play}"), soft_wrap=True)
        loaded = load(play, overrides, model)
    config = ViewerConfig(folder, host, port, token or None, loaded)

    def ready(address: str) -> None:
        console.print(Text(f"{folder}: {address}"), soft_wrap=True)
        console.print(Text("Ctrl-C ends it; reading never changes a run", style="dim"), soft_wrap=True)
        if browser:
            webbrowser.open(address)

    asyncio.run(serve_viewer(config, ready))
