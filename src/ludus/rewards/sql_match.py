"""`sql_match`: does the predicted query give the same rows as the gold one?

Each query runs in an execution of its own, read-only, on the same database, or on several: a query that
is right by luck on one is seldom right on all. Results are compared here, outside the sandbox.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from ludus.core.concurrency import run_sync
from ludus.core.failures import ConfigError
from ludus.core.task import Task
from ludus.core.trajectory import Trajectory
from ludus.rewards.function import checked_name, checked_weight
from ludus.rewards.guard import SelfGuarded
from ludus.rewards.judging.answers import code_of
from ludus.rewards.judging.place import Boxes, BrokenTask, Place, few_at_a_time, judged
from ludus.rewards.judging.tables import ResultTable, TableRules, is_ordered, same_tables
from ludus.rewards.values import Parts
from ludus.sandbox import Sandbox, SandboxConfig
from ludus.sandbox.sql import Database, QueryResult, SqlLimits, run_query
from ludus.sandbox.sql.execution import Engine

_log = logging.getLogger(__name__)

_MOST_PLACES = 8
_LANGUAGES = ("sql", "sqlite", "duckdb", "postgresql", "mysql")


class SqlMatch(SelfGuarded):
    """1 if the answer's query gives the gold query's result on every database, 0 otherwise.

    The gold query is the task's metadata under `key`, or its target. Databases are the task's metadata
    under `database` (one or a list), or `database` here; relative paths start at `folder`. Rows are
    compared as multisets, or in order when the gold query has ORDER BY at its top level (`order="auto"`).
    The part `<name>_ran` says whether the predicted query ran at all.
    """

    uses_envs = False

    def __init__(
        self,
        *,
        database: str | list[str] | None = None,
        folder: str = ".",
        engine: Engine | None = None,
        key: str = "query",
        order: Literal["auto", "always", "never"] = "auto",
        column_order: bool = True,
        column_names: bool = False,
        tolerance: float = 1e-6,
        seconds: float = 10.0,
        max_rows: int = 20_000,
        sandbox: SandboxConfig | Mapping[str, Any] | None = None,
        name: str = "sql_match",
        weight: float = 1.0,
    ) -> None:
        if order not in ("auto", "always", "never"):
            raise ConfigError(f"{name!r}: order is 'auto', 'always' or 'never', not {order!r}")
        self.name = checked_name(name)
        self.weight = checked_weight(weight, name)
        self.database, self.folder, self.engine, self.key = database, Path(folder), engine, key
        self.order = order
        self.rules = TableRules(
            column_order=column_order, column_names=column_names, tolerance=tolerance
        )
        self.limits = SqlLimits(seconds=seconds, max_rows=max_rows)
        self._place = Place(sandbox, name)
        self._places: set[tuple[str, ...]] = set()
        if database is not None:
            self._databases(database)

    async def score(self, trajectory: Trajectory, task: Task, envs: Mapping[str, Any]) -> Parts:
        async def judge(answer: str, boxes: Boxes) -> Parts:
            predicted = code_of(answer, _LANGUAGES)
            gold = task.metadata.get(self.key, task.target)
            if not isinstance(gold, str) or not gold.strip():
                raise BrokenTask(
                    f"the task has no gold query: neither metadata {self.key!r} nor a target"
                )
            for database in self._databases(task.metadata.get("database", self.database)):
                config = self._place.reading(self._readable(database))
                sandbox = await self._place.start(boxes, config)
                wanted = await self._gold(sandbox, database, gold)
                found = await self._compare(sandbox, database, gold, wanted, predicted)
                if not found:
                    return {self.name: 0.0, f"{self.name}_ran": float(found is not None)}
            return {self.name: 1.0, f"{self.name}_ran": 1.0}

        answer = trajectory.answer or ""
        return await judged(self.name, judge, answer, harmless="select 1")

    async def _gold(self, sandbox: Sandbox, database: Database, gold: str) -> QueryResult:
        """What the gold query gives. Where it fails, it is asked again where nobody else can disturb it."""
        wanted = await run_query(sandbox, database, gold, self.limits)
        if not _is_usable(wanted):
            alone = sandbox.config.model_copy(update={"workers": 1})
            async with few_at_a_time(), Sandbox(alone) as fresh:
                wanted = await run_query(fresh, database, gold, self.limits)
        if not _is_usable(wanted):
            why = wanted.message or "it gives no rows, or too many"
            raise BrokenTask(f"the gold query cannot be used on {database.path.name}: {why}")
        return wanted

    async def _compare(
        self, sandbox: Sandbox, database: Database, gold: str, wanted: QueryResult, predicted: str
    ) -> bool | None:
        """Whether the results agree; None when the predicted query has none."""
        found = await run_query(sandbox, database, predicted, self.limits)
        if not found.ok or found.columns is None:
            _log.debug("the query does not run on %s: %s", database.path.name, found.message)
            return None
        ordered = self.order == "always" or (self.order == "auto" and is_ordered(gold))
        rules = TableRules(
            ordered, self.rules.column_order, self.rules.column_names, self.rules.tolerance
        )
        if not found.complete:
            return False
        return await run_sync(same_tables, _table(wanted), _table(found), rules)

    def _databases(self, given: Any) -> list[Database]:
        several = [given] if isinstance(given, str) else given
        if not isinstance(several, list | tuple) or not several:
            raise ConfigError(
                f"{self.name!r} needs a database: give one here, or in each task's metadata as 'database'"
            )
        return [Database.of(self.folder / str(one), self.engine) for one in several]

    def _readable(self, database: Database) -> tuple[str, ...]:
        """What the sandbox must see: the folder, so that all databases in it share one, or the file."""
        folder = self.folder.resolve()
        if not database.readable:
            return ()
        if self.folder != Path() and database.path.is_relative_to(folder):
            return (str(folder),)
        self._places.add(database.readable)
        if len(self._places) > _MOST_PLACES:
            raise ConfigError(
                f"{self.name!r}: the tasks use more than {_MOST_PLACES} databases, each with a sandbox of its "
                "own; give the folder that they are all in as 'folder'"
            )
        return database.readable


def _is_usable(result: QueryResult) -> bool:
    return result.ok and result.columns is not None and result.complete


def _table(result: QueryResult) -> ResultTable:
    return ResultTable(result.columns or (), result.rows)
