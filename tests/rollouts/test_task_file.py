"""Large files of tasks: what they give and refuse is what small ones give and refuse, row by row."""

from __future__ import annotations

import json
import os
import re
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ludus.core import ConfigError, Task
from ludus.rollouts import load_tasks
from ludus.rollouts.task_files import LARGE_BYTES, MOST_CHARACTERS, TaskFile
from ludus.rollouts.tasksets import tasks_of_lines
from ludus.training import Recipe, load_parts

_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
_MESSAGE = st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant"]), "content": _TEXT})
_MESSAGES = st.lists(_MESSAGE, min_size=1, max_size=3)
_ROW = st.one_of(
    st.fixed_dictionaries(
        {"prompt": _TEXT},
        optional={"id": _TEXT | st.integers(0, 3), "target": _TEXT, "level": st.none() | st.lists(_TEXT)},
    ),
    st.fixed_dictionaries(
        {"messages": _MESSAGES},
        optional={"system": _TEXT, "envs": st.just({"desk": {"seed": 1}}), "metadata": st.just({"a": 1})},
    ),
    st.sampled_from([{}, [], {"prompt": 1}, {"prompt": "a", "messages": []}, {"prompt": "a", "envs": 3},
                     {"prompt": "a", "metadata": {"b": 1}, "b": 2}, {"prompt": "a", "system": 3}]),
)  # fmt: skip


def outcome(load: Any, file: Path) -> list[Task] | str:
    try:
        return list(load(str(file)))
    except ConfigError as error:
        return str(error)


@given(
    st.lists(_ROW, max_size=6), st.sampled_from(["\n", "\r\n"]), st.sampled_from(["", "\n", "\n\n \n"])
)
def test_a_large_file_is_what_a_small_one_is(rows: list[Any], end: str, after: str) -> None:
    file = Path(os.environ["PYTEST_TASK_FILE"])
    lines = [json.dumps(row, ensure_ascii=False) + after for row in rows]
    file.write_bytes(end.join(lines).encode())
    expected, found = outcome(load_tasks, file), outcome(tasks_of_lines, file)
    if isinstance(expected, str) and "two tasks have the id" in expected:
        # a later pair may be named, or a row that is no task, which is found before ids are compared
        assert isinstance(found, str) and re.search("two tasks have the id|, line [0-9]+", found)
    else:
        assert found == expected


@pytest.fixture(autouse=True)
def _task_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTEST_TASK_FILE", str(tmp_path / "drawn.jsonl"))


def test_repeated_ids_are_named_by_line(tmp_path: Path) -> None:
    file = tmp_path / "tasks.jsonl"
    file.write_text('{"prompt": "a", "id": "x"}\n\n{"prompt": "b"}\n{"prompt": "c", "id": "x"}\n')
    with pytest.raises(
        ConfigError, match=r"the id 'x': .*tasks.jsonl, line 1, and .*tasks.jsonl, line 4"
    ):
        tasks_of_lines(str(file))
    file.write_text('{"prompt": "a", "id": "1"}\n{"prompt": "b"}\n')  # whose id is its place
    with pytest.raises(ConfigError, match=r"the id '1': .*line 1, and .*line 2"):
        tasks_of_lines(str(file))


def large_file(path: Path, rows: int = 50_000) -> Path:
    with path.open("w") as file:
        for number in range(rows):
            file.write(
                json.dumps({"prompt": f"What is {number} and {number}? " * 14, "n": number}) + "\n"
            )
    assert path.stat().st_size > LARGE_BYTES
    return path


def test_the_tasks_of_a_large_file_are_not_held(tmp_path: Path) -> None:
    file = large_file(tmp_path / "tasks.jsonl")
    raw = {"name": "x", "model": {"scratch": {}}, "tasks": {"train": str(file)}, "rl": {"steps": 1}}
    recipe = Recipe.parse(raw | {"agent": {"system": "Count."}, "rewards": ["exact_match"]}, "the test")
    tracemalloc.start()
    try:
        tasks = load_parts(recipe).tasks
        held, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert isinstance(tasks, TaskFile) and len(tasks) == 50_000
    assert held < 5_000_000 and most < 40_000_000, "as tasks, they take over 50 MB"
    for place in (0, 1, 32_767, 49_999, -1):
        task = tasks[place]
        number = place % 50_000
        assert (task.id, task.metadata["n"]) == (str(number), number)
        assert [message.role for message in task.messages] == ["system", "user"]
    assert [task.id for task in tasks[5:8]] == ["5", "6", "7"] and not tasks[60_000:]
    with pytest.raises(IndexError):
        tasks[50_000]


def test_a_wrong_row_of_a_large_file_is_named_before_anything_begins(tmp_path: Path) -> None:
    file = large_file(tmp_path / "tasks.jsonl")
    with file.open("a") as more:
        more.write('{"prompt": "fine"}\n{"question": "?"}\n')
    with pytest.raises(ConfigError, match=r"line 50002, is not a task: .*It has: question"):
        load_tasks(str(file))


def test_a_file_may_be_replaced_and_not_changed(tmp_path: Path) -> None:
    file = tmp_path / "tasks.jsonl"
    file.write_text('{"prompt": "first"}\n{"prompt": "second"}\n')
    tasks = tasks_of_lines(str(file))
    (tmp_path / "new.jsonl").write_text('{"prompt": "other"}\n')
    (tmp_path / "new.jsonl").replace(file)
    assert tasks[1].messages[0].content == "second"
    again = tasks_of_lines(str(file))
    with file.open("a") as more:
        more.write('{"prompt": "third"}\n')
    with pytest.raises(ConfigError, match=r"tasks.jsonl was changed while its tasks are used"):
        again[0]


@pytest.mark.parametrize("is_large", [True, False])
@pytest.mark.parametrize("field", ["prompt", "messages"])
def test_a_row_that_no_context_holds_is_refused(tmp_path: Path, is_large: bool, field: str) -> None:
    text = "word " * (MOST_CHARACTERS // 5 + 1)
    value = text if field == "prompt" else [{"role": "user", "content": text}]
    file = tmp_path / "tasks.jsonl"
    file.write_text('{"prompt": "short"}\n' + json.dumps({field: value}) + "\n")
    load = tasks_of_lines if is_large else load_tasks
    with pytest.raises(
        ConfigError, match=rf"line 2: '{field}' has 4,000,00[0-9] characters, and may have"
    ):
        load(str(file))


def test_a_row_beyond_all_bounds_is_refused_without_being_held(tmp_path: Path) -> None:
    file = tmp_path / "tasks.jsonl"
    with file.open("w") as made:
        made.write('{"prompt": "short"}\n{"prompt": "')
        made.truncate(300_000_000)
    with pytest.raises(ConfigError, match=r"line 2, has more than 64,000,000 bytes"):
        load_tasks(str(file))


def test_a_carriage_return_inside_a_line_is_named(tmp_path: Path) -> None:
    file = tmp_path / "tasks.jsonl"
    file.write_bytes(b'{"prompt": "a"}\r\n{"prompt":\r "b"}\n')
    with pytest.raises(ConfigError, match="line 2, has a carriage return"):
        tasks_of_lines(str(file))
