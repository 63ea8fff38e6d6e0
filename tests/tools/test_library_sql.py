"""sql and schema as tools: tables for a model, errors with hints, scratch copies, and how they are written."""

from __future__ import annotations

import sqlite3
import tempfile
from collections.abc import AsyncIterator, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from hypothesis import given
from hypothesis import strategies as st

from ludus.core import ConfigError, Fault, InfraError, Task, ToolCall, ToolContext, ToolResult
from ludus.sandbox import Limits, SandboxConfig, shared_sandbox
from ludus.sandbox.sql import Blob, LongText, QueryResult
from ludus.tools.library import build_toolset
from ludus.tools.library.sql import rendered, shown

CONFIG = SandboxConfig(workers=1)
on_sandbox = pytest.mark.asyncio(loop_scope="module")
"""One event loop for the module, and so one shared sandbox for its tests."""


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """A folder that everybody may read, as the folders of databases are; pytest's own is private."""
    with tempfile.TemporaryDirectory() as made:
        Path(made).chmod(0o755)
        yield Path(made)


@pytest.fixture(scope="module")
def shop(folder: Path) -> Path:
    path = folder / "shop.db"
    with sqlite3.connect(path) as connection:
        connection.executescript(
            "create table users(id integer primary key, name text not null, score real);"
            "create table orders(oid integer, user_id integer references users(id));"
            "create view names as select name from users;"
            "insert into users values (1, 'Ada', 1.5), (2, 'Bób\nB', null), (3, cast(x'ff41' as text), 2.0);"
        )
    connection.close()
    return path


def contents(path: Path) -> bytes:
    return path.read_bytes()


class Desk:
    def __init__(self, path: Path, **options: Any) -> None:
        spec = {"tool": "sql", "database": str(path), **options}
        self.tools = build_toolset([spec, "python"], sandbox=CONFIG)
        self.context = ToolContext("e", Task.of("?"))

    async def __call__(self, tool: str, **arguments: Any) -> ToolResult:
        return await self.tools.call(ToolCall(tool, arguments), self.context)

    async def close(self, path: Path) -> None:
        await self.tools.close(self.context)
        await shared_sandbox(CONFIG.model_copy(update={"readable": (str(path),)})).close()


@pytest_asyncio.fixture(autouse=True, loop_scope="module", scope="module")
async def _no_sandbox_is_left(folder: Path, shop: Path) -> AsyncIterator[None]:
    yield
    await shared_sandbox(CONFIG).close()
    await shared_sandbox(CONFIG.model_copy(update={"readable": (str(shop),)})).close()


@pytest_asyncio.fixture(loop_scope="module")
async def desk(shop: Path) -> AsyncIterator[Desk]:
    made = Desk(shop, max_rows=2, seconds=1)
    yield made
    await made.close(shop)


@on_sandbox
async def test_rows_come_as_an_aligned_table(desk: Desk) -> None:
    result = await desk("sql", query="select id, name, score from users")
    assert result.fault is None
    assert result.content == (
        "id | name   | score\n"
        "---+--------+------\n"
        " 1 | Ada    |   1.5\n"
        " 2 | Bób\\nB |  NULL\n"
        "... 1 more rows (3 rows in all)"
    )
    assert (await desk("sql", query="select 1 as a where 0")).content == "a\n(0 rows)"


@on_sandbox
async def test_errors_are_short_and_help(desk: Desk) -> None:
    table = await desk("sql", query="select * from usrs")
    assert (table.fault, table.content) == (
        Fault.TOOL_RAISED,
        "Error: no such table: usrs. Did you mean users?",
    )
    assert "Did you mean name?" in (await desk("sql", query="select nme from users")).content
    endless = "with recursive c(x) as (select 1 union all select x + 1 from c) select count(*) from c"
    assert (await desk("sql", query=endless)).fault is Fault.TOOL_TIMEOUT
    write = await desk("sql", query="delete from users")
    assert "only reading is allowed" in write.content


@on_sandbox
async def test_the_schema_can_be_read(desk: Desk) -> None:
    assert (await desk("schema")).content == (
        "users(id INTEGER PRIMARY KEY, name TEXT NOT NULL, score REAL)\n"
        "orders(oid INTEGER, user_id INTEGER -> users.id)\n"
        "names(name TEXT) -- view"
    )
    assert (await desk("schema", table="ORDERS")).content.startswith("orders(")
    assert "Did you mean orders?" in (await desk("schema", table="order")).content


@on_sandbox
async def test_the_file_itself_cannot_be_changed_by_other_tools(desk: Desk, shop: Path) -> None:
    before = contents(shop)
    code = (
        f"import sqlite3; c = sqlite3.connect({str(shop)!r}); c.execute('delete from users'); c.commit()"
    )
    assert (await desk("python", code=code)).fault is Fault.TOOL_RAISED
    assert (await desk("python", code=f"open({str(shop)!r}, 'ab').write(b'x')")).fault is not None
    assert contents(shop) == before


