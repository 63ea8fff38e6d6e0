"""Recordings in one SQLite file.

Who waits for whom. Statements run in one thread of the store's own, never on the event loop, in the order in
which they were asked for. (A statement whose caller is cancelled runs to its end while another thread takes
over, hence the lock around the one connection.) Processes meet in the file: in write-ahead mode readers do not
wait, and writers queue for SQLite's lock for at most `busy_seconds`. Each write is one statement and so one
transaction: a process that is killed leaves either all of it or nothing.

Writes are not synced one by one (`synchronous=NORMAL`): a loss of power may cost the last of them, never
the file.
"""

from __future__ import annotations

import os
import sqlite3
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import astuple
from pathlib import Path
from typing import TypeVar
from urllib.parse import quote

from ludus.core.failures import ConfigError
from ludus.remote.threads import WorkerError
from ludus.tools.recording.keys import Label
from ludus.tools.recording.store import RecordingStoreError, ThreadedStore

T = TypeVar("T")

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


class SQLiteStore(ThreadedStore[sqlite3.Connection]):
    """A file of records. Opened at the first use, closed by `close` or at the end of the process."""

    _most_threads = 1

    def __init__(self, path: str | Path, *, read_only: bool = False, busy_seconds: float = 10.0) -> None:
        super().__init__()
        self.path = Path(path)
        self.read_only = read_only
        self.busy_seconds = busy_seconds

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

    async def _run(self, statement: Callable[[sqlite3.Connection], T]) -> T:
        try:
            return await self._in_thread(statement)
        except WorkerError as error:
            raise RecordingStoreError(f"the recording {self.path} could not be used: {error}") from error
        except sqlite3.DatabaseError as error:
            raise self._failure(error) from error

    def _with_client(self, action: Callable[[sqlite3.Connection], T]) -> T:
        with self._lock:
            return super()._with_client(action)

    def _connect(self) -> sqlite3.Connection:
        if self.path.is_dir():
            raise ConfigError(f"{self.path} is a folder; a recording is a file")
        if self.read_only:
            if not self.path.exists():
                message = f"there is no recording {self.path}; make one with the mode record first"
                raise ConfigError(message)
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

    def _disconnect(self, client: sqlite3.Connection) -> None:
        client.close()

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
        is_new = self._is_new(db)
        if self.read_only:
            if is_new:
                raise ConfigError(f"the recording {self.path} is empty; make one with the mode record")
            return
        if is_new:
            self._retry_while_locked(lambda: _create(db))
        self._retry_while_locked(lambda: db.execute("PRAGMA journal_mode = WAL").fetchone())
        db.execute("PRAGMA synchronous = NORMAL")

    def _is_new(self, db: sqlite3.Connection) -> bool:
        marks = self._retry_while_locked(lambda: db.execute(_MARKS).fetchone())
        version, owner, _ = marks
        if marks == (0, 0, 0):
            return True
        if owner != _APPLICATION:
            raise ConfigError(
                f"{self.path} is a database of another program; give the recording a file of its own"
            )
        if version != _SCHEMA_VERSION:
            raise ConfigError(
                f"the recording {self.path} has version {version}, this Ludus writes {_SCHEMA_VERSION}; "
                "use the Ludus that wrote it, or record anew into another file"
            )
        return False

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
