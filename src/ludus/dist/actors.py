"""What the actors of a run have in common: they know whose they are, and say how they are."""

from __future__ import annotations

import asyncio
import importlib
import os
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ludus.core.messages import Json


class RunActor:
    """An actor of a run. It is asked on an event loop, so that it answers while it works.

    On its own it holds a place: rank 0 is the process of `ludus train`, which Ray does not know of.
    """

    def __init__(self, path: list[str], folder: str, run: str, role: str, number: int) -> None:
        """`path` is where modules are looked for, and `folder` where relative paths begin, as in the process
        that started it. Without shared storage this node may not have the folder."""
        sys.path[:] = [*path, *(entry for entry in sys.path if entry not in path)]
        with suppress(OSError):
            os.chdir(folder)
        self._folder = folder
        self._told: Json = {"run": run, "role": role, "number": number, "pid": os.getpid()}
        self._heard = time.time()

    async def tell(self, facts: Mapping[str, Any]) -> None:
        """Remember what `status` shows."""
        self._told |= facts
        self._heard = time.time()

    async def status(self) -> Json:
        """Whose it is, where it lives, and what it was last told or has done."""
        runtime = importlib.import_module("ray").get_runtime_context()
        return {
            **self._told,
            "node": runtime.get_node_id(),
            "gpu_ids": runtime.get_accelerator_ids().get("GPU", []),
            "memory_bytes": sum(_resident(pid) for pid in {os.getpid(), self._told["pid"]}),
            "seconds_since_heard": round(time.time() - self._heard, 1),
        }

    async def live(self) -> None:
        """Never returns: a request that fails when the actor dies, which is how that is noticed."""
        await asyncio.Event().wait()


def _resident(pid: int) -> int:
    try:
        text = Path(f"/proc/{pid}/statm").read_text(encoding="ascii")
        return int(text.split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):  # it has ended, or this is no Linux
        return 0
