"""Execution match: which results are the same, and whose fault it is when there is none."""

from __future__ import annotations

import math
import random
import sqlite3
import tempfile
from collections.abc import AsyncIterator, Iterator
from decimal import Decimal
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from hypothesis import given
from hypothesis import strategies as st

from ludus.core import ConfigError, InfraError, Task
from ludus.rewards import build_reward, check_rewards, synthetic_episode
from ludus.rewards.code_tests import SqlMatch
from ludus.rewards.code_tests.sql_match import TableRules, equal_tables, is_ordered
from ludus.sandbox import Execution, Outcome, Sandbox, SandboxConfig, SandboxError, shared_sandbox
from ludus.sandbox.sql import Blob, QueryResult

CONFIG = SandboxConfig(workers=1)
on_sandbox = pytest.mark.asyncio(loop_scope="module")
"""One event loop for the module, and so one shared sandbox for its tests."""


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as made:
        made = str(Path(made).resolve())
        Path(made).chmod(0o755)
        for name, scores in (("one.db", (1, 1, 2, None)), ("two.db", (5, 6, 7, 8))):
            connection = sqlite3.connect(Path(made) / name)
            connection.execute("create table t(id integer, name text, score real)")
            rows = [(i, f"n{i % 2}", score) for i, score in enumerate(scores)]
            connection.executemany("insert into t values (?, ?, ?)", rows)
            connection.commit()
            connection.close()
        yield Path(made)


@pytest_asyncio.fixture(autouse=True, loop_scope="module", scope="module")
async def _no_sandbox_is_left(folder: Path) -> AsyncIterator[None]:
    yield
    await shared_sandbox(CONFIG.model_copy(update={"readable": (str(folder),)})).close()


async def parts(folder: Path, gold: str, predicted: str, **options: Any) -> dict[str, float]:
    reward = SqlMatch(
        **{"folder": str(folder), "database": "one.db", "sandbox": CONFIG, "seconds": 1, **options}
    )
    task = Task.of("?", gold)
    return await reward.score(synthetic_episode(task, f"```sql\n{predicted}\n```"), task, {})


async def match(folder: Path, gold: str, predicted: str, **options: Any) -> bool:
    return (await parts(folder, gold, predicted, **options))["sql_match"] == 1.0


@on_sandbox
async def test_the_same_rows_win_however_they_are_asked_for(folder: Path) -> None:
    gold = "select name, count(*) from t group by name"
    assert await match(folder, gold, "select name n, sum(1) from t group by 1 order by 2 desc, 1 desc;")
    assert not await match(folder, gold, "select count(*), name from t group by name")
    assert await match(folder, gold, "select count(*), name from t group by name", column_order=False)
    assert not await match(
        folder, gold, "select name, count(*) as n from t group by name", column_names=True
    )
    assert not await match(folder, gold, "select name from t group by name")
    assert not await match(folder, "select score from t", "select distinct score from t")
    assert await match(folder, "select score from t where id = 3", "select null")
    assert await match(folder, "select avg(score) from t", "select 4.0 / 3")
    assert not await match(folder, "select 1 where 0", "select 1")


@on_sandbox
async def test_order_counts_when_the_gold_query_has_one(folder: Path) -> None:
    gold, other = "select id from t order by id", "select id from t order by id desc"
    assert not await match(folder, gold, other)
    assert await match(folder, gold, other, order="never")
    assert await match(folder, "select id from t", other)
    assert not await match(folder, "select id from t", other, order="always")


@on_sandbox
async def test_all_databases_must_agree(folder: Path) -> None:
    gold, lucky = "select count(*) from t where score > 1.5", "select 1"
    assert await match(folder, gold, lucky)
    assert not await match(folder, gold, lucky, database=["one.db", "two.db"])
    assert await match(folder, gold, gold, database=["one.db", "two.db"])


@pytest.mark.parametrize(
    "predicted",
    [
        "selec 1",
        "",
        "delete from t",
        "select 1; select 2",
        "attach '/tmp/x' as x",
        "with recursive c(x) as (select 1 union all select x + 1 from c) select count(*) from c",
        "with recursive c(x) as (select 1 union all select x + 1 from c) select x from c",
        "select zeroblob(1000000000)",
    ],
    ids=range(8),
)
@on_sandbox
async def test_a_bad_query_is_the_models(folder: Path, predicted: str) -> None:
    found = await parts(folder, "select 1", predicted)
    assert found["sql_match"] == 0.0
    assert found["sql_match_ran"] == float("select x from c" in predicted)


