"""Threads of a store's own, so that slow tools in the shared ones never hold up the recording."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

from ludus.core.concurrency import ThreadExecutor

T = TypeVar("T")


class StoreThreads:
    """At most `most` daemon threads, started when needed; after a fork, or after `close`, new ones."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._executor: ThreadExecutor | None = None
        self._process = 0

    async def run(self, function: Callable[..., T], *args: Any) -> T:
        """The function's result; `WorkerError` when no thread can be had."""
        if self._executor is None or self._process != os.getpid():
            self._executor = ThreadExecutor(self._most, name="ludus-recording")
            self._process = os.getpid()
        return await self._executor.run(function, *args)

    async def close(self) -> None:
        """Let the threads end; what still waits fails."""
        executor, self._executor = self._executor, None
        if executor is not None and self._process == os.getpid():
            await executor.close()