@on_sandbox
async def test_a_scratch_copy_lasts_for_the_episode_and_no_longer(shop: Path) -> None:
    before = contents(shop)
    desk = Desk(shop, mode="scratch", name="notes")
    done = await desk(
        "notes", query="insert into users values (9, 'Eve', 0); delete from users where id < 3"
    )
    assert done.content == "done; 2 rows changed"
    await desk("python", code="import os; os.chdir('/tmp')")
    assert " 2" in (await desk("notes", query="select count(*) from users")).content
    assert (await desk("notes_schema", table="users")).fault is None
    assert (await desk("notes", query="attach 'x.db' as x")).fault is Fault.TOOL_RAISED
    await desk.tools.close(desk.context)
    assert " 3" in (await desk("notes", query="select count(*) from users")).content
    await desk.close(shop)
    assert contents(shop) == before


@on_sandbox
async def test_a_database_may_be_a_script(tmp_path: Path) -> None:
    script = tmp_path / "made.sql"
    script.write_text("create table t(a, b); insert into t values (1, 'x;y'), (2, null);")
    tools = build_toolset({"tool": "sql", "database": str(script)}, sandbox=CONFIG)
    context = ToolContext("e", Task.of("?"))
    result = await tools.call(ToolCall("sql", {"query": "select * from t order by a"}), context)
    assert result.content == "a | b\n--+-----\n1 | x;y\n2 | NULL\n(2 rows)"
    await tools.close(context)


@on_sandbox
async def test_duckdb_looks_the_same(folder: Path) -> None:
    duckdb = pytest.importorskip("duckdb")
    path = folder / "shop.duckdb"
    with duckdb.connect(str(path)) as connection:
        connection.execute("create table t(id integer primary key, d date, amount decimal(10, 2))")
        connection.execute("insert into t values (1, '2020-01-01', 1.5), (2, null, null)")
    desk = Desk(path)
    assert (await desk("sql", query="select * from t order by id")).content == (
        "id | d          | amount\n"
        "---+------------+-------\n"
        " 1 | 2020-01-01 |   1.50\n"
        " 2 | NULL       |   NULL\n"
        "(2 rows)"
    )
    assert (await desk("schema")).content == "t(id INTEGER PRIMARY KEY, d DATE, amount DECIMAL(10,2))"
    assert (await desk("sql", query="select * from read_csv('/etc/passwd')")).fault is Fault.TOOL_RAISED
    await desk.close(path)


RUINED = {
    "overwritten": "open('shop.db', 'wb').write(b'no database')",
    "a pipe": "os.path.exists('shop.db') and os.unlink('shop.db')\nos.mkfifo('shop.db')",
    "a folder": "os.path.exists('shop.db') and os.unlink('shop.db')\nos.mkdir('shop.db')",
    "a full disk": "open('full', 'wb').write(bytes(60 << 20))\nopen('more', 'wb').write(bytes(60 << 20))",
    "no file sizes": "resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))",
    "no processes": "resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))",
    "no files": "resource.setrlimit(resource.RLIMIT_NOFILE, (16, 16))\nx = [os.dup(0) for _ in range(9)]",
    "no memory": "resource.setrlimit(resource.RLIMIT_DATA, (1 << 22, 1 << 22))",
    "no home": "os.environ['HOME'] = '/nowhere'",
    "no python": "os.environ['LD_LIBRARY_PATH'] = '.'; open('libc.so.6', 'w').write('no library')",
}
SAY = """
def say(*arguments):
    os.write(1, {text})
    return {{"done": "ok", "code": 0}}
frame = sys._getframe()
while frame.f_code.co_name != "_serve": frame = frame.f_back
frame.f_globals["run_program"] = say
"""
RESULT = '"rows": [[1]], "total": 1, "counted": true, "changed": null'
FORGED = {
    "failure": """b'{"failure": "the disk is gone"}'""",
    "no failure": """b'{"failure": ' + b'[' * 900 + b']' * 900 + b'}'""",
    "nothing": "b''",
    "no table": "b'[]'",
    "nested": """b'{"a": ' + b'[' * 990 + b']' * 990 + b'}'""",
    "more nested": "b'[' * 50000",
    "half a result": """b'{"columns": ["a"]}'""",
    "narrow": f"""b'{{"columns": ["a", "b"], {RESULT}}}'""",
    "no columns": f"""b'{{"columns": 3, {RESULT}}}'""",
    "no number": f"""b'{{"columns": ["a"], {RESULT}}}'.replace(b'[1]', b'[{{"n": "sNaN"}}]')""",
    "no kind": f"""b'{{"columns": ["a"], {RESULT}}}'.replace(b'[1]', b'[{{"n": 1, "m": 2}}]')""",
    "no count": f"""b'{{"columns": ["a"], {RESULT}}}'.replace(b'total": 1', b'total": 1e400')""",
    "no change": f"""b'{{"columns": ["a"], {RESULT}}}'.replace(b'null', b'"a"')""",
    "no error": """b'{"error": []}'""",
    "another error": """b'{"error": {"kind": "ours", "message": 1}}'""",
}