@on_sandbox
async def test_what_we_do_wrong_is_ours(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InfraError, match=r"the gold query cannot be used on one\.db: no such table"):
        await parts(folder, "select * from missing", "select 1")
    with pytest.raises(InfraError, match="no gold query"):
        await parts(folder, " ", "select 1")
    with pytest.raises(ConfigError, match="there is no database"):
        SqlMatch(database="nowhere.db")
    with pytest.raises(ConfigError, match="needs a database"):
        await parts(folder, "select 1", "select 1", database=None)
    with pytest.raises(ConfigError, match="order"):
        build_reward({"reward": "sql_match", "order": "sometimes"})

    async def lost(*args: object, **named: object) -> None:
        raise SandboxError("no worker")

    monkeypatch.setattr("ludus.sandbox.Sandbox.python", lost)
    with pytest.raises(InfraError) as caught:
        await parts(folder, "select 1", "select 1")
    assert caught.value.boundary == "sandbox"


def test_many_databases_need_their_folder_named() -> None:
    with tempfile.TemporaryDirectory() as made:
        paths = [str(Path(made) / f"{i}.db") for i in range(9)]
        for path in paths:
            Path(path).write_bytes(b"SQLite format 3\0")
        reward = SqlMatch(sandbox=CONFIG)
        databases = [reward._databases(path)[0] for path in paths]
        with pytest.raises(ConfigError, match="give the folder"):
            for database in databases:
                reward._readable(database)
        one_place = SqlMatch(folder=made, sandbox=CONFIG)
        assert len({one_place._readable(database) for database in databases}) == 1


@on_sandbox
async def test_a_task_set_can_be_checked(folder: Path) -> None:
    reward = SqlMatch(folder=str(folder), sandbox=CONFIG)
    tasks = [
        Task.of("How many?", "select count(*) from t", database="one.db"),
        Task.of("Names?", "select distinct name from t", database="two.db"),
    ]
    report = await check_rewards(tasks, [reward])
    assert report.ok, report


# Pure comparison ----------------------------------------------------------------------------------

cells = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 3),
    st.sampled_from([0.0, 0.5, 1.0, math.nan, math.inf]),
    st.sampled_from(["", "a", "A", "1"]),
    st.just(Decimal("1")),
    st.just(Blob(1, "00", "x")),
    st.just((1, "a")),
)
widths = st.integers(1, 3)
tables = widths.flatmap(lambda width: st.lists(st.tuples(*[cells] * width), max_size=5))


def table(rows: list[Any]) -> QueryResult:
    width = len(rows[0]) if rows else 1
    return QueryResult(tuple(f"c{i}" for i in range(width)), tuple(rows))


@given(tables, st.randoms(use_true_random=False))
def test_order_does_not_matter_unless_it_does(rows: list[Any], chance: random.Random) -> None:
    shuffled = list(rows)
    chance.shuffle(shuffled)
    assert equal_tables(table(rows), table(shuffled), TableRules())
    assert equal_tables(table(rows), table(rows), TableRules(ordered=True))
    order = list(range(len(table(rows).columns)))
    chance.shuffle(order)
    turned = [tuple(row[i] for i in order) for row in shuffled]
    assert equal_tables(table(rows), table(turned), TableRules(column_order=False))


@given(tables, tables, st.booleans())
def test_it_is_symmetric_and_duplicates_count(one: list[Any], other: list[Any], ordered: bool) -> None:
    rules = TableRules(ordered=ordered)
    assert equal_tables(table(one), table(other), rules) == equal_tables(table(other), table(one), rules)
    if one:
        assert not equal_tables(table(one), table([*one, one[0]]), rules)


numbers = st.lists(
    st.tuples(
        st.sampled_from([1.0, 1.0 + 4e-7, 1.0 + 8e-7, 2.0]), st.sampled_from([5.0, 5.0 + 4e-6, 6])
    ),
    min_size=1,
    max_size=4,
)


