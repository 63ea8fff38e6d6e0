"""Versions of tools and environments: another corpus, database or option is another version."""

from __future__ import annotations

import json
from pathlib import Path

from ludus.core import Task, ToolCall
from ludus.core.messages import ToolContext
from ludus.envs import EnvPool
from ludus.tools.library import build_toolset
from ludus.tools.recording import RecordingConfig
from ludus.tools.versions import tool_versions


async def test_versions_follow_the_data_behind_a_tool(tmp_path: Path) -> None:
    corpus, database = tmp_path / "corpus.jsonl", tmp_path / "shop.sql"
    specs = [
        {"tool": "search", "corpus": str(corpus)},
        {"tool": "sql", "database": str(database)},
    ]
    found: list[dict[str, str]] = []
    for text, rows in (("a fox", "1"), ("a dog", "1"), ("a dog", "2"), ("a dog", "2")):
        corpus.write_text(json.dumps({"title": "T", "text": text}))
        database.write_text(f"create table t(x); insert into t values ({rows});")
        found.append(await tool_versions(build_toolset(specs)))
        recorded = build_toolset(specs, record=RecordingConfig(path=str(tmp_path / "store.sqlite")))
        assert await tool_versions(recorded) == found[-1]
    first, other_corpus, other_database, same = found
    assert first["search"] != other_corpus["search"] == other_database["search"]
    assert first["sql"] == other_corpus["sql"] != other_database["sql"]
    assert other_corpus["schema"] != other_database["schema"] and same == other_database
    other = tmp_path / "other.sql"
    other.write_bytes(database.read_bytes())
    elsewhere = await tool_versions(build_toolset([{"tool": "sql", "database": str(other)}]))
    assert elsewhere["sql"] != same["sql"]


async def test_results_of_another_database_are_not_replayed(tmp_path: Path) -> None:
    database = tmp_path / "shop.sql"
    for row in ("1", "2"):
        database.write_text(f"create table t(x); insert into t values ({row});")
        record = RecordingConfig(path=str(tmp_path / "store.sqlite"))
        tools = build_toolset([{"tool": "sql", "database": str(database)}], record=record)
        context = ToolContext(f"episode {row}", Task.of("?", id="a"))
        await tools.open(context)
        result = await tools.call(ToolCall("sql", {"query": "select x from t"}), context)
        await tools.close(context)
        assert row in result.content, result.content


def test_versions_follow_the_options_of_an_environment(tmp_path: Path) -> None:
    class Door:
        def __init__(self, path: str) -> None:
            self.path = path

        async def reset(self, task: Task) -> None: ...

    rooms = tmp_path / "rooms.json"
    rooms.write_text("[1]")
    first = EnvPool(Door, options={"path": str(rooms)}).version
    assert EnvPool(Door, options={"path": str(rooms)}).version == first
    assert EnvPool(Door, options={"path": str(tmp_path)}).version != first
    rooms.write_text("[2]")
    assert EnvPool(Door, options={"path": str(rooms)}).version != first
