"""Trajectories as Parquet, one row per episode, for pandas, DuckDB and `datasets` alike."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

from ludus.core.failures import Boundary, Failure, LudusError, not_there
from ludus.core.messages import Json
from ludus.core.trajectory import Group, Trajectory
from ludus.observe.atomic import atomic_file
from ludus.observe.rows import row_of, trajectory_of

FORMAT = b"1"
"""Counts the changes to the columns that an older reader would misread."""

_FORMAT_KEY = b"ludus.trajectories"
_ROWS_AT_ONCE = 256


class StoreError(LudusError):
    """A file of trajectories cannot be written or read."""


def write_trajectories(
    path: str | Path,
    trajectories: Sequence[Trajectory],
    *,
    step: int = 0,
    split: str = "train",
    groups: Sequence[int] | None = None,
) -> None:
    """Write a file of trajectories, whole or not at all; one that is there is replaced.

    `groups` numbers the group of each trajectory. Without it, attempts at one task are one group, and an
    attempt number that comes again starts another.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    numbers = list(groups) if groups is not None else _numbered(trajectories)
    if len(numbers) != len(trajectories):
        raise ValueError(f"{len(numbers)} group numbers for {len(trajectories)} trajectories")
    rows = (
        row_of(trajectory, step=step, split=split, group=number)
        for trajectory, number in zip(trajectories, numbers, strict=True)
    )
    with (
        atomic_file(path) as temporary,
        pq.ParquetWriter(temporary, _schema(), **_encodings()) as writer,
    ):
        while chunk := list(islice(rows, _ROWS_AT_ONCE)):
            try:
                writer.write_table(pa.Table.from_pylist(chunk, schema=_schema()))
            except (pa.ArrowException, OverflowError, TypeError) as error:
                raise StoreError(f"{path}: a trajectory does not fit the columns: {error}") from error


def write_groups(
    path: str | Path, groups: Sequence[Group], *, step: int = 0, split: str = "train"
) -> None:
    """Write the trajectories of groups, in order, numbered by group."""
    flat = [trajectory for group in groups for trajectory in group.trajectories]
    numbers = [number for number, group in enumerate(groups) for _ in group.trajectories]
    write_trajectories(path, flat, step=step, split=split, groups=numbers)


def read_trajectories(path: str | Path) -> list[Trajectory]:
    """The trajectories of a file, exactly as they were written."""
    return [trajectory for _, trajectory in _read(path)]


def holds_trajectories(path: str | Path) -> bool:
    """Whether a Parquet file was written by Ludus, rather than being a table of somebody's own."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return _FORMAT_KEY in (pq.read_schema(path).metadata or {})
    except (pa.ArrowException, OSError):
        return False


def read_groups(path: str | Path) -> list[Group]:
    """The trajectories of a file, put together into the groups they were written in."""
    groups: dict[int, Group] = {}
    for number, trajectory in _read(path):
        groups.setdefault(number, Group(trajectory.task, [])).trajectories.append(trajectory)
    return list(groups.values())


def read_failures(path: str | Path) -> list[Failure]:
    """The failures of a file's episodes; nothing else of it is read."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    names = ("failure_boundary", "failure_kind", "failure_message", "failure_attempts")
    try:
        rows = pq.read_table(path, columns=list(names)).to_pylist()
        found = [[row[name] for name in names] for row in rows if row["failure_boundary"] is not None]
        return [Failure(Boundary(where), *rest) for where, *rest in found]
    except (pa.ArrowException, OSError, KeyError, ValueError, TypeError) as error:
        raise StoreError(f"{path} cannot be read as trajectories: {error}") from error


