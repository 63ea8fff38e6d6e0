"""Where recordings are kept: a SQLite file, or a Redis server that machines share.

Who waits for whom. SQLite's client blocks, so a store has one thread, in which statements run in the order in
which they were asked for. Processes meet in the file: in write-ahead mode readers do not wait, and writers
queue for its lock for `busy_seconds`. Each write is one statement and one transaction, so a process that is
killed leaves all of it or nothing; writes are not synced one by one, so a loss of power may cost the last of
them, never the file. Redis has 16 connections for each event loop, and every answer has a deadline. Beside its
records there is a short list for each tool of the labels recorded last, which is only read to explain a miss.
"""

from __future__ import annotations

import json
import os
import sqlite3
import threading
import time
import weakref
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import astuple, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast, runtime_checkable
from urllib.parse import quote, urlsplit

from ludus.core.failures import Boundary, ConfigError, InfraError, MissingExtraError
from ludus.remote.client import PerLoop
from ludus.remote.threads import ThreadExecutor, WorkerError
from ludus.tools.recording.records import Label

T = TypeVar("T")

_CONNECTIONS = 16
_LABELS_KEPT = 200
_APPLICATION = 0x4C554452  # "LUDR", so that a database of something else is recognised
_SCHEMA_VERSION = 1
_SCHEMA = (
    """CREATE TABLE IF NOT EXISTS records (
        key TEXT PRIMARY KEY, data BLOB NOT NULL, created REAL NOT NULL,
        tool TEXT, version TEXT, history TEXT, arguments_digest TEXT, arguments TEXT
    ) WITHOUT ROWID""",
    "CREATE INDEX IF NOT EXISTS by_arguments ON records (tool, arguments_digest)",
    "CREATE INDEX IF NOT EXISTS by_history ON records (history, tool)",
    f"PRAGMA application_id = {_APPLICATION}",
    f"PRAGMA user_version = {_SCHEMA_VERSION}",
)
# one statement, so of one moment: another process may be making the tables
_MARKS = (
    "SELECT (SELECT user_version FROM pragma_user_version), "
    "(SELECT application_id FROM pragma_application_id), (SELECT count(*) FROM sqlite_master)"
)
_SIMILAR = tuple(
    f"SELECT tool, version, history, arguments_digest, arguments FROM records WHERE {where} LIMIT :most"
    for where in (
        "tool = :tool AND arguments_digest = :arguments",
        "history = :history AND tool = :tool",
        "tool = :tool",
    )
)


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

    Nothing is opened before the first use. With `must_exist`, for replaying, a file is opened for reading only,
    and one that is not there is an error rather than an empty recording.
    """
    text = str(address)
    if text.startswith(("redis://", "rediss://")):
        return RedisStore(text)
    if not text or "://" in text:
        raise ConfigError(
            f"{text.partition('://')[0]!r} is no store for recordings; give the path of a file, or "
            "redis://host:port/db"
        )
    return SQLiteStore(text, read_only=must_exist)


class SQLiteStore:
    """A file of records. Opened at the first use, closed by `close` or at the end of the process.

    A fork starts with a new connection: the parent's must not be used, nor even closed, on the other side.
    """

    def __init__(self, path: str | Path, *, read_only: bool = False, busy_seconds: float = 10.0) -> None:
        self.path, self.read_only, self.busy_seconds = Path(path), read_only, busy_seconds
        self._begin()

    def _begin(self) -> None:
        self._process, self._db = os.getpid(), cast(sqlite3.Connection | None, None)
        self._thread, self._lock = ThreadExecutor(1, name="ludus-recording"), threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        made = partial(SQLiteStore, read_only=self.read_only, busy_seconds=self.busy_seconds)
        return made, (self.path,)

    async def get(self, key: str) -> bytes | None:
        query = "SELECT CAST(data AS BLOB) FROM records WHERE key = ?"
        row = await self._run(lambda db: db.execute(query, (key,)).fetchone())
        return None if row is None else bytes(row[0])

    async def put(self, key: str, data: bytes, *, label: Label | None, replace: bool) -> None:
        verb = "REPLACE" if replace else "IGNORE"
        named = (None,) * 5 if label is None else (_utf8(label.tool), *astuple(label)[1:])
        statement = f"INSERT OR {verb} INTO records VALUES (?, ?, ?, ?, ?, ?, ?, ?)"
        await self._run(lambda db: db.execute(statement, (key, data, time.time(), *named)).rowcount)

    async def similar(self, label: Label, most: int) -> Sequence[Label]:
        wanted: dict[str, Any] = {"tool": _utf8(label.tool), "arguments": label.arguments_digest}
        wanted |= {"history": label.history, "most": most}
        rows = await self._run(
            lambda db: [row for query in _SIMILAR for row in db.execute(query, wanted).fetchall()]
        )
        return [Label(*row) for row in dict.fromkeys(rows)][:most]

    async def close(self) -> None:
        if self._db is not None and self._process == os.getpid():
            await self._thread.run(self._close)

    async def _run(self, statement: Callable[[sqlite3.Connection], T]) -> T:
        if self._process != os.getpid():
            self._begin()
        try:
            return await self._thread.run(self._performed, statement)
        except WorkerError as error:
            raise RecordingStoreError(f"the recording {self.path} could not be used: {error}") from error
        except sqlite3.DatabaseError as error:
            raise self._failure(error) from error

    def _performed(self, statement: Callable[[sqlite3.Connection], T]) -> T:
        with self._lock:  # a statement without a caller runs to its end while another thread takes over
            if self._db is None:
                self._db = self._connect()
            return statement(self._db)

    def _close(self) -> None:
        with self._lock:
            db, self._db = self._db, None
            if db is not None:
                db.close()

    def _connect(self) -> sqlite3.Connection:
        if self.path.is_dir():
            raise ConfigError(f"{self.path} is a folder; a recording is a file")
        if self.read_only:
            if not self.path.exists():
                raise ConfigError(
                    f"there is no recording {self.path}; make one with the mode record first"
                )
            try:
                return self._opened("ro")
            except sqlite3.OperationalError:
                # Write-ahead mode writes beside the file. Where that is forbidden, the file cannot change.
                return self._opened("ro&immutable=1")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"the folder of the recording {self.path} cannot be made: {error}"
            ) from None
        return self._opened("rwc")

    def _opened(self, mode: str) -> sqlite3.Connection:
        db = sqlite3.connect(
            f"file:{quote(str(self.path.absolute()))}?mode={mode}",
            uri=True,
            timeout=self.busy_seconds,
            isolation_level=None,  # no implicit transactions: each statement is one
            check_same_thread=False,  # `_lock` sees to that
        )
        try:
            self._prepare(db)
        except BaseException:
            db.close()
            raise
        weakref.finalize(self, _close_in, os.getpid(), db)
        return db

    def _prepare(self, db: sqlite3.Connection) -> None:
        """Check that the file is a recording; make one of a new file."""
        marks = self._retry_while_locked(lambda: db.execute(_MARKS).fetchone())
        version, owner, _ = marks
        is_new = marks == (0, 0, 0)
        if not is_new and owner != _APPLICATION:
            raise ConfigError(
                f"{self.path} is a database of another program; give the recording a file of its own"
            )
        if not is_new and version != _SCHEMA_VERSION:
            raise ConfigError(
                f"the recording {self.path} has version {version}, this Ludus writes {_SCHEMA_VERSION}; "
                "use the Ludus that wrote it, or record anew into another file"
            )
        if self.read_only:
            if is_new:
                raise ConfigError(f"the recording {self.path} is empty; make one with the mode record")
            return
        if is_new:
            self._retry_while_locked(lambda: _create(db))
        self._retry_while_locked(lambda: db.execute("PRAGMA journal_mode = WAL").fetchone())
        db.execute("PRAGMA synchronous = NORMAL")

    def _retry_while_locked(self, action: Callable[[], T]) -> T:
        """Some locks of SQLite (the switch to write-ahead mode, recovery) do not wait by themselves."""
        deadline = time.monotonic() + self.busy_seconds
        while True:
            try:
                return action()
            except sqlite3.OperationalError as error:
                if "locked" not in str(error) or time.monotonic() >= deadline:
                    raise
                time.sleep(0.01)

    def _failure(self, error: sqlite3.DatabaseError) -> RecordingStoreError | ConfigError:
        text = str(error)
        if not isinstance(error, sqlite3.OperationalError) or "malformed" in text:
            return ConfigError(
                f"the recording {self.path} is damaged or no SQLite file ({text}); move it away and record "
                f"anew, or save what can be read with: sqlite3 {self.path} .recover | sqlite3 rescued.sqlite"
            )
        if "locked" in text or "busy" in text:
            return RecordingStoreError(
                f"the recording {self.path} was locked by another process for {self.busy_seconds:g} seconds"
            )
        if "readonly" in text or "unable to open" in text:
            return ConfigError(
                f"the recording {self.path} cannot be opened here ({text}): check the permissions of the "
                "file and its folder"
            )
        return RecordingStoreError(f"the recording {self.path} could not be used: {text}")


def _create(db: sqlite3.Connection) -> None:
    with db:
        db.execute("BEGIN IMMEDIATE")
        for statement in _SCHEMA:
            db.execute(statement)


def _close_in(process: int, connection: sqlite3.Connection) -> None:
    if process == os.getpid():
        connection.close()


def _utf8(text: str) -> str:
    """SQLite keeps UTF-8, which has no lone surrogates; the key is of the exact text."""
    return text.encode("utf-8", "backslashreplace").decode()


class RedisStore:
    """Records by the address of a server: `redis://[user:password@]host:port/db`."""

    def __init__(
        self,
        address: str,
        *,
        expire_seconds: int | None = None,
        timeout: float = 5.0,
        prefix: str = "ludus:recording:1",
    ) -> None:
        """`expire_seconds` lets the server forget records after that time."""
        if expire_seconds is not None and expire_seconds < 1:
            raise ConfigError(f"expire_seconds must be at least 1, not {expire_seconds}")
        self.where = _without_password(address)
        self.expire_seconds, self.timeout, self.prefix = expire_seconds, timeout, prefix
        self._address, self._clients = address, PerLoop(self._connected)

    def __reduce__(self) -> tuple[Any, ...]:
        expires, prefix = self.expire_seconds, self.prefix
        made = partial(RedisStore, expire_seconds=expires, timeout=self.timeout, prefix=prefix)
        return made, (self._address,)

    async def get(self, key: str) -> bytes | None:
        data: bytes | None = await self._run(lambda client: client.get(self._name("call", key)))
        return data

    async def put(self, key: str, data: bytes, *, label: Label | None, replace: bool) -> None:
        async def write(client: Any) -> None:
            async with client.pipeline(transaction=False) as pipeline:
                pipeline.set(self._name("call", key), data, ex=self.expire_seconds, nx=not replace)
                if label is not None:
                    labels = self._name("tool", label.tool)
                    pipeline.lpush(labels, json.dumps(astuple(label)))
                    pipeline.ltrim(labels, 0, _LABELS_KEPT - 1)
                    if self.expire_seconds is not None:
                        pipeline.expire(labels, self.expire_seconds)
                await pipeline.execute()

        await self._run(write)

    async def similar(self, label: Label, most: int) -> Sequence[Label]:
        name = self._name("tool", label.tool)
        rows: list[bytes] = await self._run(lambda client: client.lrange(name, 0, _LABELS_KEPT - 1))
        labels = [one for one in map(_label, dict.fromkeys(rows)) if one is not None]

        def difference(one: Label) -> tuple[bool, bool]:
            return one.arguments_digest != label.arguments_digest, one.history != label.history

        return sorted(labels, key=difference)[:most]

    async def close(self) -> None:
        await self._clients.close()

    def _name(self, kind: str, what: str) -> bytes:
        return f"{self.prefix}:{kind}:{what}".encode("utf-8", "backslashreplace")

    def _connected(self) -> _RedisClient:
        from redis import asyncio as redis

        try:
            pool = redis.BlockingConnectionPool.from_url(
                self._address,
                max_connections=_CONNECTIONS,
                timeout=None,  # each of those that it waits for has a deadline
                socket_timeout=self.timeout,
                socket_connect_timeout=self.timeout,
            )
        except ValueError as error:
            raise ConfigError(f"{self.where} is not a valid Redis address: {error}") from None
        return _RedisClient(redis.Redis.from_pool(pool))

    async def _run(self, action: Callable[[Any], Awaitable[Any]]) -> Any:
        try:
            from redis import exceptions
        except ImportError:
            raise MissingExtraError("redis", "redis", "a recording in Redis") from None
        try:
            return await action((await self._clients.get()).client)
        except (exceptions.AuthenticationError, exceptions.NoPermissionError) as error:
            raise ConfigError(
                f"the Redis server at {self.where} refuses us ({error}); put user and password into the "
                "address: redis://user:password@host:port/db"
            ) from None
        except (exceptions.ConnectionError, exceptions.TimeoutError, OSError) as error:
            raise RecordingStoreError(
                f"the Redis server at {self.where} gives no answer ({type(error).__name__}: {error}); is "
                "it running, and can it be reached from here?"
            ) from error
        except exceptions.RedisError as error:
            raise RecordingStoreError(
                f"the Redis server at {self.where} refused a command: {error}", retriable=False
            ) from error


@dataclass(frozen=True, slots=True)
class _RedisClient:
    """The client of an event loop."""

    client: Any

    async def close(self) -> None:
        await self.client.aclose()


def _without_password(address: str) -> str:
    """Host, port and database; `ConfigError` when the address is none."""
    try:
        parts = urlsplit(address)
        host, port, database = parts.hostname or "localhost", parts.port or 6379, parts.path.strip("/")
    except ValueError as error:
        raise ConfigError(f"the address of the Redis server is not an address: {error}") from None
    if database and not database.isdecimal():
        raise ConfigError(f"the address of a Redis server ends in a database's number, not {database!r}")
    return f"{parts.scheme}://{host}:{port}/{database or 0}"


def _label(row: bytes) -> Label | None:
    """The label that `put` wrote; None for a row of another program."""
    try:
        tool, version, history, arguments_digest, arguments = map(str, json.loads(row))
    except (ValueError, TypeError):
        return None
    return Label(tool, version, history, arguments_digest, arguments)
