"""Text-to-SQL: look at a database, try queries, and answer with the one that gives what was asked for.

Out of the box there are eleven small databases and questions about them (`databases`). Spider's
folders and AgentBench's dbbench are read from the folder LUDUS_SQL_DATA (`files`). Queries run in the sandbox,
read-only, with limits on rows and time.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from difflib import get_close_matches
from functools import cache
from typing import Any

from ludus.core.failures import ToolFault
from ludus.core.messages import ToolCall, ToolResult
from ludus.core.task import Task
from ludus.core.trajectory import Trajectory
from ludus.envs.env import Env
from ludus.envs.world import World
from ludus.rewards.code_tests.sql_match import SqlMatch, TableRules, equal_tables
from ludus.rewards.scores import Parts
from ludus.sandbox import Sandbox, Session, shared_sandbox
from ludus.sandbox.sql import Database, QueryResult, SqlLimits, read_schema, run_query
from ludus.tools import tool
from ludus.tools.library.sql import described, fault_of, problem_of, rendered
from ludus.worlds.sql.databases import (
    CHECKED_ON,
    HELD_OUT,
    NAMES,
    VARIANTS,
    SqlQuestion,
    hard_questions,
    questions,
    schema_of,
)
from ludus.worlds.sql.files import (
    SANDBOX,
    TableTask,
    dbbench_rows,
    find_database,
    memory_database,
    quoted,
    readable_of,
    schema_hint,
    spider_rows,
)

LIMITS = SqlLimits(seconds=5.0, max_rows=30, max_bytes=20_000, max_cell=100)
"""Of a query that the agent tries."""
_COMPARED = SqlLimits(seconds=10.0)
_COPY = "copy.db"
_PROMPT = """Answer the question with one SQLite query.

Database: {name}
{tables}