def select_trajectories(
    path: str | Path, wanted: Callable[[str, int, bool], bool]
) -> Iterator[Trajectory]:
    """The trajectories of a file for which `wanted(task, attempt, has_failed)`; no others are decoded."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    names = ["task_id", "attempt", "failure_boundary"]
    try:
        with pq.ParquetFile(path) as file:
            _check_format(path, (file.schema_arrow.metadata or {}).get(_FORMAT_KEY))
            for batch in file.iter_batches(batch_size=_ROWS_AT_ONCE):
                columns = [batch.column(name).to_pylist() for name in names]
                found = [
                    place
                    for place, (task, attempt, failed) in enumerate(zip(*columns, strict=True))
                    if wanted(task, attempt, failed is not None)
                ]
                for row in batch.take(pa.array(found, pa.int64())).to_pylist() if found else ():
                    yield trajectory_of(row)
    except (pa.ArrowException, OSError, KeyError, ValueError, IndexError, TypeError) as error:
        raise StoreError(f"{path} cannot be read as trajectories: {error}") from error


def _read(path: str | Path) -> Iterator[tuple[int, Trajectory]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    if not Path(path).is_file():
        raise StoreError(not_there(path, beside_recipe=False))
    try:
        with pq.ParquetFile(path) as file:
            _check_format(path, (file.schema_arrow.metadata or {}).get(_FORMAT_KEY))
            for batch in file.iter_batches(batch_size=_ROWS_AT_ONCE):
                for row in batch.to_pylist():
                    yield row["group_id"], trajectory_of(row)
    except (pa.ArrowException, OSError, KeyError, ValueError, IndexError, TypeError) as error:
        raise StoreError(f"{path} cannot be read as trajectories: {error}") from error


def _check_format(path: str | Path, found: bytes | None) -> None:
    if found is None:
        raise StoreError(f"{path} is Parquet, but not written by Ludus")
    if found != FORMAT:
        raise StoreError(
            f"{path} has format {found.decode(errors='replace')} and this version of Ludus reads "
            f"{FORMAT.decode()}; use the version that wrote it"
        )


def _numbered(trajectories: Sequence[Trajectory]) -> list[int]:
    seen: Counter[tuple[str, int]] = Counter()
    numbers: dict[tuple[str, int], int] = {}
    result: list[int] = []
    for trajectory in trajectories:
        attempt = (trajectory.task.id, trajectory.attempt)
        group = (trajectory.task.id, seen[attempt])
        seen[attempt] += 1
        result.append(numbers.setdefault(group, len(numbers)))
    return result


@cache
def _schema() -> Any:
    """The columns. Named numbers are lists of (name, value): not every reader has a map type."""
    import pyarrow as pa

    text, count, number = pa.string(), pa.int32(), pa.float64()
    entries = pa.list_(pa.struct([("name", text), ("value", number)]))
    messages = pa.list_(pa.struct(_message_fields(pa)))
    flat = [
        ("tokens", pa.list_(pa.int32())),
        ("action_mask", pa.list_(pa.bool_())),
        ("logprobs", pa.list_(number)),
    ]
    columns = [
        ("step", pa.int64()), ("split", text), ("group_id", count), ("attempt", count),
        ("seed", pa.int64()), ("task_id", text), ("prompt", messages), ("target", text),
        ("envs", text), ("metadata", text),
        ("task_exact", pa.bool_()), ("stop", text), ("failure_boundary", text), ("failure_kind", text),
        ("failure_message", text), ("failure_attempts", count), ("reward", number), ("rewards", entries),
        ("answer", text), ("turns", count),
        *flat,
        ("messages", messages),
        ("segments", pa.list_(pa.struct(_segment_fields(pa)))),
        ("parents", pa.list_(pa.struct([("sequence", count), ("segment", count)]))),
        ("more_sequences", pa.list_(pa.struct(flat))),
        ("seconds", entries),
    ]  # fmt: skip
    return pa.schema(columns, metadata={_FORMAT_KEY: FORMAT})


def _message_fields(pa: Any) -> list[tuple[str, Any]]:
    names = ("role", "content", "name", "tool_calls", "tool_call_id", "media")
    return [(name, pa.string()) for name in names]


def _segment_fields(pa: Any) -> list[tuple[str, Any]]:
    count, number, text = pa.int32(), pa.float64(), pa.string()
    return [
        ("sequence", count),
        ("kind", text),
        ("length", count),
        ("reward", number),
        ("finish", text),
        ("calls", text),
        ("faults", pa.list_(text)),
        ("versions", pa.list_(pa.struct([("start", count), ("version", pa.int64())]))),
        ("seconds", number),
        ("media", pa.list_(pa.struct([("sha256", text), ("start", count), ("stop", count)]))),
    ]


def _encodings() -> Json:
    """Byte-stream splitting makes exact 64-bit log-probabilities as small as 32-bit ones.

    They come from 32-bit arithmetic as a rule, so half of their bytes are zero and compress to nothing.
    """
    numbers = ("logprobs.list.element", "more_sequences.list.element.logprobs.list.element")
    texts = (
        "split",
        "task_id",
        "target",
        "envs",
        "metadata",
        "stop",
        "failure_boundary",
        "failure_kind",
        "answer",
    )
    return {
        "compression": "zstd",
        "use_dictionary": list(texts),
        "column_encoding": dict.fromkeys(numbers, "BYTE_STREAM_SPLIT"),
    }
