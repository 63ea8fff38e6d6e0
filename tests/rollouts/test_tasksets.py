"""Task sets: every source gives the same tasks, and a broken row is named."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ludus.core.failures import ConfigError, MissingExtraError
from ludus.core.task import Task
from ludus.rollouts import load_tasks

ROWS = [
    {"prompt": "2+3?", "target": "5", "level": "easy"},
    {"messages": [{"role": "system", "content": "Short!"}, {"role": "user", "content": "4+5?"}], "id": "nine",
     "envs": {"desk": {"seed": 1}}},
]  # fmt: skip


def made() -> list[dict[str, object]]:
    return ROWS


def check(tasks: list[Task]) -> None:
    first, second = tasks
    assert (first.id, first.target, first.metadata["level"]) == ("0", "5", "easy")
    assert first.messages[0].content == "2+3?" and not first.envs
    assert second.id == "nine" and second.messages[0].role == "system"
    assert second.envs == {"desk": {"seed": 1}}


def test_from_json_lines(tmp_path: Path) -> None:
    file = tmp_path / "tasks.jsonl"
    file.write_text("\n".join(json.dumps(row) for row in ROWS) + "\n\n")
    check(load_tasks(str(file)))


def test_from_parquet_whose_rows_have_different_columns(tmp_path: Path) -> None:
    file = tmp_path / "tasks.parquet"
    pq.write_table(pa.Table.from_pylist([{**dict.fromkeys(ROWS[1]), **ROWS[0]}, ROWS[1]]), file)
    check(load_tasks(str(file)))


def test_from_a_function(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "my_tasks", SimpleNamespace(made=made))
    check(load_tasks("my_tasks:made"))


def test_from_a_dataset(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load_dataset(name: str, split: str) -> list[dict[str, object]]:
        asked.append((name, split))
        return ROWS

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    check(load_tasks("dataset:someone/sums@test"))
    check(load_tasks("dataset:someone/sums"))
    assert asked == [("someone/sums", "test"), ("someone/sums", "train")]
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingExtraError, match=r"ludus\[datasets\]"):
        load_tasks("dataset:someone/sums")


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("{", "line 1, is not JSON"),
        ('{"target": "5"}', "task 1 of .* exactly one of 'prompt' and 'messages'"),
        ('{"prompt": "a", "id": "x"}\n{"prompt": "b", "id": "x"}', "two tasks have the id 'x'"),
        ('{"messages": [{"role": "god", "content": "hi"}]}', "role must be"),
        ('{"messages": [{"role": "user", "content": 5}]}', "content must be a string"),
        ('["prompt"]', "task 1"),
        ("", "holds no tasks"),
    ],
)
def test_a_broken_row_is_named(tmp_path: Path, lines: str, message: str) -> None:
    file = tmp_path / "tasks.jsonl"
    file.write_text(lines)
    with pytest.raises(ConfigError, match=message):
        load_tasks(str(file))


@pytest.mark.parametrize(
    "source", ["tasks.csv", "no.such.module:tasks", "missing.jsonl", "missing.parquet"]
)
def test_a_source_that_is_none_is_refused(source: str) -> None:
    with pytest.raises(ConfigError):
        load_tasks(source)
