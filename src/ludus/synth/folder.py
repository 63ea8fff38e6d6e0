"""The folder of a synthesis: what is made is written at once, so that stopping loses nothing that was finished.

::

    settings.json                 what was asked for; a folder holds one method under one set of settings
    parts/STAGE/000003.parquet    what the fourth item of a stage has given: episodes, notes, cost
    examples.parquet              what was kept: demonstrations for any stage
    rejected.parquet              the other candidates, each with its reason
    pairs.parquet                 better and worse episodes at one task, for dpo
    report.json, report.md        yield, reasons, cost
    page.html                     what was kept and why, to look at

Every file appears whole or not at all. An item counts as finished when none of its episodes failed through our
fault; the others are made again by the next run.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ludus.core.messages import Json, Message
from ludus.core.trajectory import Trajectory, is_lost
from ludus.observe import (
    SettingsFolder,
    StoreError,
    atomic_file,
    read_notes,
    read_trajectories,
    write_trajectories,
)
from ludus.synth.result import Cost, Rejected, with_provenance


@dataclass(slots=True)
class ItemResult:
    """What one item of a stage has given."""

    trajectories: list[Trajectory] = field(default_factory=list)
    notes: Json = field(default_factory=dict)
    """Anything that JSON can say: an outline, scores, why there are no episodes."""
    cost: Cost = field(default_factory=Cost)

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
        """What an item has given, if it is finished; None where it is to be made."""
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
        write_trajectories(self.examples_path, kept)
        told = [
            with_provenance(one.trajectory, rejected=one.reason, detail=one.detail) for one in rejected
        ]
        write_trajectories(self.rejected_path, told)

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
