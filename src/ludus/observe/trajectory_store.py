"""Trajectories as Parquet, one row per episode, for pandas, DuckDB and `datasets` alike.

Tokens and log-probabilities are stored once, flat, for each sequence; `segments` says how many of them,
in order, belong to which segment. The first sequence, nearly always the only one, has the columns
`tokens`, `action_mask` and `logprobs` to itself; further ones are in `more_sequences`. `action_mask`
alone could be computed from the segments: it is there because every reader wants it, and costs next to
nothing.

A branch of a tree is stored without what the attempt that it branched off has already: of its first sequence
without `shared_segments` segments, and without `shared_messages` messages. Its parent's row stands before it in
the same group.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from functools import cache
from itertools import islice, takewhile
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from ludus.core.codec import decode
from ludus.core.failures import Boundary, Failure, LudusError, not_there
from ludus.core.messages import Json, Message, ToolCall
from ludus.core.task import Task
from ludus.core.trajectory import (
    Branch,
    EnvRender,
    Group,
    Segment,
    SegmentKind,
    TimeSpan,
    TokenSequence,
    Trajectory,
)
from ludus.observe.encoding import dump_value, escape, load_value, unescape
from ludus.observe.files import atomic_file

FORMATS = FORMAT, TREE_FORMAT = (b"1", b"2")
"""Counts the changes to the columns that an older reader would misread. 2: there are branches of trees."""

_FORMAT_KEY = b"ludus.trajectories"
_NOTES_KEY = b"ludus.groups"
_ROWS_AT_ONCE = 256
_FAILURE = tuple(field.name for field in fields(Failure))
_BRANCH = tuple(field.name for field in fields(Branch))
_OF_TRAINING = ("advantages", "entropies")
"""What a step of RL notes for each token of an action."""
_JSON = frozenset({"target", "envs", "metadata", "tool_calls", "calls", "media"})
"""Columns of JSON text, which `dump_value` has escaped."""
_TRAJECTORY = TypeAdapter(Trajectory)
_SEGMENT = TypeAdapter(Segment)
_MESSAGES = TypeAdapter(tuple[Message, ...])


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
    schema = _schema().with_metadata(
        {_FORMAT_KEY: TREE_FORMAT if has_trees else FORMAT, _NOTES_KEY: json.dumps(list(notes))}
    )
    with (
        atomic_file(path) as temporary,
        pq.ParquetWriter(temporary, schema, **_encodings()) as writer,
    ):
        while chunk := list(islice(rows, _ROWS_AT_ONCE)):
            try:
                writer.write_table(pa.Table.from_pylist(chunk, schema=schema))
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
    """What was noted of each group of a file; nothing where it was written without."""
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
    """The same, each under the number that it was written with."""
    groups: dict[int, Group] = {}
    for number, trajectory in _read(path):
        groups.setdefault(number, Group(trajectory.task, [])).trajectories.append(trajectory)
    return groups


def read_failures(path: str | Path) -> list[Failure]:
    """The failures of a file's episodes; nothing else of it is read."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    names = [f"failure_{name}" for name in _FAILURE]
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
    """The trajectories, each with the number of its group."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    if not Path(path).is_file():
        raise StoreError(not_there(path, beside_recipe=False))
    names = ("task_id", "attempt", "failure_boundary")
    known: dict[tuple[int, int], Trajectory] = {}
    try:
        with pq.ParquetFile(path) as file:
            format = (file.schema_arrow.metadata or {}).get(_FORMAT_KEY)
            _check_format(path, format)
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


def _check_format(path: str | Path, found: bytes | None) -> None:
    if found is None:
        raise StoreError(f"{path} is Parquet, but not written by Ludus")
    if found not in FORMATS:
        raise StoreError(
            f"{path} has format {found.decode(errors='replace')} and this version of Ludus reads "
            f"{' and '.join(one.decode() for one in FORMATS)}; use the version that wrote it"
        )


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


@cache
def _schema() -> Any:
    """The columns. Named numbers are lists of (name, value): not every reader has a map type."""
    import pyarrow as pa

    text, count, number = pa.string(), pa.int32(), pa.float64()
    entries = pa.list_(pa.struct([("name", text), ("value", number)]))
    messages = pa.list_(pa.struct([(field.name, text) for field in fields(Message)]))
    segments = [
        ("sequence", count), ("kind", text), ("length", count), ("reward", number), ("finish", text),
        ("calls", text), ("faults", pa.list_(text)), ("faulted", pa.list_(text)),
        ("versions", pa.list_(pa.struct([("start", count), ("version", pa.int64())]))),
        ("seconds", number),
        ("media", pa.list_(pa.struct([("sha256", text), ("start", count), ("stop", count)]))),
    ]  # fmt: skip
    flat = [
        ("tokens", pa.list_(pa.int32())),
        ("action_mask", pa.list_(pa.bool_())),
        ("logprobs", pa.list_(number)),
        ("advantages", pa.list_(pa.float32())),
        ("entropies", pa.list_(pa.float32())),
    ]
    picture = pa.struct([("kind", text), ("sha256", text)])
    columns = [
        ("step", pa.int64()), ("split", text), ("group_id", count), ("attempt", count),
        ("seed", pa.int64()), ("task_id", text), ("prompt", messages), ("target", text),
        ("envs", text), ("metadata", text),
        ("task_exact", pa.bool_()), ("stop", text), ("failure_boundary", text), ("failure_kind", text),
        ("failure_message", text), ("failure_attempts", count), ("reward", number), ("rewards", entries),
        ("answer", text), ("turns", count),
        *flat,
        ("messages", messages),
        ("segments", pa.list_(pa.struct(segments))),
        ("parents", pa.list_(pa.struct([("sequence", count), ("segment", count)]))),
        ("more_sequences", pa.list_(pa.struct(flat))),
        ("seconds", entries), ("counts", entries),
        ("branch_attempt", count), ("branch_segments", count), ("branch_state", text),
        ("shared_segments", count), ("shared_messages", count),
        ("spans", pa.list_(pa.struct([
            ("kind", text), ("start", number), ("seconds", number), ("name", text), ("turn", count)]))),
        ("renders", pa.list_(pa.struct([
            ("turn", count), ("env", text), ("text", text), ("picture", picture)]))),
    ]  # fmt: skip
    return pa.schema(columns, metadata={_FORMAT_KEY: FORMAT})


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


def row_of(
    trajectory: Trajectory, *, step: int, split: str, group: int, parent: Trajectory | None = None
) -> Json:
    """The row for a trajectory; what a branch shares with its `parent` is left out."""
    task, branch = trajectory.task, trajectory.branch
    sequences, shared_segments, shared_messages = trajectory.sequences, 0, 0
    if branch is not None and parent is not None:
        first = sequences[0]
        shared_segments = _same(first.segments, parent.sequences[0].segments, branch.segments)
        shared_messages = _same(trajectory.messages, parent.messages, len(trajectory.messages))
        sequences = [TokenSequence(first.segments[shared_segments:], first.parent), *sequences[1:]]
    dumped = {name: dump_value(getattr(task, name)) for name in ("target", "envs", "metadata")}
    flat, *more = [_flat(sequence) for sequence in sequences] or [_flat(TokenSequence())]
    parents = [sequence.parent or (None, None) for sequence in sequences]
    row = {
        "step": step,
        "split": split,
        "group_id": group,
        "attempt": trajectory.attempt,
        "seed": trajectory.seed,
        "task_id": task.id,
        "prompt": [_message_row(message) for message in task.messages],
        **{name: text for name, (text, _) in dumped.items()},
        "task_exact": all(exact for _, exact in dumped.values()),
        "stop": trajectory.stop,
        **{f"failure_{name}": getattr(trajectory.failure, name, None) for name in _FAILURE},
        "reward": trajectory.reward,
        "rewards": _entries(trajectory.rewards),
        "answer": trajectory.answer,
        "turns": trajectory.turns,
        **flat,
        "messages": [_message_row(message) for message in trajectory.messages[shared_messages:]],
        "segments": [
            _segment_row(segment, index)
            for index, sequence in enumerate(sequences)
            for segment in sequence.segments
        ],
        "parents": [{"sequence": sequence, "segment": segment} for sequence, segment in parents],
        "more_sequences": more,
        "seconds": _entries(trajectory.seconds),
        "counts": _entries(trajectory.counts),
        **{f"branch_{name}": getattr(branch, name, None) for name in _BRANCH},
        "shared_segments": shared_segments if branch is not None else None,
        "shared_messages": shared_messages if branch is not None else None,
        "spans": [_fields(span) for span in trajectory.spans],
        "renders": [_render_row(render) for render in trajectory.renders],
    }
    escaped: Json = _with_texts(row, escape)
    return escaped


def _same(own: Sequence[Any], others: Sequence[Any], most: int) -> int:
    """How many leading items, at most, are the very same."""
    pairs = islice(zip(own, others, strict=False), most)
    return sum(1 for _ in takewhile(lambda pair: pair[0] is pair[1], pairs))


def trajectory_of(stored: Mapping[str, Any], parent: Trajectory | None = None) -> Trajectory:
    """The trajectory that `row_of` was given; a `ValueError` says what does not fit."""
    row = _with_texts(stored, unescape)
    values = {name: load_value(row[name]) for name in ("target", "envs", "metadata")}
    prompt = decode(_MESSAGES, [_message(message) for message in row["prompt"]])
    failure = {name: row[f"failure_{name}"] for name in _FAILURE}
    fields = {
        "task": Task(row["task_id"], prompt, **values),
        "sequences": _sequences(row),
        "messages": [_message(message) for message in row["messages"]],
        "failure": None if failure["boundary"] is None else failure,
        "rewards": {entry["name"]: entry["value"] for entry in row["rewards"]},
        "seconds": {entry["name"]: entry["value"] for entry in row["seconds"]},
        # files from before it was counted have none
        "counts": {entry["name"]: entry["value"] for entry in row.get("counts") or ()},
        "spans": row.get("spans") or [],
        "renders": row.get("renders") or [],
    }
    branch = {name: row.get(f"branch_{name}") for name in _BRANCH}
    fields["branch"] = None if branch["attempt"] is None else branch
    trajectory = decode(_TRAJECTORY, {**row, **fields})
    if row.get("shared_segments") or row.get("shared_messages"):
        if parent is None:
            raise ValueError(
                f"attempt {trajectory.attempt} branched off attempt {branch['attempt']}, which is not there"
            )
        trajectory.sequences[0].segments[:0] = parent.sequences[0].segments[: row["shared_segments"]]
        trajectory.messages[:0] = parent.messages[: row["shared_messages"]]
    return trajectory


def _with_texts(value: Any, change: Callable[[str], str]) -> Any:
    """`value` with every text changed but JSON. Lists of numbers, which are long, stay as they are."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {
            key: item if isinstance(item, str) and key in _JSON else _with_texts(item, change)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple) and value and isinstance(value[0], str | dict):
        return [_with_texts(item, change) for item in value]
    return value