Question: {question}"""
_TABLE_PROMPT = "{text}\n\nThe database is SQLite. {rest}"
_CHANGE = "Make this change in the database, then answer: done"
_VALUES = 'Query it as often as you need, then answer with the values as a JSON list, such as ["7"].'


class Sql(Env):
    """One database. A task gives it as `envs = {"sql": {"database": "library-1"}}`.

    With `writable`, an episode has a copy of its own, in a sandbox session; otherwise nothing can be changed.
    """

    def __init__(self) -> None:
        self.database: Database | None = None
        self._config = SANDBOX
        self._writable = False
        self._session: Session | None = None

    async def reset(self, task: Task, database: str, writable: bool = False) -> None:
        await self.close()
        self.database, self._writable = find_database(database), writable
        self._config = SANDBOX.model_copy(update={"readable": readable_of(self.database)})

    async def close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    @tool(timeout=None)
    async def sql(self, query: str) -> ToolResult:
        """Run a SQL query on the database and read its rows.

        Args:
            query: One SQLite statement.
        """
        result = await self.run(query, LIMITS)
        return (
            ToolResult(rendered(result))
            if result.ok
            else ToolResult(problem_of(result), fault=fault_of(result))
        )

    @tool(timeout=None)
    async def schema(self, table: str | None = None) -> ToolResult:
        """Show the tables of the database with their columns, types and keys.

        Args:
            table: One table; all of them when left out.
        """
        assert self.database is not None, "reset comes first"
        where, options = await self._place()
        tables = await read_schema(where, self.database, LIMITS, **options)
        if isinstance(tables, QueryResult):
            return ToolResult(problem_of(tables), fault=fault_of(tables))
        if text := described(tables, table):
            return ToolResult(text)
        names = [one.name for one in tables]
        near = get_close_matches((table or "")[:100], names, n=1, cutoff=0.5)
        hint = f"Did you mean {near[0]}?" if near else f"Tables: {', '.join(names)}."
        raise ToolFault(f"there is no table {(table or '')[:100]!r}. {hint}")

    async def run(self, query: str, limits: SqlLimits) -> QueryResult:
        """A query's result, in the episode's own copy where it has one."""
        assert self.database is not None, "reset comes first"
        where, options = await self._place()
        return await run_query(where, self.database, query, limits, **options)

    async def _place(self) -> tuple[Sandbox | Session, dict[str, Any]]:
        if not self._writable:
            return shared_sandbox(self._config), {}
        if self._session is None or not self._session.alive:
            await self.close()
            self._session = await shared_sandbox(self._config).session()
        return self._session, {"scratch": _COPY, "control": self._config}


# Rewards


class ExecutionMatch(SqlMatch):
    """1 if the answer's query gives the rows of the gold query, else `otherwise`; logs `success` as 0 or 1.

    The gold query is the task's target. For dbbench, `scored_by` in the metadata says what is compared
    instead: "values" (the answer's with the label's), or "state" (the table after the episode with that after
    the gold statement).
    """

    uses_envs = True

    def __init__(self, *, otherwise: float = 0.0, name: str = "success", weight: float = 1.0) -> None:
        super().__init__(sandbox=SANDBOX, name=name, weight=weight)
        self.otherwise = otherwise

    async def score(self, trajectory: Trajectory, task: Task, envs: Mapping[str, Any]) -> Parts:
        scored_by = task.metadata.get("scored_by", "query")
        if scored_by == "query":
            parts = await super().score(trajectory, task, envs)
        elif scored_by == "values":
            parts = {self.name: float(same_values(trajectory.answer or "", str(task.target)))}
        else:
            parts = {self.name: float(await same_state(envs["sql"], task))}
        matched = parts[self.name]
        return {**parts, self.name: 1.0 if matched else self.otherwise, "success": matched}

    def _databases(self, given: Any) -> list[Database]:
        several = [given] if isinstance(given, str) else given
        if isinstance(several, list | tuple) and several:
            return [find_database(str(one)) for one in several]
        return super()._databases(given)

    def _readable(self, database: Database) -> tuple[str, ...]:
        return readable_of(database)


success = ExecutionMatch()
vt_sql = ExecutionMatch(otherwise=-1.0, name="vt_sql")
"""VT-SQL (VerlTool, F.3): 1 for an execution match, -1 otherwise."""


def same_values(answer: str, label: str) -> bool:
    """Whether an answer lists the label's values, in any order; numbers by value, as AgentBench compares."""
    return _values(answer) == _values(label)


def _values(text: str) -> frozenset[float | str]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = [text]
    several = found if isinstance(found, list) else [found]
    return frozenset(_value(str(one)) for one in several)


