"""Where tasks and other rows of data come from: files, datasets, or a function of the user's."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

from ludus.core.failures import ConfigError, LudusError, MissingExtraError
from ludus.core.images import PARTS, ImageError, image_of_file, image_of_part, image_of_url
from ludus.core.messages import Media, Message
from ludus.core.registry import import_object
from ludus.core.task import Task, numbered
from ludus.core.user_code import error_with_location
from ludus.core.user_files import file_problem, json_lines, read_user_json, read_user_text
from ludus.envs.world import adapted_tasks
from ludus.model.image_files import check_image, decode_image
from ludus.rollouts.task_files import (
    ROWS,
    TaskFile,
    is_large,
    is_logs,
    opening_rows,
    read_logs,
    too_long,
)

DATASET = "dataset:"
"""How a Hugging Face dataset is named: dataset:NAME:CONFIG@SPLIT; without them its own config, and train."""
FILES = (".jsonl", ".json", ".parquet")
"""The files that hold rows: JSON lines, a JSON list, Parquet."""
_CHECKED = frozenset({"messages", "envs", "system", "metadata"})
"""Further fields of a task."""
Columns = Mapping[str, str]
"""Which column is which field: {"prompt": "question"}; a dot reaches into one: "reward_model.ground_truth"."""


def load_tasks(source: str, columns: Columns | None = None) -> Sequence[Task]:
    """Tasks from a file (`FILES`), dataset:NAME:CONFIG@SPLIT, an adapter (`gymnasium:ID`), logs, or code.

    Those of a large file of JSON lines are all checked, and parsed again when they are asked for.
    """
    if not source.startswith(DATASET) and is_logs(source):
        return _parsed(opening_rows(read_rows(source, columns)), source)
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
    """Whether this names a file, a dataset or a folder of logs, rather than code."""
    return source.startswith(DATASET) or source.endswith(FILES) or Path(source).is_dir()


def read_rows(source: str, columns: Columns | None = None) -> Iterator[tuple[str, Any]]:
    """The rows of a source, each with where it stands, its columns called as `columns` says."""
    if source.startswith(DATASET):
        rows = _counted(source, _dataset_rows(source.removeprefix(DATASET)))
    elif is_logs(source):
        rows = iter(read_logs(source))
    elif source.endswith(".jsonl"):
        rows = json_lines(read_user_text(source), source)
    elif source.endswith(".json"):
        rows = _counted(source, _json_rows(Path(source)))
    elif source.endswith(".parquet"):
        rows = _counted(source, _parquet_rows(Path(source)))
    elif (tasks := adapted_tasks(source)) is not None:
        rows = _counted(source, tasks)
    elif ":" in source:
        made = import_object(source)
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
            f"{source!r} is no source of data; give a .jsonl, .json or .parquet file, a folder of logs, "
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
        if (problem := too_long(whole)) is not None:
            raise ConfigError(f"{where}: {problem}: shorten it, or leave the row out")
        return with_row_images(whole, folder, where) if is_rows(source) else whole

    return prepared


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
    if isinstance(rows, Mapping) and ROWS & rows.keys():
        return [rows]
    if not isinstance(rows, list):
        kind = "an object" if isinstance(rows, Mapping) else f"the value {json.dumps(rows)[:80]}"
        raise ConfigError(
            f"{path} holds {kind}, not a list of rows, nor a row ({', '.join(sorted(ROWS))})"
        )
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


_COLUMN = "images"


def with_row_images(row: Any, folder: Path | None, where: str) -> Any:
    """A row in which each image of a message is `Media`: {"type": "image", "path": "a.png"} and the like.

    Paths are relative to `folder`, that of the row's file; without one, no file is read. A part without a
    image of its own, {"type": "image"}, takes the next one of the column `images`. What is no image, too
    large or cut off is refused, with `where`.
    """
    if not isinstance(row, Mapping) or not any(isinstance(value, list) for value in row.values()):
        return row
    try:
        found = {name: _messages(value, row, folder, where) for name, value in row.items()}
    except ImageError as error:
        raise ConfigError(f"{where}: {error}") from None
    changed = {name for name, value in found.items() if value is not row[name]}
    if not changed:
        return row
    return {name: value for name, value in found.items() if name != _COLUMN or not _has_bare(row)}


def undecodable_images(messages: Iterable[Message]) -> Iterator[str]:
    """What is wrong with those of the messages' images that cannot be decoded, and where each comes from.

    It decodes each image once, which takes about 10 to 50 ms for a million pixels.
    """
    images: dict[str, Media] = {}
    for media in (media for one in messages for media in one.media if media.is_image):
        images.setdefault(media.sha256, media)
    for media in images.values():
        try:
            if media.data is not None:
                decode_image(media.data)
        except ImageError as error:
            yield media.named(error)


def _messages(value: Any, row: Mapping[str, Any], folder: Path | None, where: str) -> Any:
    if not isinstance(value, list) or not any(_has_images(message) for message in value):
        return value
    column = row.get(_COLUMN)
    left = iter(column if isinstance(column, list) else ())
    return [
        {**message, "content": [_part(part, left, folder, where) for part in message["content"]]}
        if _has_images(message)
        else message
        for message in value
    ]


def _has_images(message: Any) -> bool:
    content = message.get("content") if isinstance(message, Mapping) else None
    return isinstance(content, list) and any(_is_image(part) for part in content)


def _is_image(part: Any) -> bool:
    kind = part.get("type") if isinstance(part, Mapping) else None
    return isinstance(kind, str) and kind in PARTS


def _is_bare(part: Any) -> bool:
    return _is_image(part) and part["type"] == "image" and not part.keys() - {"type", "text"}


def _has_bare(row: Mapping[str, Any]) -> bool:
    messages = [m for value in row.values() if isinstance(value, list) for m in value]
    return any(_has_images(m) and any(_is_bare(part) for part in m["content"]) for m in messages)


def _part(part: Any, left: Iterator[Any], folder: Path | None, where: str) -> Any:
    if not _is_image(part):
        return part
    given: Any = None
    if _is_bare(part):
        given = next(left, None)
        if given is None:
            raise ImageError(
                f'a part {{"type": "image"}} has no image: give it "path", or the row a column {_COLUMN!r}'
            )
    elif part["type"] == "image":
        given = next((part[name] for name in ("path", "image", "url") if name in part), None)
    made = image_of_part(part) if given is None else _image(given, folder)
    is_path = isinstance(given, str) and not given.startswith("data:")
    name = f"{given:.200}" if is_path else "an image"
    _check(made, name)
    return {"type": "image", "image": replace(made, origin=f"{where}: {name}")}


def _check(image: Media, name: str) -> None:
    if image.data is None:
        return
    try:
        check_image(image.data)
    except MissingExtraError:
        return  # no model is shown it without that, and one that reads text only needs no images
    except ImageError as error:
        raise ImageError(f"{name}: {error}; save it again, or leave the row out") from None


def _image(given: Any, folder: Path | None) -> Media:
    """A path, a data: URL, bytes, a table with either (Parquet), or an image of Pillow's (datasets)."""
    if isinstance(given, Media):
        return given
    if isinstance(given, Mapping):
        return _image(given.get("bytes") or given.get("path"), folder)
    if isinstance(given, bytes):
        return Media.image(given)
    if hasattr(given, "save"):
        file = BytesIO()
        given.convert("RGB").save(file, format="PNG")
        return Media.image(file.getvalue())
    if not isinstance(given, str):
        raise ImageError(f"an image is a path or a data: URL, not {given!r:.60}")
    if given.startswith("data:") or "://" in given:
        return image_of_url(given)
    if folder is None:
        raise ImageError(f"the image {given!r:.60} is a path, and its row is of no file")
    return image_of_file(folder / given)
