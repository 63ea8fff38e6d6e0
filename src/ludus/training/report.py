"""A run for people: a report of tables, findings, a curve and two episodes.

The report is read from the run's folder alone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ludus.core.failures import NOTABLE_SHARE, Failure, failed_episodes_text
from ludus.core.trajectory import Trajectory, is_success
from ludus.observe import (
    LOSSES,
    Cell,
    Finding,
    ReportTable,
    RunFolder,
    Share,
    atomic_write,
    diagnose,
    episode_text,
    markdown_text,
    plot_curve,
    read_failures,
    share_text,
)
from ludus.training.config.recipe import STAGE_CONFIGS, Recipe
from ludus.training.config.rl import RLConfig
from ludus.training.early_end import best_of, plateau_report

_FILES_LOOKED_AT = 500
"""How many of the newest files of episodes are searched for the causes of failures."""


@dataclass(frozen=True, slots=True)
class Report:
    """What was measured, and an episode before and after on the same task, where there are any."""

    held_out: ReportTable
    """A row for each evaluation."""
    samples: list[tuple[str, Trajectory]]
    losses: ReportTable
    """For each stage with a loss of its own: its steps, and the loss at its beginning and its end."""
    best: Path | None = None
    """The checkpoint with the best held-out number."""
    success: Mapping[str, str] = field(default_factory=dict)
    """The share of held-out tasks that succeeded, by when it was measured."""
    best_stage: str = ""
    """When that was, such as "after the warm start": the best need not be of the last stage."""
    warnings: list[str] = field(default_factory=list)
    """Warnings beside the numbers: episodes that are missing from them."""
    findings: Sequence[Finding] = ()
    """What needs a person."""


def write_report(
    run: RunFolder, recipe: Recipe, findings: Sequence[Finding] = (), *, is_live: bool = False
) -> Report:
    """Write `report.md` into the run's folder, and draw `curve.png`, which a run that goes on does not have."""
    best = best_of(run.metrics(), recipe)
    path = {one.step: one.path for one in run.checkpoints()}.get(best.step) if best else None
    when = stage_of(best.step, recipe) if best else ""
    measured = _measured(run)
    report = Report(
        held_out_table(run, recipe),
        [] if is_live else _samples(run, recipe),
        _losses(run, recipe),
        path,
        {stage_of(step, recipe): success_text(row) for step, row in measured.items()},
        when,
        _warnings(run),
        [one for one in findings if one.kind != "lost"],
    )
    parts = [f"# {run.name}\n", *(["The run goes on.\n"] if is_live else [])]
    parts += [table.markdown() for table in _tables(report, run) if table.rows]
    if best is not None and path is not None:
        by = recipe.evaluation.best_by
        value = share_text(best.value) if by == "success" else f"{best.value:.3f}"
        parts.append(f"Best checkpoint: `checkpoints/{path.name}` (held-out {by} {value}, {when})\n")
    parts += [f"**Warning:** {markdown_text(text)}\n" for text in report.warnings]
    if report.findings:
        told = [f"- **{markdown_text(f.title)}.** {markdown_text(f.detail)}" for f in report.findings]
        parts.append("## What needs a person\n\n" + "\n".join(told) + "\n")
    parts += [] if is_live else ["![curve](curve.png)\n"]
    parts += _plateaus(run, recipe)
    if run.diagnosis_path.exists():
        parts.append(run.diagnosis_path.read_text())
    for label, trajectory in report.samples:
        parts.append(f"## An episode {label}\n\n```text\n{episode_text(trajectory)}\n```\n")
    atomic_write(run.report_path, "\n".join(parts))
    if not is_live:  # last: a finished run is known by it
        plot_curve(run.curve_path, run.metrics(), title=recipe.name)
    return report


def _tables(report: Report, run: RunFolder) -> list[ReportTable]:
    return [report.held_out, report.losses, *_passes(run)]


def held_out_table(run: RunFolder, recipe: Recipe) -> ReportTable:
    """A row for each evaluation of a run."""
    return _held_out(_measured(run).values(), recipe)


def _measured(run: RunFolder) -> dict[int, Mapping[str, float]]:
    """Evaluations by step, because a run that was resumed at its end has measured there twice."""
    return {row["step"]: row for row in run.metrics() if row.get("eval/episodes") is not None}


def write_diagnosis(
    run: RunFolder, when: str, episodes: Sequence[Trajectory], *, has_tools: bool
) -> None:
    """Write why held-out episodes did not succeed into the run's folder: those of the newest evaluation."""
    found = diagnose(episodes, has_tools=has_tools).markdown or "Every scored episode succeeded.\n"
    atomic_write(run.diagnosis_path, f"## Failure modes, {when}\n\n{found}")


def _plateaus(run: RunFolder, recipe: Recipe) -> list[str]:
    """Text on the trend of tool use, for each stage that follows it."""
    return [
        plateau_report(run.metrics(), config.plateau, start, end)
        for config, start, end in recipe.stage_spans
        if isinstance(config, RLConfig) and config.plateau is not None
    ]


def stage_of(step: int, recipe: Recipe) -> str:
    """Where in the recipe a step stands, in words."""
    before = "at the start"
    for number, (_, start, end) in enumerate(recipe.stage_spans):
        if step == start:
            return before
        if step < end:
            return f"after {step - start} steps of {recipe.stage_title(number)}"
        before = f"after {recipe.stage_title(number)}"
    return before


