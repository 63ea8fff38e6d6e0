"""Text-to-SQL: the databases and their questions, the tools, execution match, Spider's and dbbench's files."""

from __future__ import annotations

import gzip
import json
import os
import sqlite3
from collections import Counter
from pathlib import Path

import pytest
from world_play import play_expert

from ludus.core import ConfigError, Fault, Task, ToolCall, ToolContext, ToolResult
from ludus.envs import EnvTools, tools_of
from ludus.rewards import Scorer, synthetic_episode
from ludus.worlds.sql import (
    Sql,
    dbbench_tasks,
    expert,
    hard_held_out_tasks,
    hard_training_tasks,
    held_out_tasks,
    same_values,
    spider_held_out_tasks,
    spider_training_tasks,
    success,
    training_tasks,
    vt_sql,
)
from ludus.worlds.sql.databases import HELD_OUT, NAMES, questions, script_of

DBBENCH = "LUDUS_SQL_DATA" in os.environ


async def tool_of(env: Sql, name: str, **arguments: object) -> ToolResult:
    context = ToolContext("e", Task.of("?"), {"sql": env})
    return await EnvTools(env, await tools_of(env, "sql")).call(ToolCall(name, arguments), context)


async def scored(reward: object, task: Task, answer: str, env: Sql | None = None) -> dict[str, float]:
    episode = synthetic_episode(task, answer)
    await Scorer([reward]).score(episode, {"sql": env} if env else {})
    assert episode.failure is None
    return episode.rewards


def test_tasks_are_split_by_database() -> None:
    train, held_out = training_tasks(), held_out_tasks()
    used = [{t.metadata["database"].partition("-")[0] for t in tasks} for tasks in (train, held_out)]
    assert used == [set(NAMES) - set(HELD_OUT), set(HELD_OUT)]
    assert len(train) == 1684 and len(held_out) == 159 and train[17].id == "sql-train-17"
    wanted = {"aggregate", "date", "filter", "group", "join", "nested", "order"}
    assert {task.metadata["subtask"] for task in held_out} == wanted
    assert held_out[0].messages[0].content == (
        "Answer the question with one SQLite query.\n\nDatabase: cinema\n"
        "Tables: directors, films, screenings\n\n"
        f"Question: {questions('cinema-1')[0].text}"
    )


def test_databases_are_the_same_every_time_and_hold_together() -> None:
    assert script_of("library-1") != script_of("library-2")
    connection = sqlite3.connect(":memory:")
    connection.executescript(script_of("library-1"))
    assert connection.execute("select count(*) from loans").fetchall() == [(90,)]
    assert connection.execute("pragma foreign_key_check").fetchall() == []
    first = connection.execute("select name, country, birth_year from authors where id = 1").fetchone()
    assert first == ("Gita Diaz", "Ghana", 1913)


def test_a_question_with_a_limit_has_one_answer() -> None:
    connection = sqlite3.connect(":memory:")
    connection.executescript(script_of("league-1"))
    for one in questions("league-1"):
        rows = connection.execute(one.query).fetchall()
        assert 1 <= len(rows) <= 30 and rows != [(None,)]
        if one.subtask == "order":  # by hand: no two teams or players share the number in question
            head = one.query.partition(" limit ")[0]
            best = [row[1] for row in connection.execute(head)][: len(rows) + 1]
            assert len(set(best)) == len(best)


async def test_the_tools_read_and_never_write() -> None:
    env = Sql()
    await env.reset(Task.of("?"), "league-1")
    shown = await tool_of(env, "schema", table="teams")
    assert shown.content == "teams(id INTEGER PRIMARY KEY, name TEXT, city TEXT, founded INTEGER)"
    rows = await tool_of(env, "sql", query="select count(*) as n from players")
    assert rows.content == " n\n--\n48\n(1 row)"
    refused = [
        ("sql", {"query": "delete from players"}, "only reading is allowed"),
        ("sql", {"query": "select 1; drop table players"}, "one statement at a time"),
        ("sql", {"query": "attach 'x.db' as y"}, "Error"),
        ("sql", {"query": "select nam from players"}, "Did you mean name?"),
        ("schema", {"table": "team"}, "Did you mean teams?"),
    ]
    for name, arguments, said in refused:
        result = await tool_of(env, name, **arguments)
        assert result.fault is Fault.TOOL_RAISED and said in result.content, arguments
    many = await tool_of(env, "sql", query="select a.id from players a, players b")
    assert "2,274 more rows (2,304 rows in all)" in many.content
    again = await tool_of(env, "sql", query="select count(*) as n from players")
    assert again.content == rows.content
    await env.close()


