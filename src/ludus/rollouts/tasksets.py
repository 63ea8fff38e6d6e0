"""Where tasks come from: files, datasets, or a function of the user's."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ludus.core.failures import ConfigError, MissingExtraError
from ludus.core.registry import load_reference
from ludus.core.task import Task, numbered

DATASET = "dataset:"
"""How a Hugging Face dataset is named: dataset:NAME or dataset:NAME@SPLIT; the split is train by default."""


def load_tasks(source: str) -> list[Task]:
    """Tasks from a .jsonl or .parquet file, from dataset:NAME@SPLIT, or from 'module:function'."""
    if source.startswith(DATASET):
        rows: Iterable[Any] = _dataset_rows(source.removeprefix(DATASET))
    elif source.endswith(".jsonl"):
        rows = _jsonl_rows(Path(source))
    elif source.endswith(".parquet"):
        rows = _parquet_rows(Path(source))
    elif ":" in source:
        made = load_reference(source)
        rows = made() if callable(made) else made
    else:
        raise ConfigError(
            f"{source!r} is no source of tasks; give a .jsonl or .parquet file, "
            "'module:function', or 'dataset:NAME@SPLIT'"
        )
    return parse_tasks(rows, source)


def parse_tasks(rows: Iterable[Task | Mapping[str, Any]], source: str) -> list[Task]:
    """Checked tasks with unique ids; the error says which row is wrong, and how."""
    tasks: list[Task] = []
    if not isinstance(rows, Iterable) or isinstance(rows, Mapping):
        raise ConfigError(
            f"{source} is a list of tasks, or the name of a file or a function; not {type(rows).__name__}"
        )
    for number, row in enumerate(rows, start=1):
        try:
            tasks.append(Task.parse(row))
        except (ValueError, TypeError, AttributeError, KeyError) as error:
            raise ConfigError(f"task {number} of {source} is not a task: {error}") from None
    if not tasks:
        raise ConfigError(f"{source} holds no tasks")
    try:
        return numbered(tasks)
    except ValueError as error:
        raise ConfigError(f"{source}: {error}") from None


def _jsonl_rows(path: Path) -> Iterator[Any]:
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    try:
                        yield json.loads(line)
                    except ValueError as error:
                        raise ConfigError(f"{path}, line {number}, is not JSON: {error}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None


def _parquet_rows(path: Path) -> Iterator[Any]:
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.read_table(path)
    except (OSError, pyarrow.ArrowException) as error:
        raise ConfigError(f"{path} cannot be read as Parquet: {error}") from None
    for row in table.to_pylist():
        yield _without_gaps(row)


def _without_gaps(value: Any) -> Any:
    """Parquet gives every row every column and every struct every field; what is not there is None."""
    if isinstance(value, dict):
        return {name: _without_gaps(inner) for name, inner in value.items() if inner is not None}
    return [_without_gaps(inner) for inner in value] if isinstance(value, list) else value


def _dataset_rows(name: str) -> Iterator[Any]:
    try:
        import datasets
    except ImportError:
        raise MissingExtraError("datasets", "datasets", f"the task source dataset:{name}") from None
    where, _, split = name.partition("@")
    yield from datasets.load_dataset(where, split=split or "train")
