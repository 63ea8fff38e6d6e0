"""Result of a method of synthesis: kept examples, rejected ones with the reason, the cost; its folder.

    settings.json                 what was asked for; a folder holds one method under one set of settings
    parts/STAGE/000003.parquet    what the fourth item of a stage has given: episodes, notes, cost
    examples, rejected, pairs     .parquet: what was kept, the other candidates, better and worse episodes
    report.json, report.md        yield, reasons, cost; page.html shows what was kept and why

Every file appears whole or not at all. An item counts as finished when none of its episodes failed through our
fault; the others are made again by the next run.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from ludus.core.messages import Json, Message
from ludus.core.trajectory import Trajectory, is_lost
from ludus.observe import (
    ReportTable,
    SettingsFolder,
    StoreError,
    atomic_file,
    read_notes,
    read_trajectories,
    write_trajectories,
)

PROVENANCE = "synth"
"""The key of a task's metadata under which an example says how it was made."""


@dataclass(slots=True)
class Cost:
    """Cost: of episodes, and of calls of language models that judge or write."""

    episodes: int = 0
    sampled_tokens: int = 0
    tool_calls: int = 0
    episode_seconds: float = 0.0
    """The time of all episodes, one after the other; many are played at once."""
    model_calls: int = 0
    """Calls of language models; those answered from a cache are counted apart, and cost nothing."""
    cached_calls: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0

    def add(self, other: Cost) -> None:
        for one in fields(self):
            setattr(self, one.name, getattr(self, one.name) + getattr(other, one.name))

    def add_episodes(self, trajectories: Sequence[Trajectory]) -> None:
        """Count what these have sampled and called; what a branch shares is another's."""
        for one in trajectories:
            actions = [segment for segment in one.own_segments if segment.logprobs is not None]
            self.episodes += 1
            self.sampled_tokens += sum(len(action.tokens) for action in actions)
            self.tool_calls += sum(len(action.calls) for action in actions)
            self.episode_seconds += one.seconds.get("total", 0.0)

    def as_json(self) -> Json:
        return {one.name: getattr(self, one.name) for one in fields(self)}


def nothing_kept_hint(reasons: Mapping[str, int]) -> str | None:
    """A hint where nothing was kept because most examples did not meet a limit; else None."""
    if not reasons:
        return None
    most = max(reasons, key=lambda reason: reasons[reason])
    setting = _LIMITS.get(most)
    if setting is None:
        return None
    counted = f"{reasons[most]} were {most.replace('_', ' ')}"
    return f"nothing was kept: {counted}. {setting} may be what this data needs"


_LIMITS = {
    "too_short": "min_turns = 1 (synth.min_turns=1 on the command line of ludus synth)",
    "too_long": "a larger max_turns",
    "too_many_calls": "a larger max_calls",
    "wasteful": "a larger max_useless or max_detour",
    "low_quality": "a lower min_quality, or needs_thought = false for a model that does not think aloud",
}

current_cost: ContextVar[Cost | None] = ContextVar("current_cost", default=None)
"""Where the calls of language models are counted: the cost of the item that is being made."""


@dataclass(frozen=True, slots=True)
class Rejected:
    """A candidate that was left out. `reason` is a short name that reports count by; `detail`, the facts."""

    trajectory: Trajectory
    reason: str
    detail: str = ""


@dataclass(slots=True)
class SynthResult:
    """The examples of a method."""

    kept: list[Trajectory] = field(default_factory=list)
    """To be learned from, each with how it was made in its task's metadata (`provenance_of`)."""
    rejected: list[Rejected] = field(default_factory=list)
    pairs: list[tuple[Trajectory, Trajectory]] = field(default_factory=list)
    """(better, worse) episodes at one task, for preference losses."""
    numbers: dict[str, float] = field(default_factory=dict)
    """Further numbers of the report, by name."""
    tables: list[ReportTable] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def add(self, piece: ItemResult, made_from: Trajectory | None = None) -> None:
        """Keep what an item has given, or leave it out (`ItemResult.left_out`); what was lost is neither."""
        there = [one for one in piece.trajectories if not is_lost(one)]
        if reason := piece.notes.get("reason"):
            rejected = [made_from] if made_from is not None else there
            self.rejected += [Rejected(one, reason, piece.notes.get("detail", "")) for one in rejected]
        else:
            self.kept += there

    @property
    def reasons(self) -> Counter[str]:
        return Counter(one.reason for one in self.rejected)

    @property
    def candidates(self) -> int:
        return len(self.kept) + len(self.rejected)

    @property
    def yielded(self) -> float:
        """The share of candidates that was kept."""
        return len(self.kept) / max(1, self.candidates)


