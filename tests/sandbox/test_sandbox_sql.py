"""SQL in the sandbox: what hostile queries get, what values survive, and whose fault a problem is."""

from __future__ import annotations

import sqlite3
import tempfile
from collections.abc import AsyncIterator, Iterator
from decimal import Decimal
from pathlib import Path

import pytest
import pytest_asyncio

from ludus.core import ConfigError, InfraError
from ludus.sandbox import Sandbox, SandboxConfig
from ludus.sandbox.guest.sql_engines import Sqlite
from ludus.sandbox.sql import Blob, Database, LongText, SqlLimits, SqlProblem, read_schema, run_query

SQL, REFUSED, TIMEOUT, MEMORY = SqlProblem.SQL, SqlProblem.REFUSED, SqlProblem.TIMEOUT, SqlProblem.MEMORY
on_sandbox = pytest.mark.asyncio(loop_scope="module")
LIMITS = SqlLimits(seconds=0.5, max_rows=3, memory_mb=64)


def contents(database: Database) -> bytes:
    return database.path.read_bytes()


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """Databases in a folder that everybody may read."""
    with tempfile.TemporaryDirectory() as made:
        path = Path(made)
        path.chmod(0o755)
        connection = sqlite3.connect(path / "lite.db")
        connection.executescript(
            "create table t(id integer primary key, name text, data blob);"
            "insert into t values (1, 'Bób', x'0001ff'), (2, null, null);"
            "insert into t values (3, cast(x'ff41' as text), zeroblob(40));"
            "create table big(n); with recursive c(x) as (select 1 union all select x + 1 from c limit 3000)"
            "insert into big select x from c;"
        )
        connection.close()
        (path / "made.sql").write_text("create table t(id integer); insert into t values (1), (2);")
        (path / "broken.db").write_bytes(b"SQLite format 3\0 and then nonsense" * 100)
        yield path


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def sandbox(folder: Path) -> AsyncIterator[Sandbox]:
    async with Sandbox(SandboxConfig(workers=1, readable=(str(folder),))) as made:
        yield made


@pytest.fixture
def lite(folder: Path) -> Database:
    return Database.of(folder / "lite.db")


@pytest.fixture(scope="module")
def duck(folder: Path) -> Database:
    duckdb = pytest.importorskip("duckdb")
    path = folder / "quack.duckdb"
    with duckdb.connect(str(path)) as connection:
        connection.execute(
            "create table t(id integer, name varchar); insert into t values (1, 'x'), (2, null)"
        )
    return Database.of(path)


@on_sandbox
async def test_values_of_sqlite_survive(sandbox: Sandbox, lite: Database) -> None:
    result = await run_query(sandbox, lite, "select * from t", LIMITS)
    assert result.ok and result.complete
    assert result.columns == ("id", "name", "data")
    assert result.rows[0][:2] == (1, "Bób")
    assert isinstance(result.rows[0][2], Blob) and result.rows[0][2].start == "0001ff"
    assert result.rows[1] == (2, None, None)
    assert result.rows[2][1] == "\\xffA"
    assert isinstance(result.rows[2][2], Blob) and result.rows[2][2].size == 40
    odd = await run_query(
        sandbox, lite, "select 9e999, -9e999, 'a' || char(0) || 'b', 9223372036854775807"
    )
    assert odd.rows == ((float("inf"), float("-inf"), "a\0b", 9223372036854775807),)


@on_sandbox
async def test_rows_beyond_the_bound_are_counted(sandbox: Sandbox, lite: Database) -> None:
    result = await run_query(sandbox, lite, "select n from big", LIMITS)
    assert (len(result.rows), result.total, result.counted, result.complete) == (3, 3000, True, False)
    by_bytes = await run_query(sandbox, lite, "select n from big", SqlLimits(max_bytes=100))
    assert 0 < len(by_bytes.rows) < 50 and by_bytes.total == 3000
    cut = await run_query(sandbox, lite, "select hex(zeroblob(500))", SqlLimits(max_cell=10))
    assert cut.rows == ((LongText("0" * 10, 1000),),)
    long = "with recursive c(x) as (select 1 union all select x + 1 from c) select x from c"
    uncounted = await run_query(sandbox, lite, long, SqlLimits(seconds=0.2, max_rows=2))
    assert uncounted.rows == ((1,), (2,)) and not uncounted.counted


@pytest.mark.parametrize(
    ("query", "problem"),
    [
        (
            "with recursive c(x) as (select 1 union all select x + 1 from c) select count(*) from c",
            TIMEOUT,
        ),
        ("select count(*) from big a, big b, big c, big d", TIMEOUT),
        ("attach '/tmp/x.db' as y", REFUSED),
        ("select load_extension('x')", REFUSED),
        ("pragma writable_schema = 1", REFUSED),
        ("pragma journal_mode = wal", REFUSED),
        ("update sqlite_master set sql = ''", SQL),
        ("vacuum into '/tmp/x'", REFUSED),
        ("insert into t values (9, 'x', null)", REFUSED),
        ("create temp table x(a)", REFUSED),
        ("begin", REFUSED),
        ("select 1; drop table t", REFUSED),
        ("select zeroblob(1000000000)", REFUSED),
        (
            "with a as materialized (select randomblob(5000000) b from big) select count(*) from a, a x",
            MEMORY,
        ),
        ("selec 1", SQL),
        ("select 'unclosed", SQL),
        ("select \0 1", SQL),
        ("", REFUSED),
        ("  -- nothing\n ;; ", REFUSED),
        ("select " + "(" * 5000 + "1" + ")" * 5000, SQL),
        ("select '" + "x" * 200_000 + "'", REFUSED),
    ],
)
@on_sandbox
async def test_sqlite_resists(sandbox: Sandbox, lite: Database, query: str, problem: SqlProblem) -> None:
    before = contents(lite)
    result = await run_query(sandbox, lite, query, LIMITS)
    assert result.problem is problem, result.message
    assert result.message and len(result.message) <= 600
    assert contents(lite) == before


