"""Where tasks and other rows of data come from: files, datasets, or a function of the user's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ludus.core.failures import ConfigError, LudusError, MissingExtraError
from ludus.core.registry import load_reference
from ludus.core.task import Task, numbered
from ludus.core.user_code import error_with_location
from ludus.core.user_files import file_problem, json_lines, read_user_json, read_user_text
from ludus.envs.world import adapted_tasks
from ludus.rollouts.row_images import with_row_images
from ludus.rollouts.task_file import TaskFile, is_large

DATASET = "dataset:"
"""How a Hugging Face dataset is named: dataset:NAME:CONFIG@SPLIT; without them its own config, and train."""
FILES = (".jsonl", ".json", ".parquet")
"""The files that hold rows: JSON lines, a JSON list, Parquet."""
MOST_CHARACTERS = 4_000_000
"""Most characters of a row's texts, about a million tokens."""
_TEXTS = frozenset({"prompt", "messages", "completion", "chosen", "rejected"})
"""Fields of a row that a model reads."""
_CHECKED = frozenset({"messages", "envs", "system", "metadata"})
"""Further fields of a task."""
Columns = Mapping[str, str]
"""Which column is which field: {"prompt": "question"}; a dot reaches into one: "reward_model.ground_truth"."""


def load_tasks(source: str, columns: Columns | None = None) -> Sequence[Task]:
    """Tasks from a file (`FILES`), dataset:NAME:CONFIG@SPLIT, an adapter (`gymnasium:ID`), or code.

    Those of a large file of JSON lines are all checked, and parsed again when they are asked for.
    """
    if source.endswith(".jsonl") and not source.startswith(DATASET) and is_large(source):
        return tasks_of_lines(source, columns)
    return _parsed(read_rows(source, columns), source)


def tasks_of_lines(source: str, columns: Columns | None = None) -> TaskFile:
    """The tasks of a file of JSON lines, each parsed when it is asked for."""
    prepared = _prepared(source, columns)
    return TaskFile(
        source,
        read=lambda where, row: _task(where, prepared(where, row)),
        check=lambda where, row: _id_of(where, prepared(where, row)),
    )


def is_rows(source: str) -> bool:
    """Whether this names a file or a dataset, rather than code."""
    return source.startswith(DATASET) or source.endswith(FILES)


def read_rows(source: str, columns: Columns | None = None) -> Iterator[tuple[str, Any]]:
    """The rows of a source, each with where it stands, its columns called as `columns` says."""
    if source.startswith(DATASET):
        rows = _counted(source, _dataset_rows(source.removeprefix(DATASET)))
    elif source.endswith(".jsonl"):
        rows = json_lines(read_user_text(source), source)
    elif source.endswith(".json"):
        rows = _counted(source, _json_rows(Path(source)))
    elif source.endswith(".parquet"):
        rows = _counted(source, _parquet_rows(Path(source)))
    elif (tasks := adapted_tasks(source)) is not None:
        rows = _counted(source, tasks)
    elif ":" in source:
        made = load_reference(source)
        try:
            found = made() if callable(made) else made
        except LudusError:
            raise
        except Exception as error:
            raise ConfigError(f"{source} raised {error_with_location(error)}") from error
        if not isinstance(found, Iterable) or isinstance(found, Mapping):
            raise ConfigError(f"{source} gives {type(found).__name__}, not a list")
        rows = _counted(source, found)
    else:
        raise ConfigError(
            f"{source!r} is no source of data; give a .jsonl, .json or .parquet file, "
            "'module:function', or 'dataset:NAME@SPLIT' ('dataset:NAME:CONFIG@SPLIT')"
        )
    prepared = _prepared(source, columns)
    for where, row in rows:
        yield where, prepared(where, row)


def _prepared(source: str, columns: Columns | None) -> Callable[[str, Any], Any]:
    """How a row of a source is read: its columns called as `columns` says, its images in their places."""
    has_gaps = source.startswith(DATASET) or source.endswith(".parquet")
    folder = Path(source).parent if source.endswith(FILES) and not source.startswith(DATASET) else None

    def prepared(where: str, row: Any) -> Any:
        named = _renamed(row, columns, where) if columns else row
        whole = _without_gaps(named) if has_gaps else named
        _refuse_long(where, whole)
        return with_row_images(whole, folder, where) if is_rows(source) else whole

    return prepared


def _refuse_long(where: str, row: Any) -> None:
    """Refuse what no context holds: tokenizers would work at it for minutes, and hear of no signal."""
    if not isinstance(row, Mapping):
        return
    for name in _TEXTS & row.keys():
        if (size := _characters(row[name])) > MOST_CHARACTERS:
            raise ConfigError(
                f"{where}: {name!r} has {size:,} characters, and may have {MOST_CHARACTERS:,}: shorten it, or "
                "leave the row out"
            )


def _characters(value: Any) -> int:
    """Number of characters of all text in a value; images count as none."""
    if isinstance(value, str):
        return 0 if value.startswith("data:") else len(value)
    if isinstance(value, Mapping):
        return sum(map(_characters, value.values()))
    return sum(map(_characters, value)) if isinstance(value, list | tuple) else 0


