"""Where recordings are kept: the store protocol, a SQLite file, a Redis server."""

from __future__ import annotations

import json
import os
import sqlite3
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import astuple
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable
from urllib.parse import quote, urlsplit

from ludus.core.concurrency import ThreadExecutor, WorkerError
from ludus.core.failures import Boundary, ConfigError, InfraError, MissingExtraError
from ludus.tools.recording.keys import Label

if TYPE_CHECKING:
    import redis


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


# Records in one SQLite file.
#
# Who waits for whom. Statements run in one thread of the store's own, never on the event loop, in the
# order in which they were asked for. (A statement whose caller is cancelled runs to its end while another
# thread takes over, hence the lock around the one connection.) Processes meet in the file: in write-ahead
# mode readers wait for nobody, and writers queue for SQLite's lock for at most `busy_seconds`. Each write
# is one statement and so one transaction: a process that is killed leaves either all of it or nothing.
#
# Writes are not synced one by one (`synchronous=NORMAL`): a loss of power may cost the last of them, never
# the file.


_APPLICATION = 0x4C554452  # "LUDR", so that a database of something else is recognised
_SCHEMA_VERSION = 1
_SCHEMA = """
CREATE TABLE IF NOT EXISTS records (
    key TEXT PRIMARY KEY, data BLOB NOT NULL, created REAL NOT NULL,
    tool TEXT, version TEXT, history TEXT, arguments_digest TEXT, arguments TEXT
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS by_arguments ON records (tool, arguments_digest);
CREATE INDEX IF NOT EXISTS by_history ON records (history, tool);
"""
_COLUMNS = "tool, version, history, arguments_digest, arguments"
_SIMILAR = (
    f"SELECT {_COLUMNS} FROM records WHERE tool = :tool AND arguments_digest = :arguments LIMIT :most",
    f"SELECT {_COLUMNS} FROM records WHERE history = :history AND tool = :tool LIMIT :most",
    f"SELECT {_COLUMNS} FROM records WHERE tool = :tool LIMIT :most",
)


