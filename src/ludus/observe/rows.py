"""A trajectory as one row of a table, and back. `store` puts the rows into Parquet.

Tokens and log-probabilities are stored once, flat, for each sequence; `segments` says how many of them,
in order, belong to which segment. The first sequence, nearly always the only one, has the columns
`tokens`, `action_mask` and `logprobs` to itself; further ones are in `more_sequences`. `action_mask`
alone could be computed from the segments: it is there because every reader wants it, and costs next to
nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ludus.core.failures import Boundary, Failure, Fault
from ludus.core.generation import FinishReason, VersionSpan
from ludus.core.messages import Json, Media, Message, ToolCall
from ludus.core.task import Task
from ludus.core.trajectory import (
    MediaSpan,
    Segment,
    SegmentKind,
    StopReason,
    TokenSequence,
    Trajectory,
)
from ludus.observe.encoding import dump_value, escape, load_value, unescape


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
