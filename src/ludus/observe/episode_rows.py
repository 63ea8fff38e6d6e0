"""A trajectory as a row of Parquet, and back, exactly; and values as JSON that every reader accepts.

Tokens and log-probabilities are stored once, flat, for each sequence; `segments` says how many of them, in
order, belong to which segment. The first sequence, nearly always the only one, has the columns `tokens`,
`action_mask` and `logprobs` to itself; further ones are in `more_sequences`. `action_mask` could be computed:
every reader wants it, and it costs next to nothing.

A branch of a tree is stored without what the attempt that it branched off has already: of its first sequence
without `shared_segments` segments, and without `shared_messages` messages. Its parent's row stands before it in
the same group.

Text may hold lone surrogates, which are not UTF-8, and NUL, at which some readers stop. Both are written as ␛
and four hexadecimal digits (so is ␛ itself). A value is JSON where it can be; else an object with one reserved
key: `$float` (not a number, infinities), `$tuple`, `$items` (a mapping whose keys are not text), `$bytes`
(base64), `$dict` (a mapping that looks like one of these), and `$repr` for what cannot be restored.
"""

from __future__ import annotations

import base64
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from itertools import islice, takewhile
from typing import Any

import numpy as np
from pydantic import TypeAdapter

from ludus.core.failures import Failure
from ludus.core.messages import Json, Media, Message, ToolCall
from ludus.core.strict_json import decode
from ludus.core.task import Task
from ludus.core.trajectory import (
    Branch,
    EnvRender,
    Segment,
    SegmentKind,
    TimeSpan,
    TokenSequence,
    Trajectory,
)

_UNSAFE = re.compile("[\x00\ud800-\udfff␛]")
_ESCAPE = re.compile("␛([0-9a-f]{4})")
_RESERVED = ("$float", "$tuple", "$items", "$bytes", "$dict", "$repr")
_MAX_DEPTH = 100
_MAX_REPR = 10_000
_MAX_BITS = 10_000  # Python refuses to write longer integers in decimal


@dataclass(frozen=True, slots=True)
class Opaque:
    """Stands for a value that could not be stored: only how it looked was kept."""

    text: str


def escape(text: str) -> str:
    """The text without lone surrogates and NUL."""
    return _UNSAFE.sub(lambda match: f"␛{ord(match[0]):04x}", text)


def unescape(text: str) -> str:
    """The text that `escape` was given."""
    return _ESCAPE.sub(lambda match: chr(int(match[1], 16)), text)


def dump_value(value: Any) -> tuple[str, bool]:
    """The value as valid, escaped JSON text, and whether `load_value` can restore it exactly."""
    lost: list[str] = []
    text = json.dumps(_encoded(value, (), lost), ensure_ascii=False, allow_nan=False)
    return escape(text), not lost


def load_value(text: str) -> Any:
    """The value that `dump_value` was given; `Opaque` in place of what could not be stored."""
    return _decoded(json.loads(unescape(text)))


def _encoded(value: Any, above: tuple[int, ...], lost: list[str]) -> Any:
    """`above` are the ids of the containers around the value; what cannot be restored is added to `lost`."""
    if isinstance(value, np.generic):
        value = value.item()
    inside = (*above, id(value))
    match value:
        case None | bool() | str():
            return value
        case int() if value.bit_length() <= _MAX_BITS:
            return int(value)
        case float():
            return float(value) if math.isfinite(value) else {"$float": str(float(value))}
        case bytes():
            return {"$bytes": base64.b64encode(value).decode()}
        case list() | tuple() | Mapping() if id(value) in above or len(above) >= _MAX_DEPTH:
            text = f"<a {type(value).__name__} nested too deeply>"
        case list() | tuple():
            items = [_encoded(item, inside, lost) for item in value]
            return {"$tuple": items} if isinstance(value, tuple) else items
        case Mapping() if all(isinstance(key, str) for key in value):
            plain = {str(key): _encoded(item, inside, lost) for key, item in value.items()}
            return {"$dict": plain} if len(plain) == 1 and next(iter(plain)) in _RESERVED else plain
        case Mapping():
            pairs = value.items()
            return {"$items": [[_encoded(part, inside, lost) for part in pair] for pair in pairs]}
        case Opaque():
            text = value.text
        case _:
            text = _shown(value)
    lost.append(text)
    return {"$repr": text}


def _shown(value: Any) -> str:
    try:
        return repr(value)[:_MAX_REPR]
    except Exception as error:  # noqa: BLE001 - a user's __repr__ may raise anything
        return f"<a {type(value).__name__} whose repr raised {type(error).__name__}>"


def _decoded(raw: Any) -> Any:
    if isinstance(raw, list):
        return [_decoded(item) for item in raw]
    match raw:
        case {"$float": content} if len(raw) == 1:
            return float(content)
        case {"$tuple": content} if len(raw) == 1:
            return tuple(_decoded(item) for item in content)
        case {"$items": content} if len(raw) == 1:
            return {_decoded(key): _decoded(item) for key, item in content}
        case {"$bytes": content} if len(raw) == 1:
            return base64.b64decode(content)
        case {"$dict": content} if len(raw) == 1:
            return {key: _decoded(item) for key, item in content.items()}
        case {"$repr": content} if len(raw) == 1:
            return Opaque(content)
        case dict():
            return {key: _decoded(item) for key, item in raw.items()}
    return raw


FAILURE_FIELDS = tuple(field.name for field in fields(Failure))
"""Stored in columns of their own, failure_boundary and so on."""
_BRANCH = tuple(field.name for field in fields(Branch))
_OF_TRAINING = ("advantages", "entropies")
"""Columns that a step of RL fills for each token of an action."""
_JSON = frozenset({"target", "envs", "metadata", "tool_calls", "calls", "media"})
"""Columns of JSON text, which `dump_value` has escaped."""
_TRAJECTORY = TypeAdapter(Trajectory)
_SEGMENT = TypeAdapter(Segment)
_MESSAGES = TypeAdapter(tuple[Message, ...])


@cache
def schema() -> Any:
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
    return pa.schema(columns)


def encodings() -> Json:
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
        **{f"failure_{name}": getattr(trajectory.failure, name, None) for name in FAILURE_FIELDS},
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
        "renders": [{**_fields(one), "picture": _picture(one.picture)} for one in trajectory.renders],
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
    failure = {name: row[f"failure_{name}"] for name in FAILURE_FIELDS}
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
    """A sequence's tokens and per-token columns; columns of training only where training has filled them."""
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


def _picture(media: Media | None) -> Json | None:
    return None if media is None else {"kind": media.kind, "sha256": media.sha256}


def _message_row(message: Message) -> Json:
    calls = [_fields(call) for call in message.tool_calls]
    media = [_picture(item) for item in message.media]
    return {**_fields(message), "tool_calls": _dumped(calls), "media": _dumped(media)}


def _message(raw: Json) -> Json:
    return {**raw, "tool_calls": _loaded(raw["tool_calls"]), "media": _loaded(raw["media"])}


def _fields(value: Message | ToolCall | TimeSpan | EnvRender) -> Json:
    return {field.name: getattr(value, field.name) for field in fields(value)}


def _dumped(rows: Sequence[Json | None]) -> str | None:
    """Calls or media as JSON text; None for none, which is what most messages have."""
    return dump_value(rows)[0] if rows else None


def _loaded(text: str | None) -> Any:
    return () if text is None else load_value(text)


def _entries(values: Mapping[str, float]) -> list[Json]:
    return [{"name": name, "value": value} for name, value in values.items()]