@pytest.mark.parametrize(
    "query",
    [
        "select name from pragma_table_info('t')",
        "pragma table_info(t)",
        "select 'a;b' -- c",
        "/* x; */ select 1;",
        "explain query plan select 1",
    ],
)
@on_sandbox
async def test_reading_is_not_in_the_way(sandbox: Sandbox, lite: Database, query: str) -> None:
    assert (await run_query(sandbox, lite, query, LIMITS)).ok


@pytest.mark.parametrize(
    ("query", "problem"),
    [
        (
            "with recursive c(x) as (select 1 union all select x + 1 from c) select count(*) from c",
            TIMEOUT,
        ),
        ("select count(*) from range(100000000) a, range(1000000) b", TIMEOUT),
        ("attach '/tmp/x.db' as y", REFUSED),
        ("select * from read_csv('/etc/passwd')", REFUSED),
        ("select * from read_text('/etc/passwd')", REFUSED),
        ("select * from glob('/*')", REFUSED),
        ("copy t to '/tmp/x.csv'", REFUSED),
        ("install httpfs", REFUSED),
        ("load httpfs", REFUSED),
        ("set enable_external_access = true", REFUSED),
        ("export database '/tmp/x'", REFUSED),
        ("insert into t values (1, 'x')", REFUSED),
        ("select 1; drop table t", REFUSED),
        ("select repeat('x', 1000000000)", MEMORY),
        ("select list(x) from range(100000000) r(x)", MEMORY),
        ("selec 1", SQL),
        ("select * from tt", SQL),
    ],
)
@on_sandbox
async def test_duckdb_resists(sandbox: Sandbox, duck: Database, query: str, problem: SqlProblem) -> None:
    before = contents(duck)
    result = await run_query(sandbox, duck, query, LIMITS)
    assert result.problem is problem, result.message
    assert contents(duck) == before


@on_sandbox
async def test_values_of_duckdb_survive(sandbox: Sandbox, duck: Database) -> None:
    query = (
        "select [1, null], {'a': 1}, 1.50::decimal(5,2), date '2020-01-02', 'a'::blob, true, 10::hugeint"
    )
    [row] = (await run_query(sandbox, duck, query)).rows
    assert row[:4] == ((1, None), (("a", 1),), Decimal("1.50"), "2020-01-02")
    assert isinstance(row[4], Blob) and row[5] is True and row[6] == 10


@on_sandbox
async def test_a_scratch_copy_is_the_sessions_own(
    sandbox: Sandbox, lite: Database, duck: Database
) -> None:
    async with await sandbox.session() as session:
        for database, name in ((lite, "a.db"), (duck, "a.duckdb")):
            before = contents(database)
            changed = await run_query(session, database, "delete from t where id = 1", scratch=name)
            assert changed.ok and changed.columns is None and changed.changed == 1
            script = (
                "create table u(a integer); insert into u values (1), (2); select a from u order by a"
            )
            assert (await run_query(session, database, script, scratch=name, single=False)).rows == (
                (1,),
                (2,),
            )
            tables = await read_schema(session, database, scratch=name)
            assert isinstance(tables, tuple) and "u" in {table.name for table in tables}
            refused = await run_query(session, database, "attach 'b.db' as b", scratch=name)
            assert refused.problem is REFUSED
            assert contents(database) == before


@on_sandbox
async def test_a_script_makes_a_database(sandbox: Sandbox, folder: Path) -> None:
    database = Database.of(folder / "made.sql")
    assert database.readable == ()
    assert (await run_query(sandbox, database, "select sum(id) from t")).rows == ((3,),)
    assert (await run_query(sandbox, database, "delete from t")).problem is REFUSED
    pytest.importorskip("duckdb")
    other = Database.of(folder / "made.sql", "duckdb")
    assert (await run_query(sandbox, other, "select sum(id) from t")).rows == ((3,),)


@on_sandbox
async def test_what_is_wrong_with_the_database_is_our_failure(sandbox: Sandbox, folder: Path) -> None:
    with pytest.raises(InfraError, match="the database cannot be used"):
        await run_query(sandbox, Database.of(folder / "broken.db"), "select 1")
    with pytest.raises(ConfigError, match="there is no database"):
        Database.of(folder / "missing.db")
    with pytest.raises(ConfigError, match="engine"):
        Database.of(folder / "lite.db", "oracle")  # type: ignore[arg-type]


def test_the_engine_is_read_from_the_file(folder: Path, duck: Database) -> None:
    renamed = folder / "odd-name.db"
    renamed.write_bytes(duck.path.read_bytes())
    assert Database.of(renamed).engine == "duckdb"
    assert Database.of(folder / "lite.db").engine == "sqlite"


@pytest.mark.parametrize(
    ("query", "count"),
    [
        ("select 1; select 2;", 2),
        ("select ';'; select \";\"; select `;`, [;]", 3),
        ("-- a;\nselect 1 /* ; */", 1),
        ("create trigger x after insert on t begin select 1; select 2; end; select 3", 2),
        (";;;", 0),
        ("'" * 50_001, 1),
    ],
)
def test_statements_are_told_apart(query: str, count: int) -> None:
    assert len(Sqlite.split(Sqlite.__new__(Sqlite), query)) == count