ANSWERS = {
    "select count(*) from teams": True,
    "```sql\nSELECT COUNT(id) AS how_many FROM teams;\n```": True,
    "select 12": True,  # by its rows, as the paper's
    "select count(*) from players": False,
    "select name from teams": False,
    "": False,
    "drop table teams": False,
    "nonsense \ud800\x00": False,
}


async def test_execution_match() -> None:
    teams = {"envs": {"sql": {"database": "league-1"}}, "metadata": {"database": "league-1"}}
    task = Task.of("?", "select count(*) from teams", **teams)
    for answer, right in ANSWERS.items():
        parts = await scored(vt_sql, task, answer)
        assert (parts["vt_sql"], parts["success"]) == (1.0 if right else -1.0, float(right)), answer
    assert (await scored(success, task, "select 12"))["success"] == 1.0
    assert (await scored(success, task, "select 13"))["success"] == 0.0


async def test_rows_count_in_order_only_where_the_question_has_one() -> None:
    teams = {"envs": {"sql": {"database": "league-1"}}, "metadata": {"database": "league-1"}}
    listed, ordered = "select name from teams", "select name from teams order by founded desc limit 3"
    asked = Task.of("?", listed, **teams)
    assert (await scored(success, asked, f"{listed} order by name desc"))["success"] == 1.0
    asked = Task.of("?", ordered, **teams)
    same = "select name from (select * from teams order by founded desc limit 3) order by founded"
    assert (await scored(success, asked, same))["success"] == 0.0
    assert (await scored(success, asked, ordered))["success"] == 1.0


async def test_the_expert_solves_them_with_the_agents_tools() -> None:
    chosen = held_out_tasks()[::16]
    played = await play_expert("sql", chosen)
    assert [t.rewards["success"] for t in played] == [1.0] * len(chosen)
    assert all([call.name for call in t.calls] == ["schema", "sql"] and not t.faults for t in played)


@pytest.mark.slow
async def test_the_expert_solves_all_of_them() -> None:
    hard = [*hard_held_out_tasks(), *hard_training_tasks()[::4]]
    played = await play_expert("sql", [*held_out_tasks(), *training_tasks()[::4], *hard])
    assert [t.task.id for t in played if t.rewards["success"] != 1.0 or t.faults] == []


def question_of(task: Task) -> str:
    return task.messages[0].content.partition("Question: ")[2]


def test_hard_tasks_share_neither_databases_nor_wordings_between_the_splits() -> None:
    train, held_out = hard_training_tasks(), hard_held_out_tasks()
    assert len(train) == 774 and len(held_out) == 74
    wanted = {"correlated", "difference", "having", "pair", "second", "set", "share", "top_per_group"}
    assert {t.metadata["subtask"] for t in held_out} == {t.metadata["subtask"] for t in train} == wanted
    used = [{t.envs["sql"]["database"].partition("-")[0] for t in tasks} for tasks in (train, held_out)]
    assert used == [set(NAMES) - set(HELD_OUT), set(HELD_OUT)]
    # the first words of a question belong to its wording, not to its database
    starts = [{" ".join(question_of(t).split()[:2]) for t in tasks} for tasks in (train, held_out)]
    assert {"Out of", "Break the", "By how"} <= starts[1] and not {"Out of", "By how"} & starts[0]
    easy = {question_of(t) for t in [*training_tasks(), *held_out_tasks()]}
    assert not easy & {question_of(t) for t in [*train, *held_out]}


def test_the_rows_of_hard_questions_differ_between_the_databases_that_they_are_checked_on() -> None:
    for task in hard_held_out_tasks():
        results = []
        for name in task.metadata["database"]:
            connection = sqlite3.connect(":memory:")
            connection.executescript(script_of(name))
            results.append(connection.execute(task.target).fetchall())
            connection.close()
        assert len(results) == 3 and all(results), question_of(task)
        assert not results[0] == results[1] == results[2], question_of(task)


