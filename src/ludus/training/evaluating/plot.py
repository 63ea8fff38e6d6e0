"""A study as a picture: pass@k over k, success over turns. Matplotlib's own state is not touched."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ludus.observe import atomic_file, printable
from ludus.observe.statistics import Estimate
from ludus.training.evaluating.study import Study
from ludus.training.evaluating.summary import ALL

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
    several = len({measured.turns for measured in study.measured}) > 1
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
