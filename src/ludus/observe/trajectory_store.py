"""Trajectories as Parquet, one row per episode, for pandas, DuckDB and `datasets` alike.

Tokens and log-probabilities are stored once, flat, for each sequence; `segments` says how many of them,
in order, belong to which segment. The first sequence, nearly always the only one, has the columns
`tokens`, `action_mask` and `logprobs` to itself; further ones are in `more_sequences`. `action_mask`
alone could be computed from the segments: it is there because every reader wants it, and costs next to
nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

from ludus.core.failures import Boundary, Failure, Fault, LudusError, not_there
from ludus.core.generation import FinishReason, VersionSpan
from ludus.core.messages import Json, Media, Message, ToolCall
from ludus.core.task import Task
from ludus.core.trajectory import (
    Group,
    MediaSpan,
    Segment,
    SegmentKind,
    StopReason,
    TokenSequence,
    Trajectory,
)
from ludus.observe.encoding import dump_value, escape, load_value, unescape
from ludus.observe.files import atomic_file

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
    """Whether a Parquet file was written by Ludus, as against any other table."""
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
    return (trajectory for _, trajectory in _read(path, wanted))


def _read(
    path: str | Path, wanted: Callable[[str, int, bool], bool] | None = None
) -> Iterator[tuple[int, Trajectory]]:
    """The trajectories, each with the number of its group."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    if not Path(path).is_file():
        raise StoreError(not_there(path, beside_recipe=False))
    names = ("task_id", "attempt", "failure_boundary")
    try:
        with pq.ParquetFile(path) as file:
            _check_format(path, (file.schema_arrow.metadata or {}).get(_FORMAT_KEY))
            for batch in file.iter_batches(batch_size=_ROWS_AT_ONCE):
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
    texts = "split task_id target envs metadata stop failure_boundary failure_kind answer"
    return {
        "compression": "zstd",
        "use_dictionary": texts.split(),
        "column_encoding": dict.fromkeys(numbers, "BYTE_STREAM_SPLIT"),
    }


def row_of(trajectory: Trajectory, *, step: int, split: str, group: int) -> Json:
    """The row for a trajectory."""
    first, *more = [_flat(sequence) for sequence in trajectory.sequences] or [_flat(TokenSequence())]
    failure = trajectory.failure
    return {
        "step": step,
        "split": escape(split),
        "group_id": group,
        "attempt": trajectory.attempt,
        "seed": trajectory.seed,
        **_task_columns(trajectory.task),
        "stop": trajectory.stop.value,
        "failure_boundary": failure.boundary.value if failure else None,
        "failure_kind": escape(failure.kind) if failure else None,
        "failure_message": escape(failure.message) if failure else None,
        "failure_attempts": failure.attempts if failure else None,
        "reward": trajectory.reward,
        "rewards": _entries(trajectory.rewards),
        "answer": None if trajectory.answer is None else escape(trajectory.answer),
        "turns": trajectory.turns,
        **first,
        "messages": [_message_row(message) for message in trajectory.messages],
        "segments": [
            _segment_row(segment, index)
            for index, sequence in enumerate(trajectory.sequences)
            for segment in sequence.segments
        ],
        "parents": [_parent_row(sequence) for sequence in trajectory.sequences],
        "more_sequences": more,
        "seconds": _entries(trajectory.seconds),
    }


def trajectory_of(row: Mapping[str, Any]) -> Trajectory:
    """The trajectory that `row_of` was given."""
    failure = None
    if row["failure_boundary"] is not None:
        failure = Failure(
            Boundary(row["failure_boundary"]),
            unescape(row["failure_kind"]),
            unescape(row["failure_message"]),
            row["failure_attempts"],
        )
    return Trajectory(
        task=_task(row),
        sequences=_sequences(row),
        messages=[_message(message) for message in row["messages"]],
        answer=None if row["answer"] is None else unescape(row["answer"]),
        stop=StopReason(row["stop"]),
        failure=failure,
        rewards=_mapping(row["rewards"]),
        reward=row["reward"],
        attempt=row["attempt"],
        seed=row["seed"],
        seconds=_mapping(row["seconds"]),
    )


def _task_columns(task: Task) -> Json:
    target, exact_target = dump_value(task.target)
    envs, exact_envs = dump_value(task.envs)
    metadata, exact_metadata = dump_value(task.metadata)
    return {
        "task_id": escape(task.id),
        "prompt": [_message_row(message) for message in task.messages],
        "target": target,
        "envs": envs,
        "metadata": metadata,
        "task_exact": exact_target and exact_envs and exact_metadata,
    }


def _task(row: Mapping[str, Any]) -> Task:
    return Task(
        id=unescape(row["task_id"]),
        messages=tuple(_message(message) for message in row["prompt"]),
        target=load_value(row["target"]),
        envs=load_value(row["envs"]),
        metadata=load_value(row["metadata"]),
    )