@pytest.mark.parametrize("code", RUINED.values(), ids=RUINED)
@pytest.mark.parametrize("has_copy", [True, pytest.param(False, marks=pytest.mark.slow)])
@on_sandbox
async def test_a_session_that_the_model_ruined_is_the_models(
    shop: Path, code: str, has_copy: bool
) -> None:
    """Called ours, the episode would be unscored, and a policy could learn to ruin it."""
    desk = Desk(shop, mode="scratch", seconds=1)
    if has_copy:
        assert (await desk("sql", query="select 1")).fault is None
    await desk("python", code="import os, resource, sys\n" + code)
    found = await desk("sql", query="insert into users values (9, 'Eve', 0)")
    assert found.fault is not None or "1 row changed" in found.content, found
    assert (await desk("schema")).content
    await desk.tools.close(desk.context)


@pytest.mark.parametrize("text", FORGED.values(), ids=FORGED)
@pytest.mark.parametrize(
    ("mode", "tool"), [("scratch", "sql"), pytest.param("read_only", "schema", marks=pytest.mark.slow)]
)
@on_sandbox
async def test_an_answer_that_the_model_forges_is_the_models(
    shop: Path, text: str, mode: str, tool: str
) -> None:
    desk = Desk(shop, mode=mode, seconds=1)
    await desk("python", code="import os, sys" + SAY.format(text=text))
    found = await desk(tool, **({"query": "select 1"} if tool == "sql" else {}))
    assert found.fault is Fault.TOOL_RAISED, found
    await desk.tools.close(desk.context)


@on_sandbox
async def test_a_disk_that_was_full_leaves_no_half_copy(shop: Path) -> None:
    desk = Desk(shop, mode="scratch", seconds=1)
    fill = "import os\nwith open('full', 'wb', buffering=0) as file:\n    while file.write(bytes(4096)): pass"
    assert (await desk("python", code=fill)).fault is not None
    await desk("sql", query="select 1")
    await desk("python", code="os.unlink('full')")
    assert " 3" in (await desk("sql", query="select count(*) from users")).content
    await desk.tools.close(desk.context)


@on_sandbox
async def test_a_database_that_is_broken_for_everybody_is_ours(folder: Path) -> None:
    path = folder / "broken.db"
    path.write_bytes(b"SQLite format 3\0" + b"x" * 5000)
    for mode in ("scratch", "read_only"):
        desk = Desk(path, mode=mode)
        with pytest.raises(InfraError, match="the database cannot be used"):
            await desk("sql", query="select 1")
        await desk.close(path)


def test_options_are_checked(shop: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean 'max_rows'"):
        build_toolset({"tool": "sql", "database": str(shop), "max_row": 3})
    with pytest.raises(ConfigError, match="database"):
        build_toolset("sql")
    with pytest.raises(ConfigError, match="there is no database"):
        build_toolset({"tool": "sql", "database": "nowhere.db"})
    with pytest.raises(ConfigError, match="mode"):
        build_toolset({"tool": "sql", "database": str(shop), "mode": "write"})
    small = SandboxConfig(limits=Limits(disk_mb=1))
    large = shop.with_name("large.db")
    large.write_bytes(b"SQLite format 3\0" + bytes(2 << 20))
    with pytest.raises(ConfigError, match="disk_mb"):
        build_toolset({"tool": "sql", "database": str(large), "mode": "scratch"}, sandbox=small)


values = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=100),
    st.decimals(allow_nan=False, allow_infinity=False, places=3),
    st.just(Blob(3, "000102", "d")),
    st.just(LongText("abc", 1000)),
    st.tuples(st.integers(), st.text(max_size=5)),
)


@given(st.lists(st.tuples(values, values), min_size=1, max_size=5))
def test_a_table_has_one_line_for_each_row(rows: list[tuple[Any, Any]]) -> None:
    text = rendered(QueryResult(("a", "b"), tuple(rows), len(rows)))
    lines = text.split("\n")
    assert len(lines) == len(rows) + 3

    assert all(
        len(shown(value)) <= 90 for row in rows for value in row if not isinstance(value, Decimal | int)
    )
