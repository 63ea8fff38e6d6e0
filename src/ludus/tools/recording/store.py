"""Where recordings are kept: what a store is, and how one is opened by its address."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeVar, runtime_checkable

from ludus.core.failures import Boundary, ConfigError, InfraError
from ludus.remote.threads import ThreadExecutor
from ludus.tools.recording.keys import Label


class RecordingStoreError(InfraError):
    """The store could not be read or written: an infrastructure failure."""

    def __init__(self, message: str, *, retriable: bool = True) -> None:
        super().__init__(Boundary.TOOL, message, retriable=retriable)


@runtime_checkable
class Store(Protocol):
    """Bytes by key, and labels to explain a miss with. Safe from several tasks and processes at once.

    All methods raise `RecordingStoreError` for what may pass, and `ConfigError` for what needs a person.
    """

    async def get(self, key: str) -> bytes | None:
        """The data stored under `key`; None where there is none."""

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
    from ludus.tools.recording.redis_store import RedisStore
    from ludus.tools.recording.sqlite_store import SQLiteStore

    text = str(address)
    if text.startswith(("redis://", "rediss://")):
        return RedisStore(text)
    if "://" in text:
        raise ConfigError(
            f"{text.partition('://')[0]!r} is no store for recordings; give the path of a file, or "
            "redis://host:port/db"
        )
    if not text:
        raise ConfigError("a recording needs a path, or an address such as redis://localhost:6379/0")
    return SQLiteStore(text, read_only=must_exist)


T = TypeVar("T")
Client = TypeVar("Client")
_OF_PROCESS = {"_process", "_lock", "_client", "_threads"}


class ThreadedStore(Generic[Client]):
    """A store behind a blocking client, which is opened at the first use and works in threads of its own.

    So any event loop can use it, and slow tools never hold up the recording. A fork starts with a new client
    and new threads: the parent's client must not be used, nor even closed, on the other side of a fork.
    """

    _most_threads: ClassVar[int]
    _client: Client | None
    _threads: ThreadExecutor | None

    def __init__(self) -> None:
        self._forget()

    def _connect(self) -> Client:
        raise NotImplementedError

    def _disconnect(self, client: Client) -> None:
        raise NotImplementedError

    async def _in_thread(self, action: Callable[[Client], T]) -> T:
        """Run `action` with the client in a thread; `WorkerError` when no thread can be had."""
        if self._process != os.getpid():
            self._forget()
        if self._threads is None:
            self._threads = ThreadExecutor(self._most_threads, name="ludus-recording")
        return await self._threads.run(self._with_client, action)

    def _with_client(self, action: Callable[[Client], T]) -> T:
        with self._lock:
            if self._client is None:
                self._client = self._connect()
            client = self._client
        return action(client)

    async def close(self) -> None:
        """Release the client and let the threads end; what still waits fails."""
        threads, self._threads = self._threads, None
        if threads is not None and self._process == os.getpid():
            await threads.run(self._close)
            await threads.close()

    def _close(self) -> None:
        with self._lock:
            client, self._client = self._client, None
            if client is not None:
                self._disconnect(client)

    def _forget(self) -> None:
        self._process = os.getpid()
        self._lock = threading.RLock()
        self._client = None
        self._threads = None

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in _OF_PROCESS}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._forget()