def _flat(sequence: TokenSequence) -> Json:
    """Its tokens, and what there is one of for each; where training has left nothing, one list is missing."""
    return {
        "tokens": sequence.tokens,
        "action_mask": sequence.action_mask,
        "logprobs": sequence.logprobs,
        **{name: _of_training(sequence, name) for name in _OF_TRAINING},
    }


def _of_training(sequence: TokenSequence, name: str) -> list[float | None] | None:
    """Advantages or entropies: nothing at tokens that were not trained on."""
    if all(getattr(segment, name) is None for segment in sequence.segments):
        return None
    return [
        value
        for segment in sequence.segments
        for value in (getattr(segment, name) or [None] * len(segment.tokens))
    ]


def _render_row(render: EnvRender) -> Json:
    picture = render.picture
    kept = None if picture is None else {"kind": picture.kind, "sha256": picture.sha256}
    return {**_fields(render), "picture": kept}


def _segment_row(segment: Segment, sequence: int) -> Json:
    apart = {"tokens", "logprobs", "calls", "media", *_OF_TRAINING}
    plain = _SEGMENT.dump_python(segment, exclude=apart, warnings=False)
    calls = _dumped([_fields(call) for call in segment.calls])
    media = [{"sha256": one.sha256, "start": one.start, "stop": one.stop} for one in segment.media]
    return {
        **plain,
        "sequence": sequence,
        "length": len(segment.tokens),
        "calls": calls,
        "media": media,
    }


