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
from html import escape
from pathlib import Path
from typing import Any

from ludus.core.failures import Failure, most_frequent_failure
from ludus.core.messages import Json, Message
from ludus.core.trajectory import Trajectory, is_lost
from ludus.observe import (
    Cell,
    ReportTable,
    SettingsFolder,
    Share,
    StoreError,
    atomic_file,
    atomic_write,
    episode_text,
    markdown_text,
    printable,
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


# Report: tables, Markdown, JSON, and a page of what was kept and why

MOST_SHOWN = 200
"""Examples on a page, of those kept and of those of each reason."""
_MOST_CHARS = 20_000


def tables_of(result: SynthResult, cost: Cost) -> list[ReportTable]:
    """Tables of the report: the yield, the reasons, the method's own, the cost."""
    count: list[Cell] = [result.candidates, len(result.kept), Share(result.yielded)]
    numbers = [(name.replace("_", " "), value) for name, value in result.numbers.items()]
    spent = [(name.replace("_", " "), value) for name, value in cost.as_json().items() if value]
    found = [
        ReportTable(("candidates", "kept", "share"), [count], "yield"),
        ReportTable(("reason", "candidates"), result.reasons.most_common(), "left out, by reason"),
        ReportTable(("what", "value"), numbers, "numbers"),
        *result.tables,
        ReportTable(("what", "spent"), spent, "cost"),
    ]
    return [table for table in found if table.rows]


def report_json(method: str, result: SynthResult, cost: Cost, failures: Sequence[Failure]) -> Json:
    return {
        "method": method,
        "candidates": result.candidates,
        "kept": len(result.kept),
        "yield": result.yielded,
        "reasons": dict(result.reasons.most_common()),
        "pairs": len(result.pairs),
        "numbers": result.numbers,
        "tables": [one.as_json() for one in result.tables],
        "cost": cost.as_json(),
        "failures": len(failures),
        "warnings": result.warnings,
    }


def write_result(
    folder: SynthFolder, title: str, result: SynthResult, cost: Cost, failures: Sequence[Failure] = ()
) -> list[Path]:
    """Write everything that the folder is for; what was written, the examples first."""
    if failures:
        result.warnings.append(
            f"{len(failures)} failures through no fault of the model's; the same command makes what is missing "
            f"again. {most_frequent_failure(failures)}"
        )
    folder.write_examples(result.kept, result.rejected)
    written = [folder.examples_path, folder.rejected_path]
    if result.pairs:
        folder.write_pairs(result.pairs)
        written.append(folder.pairs_path)
    told = report_json(title, result, cost, failures)
    atomic_write(folder.path / "report.json", json.dumps(told, indent=2, ensure_ascii=False) + "\n")
    parts = [f"# {markdown_text(title)}\n"]
    for table in tables_of(result, cost):
        parts += [f"## {markdown_text(table.title)}\n", table.markdown()]
    parts += [f"- {markdown_text(warning)}" for warning in result.warnings]
    atomic_write(folder.path / "report.md", "\n".join(parts) + "\n")
    atomic_write(folder.page_path, page_html(title, result, cost))
    return [*written, folder.path / "report.md", folder.page_path]


_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 70rem; padding: 0 1rem; color: #222 }
table { border-collapse: collapse; margin: .5rem 0 1.5rem }
td, th { padding: .2rem .8rem; border: 1px solid #ddd; text-align: left }
details { border: 1px solid #ddd; border-radius: 4px; margin: .4rem 0; padding: .3rem .7rem }
summary { cursor: pointer } pre { white-space: pre-wrap; overflow-wrap: anywhere; font-size: 13px }
.kept { color: #176b2c } .out { color: #9b1c1c } .facts { color: #666; font-size: 13px }
"""


def page_html(title: str, result: SynthResult, cost: Cost) -> str:
    """A page that needs nothing else: what was kept, what was not, and why. All text is escaped."""
    parts = [
        "<!doctype html><html lang=en><head><meta charset=utf-8>",
        "<meta http-equiv=Content-Security-Policy content=\"default-src 'none'; style-src 'unsafe-inline'\">",
        f"<title>{_text(title)}</title><style>{_STYLE}</style></head><body><h1>{_text(title)}</h1>",
        *(f"<p><b>{_text(warning)}</b></p>" for warning in result.warnings),
        *(_table_html(table) for table in tables_of(result, cost)),
        f"<h2 class=kept>kept: {len(result.kept)}</h2>",
        *(_example_html(one, "") for one in result.kept[:MOST_SHOWN]),
        _more_html(len(result.kept)),
    ]
    for reason, count in result.reasons.most_common():
        own = [one for one in result.rejected if one.reason == reason]
        parts += [
            f"<h2 class=out>left out, {_text(reason)}: {count}</h2>",
            *(_example_html(one.trajectory, one.detail) for one in own[:MOST_SHOWN]),
            _more_html(count),
        ]
    return "".join([*parts, "</body></html>\n"])


def _table_html(table: ReportTable) -> str:
    head = "".join(f"<th>{_text(column)}</th>" for column in table.columns)
    rows = "".join(
        "<tr>" + "".join(f"<td>{_text(cell)}</td>" for cell in row) + "</tr>" for row in table.texts
    )
    return f"<h3>{_text(table.title)}</h3><table><tr>{head}</tr>{rows}</table>"


def _example_html(trajectory: Trajectory, detail: str) -> str:
    reward = "not scored" if trajectory.reward is None else f"reward {trajectory.reward:.3g}"
    facts = {name: value for name, value in provenance_of(trajectory).items() if name != PROVENANCE}
    told = json.dumps(facts, ensure_ascii=False, default=str) if facts else ""
    head = f"task {trajectory.task.id}, attempt {trajectory.attempt}: {trajectory.turns} turns, {reward}"
    why = f" <span class=out>{_text(detail)}</span>" if detail else ""
    body = episode_text(trajectory)
    cut = f"\n[{len(body) - _MOST_CHARS} more characters]" if len(body) > _MOST_CHARS else ""
    return (
        f"<details><summary>{_text(head)}{why}</summary><p class=facts>{_text(told)}</p>"
        f"<pre>{_text(body[:_MOST_CHARS] + cut)}</pre></details>"
    )


def _more_html(count: int) -> str:
    more = count - MOST_SHOWN
    return f"<p class=facts>and {more} more, in the Parquet files</p>" if more > 0 else ""


def _text(text: str) -> str:
    return escape(printable(text))