def _value(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text.strip()


async def same_state(env: Sql, task: Task) -> bool:
    """Whether the table is as the gold statement makes it."""
    everything = f"select * from {quoted(str(task.metadata['table']))}"
    found = await env.run(everything, _COMPARED)
    wanted = _changed_table(find_database(task.envs["sql"]["database"]), str(task.target), everything)
    return found.ok and found.complete and equal_tables(wanted, found, TableRules())


def _changed_table(database: Database, statement: str, query: str) -> QueryResult:
    """The rows after the gold statement, which is the task set's own."""
    with closing(memory_database(database.script or "")) as connection:
        connection.execute(statement)
        cursor = connection.execute(query)
        return QueryResult(tuple(one[0] for one in cursor.description), tuple(cursor.fetchall()))


# Tasks


def training_tasks() -> list[Task]:
    """Questions about eight databases, each filled in four ways."""
    return _own("train", [(name, one) for name in _TRAINED for one in questions(name)])


def held_out_tasks() -> list[Task]:
    """Questions about three other databases."""
    return _own("held-out", [(name, one) for name in _MEASURED for one in questions(name)])


def hard_training_tasks() -> list[Task]:
    """Questions of two steps (`hard_questions`) about the eight databases."""
    pairs = [(name, one) for name in _TRAINED for one in hard_questions(name, "train")]
    return _own("hard-train", pairs, CHECKED_ON)


def hard_held_out_tasks() -> list[Task]:
    """Hard tasks on the three other databases, in other words. Answers are compared on hidden rows too."""
    pairs = [(name, one) for name in _MEASURED for one in hard_questions(name, "held_out")]
    return _own("hard-held-out", pairs, CHECKED_ON)


_TRAINED = [f"{name}-{n}" for n in range(1, VARIANTS + 1) for name in NAMES if name not in HELD_OUT]
_MEASURED = [f"{name}-1" for name in HELD_OUT]


def _own(
    split: str, pairs: list[tuple[str, SqlQuestion]], checked_on: tuple[int, ...] = ()
) -> list[Task]:
    return [
        _query_task(
            f"sql-{split}-{number}",
            name,
            "Tables: " + ", ".join(table.name for table in schema_of(name)),
            question.text,
            question.query,
            question.subtask,
            [f"{name.partition('-')[0]}-{variant}" for variant in checked_on],
        )
        for number, (name, question) in enumerate(pairs)
    ]


def _query_task(
    own: str,
    database: str,
    tables: str,
    question: str,
    query: str,
    subtask: str,
    hidden: Sequence[str] = (),
    **metadata: str,
) -> Task:
    return Task.of(
        _PROMPT.format(name=database.partition("-")[0], tables=tables, question=question),
        query,
        id=own,
        envs={"sql": {"database": database}},
        subtask=subtask,
        database=[database, *hidden] if hidden else database,
        metadata=metadata,
    )


def spider_training_tasks() -> list[Task]:
    """Spider's training questions, from LUDUS_SQL_DATA."""
    return _spider("train")


def spider_held_out_tasks() -> list[Task]:
    """Its development questions, or those of sets in its form."""
    return _spider("held_out")


def _spider(split: str) -> list[Task]:
    hint = cache(schema_hint)
    return [
        _query_task(
            f"{own}-{number}",
            str(row["db_id"]),
            hint(str(row["db_id"])),
            str(row["question"]),
            str(row["query"]),
            own,
            dataset=own,
        )
        for own, rows in spider_rows(split).items()
        for number, row in enumerate(rows)
    ]


def dbbench_tasks() -> list[Task]:
    """AgentBench's dbbench: questions about a table, and changes of one that SQLite can run."""
    tasks = []
    for number, row in enumerate(dbbench_rows()):
        if row.is_change and not _runs(row):
            continue
        tasks.append(
            Task.of(
                _TABLE_PROMPT.format(text=row.text, rest=_CHANGE if row.is_change else _VALUES),
                row.query if row.is_change else json.dumps(row.label),
                id=f"dbbench-{number}",
                envs={"sql": {"database": f"dbbench/{number}", "writable": True}},
                subtask=row.kind,
                scored_by="state" if row.is_change else "values",
                table=row.table,
                query=row.query,
            )
        )
    return tasks


def _runs(row: TableTask) -> bool:
    try:
        with closing(memory_database(row.script)) as connection:
            connection.execute(row.query)
    except sqlite3.Error:
        return False
    return True


# The demonstrator


def expert(task: Task) -> Generator[ToolCall | str, str, None]:
    """Looks at the schema, tries the gold query, and answers with it.

    In dbbench it makes the gold change; of a question it tries the gold query, and answers with the label, as
    most of that set's gold queries do not give it.
    """
    scored_by = task.metadata.get("scored_by", "query")
    query = str(task.metadata.get("query", task.target))
    yield ToolCall("schema", {})
    yield ToolCall("sql", {"query": query})
    yield {"query": query, "values": str(task.target), "state": "done"}[scored_by]


WORLD = World(
    "sql",
    "Answer questions about a database with a query; Spider and dbbench by path.",
    env=Sql,
    rewards=(success,),
    training_tasks=training_tasks,
    held_out_tasks=held_out_tasks,
    expert=expert,
    max_turns=5,
)
