"""Files of episodes: Parquet, one row per episode, for pandas, DuckDB and `datasets` alike; and their images.

The bytes of images lie beside the file, each once, under their hash.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

from ludus.core.failures import Boundary, ConfigError, Failure, LudusError, not_there
from ludus.core.messages import Json, Media, MediaSpan, Message
from ludus.core.trajectory import Group, Trajectory
from ludus.observe.episode_rows import FAILURE_FIELDS, encodings, row_of, schema, trajectory_of
from ludus.observe.files import atomic_file, atomic_write

_log = logging.getLogger(__name__)

FORMATS = FORMAT, TREE_FORMAT = (b"1", b"2")
"""Counts the changes to the columns that an older reader would misread. 2: there are branches of trees."""

_FORMAT_KEY = b"ludus.trajectories"
_NOTES_KEY = b"ludus.groups"
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
    notes: Sequence[Json] = (),
) -> None:
    """Write a file of trajectories, whole or not at all; one that is there is replaced.

    `groups` numbers the group of each trajectory. Without it, attempts at one task are one group, and an
    attempt number that comes again starts another. `notes` are kept in the file's metadata.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    numbers = list(groups) if groups is not None else _numbered(trajectories)
    if len(numbers) != len(trajectories):
        raise ValueError(f"{len(numbers)} group numbers for {len(trajectories)} trajectories")
    rows = (
        row_of(trajectory, step=step, split=split, group=number, parent=parent)
        for trajectory, number, parent in zip(
            trajectories, numbers, _parents(trajectories, numbers), strict=True
        )
    )
    has_trees = any(trajectory.branch is not None for trajectory in trajectories)
    columns = schema().with_metadata(
        {_FORMAT_KEY: TREE_FORMAT if has_trees else FORMAT, _NOTES_KEY: json.dumps(list(notes))}
    )
    with (
        atomic_file(path) as temporary,
        pq.ParquetWriter(temporary, columns, **encodings()) as writer,
    ):
        while chunk := list(islice(rows, _ROWS_AT_ONCE)):
            try:
                writer.write_table(pa.Table.from_pylist(chunk, schema=columns))
            except (pa.ArrowException, OverflowError, TypeError) as error:
                raise StoreError(f"{path}: a trajectory does not fit the columns: {error}") from error


def write_groups(
    path: str | Path,
    groups: Sequence[Group],
    *,
    step: int = 0,
    split: str = "train",
    notes: Sequence[Json] = (),
) -> None:
    """Write the trajectories of groups, in order, numbered by group; `notes` has one for each group, or
    none."""
    flat = [trajectory for group in groups for trajectory in group.trajectories]
    numbers = [number for number, group in enumerate(groups) for _ in group.trajectories]
    write_trajectories(path, flat, step=step, split=split, groups=numbers, notes=notes)


def read_notes(path: str | Path) -> list[Json]:
    """The notes on each group of a file; empty if it was written without notes."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        noted = (pq.read_schema(path).metadata or {}).get(_NOTES_KEY, b"[]")
        notes: list[Json] = json.loads(noted)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise StoreError(f"{path} cannot be read as trajectories: {error}") from error
    return notes


def read_trajectories(path: str | Path) -> list[Trajectory]:
    """The trajectories of a file, exactly as they were written."""
    return [trajectory for _, trajectory in _read(path)]


def holds_trajectories(path: str | Path) -> bool:
    """Whether a Parquet file was written by Ludus, as against any other table."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return _FORMAT_KEY in (pq.read_schema(path).metadata or {})
    except (pa.ArrowException, OSError):
        return False


def read_groups(path: str | Path) -> list[Group]:
    """The trajectories of a file, put together into the groups they were written in."""
    return list(read_numbered_groups(path).values())