def _flat(sequence: TokenSequence) -> Json:
    return {
        "tokens": sequence.tokens,
        "action_mask": sequence.action_mask,
        "logprobs": sequence.logprobs,
    }


def _parent_row(sequence: TokenSequence) -> Json:
    owner, segment = sequence.parent if sequence.parent is not None else (None, None)
    return {"sequence": owner, "segment": segment}


def _segment_row(segment: Segment, sequence: int) -> Json:
    return {
        "sequence": sequence,
        "kind": segment.kind.value,
        "length": len(segment.tokens),
        "reward": segment.reward,
        "finish": segment.finish.value if segment.finish is not None else None,
        "calls": _dump_calls(segment.calls),
        "faults": [fault.value for fault in segment.faults],
        "versions": [{"start": span.start, "version": span.version} for span in segment.versions],
        "seconds": segment.seconds,
        "media": [
            {"sha256": escape(span.sha256), "start": span.start, "stop": span.stop}
            for span in segment.media
        ],
    }


def _sequences(row: Mapping[str, Any]) -> list[TokenSequence]:
    sequences = [TokenSequence(parent=_parent(parent)) for parent in row["parents"]]
    flats = [row, *row["more_sequences"]]
    positions = [0] * len(sequences)
    for raw in row["segments"]:
        index = raw["sequence"]
        start, stop = positions[index], positions[index] + raw["length"]
        positions[index] = stop
        sequences[index].segments.append(_segment(raw, flats[index], start, stop))
    for index, sequence in enumerate(sequences):
        if positions[index] != len(flats[index]["tokens"]) or (
            sequence.action_mask != flats[index]["action_mask"]
        ):
            raise ValueError("the segments do not match the tokens and the action mask")
    return sequences


def _segment(raw: Mapping[str, Any], flat: Mapping[str, Any], start: int, stop: int) -> Segment:
    kind = SegmentKind(raw["kind"])
    return Segment(
        kind=kind,
        tokens=flat["tokens"][start:stop],
        logprobs=flat["logprobs"][start:stop] if kind is SegmentKind.ACTION else None,
        versions=tuple(VersionSpan(span["start"], span["version"]) for span in raw["versions"]),
        finish=FinishReason(raw["finish"]) if raw["finish"] is not None else None,
        calls=_load_calls(raw["calls"]),
        faults=tuple(Fault(fault) for fault in raw["faults"]),
        reward=raw["reward"],
        seconds=raw["seconds"],
        media=tuple(MediaSpan(unescape(m["sha256"]), m["start"], m["stop"]) for m in raw["media"]),
    )


def _parent(raw: Mapping[str, Any]) -> tuple[int, int] | None:
    return None if raw["sequence"] is None else (raw["sequence"], raw["segment"])


def _message_row(message: Message) -> Json:
    media = [{"kind": item.kind, "sha256": item.sha256} for item in message.media]
    return {
        "role": message.role,
        "content": escape(message.content),
        "name": None if message.name is None else escape(message.name),
        "tool_calls": _dump_calls(message.tool_calls),
        "tool_call_id": None if message.tool_call_id is None else escape(message.tool_call_id),
        "media": dump_value(media)[0] if media else None,
    }


def _message(raw: Mapping[str, Any]) -> Message:
    media = load_value(raw["media"]) if raw["media"] is not None else ()
    return Message(
        role=raw["role"],
        content=unescape(raw["content"]),
        tool_calls=_load_calls(raw["tool_calls"]),
        name=None if raw["name"] is None else unescape(raw["name"]),
        tool_call_id=None if raw["tool_call_id"] is None else unescape(raw["tool_call_id"]),
        media=tuple(Media(item["kind"], item["sha256"]) for item in media),
    )


def _dump_calls(calls: Sequence[ToolCall]) -> str | None:
    """The calls as JSON text; None for none, which is what most messages have."""
    if not calls:
        return None
    rows = [
        {
            "id": call.id,
            "name": call.name,
            "arguments": call.arguments,
            "fault": call.fault.value if call.fault is not None else None,
            "problem": call.problem,
        }
        for call in calls
    ]
    return dump_value(rows)[0]


def _load_calls(text: str | None) -> tuple[ToolCall, ...]:
    return tuple(
        ToolCall(
            name=raw["name"],
            arguments=raw["arguments"],
            id=raw["id"],
            fault=Fault(raw["fault"]) if raw["fault"] is not None else None,
            problem=raw["problem"],
        )
        for raw in (load_value(text) if text is not None else ())
    )


def _entries(values: Mapping[str, float]) -> list[Json]:
    return [{"name": escape(name), "value": value} for name, value in values.items()]


def _mapping(entries: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    return {unescape(entry["name"]): entry["value"] for entry in entries}