async def test_a_hard_answer_that_is_right_by_luck_on_the_shown_rows_does_not_pass() -> None:
    task = next(t for t in hard_held_out_tasks() if t.metadata["subtask"] == "difference")
    shown = task.envs["sql"]["database"]
    connection = sqlite3.connect(":memory:")
    connection.executescript(script_of(shown))
    ((number,),) = connection.execute(task.target).fetchall()
    connection.close()
    assert (await scored(success, task, task.target))["success"] == 1.0
    assert (await scored(success, task, f"select {number}"))["success"] == 0.0
    seen = Task.of("?", task.target, envs=task.envs, metadata={"database": shown})
    assert (await scored(success, seen, f"select {number}"))["success"] == 1.0


async def test_the_expert_solves_hard_tasks() -> None:
    chosen = hard_held_out_tasks()[::9]
    played = await play_expert("sql", chosen)
    assert [t.rewards["success"] for t in played] == [1.0] * len(chosen)


def spider(folder: Path) -> None:
    """A folder in Spider's form, with a database that is called as one of ours."""
    folder.chmod(0o755)  # sessions are another user
    (folder / "database" / "cinema").mkdir(parents=True)
    connection = sqlite3.connect(folder / "database" / "cinema" / "cinema.sqlite")
    connection.executescript(
        "create table halls(hall_id int primary key, name text);"
        "insert into halls values (1, 'Big'), (2, 'Small');"
    )
    connection.close()
    row = {"db_id": "cinema", "question": "How many halls?", "query": "SELECT count(*) FROM halls"}
    (folder / "train_spider.json").write_text(json.dumps([row, row]))
    (folder / "dev.json.gz").write_bytes(gzip.compress(json.dumps([row]).encode()))
    (folder / "tables.json").write_text("[]")


def test_the_sets_of_spider_stay_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LUDUS_SQL_DATA", str(tmp_path))
    spider(tmp_path)
    row = {"db_id": "cinema", "question": "How many halls?", "query": "SELECT count(*) FROM halls"}
    files = {
        "test.json": 2,
        "spider-realistic.json": 3,
        "Spider-DK/Spider-DK.json": 4,
        "Spider-Syn/dev_syn.json": 5,
        "Spider-Syn/train_spider.json": 6,  # training questions, whatever their folder is called
        "bird/dev.json": 7,
    }
    for name, count in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(json.dumps([row] * count))
    held_out, training = spider_held_out_tasks(), spider_training_tasks()
    sets = Counter(task.metadata["dataset"] for task in held_out)
    assert sets == {
        "spider-dev": 1,
        "spider-test": 2,
        "spider-realistic": 3,
        "spider-dk": 4,
        "spider-syn": 5,
        "bird-dev": 7,
    }
    assert Counter(task.metadata["subtask"] for task in held_out) == sets
    assert Counter(task.metadata["dataset"] for task in training) == {
        "spider-train": 2,
        "spider-syn-train": 6,
    }
    assert len({task.id for task in held_out + training}) == 30


async def test_spiders_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LUDUS_SQL_DATA", raising=False)
    with pytest.raises(ConfigError, match="set LUDUS_SQL_DATA"):
        spider_training_tasks()
    monkeypatch.setenv("LUDUS_SQL_DATA", str(tmp_path))
    with pytest.raises(ConfigError, match="holds no questions"):
        spider_training_tasks()
    spider(tmp_path)
    assert len(spider_training_tasks()) == 2
    (task,) = spider_held_out_tasks()
    assert "Database: cinema\nhalls(hall_id INT, name TEXT)\n" in task.messages[0].content
    env = Sql()
    await env.reset(task, **task.envs["sql"])
    shown = await tool_of(env, "sql", query="select name from halls")
    assert shown.content == "name\n-----\nBig\nSmall\n(2 rows)"
    assert (await scored(success, task, "select 2"))["success"] == 1.0
    (tmp_path / "dev.json.gz").unlink()
    (tmp_path / "dev.json").write_text('[{"db_id": "gone", "question": "?", "query": "select 1"}]')
    with pytest.raises(ConfigError, match="holds no database 'gone'"):
        spider_held_out_tasks()