@dataclass(slots=True)
class ItemResult:
    """Result of one item of a stage."""

    trajectories: list[Trajectory] = field(default_factory=list)
    notes: Json = field(default_factory=dict)
    """Anything that JSON can say: an outline, scores, why there are no episodes."""
    cost: Cost = field(default_factory=Cost)

    @classmethod
    def left_out(cls, reason: str, detail: str, *candidates: Trajectory) -> ItemResult:
        """An item that gives no example; `candidates` are what is left out, if not what it was made from."""
        return cls(list(candidates), {"reason": reason, "detail": detail})

    @property
    def is_finished(self) -> bool:
        return not any(map(is_lost, self.trajectories))


class SynthFolder(SettingsFolder):
    """The folder of one method under one set of settings."""

    holds = "examples"
    root = "synth"

    @property
    def examples_path(self) -> Path:
        return self.path / "examples.parquet"

    @property
    def rejected_path(self) -> Path:
        return self.path / "rejected.parquet"

    @property
    def pairs_path(self) -> Path:
        return self.path / "pairs.parquet"

    @property
    def page_path(self) -> Path:
        return self.path / "page.html"

    def piece(self, stage: str, number: int, key: str) -> ItemResult | None:
        """The stored result of an item; None where it is to be made."""
        path = self._piece_path(stage, number)
        if not path.is_file():
            return None
        try:
            [noted] = read_notes(path)
            piece = ItemResult(read_trajectories(path), noted["notes"], Cost(**noted["cost"]))
        except (StoreError, ValueError, KeyError, TypeError):
            return None  # damaged: made again
        return piece if noted["key"] == key and piece.is_finished else None

    def write_piece(self, stage: str, number: int, key: str, piece: ItemResult) -> None:
        noted = {"key": key, "notes": piece.notes, "cost": piece.cost.as_json()}
        write_trajectories(self._piece_path(stage, number), piece.trajectories, notes=[noted])

    def write_examples(self, kept: Sequence[Trajectory], rejected: Sequence[Rejected]) -> None:
        write_trajectories(self.examples_path, kept, split="kept")
        told = [
            with_provenance(one.trajectory, rejected=one.reason, detail=one.detail) for one in rejected
        ]
        write_trajectories(self.rejected_path, told, split="rejected")

    def write_pairs(self, pairs: Sequence[tuple[Trajectory, Trajectory]]) -> None:
        """Rows of `chosen` and `rejected` messages, which the stage dpo, TRL and `datasets` read alike."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        rows = [{"chosen": _chat(better), "rejected": _chat(worse)} for better, worse in pairs]
        with atomic_file(self.pairs_path) as temporary:
            pq.write_table(pa.Table.from_pylist(rows), temporary)

    def _piece_path(self, stage: str, number: int) -> Path:
        return self.path / "parts" / stage / f"{number:06d}.parquet"


def _chat(trajectory: Trajectory) -> list[Json]:
    return [_row(message) for message in trajectory.messages]


def _row(message: Message) -> Json:
    """A message whose calls have their arguments as JSON text: a column has one type."""
    row = message.as_chat()
    for call in row.get("tool_calls", ()):
        call["function"] = {
            **call["function"],
            "arguments": json.dumps(call["function"]["arguments"], ensure_ascii=False),
        }
    return {"tool_calls": None, "name": None, "tool_call_id": None, **row}


def provenance_of(trajectory: Trajectory) -> Mapping[str, Any]:
    """How an example was made; nothing for an episode that was only played."""
    found = trajectory.task.metadata.get(PROVENANCE, {})
    return found if isinstance(found, Mapping) else {}


def with_provenance(trajectory: Trajectory, **facts: Any) -> Trajectory:
    """The episode, with how it was made in its task's metadata."""
    task = trajectory.task
    told = {**provenance_of(trajectory), **facts}
    return replace(trajectory, task=replace(task, metadata={**task.metadata, PROVENANCE: told}))


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