class SQLiteStore:
    """A file of records. Opened at the first use, closed by `close` or at the end of the process."""

    def __init__(self, path: str | Path, *, read_only: bool = False, busy_seconds: float = 10.0) -> None:
        self.path = Path(path)
        self.read_only = read_only
        self.busy_seconds = busy_seconds
        self._threads = StoreThreads(1)
        self._lock = threading.Lock()
        self._connection: sqlite3.Connection | None = None
        self._process = os.getpid()
        self._finalizer: weakref.finalize[Any, Any] | None = None

    async def get(self, key: str) -> bytes | None:
        row = await self._run(
            lambda db: db.execute(
                "SELECT CAST(data AS BLOB) FROM records WHERE key = ?", (key,)
            ).fetchone()
        )
        return None if row is None else bytes(row[0])

    async def put(self, key: str, data: bytes, *, label: Label | None, replace: bool) -> None:
        verb = "REPLACE" if replace else "IGNORE"
        named = (None,) * 5 if label is None else (_utf8(label.tool), *astuple(label)[1:])
        values = (key, data, time.time(), *named)
        statement = f"INSERT OR {verb} INTO records VALUES (?, ?, ?, ?, ?, ?, ?, ?)"
        await self._run(lambda db: db.execute(statement, values).rowcount)

    async def similar(self, label: Label, most: int) -> Sequence[Label]:
        wanted = {
            "tool": _utf8(label.tool),
            "arguments": label.arguments_digest,
            "history": label.history,
            "most": most,
        }
        rows = await self._run(
            lambda db: [row for query in _SIMILAR for row in db.execute(query, wanted).fetchall()]
        )
        return [Label(*row) for row in dict.fromkeys(rows)][:most]

    async def close(self) -> None:
        self._reset_after_fork()
        await self._threads.run(self._close)
        await self._threads.close()

    def __reduce__(self) -> tuple[Any, ...]:
        make = partial(SQLiteStore, self.path, read_only=self.read_only, busy_seconds=self.busy_seconds)
        return make, ()

    async def _run(self, statement: Callable[[sqlite3.Connection], T]) -> T:
        try:
            self._reset_after_fork()
            return await self._threads.run(self._with_connection, statement)
        except WorkerError as error:
            raise RecordingStoreError(f"the recording {self.path} could not be used: {error}") from error
        except sqlite3.OperationalError as error:
            raise self._explained(error) from error
        except sqlite3.DatabaseError as error:
            raise self._corrupt(error) from error

    def _reset_after_fork(self) -> None:
        """A connection must not be used, nor even closed, on the other side of a fork."""
        if self._process != os.getpid():
            self._process, self._lock, self._connection = os.getpid(), threading.Lock(), None

    def _with_connection(self, statement: Callable[[sqlite3.Connection], T]) -> T:
        with self._lock:
            if self._connection is None:
                self._connection = self._connect()
                self._finalizer = weakref.finalize(self, _close_in, self._process, self._connection)
            return statement(self._connection)

    def _connect(self) -> sqlite3.Connection:
        if self.path.is_dir():
            raise ConfigError(f"{self.path} is a folder; a recording is a file")
        if self.read_only:
            if not self.path.exists():
                message = f"there is no recording {self.path}; make one with the mode record first"
                raise ConfigError(message)
            try:
                return self._opened("ro", self._refuse_empty)
            except sqlite3.OperationalError:
                # Write-ahead mode needs to write beside the file; where that is forbidden, nobody writes.
                return self._opened("ro&immutable=1", self._refuse_empty)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"the folder of the recording {self.path} cannot be made: {error}"
            ) from None
        return self._opened("rwc", self._prepare)

    def _opened(self, mode: str, check: Callable[[sqlite3.Connection], None]) -> sqlite3.Connection:
        db = sqlite3.connect(
            f"file:{quote(str(self.path.absolute()))}?mode={mode}",
            uri=True,
            timeout=self.busy_seconds,
            isolation_level=None,  # no implicit transactions: each statement is one
            check_same_thread=False,  # `_lock` sees to that
        )
        try:
            check(db)
        except BaseException:
            db.close()
            raise
        return db

    def _refuse_empty(self, db: sqlite3.Connection) -> None:
        if self._version(db) == 0:
            raise ConfigError(f"the recording {self.path} is empty; make one with the mode record")

    def _prepare(self, db: sqlite3.Connection) -> None:
        if self._version(db) == 0:
            self._retry_while_locked(lambda: _create(db))
        self._retry_while_locked(lambda: db.execute("PRAGMA journal_mode = WAL").fetchone())
        db.execute("PRAGMA synchronous = NORMAL")

    def _version(self, db: sqlite3.Connection) -> int:
        """The version of the schema; 0 for a new file."""
        version, owner, tables = self._retry_while_locked(lambda: _marks(db))
        if version == 0 and owner == 0 and tables == 0:
            return 0
        if owner != _APPLICATION:
            raise ConfigError(
                f"{self.path} is a database of another program; give the recording a file of its own"
            )
        if version != _SCHEMA_VERSION:
            raise ConfigError(
                f"the recording {self.path} has version {version}, this Ludus writes {_SCHEMA_VERSION}; "
                "use the Ludus that wrote it, or record anew into another file"
            )
        return version

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

    def _close(self) -> None:
        with self._lock:
            if self._finalizer is not None:
                self._finalizer()
            self._connection = self._finalizer = None

    def _explained(self, error: sqlite3.OperationalError) -> RecordingStoreError | ConfigError:
        text = str(error)
        if "malformed" in text:
            return self._corrupt(error)
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

    def _corrupt(self, error: sqlite3.DatabaseError) -> ConfigError:
        return ConfigError(
            f"the recording {self.path} is damaged or no SQLite file ({error}); move it away and record "
            f"anew, or save what can be read with: sqlite3 {self.path} .recover | sqlite3 rescued.sqlite"
        )


def _marks(db: sqlite3.Connection) -> tuple[int, int, int]:
    """(version, owner, tables) of one moment: another process may be making the tables."""
    db.execute("BEGIN")
    try:
        version, owner, tables = (
            int(db.execute(question).fetchone()[0])
            for question in (
                "PRAGMA user_version",
                "PRAGMA application_id",
                "SELECT count(*) FROM sqlite_master",
            )
        )
    finally:
        if db.in_transaction:  # an error may have ended it
            db.execute("ROLLBACK")
    return version, owner, tables


def _create(db: sqlite3.Connection) -> None:
    db.execute("BEGIN IMMEDIATE")
    try:
        for statement in _SCHEMA.split(";"):
            db.execute(statement)
        db.execute(f"PRAGMA application_id = {_APPLICATION}")
        db.execute(f"PRAGMA user_version = {_SCHEMA_VERSION}")
        db.execute("COMMIT")
    except BaseException:
        db.execute("ROLLBACK")
        raise


def _close_in(process: int, connection: sqlite3.Connection) -> None:
    if process == os.getpid():
        connection.close()