def _held_out(measured: Collection[Mapping[str, float]], recipe: Recipe) -> ReportTable:
    has_lost = any(row["eval/episodes_scored"] < row["eval/episodes"] for row in measured)
    scored = ("scored",) if has_lost else ()
    return ReportTable(
        ("held-out tasks", "step", "success", *scored, "lost", "reward", "turns", "tool errors"),
        [
            [
                stage_of(int(row["step"]), recipe),
                int(row["step"]),
                success_of(row),
                *(f"{row['eval/episodes_scored']:.0f} of {row['eval/episodes']:.0f}" for _ in scored),
                int(row.get("eval/failures", 0)),
                row.get("eval/reward"),
                row.get("eval/turns"),
                None if (errors := row.get("eval/invalid_call_share")) is None else Share(errors),
            ]
            for row in measured
        ],
    )


def _losses(run: RunFolder, recipe: Recipe) -> ReportTable:
    """The stages whose steps tell a loss that falls while they learn; RL's does not."""
    rows = run.metrics()
    found: list[list[Cell]] = []
    for number, (config, start, end) in enumerate(recipe.stage_spans):
        own = [row for row in rows if start < row["step"] <= end]
        losses = [row[name] for row in own for name in LOSSES if row.get(name) is not None]
        if losses:
            found.append([recipe.stage_title(number), config.total_steps, losses[0], losses[-1]])
    return ReportTable(("stage", "steps", "loss at first", "loss at the end"), found)


def success_of(row: Mapping[str, float]) -> Share | None:
    """The held-out success of a row of metrics, with its interval."""
    success = row.get("eval/success")
    if success is None:
        return None
    return Share(success, row.get("eval/success_low"), row.get("eval/success_high"))


def success_text(row: Mapping[str, float]) -> str:
    """The share of success of a measurement; where episodes are missing from it, of how many."""
    played, scored = int(row["eval/episodes"]), int(row["eval/episodes_scored"])
    success = row.get("eval/success")
    if success is None:
        return f"– (0 of {played} scored)"
    return share_text(success) + (f" ({scored} of {played} scored)" if scored < played else "")


def _warnings(run: RunFolder) -> list[str]:
    """Warnings for readers of the table, of the episodes that are missing from it."""
    rows = run.metrics()
    found: list[str] = []
    for split, which in (("train", "training"), ("eval", "held-out")):
        counted = [_episodes_of(row, split) for row in rows]
        played, failed = (sum(column) for column in zip(*counted, strict=True)) if counted else (0, 0)
        if failed and failed >= NOTABLE_SHARE * played:
            then = " and were not scored: what was measured is over the others"
            causes = list(_failures(run, split))
            found.append(failed_episodes_text(failed, played, then, causes, which))
    return found


def _episodes_of(row: Mapping[str, float], split: str) -> tuple[int, int]:
    kinds = [one for one in STAGE_CONFIGS if one.learns == (split == "train")]
    prefixes = [f"{one.prefix}/" if one.prefix else "" for one in kinds]
    played = sum(int(row.get(f"{prefix}episodes") or 0) for prefix in prefixes)
    return played, sum(int(row.get(f"{prefix}failures") or 0) for prefix in prefixes)


def _failures(run: RunFolder, split: str) -> Iterator[Failure]:
    files = [file for file in run.trajectory_files() if file.split == split]
    for file in files[-_FILES_LOOKED_AT:]:
        yield from read_failures(file.path)


def _passes(run: RunFolder) -> list[ReportTable]:
    tables: list[ReportTable] = []
    for row in run.metrics():
        ks = [int(name.partition("@")[2]) for name in row if name.startswith("eval/pass@")]
        shares: list[list[Cell]] = [
            [f"{what}@k", *(Share(row[f"eval/{what}@{k}"]) for k in ks)] for what in ("pass", "average")
        ]
        if ks:
            tables.append(ReportTable((f"after step {row['step']}", *(f"k = {k}" for k in ks)), shares))
    return tables


def _samples(run: RunFolder, recipe: Recipe) -> list[tuple[str, Trajectory]]:
    """Two episodes of one task, before and after RL or the whole run; a task that was learned, if any."""
    steps = sorted(file.step for file in run.trajectory_files() if file.split == "eval")
    rl = next((start for one, start, _ in recipe.stage_spans if isinstance(one, RLConfig)), None)
    first = rl or 0
    if first not in steps or steps[-1] == first:
        return []
    before, after = (run.trajectories(step, "eval") for step in (first, steps[-1]))
    # by what they ask, too: tasks of two sets may have the same id
    later = {(one.task.id, repr(one.task.messages)): one for one in after}
    found = [(old, later.get((old.task.id, repr(old.task.messages)))) for old in before]
    pairs = [(old, new) for old, new in found if new is not None]
    learned = [(old, new) for old, new in pairs if not is_success(old) and is_success(new)]
    if not pairs:
        return []
    old, new = (learned or pairs)[0]
    what = "RL" if rl is not None else "training"
    return [(f"before {what}", old), (f"after {what}", new)]