def parse_tasks(rows: Iterable[Task | Mapping[str, Any]], source: str) -> list[Task]:
    """Checked tasks with unique ids; the error says which row is wrong, and how."""
    if not isinstance(rows, Iterable) or isinstance(rows, Mapping):
        raise ConfigError(
            f"{source} is a list of tasks, or the name of a file or a function; not {type(rows).__name__}"
        )
    return _parsed(((f"task {n} of {source}", row) for n, row in enumerate(rows, start=1)), source)


def _parsed(rows: Iterable[tuple[str, Any]], source: str) -> list[Task]:
    tasks: list[Task] = []
    places: dict[str, str] = {}
    for where, row in rows:
        task = _task(where, row)
        if task.id and (first := places.setdefault(task.id, where)) != where:
            raise ConfigError(
                f"two tasks have the id {task.id!r:.200}: {first}, and {where}; ids must be unique within a "
                "task set"
            )
        tasks.append(task)
    if not tasks:
        raise ConfigError(f"{source} holds no tasks")
    try:
        return numbered(tasks)
    except ValueError as error:
        raise ConfigError(f"{source}: {error}") from None


def _task(where: str, row: Any) -> Task:
    try:
        return Task.parse(row)
    except ValueError as error:
        raise ConfigError(f"{where}, is not a task: {error}{_hint(row)}") from None


def _id_of(where: str, row: Any) -> str:
    """The id of a row that is a task. Most rows are a prompt and metadata, of which nothing can be wrong."""
    if isinstance(row, dict) and isinstance(row.get("prompt"), str) and not _CHECKED & row.keys():
        return str(row.get("id", ""))
    return _task(where, row).id


def _hint(row: Any) -> str:
    """A hint where the prompt has another name."""
    if not isinstance(row, Mapping) or {"prompt", "messages"} & row.keys():
        return ""
    names = ", ".join(map(str, row))
    return f'. It has: {names}. Say which is which: columns = {{ prompt = "...", target = "..." }}'


def _renamed(row: Any, columns: Columns, where: str) -> Any:
    if not isinstance(row, Mapping):
        raise ConfigError(f"{where} is no table of columns but {type(row).__name__}")
    rest = {name: value for name, value in row.items() if name not in columns.values()}
    return rest | {name: _column(row, name, column, where) for name, column in columns.items()}


def _column(row: Mapping[str, Any], name: str, column: str, where: str) -> Any:
    if column in row:
        return row[column]
    value: Any = row
    for part in column.split("."):
        if not isinstance(value, Mapping) or part not in value:
            raise ConfigError(
                f"{where} has no column {column!r} (columns.{name}); it has: {', '.join(map(str, row))}"
            )
        value = value[part]
    return value


def _counted(source: str, rows: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    return ((f"{source}, row {number}", row) for number, row in enumerate(rows, start=1))


def _json_rows(path: Path) -> list[Any]:
    rows = read_user_json(path)
    if not isinstance(rows, list):
        raise ConfigError(f"{path} holds {type(rows).__name__}, not a list of rows")
    return rows


def _parquet_rows(path: Path) -> list[Any]:
    import pyarrow
    import pyarrow.parquet

    if not path.is_dir() and (problem := file_problem(path)) is not None:  # a folder may hold a data set
        raise ConfigError(problem)
    try:
        rows: list[Any] = pyarrow.parquet.read_table(path).to_pylist()
    except (OSError, pyarrow.ArrowException) as error:
        raise ConfigError(f"{path} cannot be read as Parquet: {error}") from None
    return rows


def _without_gaps(value: Any) -> Any:
    """Tables give every row every column and every struct every field; what is not there is None."""
    if isinstance(value, dict):
        return {name: _without_gaps(inner) for name, inner in value.items() if inner is not None}
    return [_without_gaps(inner) for inner in value] if isinstance(value, list) else value


def _dataset_rows(name: str) -> Iterable[Any]:
    """The rows of a dataset on the hub, in a folder of data files, or saved by `save_to_disk`."""
    source, _, split = name.partition("@")
    where, _, config = source.partition(":")
    if not where.strip():
        raise ConfigError(
            f"{DATASET}{name} names no dataset: it is written dataset:NAME:CONFIG@SPLIT, where NAME is on the "
            "hub or a folder; CONFIG and SPLIT may be left out"
        )
    try:
        import datasets
    except ImportError:
        raise MissingExtraError("datasets", "datasets", f"the source dataset:{name}") from None
    try:
        if any((Path(where) / file).is_file() for file in ("dataset_dict.json", "state.json")):
            saved = datasets.load_from_disk(where)
            is_split = isinstance(saved, datasets.DatasetDict)
            rows: Iterable[Any] = saved[split or "train"] if is_split else saved
        else:
            # a folder's files may have changed since they were converted: the library's cache does not look
            mode = "reuse_cache_if_exists" if Path(where).is_dir() else None
            rows = datasets.load_dataset(
                where, config or None, split=split or "train", download_mode=mode
            )
    except (OSError, ValueError, KeyError, datasets.exceptions.DatasetsError) as error:
        raise ConfigError(
            f"dataset:{name} cannot be loaded ({type(error).__name__}: {error!s:.600}): it is written "
            "dataset:NAME:CONFIG@SPLIT, where NAME is on the hub or a folder"
        ) from None
    return rows