def dbbench(folder: Path) -> None:
    table = {
        "table_name": "Tall \"Towers\"",
        "table_info": {
            "columns": [{"name": "Name", "type": "TEXT"}, {"name": "Height (m)", "type": "INT"}],
            "rows": [["Globe", 100], ["O'Neil", 90]],
        },
    }  # fmt: skip
    common = {"table": table, "add_description": "The table is Tall Towers."}
    rows = [
        {**common, "description": "Which is higher?", "label": ["Globe"], "type": ["comparison"],
         "sql": {"query": 'select Name from "Tall ""Towers""" order by 2 desc limit 1'}},
        {**common, "description": "Raise it.", "type": ["UPDATE"],
         "label": ['UPDATE "Tall ""Towers""" SET "Height (m)" = 120 WHERE Name = \'O\'\'Neil\'']},
        {**common, "description": "Broken.", "type": ["INSERT"], "label": ["INSERT INTO 19_x VALUES (1)"]},
    ]  # fmt: skip
    (folder / "dbbench.jsonl").write_text("\n".join(map(json.dumps, rows)))


async def test_dbbench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dbbench(tmp_path)
    monkeypatch.setenv("LUDUS_SQL_DATA", str(tmp_path))
    tasks = dbbench_tasks()
    assert [task.id for task in tasks] == [
        "dbbench-0",
        "dbbench-1",
    ]  # the last one cannot be run by SQLite
    played = await play_expert("sql", tasks)
    assert [t.rewards["success"] for t in played] == [1.0, 1.0]
    env = Sql()
    await env.reset(tasks[1], **tasks[1].envs["sql"])
    assert (await scored(success, tasks[1], "done", env))["success"] == 0.0  # said, and not done
    await tool_of(env, "sql", query=str(tasks[1].target))
    assert (await scored(success, tasks[1], "whatever", env))["success"] == 1.0
    await tool_of(env, "sql", query='delete from "Tall ""Towers""" where Name = \'Globe\'')
    assert (await scored(success, tasks[1], "done", env))["success"] == 0.0
    await env.reset(
        tasks[1], **tasks[1].envs["sql"]
    )  # a copy of its own: nothing is left of the changes
    assert "Globe" in (await tool_of(env, "sql", query='select * from "Tall ""Towers"""')).content
    await env.close()


@pytest.mark.parametrize("statement", ["attach database '{}' as other", "vacuum into '{}'"])
@pytest.mark.parametrize("where", ["label", "type"])
def test_sql_of_a_data_set_reaches_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, statement: str, where: str
) -> None:
    """It runs in this process, so that the gold change can be compared."""
    dbbench(tmp_path)
    written = tmp_path / "written.db"
    harm = statement.format(written)
    row = json.loads((tmp_path / "dbbench.jsonl").read_text().splitlines()[1])
    if where == "label":
        row["label"] = [harm]
    else:
        row["table"]["table_info"]["columns"][0]["type"] = f"TEXT); {harm}; create table more(x TEXT"
    (tmp_path / "dbbench.jsonl").write_text(json.dumps(row))
    monkeypatch.setenv("LUDUS_SQL_DATA", str(tmp_path))
    assert dbbench_tasks() == [] and not written.exists()


@pytest.mark.parametrize(
    ("answer", "label", "right"),
    [
        ('["36"]', '["36.0"]', True),
        ("36", '["36"]', True),
        ('["b", "a"]', '["a", "b"]', True),
        ("Globe ", '["Globe"]', True),
        ('["a"]', '["a", "b"]', False),
        ("[" * 100_000, '["a"]', False),
        ("", '["a"]', False),
    ],
)
def test_values_are_compared_as_agentbench_does(answer: str, label: str, right: bool) -> None:
    assert same_values(answer, label) is right


def test_the_expert_looks_tries_and_answers() -> None:
    task = held_out_tasks()[0]
    moves = list(expert(task))
    assert moves[:2] == [ToolCall("schema", {}), ToolCall("sql", {"query": task.target})]
    assert moves[2] == task.target


@pytest.mark.worlds
@pytest.mark.skipif(not DBBENCH, reason="LUDUS_SQL_DATA is not set")
async def test_the_expert_solves_dbbench() -> None:
    tasks = dbbench_tasks()
    assert len(tasks) == 299
    played = await play_expert("sql", tasks)
    assert [t.task.id for t in played if t.rewards["success"] != 1.0] == []