@given(numbers, numbers)
def test_close_numbers_are_paired_as_a_search_over_all_pairings_would(one: Any, other: Any) -> None:
    def close(a: Any, b: Any) -> bool:
        return all(math.isclose(x, y, rel_tol=5e-7, abs_tol=5e-7) for x, y in zip(a, b, strict=True))

    expected = len(one) == len(other) and any(
        all(close(a, b) for a, b in zip(one, order, strict=True)) for order in permutations(other)
    )
    assert equal_tables(table(one), table(other), TableRules(tolerance=5e-7)) == expected


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ([(1,)], [(1.0,)], True),
        ([(1,)], [("1",)], False),
        ([(1,)], [(True,)], False),
        ([(None,)], [(0,)], False),
        ([(None,)], [("",)], False),
        ([(0.1 + 0.2,)], [(0.3,)], True),
        ([(10**18,)], [(10**18 + 1,)], False),
        ([(math.nan,)], [(math.nan,)], True),
        ([(Decimal("1.50"),)], [(1.5,)], True),
        ([(Blob(2, "00", "x"),)], [(Blob(2, "00", "y"),)], False),
        ([((1, 0.1 + 0.2),)], [((1, 0.3),)], True),
        ([], [], True),
        ([], [(1,)], False),
    ],
)
def test_values(one: Any, other: Any, same: bool) -> None:
    assert equal_tables(table(one), table(other), TableRules()) is same


def test_column_names_decide_where_they_are_asked_for() -> None:
    one, other = QueryResult(("A", "b"), ((1, 2),)), QueryResult(("B", "a"), ((2, 1),))
    assert not equal_tables(one, other, TableRules(column_names=True))
    assert equal_tables(one, other, TableRules(column_names=True, column_order=False))
    wrong = QueryResult(("x", "a"), ((2, 1),))
    assert not equal_tables(one, wrong, TableRules(column_names=True, column_order=False))


def test_a_column_that_fits_twice_is_not_used_twice() -> None:
    one, other = table([(1, 1, 2)] * 3), table([(1, 2, 2)] * 3)
    assert not equal_tables(one, other, TableRules(column_order=False))
    wide = [tuple([1.0] * 19 + [2.0])]
    assert not equal_tables(table(wide), table([tuple([1.0] * 20)]), TableRules(column_order=False))
    # Columns that agree one by one, rows that do not: the search for an assignment is bounded.
    left = [tuple(float((i >> bit) & 1) for bit in range(12)) for i in range(64)]
    right = [tuple(1.0 - value for value in row) for row in left[:-1]] + [left[0]]
    equal_tables(table(left), table(right), TableRules(column_order=False))


def test_many_rows_and_columns_take_no_time() -> None:
    rows = [tuple(float(i % 7) for _ in range(20)) for i in range(2000)]
    assert equal_tables(table(rows), table(rows[::-1]), TableRules(column_order=False))
    changed = [*rows[1:], tuple(-1.0 for _ in range(20))]
    assert not equal_tables(table(rows), table(changed), TableRules())


@pytest.mark.parametrize(
    ("query", "ordered"),
    [
        ("select a from t order by a", True),
        ("SELECT a FROM t ORDER\n  BY a", True),
        ("select a from t order /* x */ by a", True),
        ("select * from (select a from t order by a)", False),
        ("select row_number() over (order by a) from t", False),
        ("select 'order by' from t", False),
        ('select "order by" from t', False),
        ("select a from t -- order by a", False),
        ("with x as (select 1 order by 1) select * from x order by 1 limit 3", True),
        ("select [order by] from t", False),
        ("select a as order_by from t", False),
        ("", False),
        ("(" * 10_000 + "order by", False),
    ],
)
def test_order_by_at_the_top(query: str, ordered: bool) -> None:
    assert is_ordered(query) is ordered


@on_sandbox
async def test_a_gold_query_that_fails_in_a_disturbed_sandbox_is_asked_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody else in the shared sandbox may crash or slow it; a broken task fails alone as well."""
    shared = shared_sandbox(CONFIG.model_copy(update={"readable": (str(folder),)}))
    real = Sandbox.python

    async def disturbed(self: Sandbox, *arguments: Any, **options: Any) -> Execution:
        if self is shared and not disturbances:
            disturbances.append(True)
            return Execution(Outcome.KILLED, signal="SIGKILL")
        return await real(self, *arguments, **options)

    disturbances: list[bool] = []
    monkeypatch.setattr(Sandbox, "python", disturbed)
    assert await match(folder, "select id from t", "select id from t")
    assert disturbances
    with pytest.raises(InfraError, match="gold query cannot be used"):
        await match(folder, "select nothing from nowhere", "select id from t")
