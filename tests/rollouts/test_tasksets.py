"""Task sets: every source gives the same tasks, and a broken row is named."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ludus.core import ConfigError, MissingExtraError, Task
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


CARD = """---
configs:
- config_name: main
  data_files:
  - {split: train, path: main/train.jsonl}
  - {split: test, path: main/test.jsonl}
- config_name: other
  data_files: other/train.jsonl
---
"""
COLUMNS = {"prompt": "question", "target": "answer"}


@pytest.fixture
def sums(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A dataset with two configs, as it lies on a hub; there its name would stand in place of the folder."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "sums"
    for place, question in {"main/train": "2+3?", "main/test": "4+5?", "other/train": "6+7?"}.items():
        file = folder / f"{place}.jsonl"
        file.parent.mkdir(parents=True, exist_ok=True)
        row = {"question": question, "answer": str(eval(question[:-1])), "extra": {"level": None}}
        file.write_text(json.dumps(row))
    (folder / "README.md").write_text(CARD)
    return f"dataset:{folder}"


def test_from_a_dataset(sums: str) -> None:
    for config, asked, target in (
        (":main@train", "2+3?", "5"),
        (":main@test", "4+5?", "9"),
        (":other", "6+7?", "13"),
    ):
        (task,) = load_tasks(sums + config, COLUMNS)
        assert (task.messages[0].content, task.target, task.metadata) == (asked, target, {"extra": {}})


def test_a_dataset_in_a_folder_is_read_as_it_is_now(sums: str) -> None:
    assert load_tasks(f"{sums}:other", COLUMNS)[0].target == "13"
    file = Path(sums.removeprefix("dataset:"), "other/train.jsonl")
    file.write_text(file.read_text().replace("13", "14"))
    assert load_tasks(f"{sums}:other", COLUMNS)[0].target == "14"


def test_from_a_dataset_that_was_saved(tmp_path: Path) -> None:
    import datasets

    rows = datasets.Dataset.from_list([{"prompt": "2+3?", "target": "5"}])
    rows.save_to_disk(tmp_path / "split")
    datasets.DatasetDict(test=rows).save_to_disk(tmp_path / "all")
    for source in (f"dataset:{tmp_path}/split", f"dataset:{tmp_path}/all@test"):
        assert load_tasks(source)[0].target == "5"
    with pytest.raises(ConfigError, match="cannot be loaded"):
        load_tasks(f"dataset:{tmp_path}/all@train")


@pytest.mark.parametrize("end", ["@test", ":nope@train", ":main@nope"])
def test_a_dataset_that_cannot_be_loaded_is_told(sums: str, end: str) -> None:
    with pytest.raises(ConfigError, match="dataset:NAME:CONFIG@SPLIT"):
        load_tasks(sums + end)


@pytest.mark.parametrize("source", ["dataset:", "dataset:@train", "dataset::a@b", "dataset: "])
def test_a_dataset_without_a_name_is_told(source: str) -> None:
    with pytest.raises(ConfigError, match=f"^{source} names no dataset: .*dataset:NAME:CONFIG@SPLIT"):
        load_tasks(source)


def test_a_dataset_needs_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingExtraError, match=r"ludus-rl\[datasets\]"):
        load_tasks("dataset:someone/sums")


def test_columns_by_other_names(tmp_path: Path) -> None:
    row = {"question": "2+3?", "reward_model": {"ground_truth": "5"}, "level": "easy"}
    file = tmp_path / "tasks.json"
    file.write_text(json.dumps([row]))
    (task,) = load_tasks(str(file), {"prompt": "question", "target": "reward_model.ground_truth"})
    assert (task.messages[0].content, task.target) == ("2+3?", "5")
    assert task.metadata == {"reward_model": {"ground_truth": "5"}, "level": "easy"}
    with pytest.raises(
        ConfigError, match=r"row 1 has no column 'ask' \(columns.prompt\); it has: quest"
    ):
        load_tasks(str(file), {"prompt": "ask"})
    with pytest.raises(ConfigError, match=r"It has: question, .*columns = \{ prompt = "):
        load_tasks(str(file))


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("{", "line 1, is not JSON"),
        ('{"target": "5"}', "line 1, is not a task: .*exactly one of 'prompt' and 'messages'"),
        (
            '{"prompt": "a", "id": "x"}\n\n{"prompt": "b", "id": "x"}',
            "two tasks have the id 'x': .*line 1, and .*line 3;",
        ),
        ('{"messages": [{"role": "god", "content": "hi"}]}', "role must be"),
        ('{"messages": [{"role": "user", "content": 5}]}', "content must be a string"),
        ('["prompt"]', "line 1, is not a task"),
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
