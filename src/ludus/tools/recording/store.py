"""Where recordings are kept: what a store is, and how one is opened by its address."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar, runtime_checkable

from ludus.core.failures import Boundary, ConfigError, InfraError
from ludus.remote.threads import ThreadExecutor
from ludus.tools.recording.keys import Label


class RecordingStoreError(InfraError):
    """The store could not be read or written: a failure of ours."""

    def __init__(self, message: str, *, retriable: bool = True) -> None:
        super().__init__(Boundary.TOOL, message, retriable=retriable)


@runtime_checkable
class Store(Protocol):
    """Bytes by key, and labels to explain a miss with. Safe from several tasks and processes at once.

    All methods raise `RecordingStoreError` for what may pass, and `ConfigError` for what needs a person.
    """

    async def get(self, key: str) -> bytes | None:
        """What is kept under `key`."""

    async def put(self, key: str, data: bytes, *, label: Label | None, replace: bool) -> None:
        """Keep `data`. Without `replace`, what is there already stays: the first one wins."""

    async def similar(self, label: Label, most: int) -> Sequence[Label]:
        """Some recorded calls of the same tool, those with equal arguments or history among the first."""

    async def close(self) -> None:
        """Release connections; using the store again opens new ones."""


def open_store(address: str | Path, *, must_exist: bool = False) -> Store:
    """A store by its address: `redis://host:port/db`, or the path of a SQLite file.

    Nothing is opened before the first use. `must_exist` is for replaying: a file that is not there is
    an error rather than an empty recording, and is opened for reading only.
    """
    text = str(address)
    if text.startswith(("redis://", "rediss://")):
        from ludus.tools.recording.redis_store import RedisStore

        return RedisStore(text)
    if "://" in text:
        raise ConfigError(
            f"{text.partition('://')[0]!r} is no store for recordings; give the path of a file, or "
            "redis://host:port/db"
        )
    if not text:
        raise ConfigError("a recording needs a path, or an address such as redis://localhost:6379/0")
    from ludus.tools.recording.sqlite_store import SQLiteStore

    return SQLiteStore(text, read_only=must_exist)


T = TypeVar("T")


class StoreThreads:
    """At most `most` daemon threads of a store's own, so that slow tools never hold up the recording.

    They start when needed; after a fork, or after `close`, there are new ones.
    """

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