def read_numbered_groups(path: str | Path) -> dict[int, Group]:
    """The groups of a file by the number that each was written with."""
    groups: dict[int, Group] = {}
    for number, trajectory in _read(path):
        groups.setdefault(number, Group(trajectory.task, [])).trajectories.append(trajectory)
    return groups


def read_failures(path: str | Path) -> list[Failure]:
    """The failures of a file's episodes; nothing else of it is read."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    names = [f"failure_{name}" for name in FAILURE_FIELDS]
    try:
        rows = pq.read_table(path, columns=names).to_pylist()
        found = [[row[name] for name in names] for row in rows if row["failure_boundary"] is not None]
        return [Failure(Boundary(where), *rest) for where, *rest in found]
    except (pa.ArrowException, OSError, KeyError, ValueError, TypeError) as error:
        raise StoreError(f"{path} cannot be read as trajectories: {error}") from error


def select_trajectories(
    path: str | Path, wanted: Callable[[str, int, bool], bool]
) -> Iterator[Trajectory]:
    """The trajectories of a file for which `wanted(task, attempt, has_failed)`; no others are decoded."""
    return (trajectory for _, trajectory in _read(path, wanted))


def _read(
    path: str | Path, wanted: Callable[[str, int, bool], bool] | None = None
) -> Iterator[tuple[int, Trajectory]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    if not Path(path).is_file():
        raise StoreError(not_there(path, beside_recipe=False))
    names = ("task_id", "attempt", "failure_boundary")
    known: dict[tuple[int, int], Trajectory] = {}
    try:
        with pq.ParquetFile(path) as file:
            format = (file.schema_arrow.metadata or {}).get(_FORMAT_KEY)
            if format is None:
                raise StoreError(f"{path} is Parquet, but not written by Ludus")
            if format not in FORMATS:
                raise StoreError(
                    f"{path} has format {format.decode(errors='replace')} and this version of Ludus reads "
                    f"{' and '.join(one.decode() for one in FORMATS)}; use the version that wrote it"
                )
            for batch in file.iter_batches(batch_size=_ROWS_AT_ONCE):
                if format == TREE_FORMAT:  # branches need their parents, so all are decoded
                    for row in batch.to_pylist():
                        number = row["group_id"]
                        one = trajectory_of(row, known.get((number, row["branch_attempt"])))
                        known[number, one.attempt] = one
                        if wanted is None or wanted(one.task.id, one.attempt, one.failure is not None):
                            yield number, one
                    continue
                if wanted is not None:
                    columns = zip(*(batch.column(name).to_pylist() for name in names), strict=True)
                    found = [
                        wanted(task, attempt, failed is not None) for task, attempt, failed in columns
                    ]
                    batch = batch.filter(pa.array(found, pa.bool_()))
                for row in batch.to_pylist():
                    yield row["group_id"], trajectory_of(row)
    except (pa.ArrowException, OSError, KeyError, ValueError, IndexError, TypeError) as error:
        raise StoreError(f"{path} cannot be read as trajectories: {error}") from error


def _parents(trajectories: Sequence[Trajectory], groups: Sequence[int]) -> Iterator[Trajectory | None]:
    """For each branch, the attempt of its group that it branched off, if that one stands before it."""
    known: dict[tuple[int, int], Trajectory] = {}
    for trajectory, group in zip(trajectories, groups, strict=True):
        branch = trajectory.branch
        yield None if branch is None else known.get((group, branch.attempt))
        known[group, trajectory.attempt] = trajectory


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


# Images

MEDIA = "media"
_NAME = re.compile(r"[0-9a-f]{64}")
_MOST_BYTES = 1_000_000_000
"""Bytes of images that a run stores in all; of later images only the hash is recorded."""


class MediaStore:
    """A folder of images, each under the SHA-256 of its bytes."""

    def __init__(self, folder: Path, most_bytes: int = _MOST_BYTES) -> None:
        self.folder = folder
        self._most = most_bytes
        self._kept: set[str] | None = None
        self._bytes = 0
        self._is_full = False

    def path(self, sha256: str) -> Path | None:
        """Where an image is; None for what is no hash, or not kept."""
        file = self.folder / sha256
        return file if _NAME.fullmatch(sha256) and file.is_file() else None

    def keep(self, groups: Iterable[Group]) -> None:
        """Write the images of these episodes that are at hand and not kept yet."""
        for media in (one for g in groups for t in g.trajectories for one in _media_of(t)):
            if media.data is None:
                continue
            name = hashlib.sha256(media.data).hexdigest()
            if name != media.sha256 or name in self._known() or self._is_full:
                continue
            if self._bytes + len(media.data) > self._most:
                self._is_full = True
                _log.warning("%s is full (%d bytes): later images are not kept", self.folder, self._most)
                return
            atomic_write(self.folder / name, media.data)
            self._known().add(name)
            self._bytes += len(media.data)

    def _known(self) -> set[str]:
        if self._kept is None:
            entries = self.folder.iterdir() if self.folder.is_dir() else ()
            files = [file for file in entries if _NAME.fullmatch(file.name)]
            self._kept = {file.name for file in files}
            self._bytes = sum(file.stat().st_size for file in files)
        return self._kept


def _media_of(trajectory: Trajectory) -> Iterator[Media]:
    for message in (*trajectory.task.messages, *trajectory.messages):
        yield from message.media
    yield from (render.picture for render in trajectory.renders if render.picture is not None)
    for span in _spans(trajectory):  # of conversations that the last one does not go on from
        yield Media("image", span.sha256, span.data)


def _spans(trajectory: Trajectory) -> Iterator[MediaSpan]:
    for sequence in trajectory.sequences:
        for segment in sequence.segments:
            yield from segment.media


def keep_images(folder: Path, trajectories: Iterable[Trajectory]) -> None:
    """Write the images that models were shown to `folder`/media, beside a file of episodes to train on."""
    for span in (span for trajectory in trajectories for span in _spans(trajectory)):
        path = folder / MEDIA / span.sha256
        if span.data is not None and not path.is_file():
            path.parent.mkdir(parents=True, exist_ok=True)
            atomic_write(path, span.data)


def with_images(trajectories: Iterable[Trajectory], file: Path) -> list[Trajectory]:
    """Episodes as they were read from a file, with the bytes of their images, which lie in a folder near it.

    One that a model was shown must be there: without it nothing can be learned from the episode.
    """
    folders = [parent / MEDIA for parent in list(file.absolute().parents)[:2]]
    known: dict[str, bytes | None] = {}

    def data(sha256: str) -> bytes | None:
        if sha256 not in known:
            paths = (MediaStore(folder).path(sha256) for folder in folders)
            found = next((path.read_bytes() for path in paths if path is not None), None)
            is_right = found is not None and hashlib.sha256(found).hexdigest() == sha256
            known[sha256] = found if is_right else None
        return known[sha256]

    def whole(message: Message) -> Message:
        if not message.media:
            return message
        return replace(
            message, media=tuple(replace(one, data=data(one.sha256)) for one in message.media)
        )

    given = list(trajectories)
    for trajectory in given:
        trajectory.messages = [whole(message) for message in trajectory.messages]
        if any(message.media for message in trajectory.task.messages):
            own = tuple(whole(message) for message in trajectory.task.messages)
            trajectory.task = replace(trajectory.task, messages=own)
        for segment in (one for sequence in trajectory.sequences for one in sequence.segments):
            if not segment.media:
                continue
            segment.media = tuple(replace(span, data=data(span.sha256)) for span in segment.media)
            if missing := next((span for span in segment.media if span.data is None), None):
                where = " nor in ".join(map(str, folders))
                raise ConfigError(
                    f"{file}: the image {missing.sha256} of task {trajectory.task.id!r} is neither in "
                    f"{where}, or is damaged: put it back, or leave these episodes out"
                )
    return given
