"""A study as people and programs read it: tables, Markdown, JSON. Pure but for `write_report`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ludus.core.failures import failed_episodes_warning
from ludus.core.messages import Json
from ludus.observe import (
    Cell,
    Estimate,
    ReportTable,
    Share,
    atomic_file,
    atomic_write,
    definition_of,
    diagnose,
    markdown_text,
    printable,
    share_text,
)
from ludus.training.evaluation.evaluate import TASK_SET
from ludus.training.evaluation.study import ModelResult, Study
from ludus.training.evaluation.summary import ALL, TESTED, Summary, test_cells

_TESTS = (
    "`+/-/=` counts tasks on which the model did better, worse, the same. `p flip` is the two-sided "
    "permutation test of the mean difference, `p sign` the sign test; neither allows for several comparisons, "
    "nor for lost episodes, which the interval of the difference does.\n"
)


def study_warnings(study: Study) -> list[str]:
    """A warning for each measurement that has lost a notable share of its episodes, and of single tasks."""
    found: list[str] = []
    for measured in study.measured:
        played = measured.evaluation.trajectories
        failures = [one.failure for one in played if one.failure is not None]
        text = failed_episodes_warning(failures, len(played), f"{measured.model}'s")
        found += [text] if text else []
    lone = dict.fromkeys(summary.subtask for _, summary in study.summaries if summary.tasks == 1)
    if lone:
        where = "" if ALL in lone else f" ({', '.join(lone)})"
        found.append(
            f"a single task{where} has no interval: it says nothing about other tasks; play more of them"
        )
    return found


def letters(study: Study) -> dict[str, str]:
    """A short name for each model: a table of long ones does not fit on a terminal."""
    models = dict.fromkeys(measured.model for measured in study.measured)
    return {model: chr(ord("A") + i) if i < 26 else f"M{i}" for i, model in enumerate(models)}


def single_table(study: Study) -> ReportTable:
    """One measurement, one number in a row."""
    measured, summary = study.summaries[0]
    rows: list[list[Cell]] = [["success", Share.of(summary.success)]]
    if summary.scored < summary.episodes:
        rows.append(["scored episodes", f"{summary.scored} of {summary.episodes}"])
    if summary.failed and summary.bounds is not None:
        low, high = summary.bounds
        bounds = f"{share_text(low)} / {share_text(high)}"
        rows.append(["success, lost ones as 0 / as 1", bounds])
    rows += [[name, Share.of(estimate)] for name, estimate in _at_k(summary, study.how.ks)]
    rows += [["reward", summary.reward], ["turns", summary.turns]]
    rows += metric_rows(
        [measured.evaluation.metrics], ("tool_calls", "invalid_call_share", "tokens/action")
    )
    rows += [["truncated", _share(summary.truncated)], ["lost episodes", summary.failed]]
    if summary.left_out:
        rows.append(["aborted or not scored", summary.left_out])
    title = f"{measured.model}: {summary.tasks} tasks, {summary.episodes} episodes"
    return ReportTable(("metric", "value"), rows, title)


def full_table(study: Study) -> ReportTable:
    """All measurements, one in a row."""
    summaries = study.summaries
    ks = sorted({k for _, summary in summaries for k in summary.passed})
    most = ks[-1:]
    columns = (
        *_place_columns(study),
        "tasks",
        "episodes",
        "lost",
        "success",
        *(f"average@{k}" for k in most),
        *(f"pass@{k}" for k in ks),
        *(f"pass^{k}" for k in most),
        "reward",
        "turns used",
        "truncated",
    )
    rows: list[list[Cell]] = [
        [
            *_place(study, measured, summary.subtask, measured.model),
            summary.tasks,
            summary.episodes,
            summary.failed,
            Share.of(summary.success),
            *(Share.of(summary.average.get(k)) for k in most),
            *(Share.of(summary.passed.get(k)) for k in ks),
            *(Share.of(summary.relied.get(k)) for k in most),
            summary.reward,
            summary.turns,
            _share(summary.truncated),
        ]
        for measured, summary in summaries
    ]
    return ReportTable(columns, rows, "evaluation")


def short_table(study: Study) -> ReportTable:
    """All measurements in as many columns as fit on a terminal, models by their letters.

    Of pass@k it has what was asked for, or else the largest k.
    """
    most = max((k for _, summary in study.summaries for k in summary.passed), default=1)
    ks = study.how.ks or (most,)
    columns = (*_place_columns(study), "success", *(f"pass@{k}" for k in ks), "lost")
    names = letters(study)
    rows: list[list[Cell]] = [
        [
            *_place(study, measured, summary.subtask, names[measured.model]),
            Share.of(summary.success),
            *(Share.of(summary.passed.get(k)) for k in ks),
            summary.failed,
        ]
        for measured, summary in study.summaries
    ]
    return ReportTable(columns, rows, "evaluation")


def comparison_table(study: Study, *, short: bool = False) -> ReportTable:
    """Every model minus the one it is compared with; `short` with letters, for a terminal."""
    tasks = () if short else ("tasks",)
    columns = (*_place_columns(study), *tasks, *TESTED)
    names = letters(study) if short else {m.model: m.model for m in study.measured}
    rows: list[list[Cell]] = [
        [
            *_place(study, measured, comparison.subtask, names[measured.model]),
            *(() if short else (comparison.tasks,)),
            *test_cells(comparison.test),
        ]
        for measured, comparison in study.comparisons
    ]
    return ReportTable(columns, rows, f"success by task, minus that of {names.get(study.against or '')}")


def study_json(study: Study) -> Json:
    """All numbers, unrounded."""
    return {
        "level": study.how.level,
        "by": study.how.by,
        "measured": [
            {"model": m.model, "max_turns": m.turns, **summary.as_json()}
            for m, summary in study.summaries
        ],
        "failure_modes": [
            {"model": m.model, "max_turns": m.turns, **diagnose(m.evaluation.trajectories).metrics}
            for m in study.measured
        ],
        "against": study.against,
        "comparisons": [
            {"model": m.model, "max_turns": m.turns, **comparison.as_json()}
            for m, comparison in study.comparisons
        ],
    }


def study_markdown(study: Study) -> str:
    parts = [
        "# Evaluation\n",
        full_table(study).markdown(),
        f"Brackets are {study.how.level:.0%} intervals over tasks. Episodes lost to infrastructure failures "
        "are counted under `lost` and are in no mean; the intervals of success, average@k, pass@k and pass^k "
        "allow for them: their lower end counts every lost episode as 0, their upper end as 1.\n",
        *(f"**Warning:** {markdown_text(text)}\n" for text in study_warnings(study)),
    ]
    if study.against is not None:
        table = comparison_table(study)
        parts += [f"## {table.title[:1].upper()}{table.title[1:]}\n", table.markdown(), _TESTS]
    for measured in study.measured:
        found = diagnose(measured.evaluation.trajectories).markdown
        turns = "" if measured.turns is None else f", at most {measured.turns} turns"
        parts += (
            [f"## Failure modes of {markdown_text(measured.model)}{turns}\n", found] if found else []
        )
    return "\n".join([*parts, "![plot](plot.png)\n"])


def write_report(folder: Path, study: Study) -> list[Path]:
    """`report.md`, `report.json` and `plot.png` in this folder."""
    paths = [folder / name for name in ("report.md", "report.json", "plot.png")]
    atomic_write(paths[0], study_markdown(study))
    atomic_write(paths[1], json.dumps(study_json(study), indent=2) + "\n")
    plot_study(paths[2], study)
    return paths


METRICS = {
    "success": "success",
    "reward": "reward",
    "turns": "turns",
    "tool_calls": "tool calls",
    "invalid_call_share": "tool errors",
    "truncated": "truncated",
    "tokens/action": "tokens said",
    "failures": "lost episodes",
}
"""What the numbers of an evaluation are called in tables."""


def metric_rows(found: Sequence[Mapping[str, float]], names: Sequence[str] = ()) -> list[list[Cell]]:
    """A row for each of these metrics that was measured, a column for each measurement."""
    return [
        [METRICS[name], *(_metric(name, one.get(name)) for one in found)]
        for name in names or METRICS
        if name in found[0]
    ]


def _metric(name: str, value: float | None) -> Cell:
    metric = definition_of(name)
    if value is None or metric is None or metric.unit != "share":
        return int(value) if value is not None and name == "failures" else value
    return Share(value)


def _share(value: float | None) -> Share | None:
    return None if value is None else Share(value)


def _at_k(summary: Summary, asked: Sequence[int]) -> list[tuple[str, Estimate]]:
    """The requested numbers at k; or else each pass@k but plain success, and the others at the largest k."""
    most = max(summary.average, default=0)
    ks = asked or (most,)
    named = [(f"average@{k}", estimate) for k, estimate in summary.average.items() if k in ks]
    named += [(f"pass@{k}", e) for k, e in summary.passed.items() if k in asked or (not asked and k > 1)]
    return named + [(f"pass^{k}", e) for k, e in summary.relied.items() if k in ks and (k > 1 or asked)]


def _place_columns(study: Study) -> Sequence[str]:
    return [
        "model",
        *(["turns"] if _has_budgets(study) else []),
        *(["task set" if study.how.by == TASK_SET else "sub-task"] if study.how.by is not None else []),
    ]


def _place(study: Study, measured: ModelResult, subtask: str, name: str) -> list[Cell]:
    return [
        name,
        *([measured.turns] if _has_budgets(study) else []),
        *([subtask] if study.how.by is not None else []),
    ]


def _has_budgets(study: Study) -> bool:
    return len({measured.turns for measured in study.measured}) > 1


# Plots: pass@k over k, success over turns. Matplotlib's global state is not touched.

_LONGEST_LABEL = 48
Points = list[tuple[int, Estimate]]


def plot_study(path: str | Path, study: Study) -> None:
    """Draw one line for each model, its interval as a band."""
    from matplotlib.figure import Figure

    curves = pass_curves(study)
    scaling = turn_curves(study)
    panels = [("k", "pass@k", curves)] if curves else []
    if scaling:
        panels.append(("most turns", "success (share of episodes)", scaling))
    figure = Figure(figsize=(6.5 * max(1, len(panels)), 4.5), layout="constrained")
    axes = figure.subplots(1, max(1, len(panels)), squeeze=False)[0]
    for axis, (across, up, lines) in zip(axes, panels, strict=False):
        _draw(axis, lines)
        axis.set_xlabel(across)
        axis.set_ylabel(up)
    with atomic_file(path) as temporary:
        figure.savefig(temporary, format="png", dpi=120)


def pass_curves(study: Study) -> list[tuple[str, Points]]:
    """pass@k of each model, under each budget where there are several."""
    several = _has_budgets(study)
    return [
        (f"{m.model}, {m.turns} turns" if several else m.model, sorted(summary.passed.items()))
        for m, summary in study.summaries
        if summary.subtask == ALL and summary.passed
    ]


def turn_curves(study: Study) -> list[tuple[str, Points]]:
    """Success of each model over its budgets of turns, where there are several."""
    lines: dict[str, Points] = {}
    for measured, summary in study.summaries:
        if summary.subtask == ALL and summary.success is not None:
            lines.setdefault(measured.model, []).append((measured.turns, summary.success))
    return [(model, sorted(points)) for model, points in lines.items() if len(points) > 1]


def _draw(axis: Any, lines: Sequence[tuple[str, Points]]) -> None:
    drawn: list[Any] = []
    for _, points in lines:
        places = [place for place, _ in points]
        (line,) = axis.plot(places, [estimate.value for _, estimate in points], "o-", linewidth=2)
        drawn.append(line)
        known = [(p, e.low, e.high) for p, e in points if e.low is not None and e.high is not None]
        if known:
            where, low, high = zip(*known, strict=True)
            axis.fill_between(where, low, high, color=line.get_color(), alpha=0.15, linewidth=0)
            axis.vlines(where, low, high, color=line.get_color(), alpha=0.5, linewidth=1)
    places = sorted({place for _, points in lines for place, _ in points})
    axis.set_xscale("log", base=2)
    axis.set_xticks(places, [str(place) for place in places])
    axis.minorticks_off()
    axis.set_ylim(-0.03, 1.03)
    axis.grid(alpha=0.25)
    legend = axis.legend(drawn, [_label(label) for label, _ in lines], loc="best")
    for text in legend.get_texts():
        text.set_parse_math(False)  # a model's name may hold a dollar sign


def _label(text: str) -> str:
    clean = printable(text)
    return clean if len(clean) <= _LONGEST_LABEL else f"…{clean[-_LONGEST_LABEL:]}"
