"""Tools that run in worker processes; importable, as such tools must be."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from ludus.tools import tool


@tool(process=True, retries=1)
def die() -> None:
    """Kill the process it runs in."""
    os.kill(os.getpid(), signal.SIGKILL)


@tool(process=True, retries=1)
def die_once(marker: str) -> str:
    """Kill the process it runs in, the first time.

    Args:
        marker: A file that remembers the first time.
    """
    if not Path(marker).exists():
        Path(marker).write_text("died")
        os.kill(os.getpid(), signal.SIGKILL)
    return "alive"
