"""Recordings in one SQLite file.

Who waits for whom. Statements run in one thread of the store's own, never on the event loop, in the
order in which they were asked for. (A statement whose caller is cancelled runs to its end while another
thread takes over, hence the lock around the one connection.) Processes meet in the file: in write-ahead
mode readers wait for nobody, and writers queue for SQLite's lock for at most `busy_seconds`. Each write
is one statement and so one transaction: a process that is killed leaves either all of it or nothing.

Writes are not synced one by one (`synchronous=NORMAL`): a loss of power may cost the last of them, never
the file.
"""

from __future__ import annotations

import os
import sqlite3
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import astuple
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

from ludus.core.failures import ConfigError
from ludus.remote.threads import WorkerError
from ludus.tools.recording.keys import Label
from ludus.tools.recording.store import RecordingStoreError, StoreThreads

T = TypeVar("T")

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
