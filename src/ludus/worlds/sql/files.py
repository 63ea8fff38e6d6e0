"""Databases and questions from files that users have: Spider's folders, and AgentBench's dbbench.

LUDUS_SQL_DATA names a folder. Spider (and sets in its form: Realistic, DK, SYN, BIRD) is JSON with `db_id`,
`question` and `query`, and databases `DB_ID/DB_ID.sqlite` in a folder `database` or `databases`. dbbench is one
file of JSON lines, whose rows bring a table each.
"""

from __future__ import annotations

import json
import re
import sqlite3
from collections import defaultdict
from contextlib import closing
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from ludus.core.failures import ConfigError
from ludus.sandbox import SandboxConfig
from ludus.sandbox.sql import Database
from ludus.worlds import data_path, files_of, read_rows
from ludus.worlds.sql.databases import NAMES, script_of

VARIABLE = "LUDUS_SQL_DATA"
SANDBOX = SandboxConfig(
    preload=("datetime", "decimal", "difflib", "hashlib", "json", "shutil", "sqlite3", "urllib.parse")
)
"""Runs queries. The modules are those of the SQL runner: imported once, a query takes half the time."""
_DBBENCH = "dbbench"
_ENDINGS = (".sqlite", ".db", ".sql", ".duckdb")
_WRITES = ("INSERT", "UPDATE", "DELETE")


def folder() -> Path:
    """The folder with the files."""
    found = data_path(VARIABLE, "the folder with Spider's or dbbench's files (docs/envs/sql.md)")
    return found if found.is_dir() else found.parent


def find_database(name: str) -> Database:
    """A database by its name: a built-in one, a row of dbbench, one in LUDUS_SQL_DATA, or a file."""
    own, _, variant = name.partition("-")
    if own in NAMES and variant.isdigit():
        return Database(Path(name), "sqlite", script_of(name))
    kind, _, number = name.partition("/")
    if kind == _DBBENCH and number.isdigit():
        return Database(Path(name), "sqlite", dbbench_rows()[int(number)].script)
    return Database.of(name if Path(name).is_absolute() else _located(name))


def readable_of(database: Database) -> tuple[str, ...]:
    """Paths that a sandbox must see: the folder with all databases, so that they share one sandbox."""
    if database.script is not None:
        return ()
    try:
        own = folder().resolve()
    except ConfigError:
        return database.readable
    return (str(own),) if database.path.is_relative_to(own) else database.readable


def schema_hint(name: str) -> str:
    """The tables of a database with their columns, for a prompt."""
    database = find_database(name)
    if database.script is not None:
        opened = memory_database(database.script)
    else:
        opened = sqlite3.connect(f"{database.path.as_uri()}?mode=ro&immutable=1", uri=True)
    with closing(opened) as connection:
        listed = "select name from sqlite_master where type = 'table' and name not like 'sqlite_%'"
        lines = []
        for (table,) in connection.execute(listed).fetchall():
            columns = connection.execute("select name, type from pragma_table_info(?)", (table,))
            lines.append(f"{table}({', '.join(f'{column} {kind}'.strip() for column, kind in columns)})")
    return "\n".join(lines)


def memory_database(script: str) -> sqlite3.Connection:
    """A database in this process, made by a script of a data set: no SQL in it opens or writes a file."""
    connection = sqlite3.connect(":memory:")
    connection.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)  # neither ATTACH nor VACUUM INTO
    try:
        connection.executescript(script)
    except BaseException:
        connection.close()
        raise
    return connection


def _located(name: str) -> Path:
    for place in (*(folder() / one for one in ("database", "databases", "test_database")), folder()):
        for path in (place / name, *(place / name / f"{name}{ending}" for ending in _ENDINGS)):
            if path.is_file():
                return path
    raise ConfigError(f"{folder()} ({VARIABLE}) holds no database {name!r}: neither as a file, nor as "
                      f"database/{name}/{name}.sqlite")  # fmt: skip


# Spider


_VARIANTS = ("realistic", "dk", "syn")
_HELD_OUT = (*_VARIANTS, "test", "dev")
"""Names of files and folders of Spider's held-out sets; a file of SYN may be called dev too."""


def spider_rows(split: str) -> dict[str, list[dict[str, Any]]]:
    """The questions of a split by the name of their set: spider-dev, spider-realistic, spider-train, ...

    Names of files and folders tell the sets apart: `train_spider.json`, `dev.json`, `Spider-DK.json`.
    """
    root, is_train = folder(), split == "train"
    rows: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    for file in files_of(root, *(("train",) if is_train else _HELD_OUT)):
        name, words = file.name.lower(), str(file.relative_to(root)).lower()
        if "table" in name or "gold" in name or ("train" in name) != is_train:
            continue
        known = _VARIANTS if is_train else _HELD_OUT
        kinds = [one for one in known if re.search(f"{one}(?![a-z])", words)][:1]
        family = "bird" if "bird" in words else "spider"
        own = "-".join([family, *kinds, *(["train"] if is_train else [])])
        rows[own] += [
            {**row, "query": row.get("query") or row.get("SQL")}
            for row in read_rows(file)
            if "db_id" in row and "question" in row
        ]
    if not any(rows.values()):
        raise ConfigError(f"{root} ({VARIABLE}) holds no questions in Spider's form for {split}")
    return rows


# dbbench


@dataclass(frozen=True, slots=True)
class TableTask:
    """A row of dbbench: a question about one table, with its values; or a change of it, with its statement."""

    text: str
    kind: str
    table: str
    script: str
    label: tuple[str, ...]
    query: str

    @property
    def is_change(self) -> bool:
        return self.kind in _WRITES


def dbbench_rows() -> list[TableTask]:
    """The rows of AgentBench's file."""
    files = [file for file in files_of(folder(), _DBBENCH) if ".json" in file.name]
    if not files:
        raise ConfigError(f"{folder()} ({VARIABLE}) holds no file with {_DBBENCH} in its name")
    return _rows_of(files[0], files[0].stat().st_mtime_ns)


@lru_cache(maxsize=2)
def _rows_of(file: Path, changed: int) -> list[TableTask]:
    return [_table_task(row, f"{file}, row {n + 1}") for n, row in enumerate(read_rows(file))]


def _table_task(row: dict[str, Any], where: str) -> TableTask:
    try:
        table, info, kind = row["table"]["table_name"], row["table"]["table_info"], row["type"][0]
        name = quoted(table)
        columns = ", ".join(f"{quoted(one['name'])} {one['type']}" for one in info["columns"])
        lines = [f"create table {name}({columns});"]
        lines += [
            f"insert into {name} values ({', '.join(map(_literal, one))});" for one in info["rows"]
        ]
        label = tuple(str(one) for one in row["label"])
        query = label[0] if kind in _WRITES else row["sql"]["query"]
        text = f"{row['description'].strip()}\n{row['add_description'].strip()}"
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise ConfigError(f"{where} is no task of dbbench: {type(error).__name__}: {error}") from None
    return TableTask(text, kind, table, "\n".join(lines), label, query)


def quoted(name: str) -> str:
    """A name as SQL takes any."""
    return '"' + name.replace('"', '""') + '"'


def _literal(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool | int | float):
        return repr(float(value) if isinstance(value, float) else int(value))
    text = value if isinstance(value, str) else json.dumps(value)
    return "'" + text.replace("'", "''").replace("\0", "") + "'"