def _sequences(row: Mapping[str, Any]) -> list[Json]:
    flats, positions = [row, *row["more_sequences"]], [0] * len(row["parents"])
    sequences: list[list[Json]] = [[] for _ in row["parents"]]
    for raw in row["segments"]:
        index = raw["sequence"]
        part = slice(positions[index], positions[index] + raw["length"])
        positions[index] = part.stop
        is_action = raw["kind"] == SegmentKind.ACTION
        if flats[index]["action_mask"][part] != [is_action] * raw["length"]:
            raise ValueError("the segments do not match the action mask")
        logprobs = flats[index]["logprobs"][part] if is_action else None
        flat = {"tokens": flats[index]["tokens"][part], "logprobs": logprobs}
        for name in _OF_TRAINING:  # files from before it was recorded have none
            values = (flats[index].get(name) or ())[part]
            flat[name] = values if values and None not in values else None
        sequences[index].append({**raw, **flat, "calls": _loaded(raw["calls"])})
    if any(end != len(flat["tokens"]) for end, flat in zip(positions, flats, strict=False)):
        raise ValueError("the segments do not match the tokens")
    parents = [None if p["sequence"] is None else (p["sequence"], p["segment"]) for p in row["parents"]]
    return [
        {"segments": segments, "parent": parent}
        for segments, parent in zip(sequences, parents, strict=True)
    ]


def _message_row(message: Message) -> Json:
    calls = [_fields(call) for call in message.tool_calls]
    media = [{"kind": item.kind, "sha256": item.sha256} for item in message.media]
    return {**_fields(message), "tool_calls": _dumped(calls), "media": _dumped(media)}


def _message(raw: Json) -> Json:
    return {**raw, "tool_calls": _loaded(raw["tool_calls"]), "media": _loaded(raw["media"])}


def _fields(value: Message | ToolCall | TimeSpan | EnvRender) -> Json:
    return {field.name: getattr(value, field.name) for field in fields(value)}


def _dumped(rows: Sequence[Json]) -> str | None:
    """Calls or media as JSON text; None for none, which is what most messages have."""
    return dump_value(rows)[0] if rows else None


def _loaded(text: str | None) -> Any:
    return () if text is None else load_value(text)


def _entries(values: Mapping[str, float]) -> list[Json]:
    return [{"name": name, "value": value} for name, value in values.items()]