def _utf8(text: str) -> str:
    """SQLite keeps UTF-8, which has no lone surrogates; the key is of the exact text."""
    return text.encode("utf-8", "backslashreplace").decode()


# Records in Redis, shared by machines.
#
# The client is the blocking one, in at most `_CONNECTIONS` threads of the store's own with a connection
# each: it works from any event loop, and callers queue for a thread. Every answer has a deadline, so a
# server that hangs is a typed failure after `timeout` seconds, or a few times that where the client
# retries.
#
# Beside the records there is one short list for each tool, of the labels recorded last: it is only read to
# explain a miss, and may lag behind or hold what has expired.

_CONNECTIONS = 16
_LABELS_KEPT = 200


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
        self.where = _shown(address)
        """The address as it may be shown: without the password."""
        self.expire_seconds = expire_seconds
        self.timeout = timeout
        self.prefix = prefix
        self._address = address
        self._threads = StoreThreads(_CONNECTIONS)
        self._client: redis.Redis | None = None

    async def get(self, key: str) -> bytes | None:
        data: bytes | None = await self._run(lambda client: client.get(self._name("call", key)))
        return data

    async def put(self, key: str, data: bytes, *, label: Label | None, replace: bool) -> None:
        def write(client: redis.Redis) -> None:
            with client.pipeline(transaction=False) as pipeline:
                name = self._name("call", key)
                pipeline.set(name, data, ex=self.expire_seconds, nx=not replace)
                if label is not None:
                    labels = self._name("tool", label.tool)
                    pipeline.lpush(labels, json.dumps(astuple(label)))
                    pipeline.ltrim(labels, 0, _LABELS_KEPT - 1)
                    if self.expire_seconds is not None:
                        pipeline.expire(labels, self.expire_seconds)
                pipeline.execute()

        await self._run(write)

    async def similar(self, label: Label, most: int) -> Sequence[Label]:
        rows: list[bytes] = await self._run(
            lambda client: client.lrange(self._name("tool", label.tool), 0, _LABELS_KEPT - 1)
        )
        labels = [one for one in map(_label, dict.fromkeys(rows)) if one is not None]
        return sorted(labels, key=lambda one: -_agreement(one, label))[:most]

    async def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            await self._threads.run(client.close)
            await self._threads.run(client.connection_pool.disconnect)
            await self._threads.close()

    def __reduce__(self) -> tuple[Any, ...]:
        make = partial(
            RedisStore,
            self._address,
            expire_seconds=self.expire_seconds,
            timeout=self.timeout,
            prefix=self.prefix,
        )
        return make, ()

    def _name(self, kind: str, what: str) -> bytes:
        return f"{self.prefix}:{kind}:{what}".encode("utf-8", "backslashreplace")

    def _connect(self) -> redis.Redis:
        try:
            import redis
        except ImportError:
            raise MissingExtraError("redis", "redis", "a recording in Redis") from None
        try:
            pool = redis.BlockingConnectionPool.from_url(
                self._address,
                max_connections=_CONNECTIONS,
                timeout=self.timeout,
                socket_timeout=self.timeout,
                socket_connect_timeout=self.timeout,
            )
        except ValueError as error:
            raise ConfigError(f"{self.where} is no address of a Redis server: {error}") from None
        return redis.Redis.from_pool(pool)

    async def _run(self, action: Callable[[redis.Redis], Any]) -> Any:
        client = self._client = self._client or self._connect()
        from redis import exceptions

        try:
            return await self._threads.run(action, client)
        except (exceptions.AuthenticationError, exceptions.NoPermissionError) as error:
            raise ConfigError(
                f"the Redis server at {self.where} refuses us ({error}); put user and password into the "
                "address: redis://user:password@host:port/db"
            ) from None
        except (exceptions.ConnectionError, exceptions.TimeoutError, OSError, WorkerError) as error:
            raise RecordingStoreError(
                f"the Redis server at {self.where} gives no answer ({type(error).__name__}: {error}); is "
                "it running, and can it be reached from here?"
            ) from error
        except exceptions.RedisError as error:
            raise RecordingStoreError(
                f"the Redis server at {self.where} refused a command: {error}", retriable=False
            ) from error


def _shown(address: str) -> str:
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
    """What `put` wrote; None for what somebody else did."""
    try:
        tool, version, history, arguments_digest, arguments = json.loads(row)
    except (ValueError, TypeError):
        return None
    return Label(str(tool), str(version), str(history), str(arguments_digest), str(arguments))


def _agreement(one: Label, other: Label) -> int:
    same_arguments = one.arguments_digest == other.arguments_digest
    return 2 * same_arguments + (one.history == other.history)
