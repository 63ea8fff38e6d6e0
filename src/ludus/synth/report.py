"""A synthesis as people and programs read it: a table, Markdown, JSON, and a page of what was kept and why."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from pathlib import Path

from ludus.core.failures import Failure, most_frequent_failure
from ludus.core.messages import Json
from ludus.core.trajectory import Trajectory
from ludus.observe import Cell, ReportTable, Share, atomic_write, episode_text, markdown_text, printable
from ludus.synth.result import PROVENANCE, Cost, SynthFolder, SynthResult, provenance_of

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
