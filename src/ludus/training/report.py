"""What a finished run shows: a table, a curve, two episodes. Read from the run's folder alone."""

from __future__ import annotations

from dataclasses import dataclass

from ludus.core.success import is_success
from ludus.core.trajectory import Trajectory
from ludus.observe import RunFolder, atomic_write, episode_text, plot_curve, table_markdown
from ludus.observe.report import Cell
from ludus.training.recipe import Recipe

COLUMNS = ("held-out tasks", "step", "success", "reward", "turns", "tool errors")


@dataclass(frozen=True, slots=True)
class Report:
    """The table's rows, and an episode before and after on the same task, where there are any."""

    rows: list[list[Cell]]
    samples: list[tuple[str, Trajectory]]


def write_report(run: RunFolder, recipe: Recipe) -> Report:
    """Draw `curve.png` and write `report.md` into the run's folder."""
    report = Report(_rows(run, recipe), _samples(run, recipe))
    plot_curve(run.curve_path, run.metrics(), title=recipe.name)
    parts = [f"# {run.name}\n", table_markdown(COLUMNS, report.rows), "![curve](curve.png)\n"]
    for label, trajectory in report.samples:
        parts.append(f"## An episode {label}\n\n```text\n{episode_text(trajectory)}\n```\n")
    atomic_write(run.report_path, "\n".join(parts))
    return report


def stage_of(step: int, recipe: Recipe) -> str:
    """Where in the recipe a step stands, in words."""
    warm = recipe.warm_start.steps if recipe.warm_start else 0
    if step < warm or (step == 0 and warm == 0):
        return "at the start"
    if step == warm:
        return "after the warm start"
    if step >= warm + recipe.rl.steps:
        return "after RL"
    return f"after {step - warm} steps of RL"


def _rows(run: RunFolder, recipe: Recipe) -> list[list[Cell]]:
    names = ("eval/success", "eval/reward", "eval/turns", "eval/invalid_call_share")
    # by step, because a run that was resumed at its end has measured there twice
    measured = {row["step"]: row for row in run.metrics() if row.get("eval/success") is not None}
    return [
        [
            stage_of(row["step"], recipe),
            row["step"],
            f"{row['eval/success']:.1%}",
            *_cells(row, names[1:]),
        ]
        for row in measured.values()
    ]


def _cells(row: dict[str, float], names: tuple[str, ...]) -> list[Cell]:
    return [round(float(row[name]), 2) if row.get(name) is not None else None for name in names]


def _samples(run: RunFolder, recipe: Recipe) -> list[tuple[str, Trajectory]]:
    """The same task before and after RL: one that was learned, if there is such a one."""
    steps = sorted(file.step for file in run.trajectory_files() if file.split == "eval")
    warm = recipe.warm_start.steps if recipe.warm_start else 0
    if warm not in steps or steps[-1] == warm:
        return []
    before, after = (run.trajectories(step, "eval") for step in (warm, steps[-1]))
    later = {trajectory.task.id: trajectory for trajectory in after}
    pairs = [(old, later[old.task.id]) for old in before if old.task.id in later]
    learned = [(old, new) for old, new in pairs if not is_success(old) and is_success(new)]
    if not pairs:
        return []
    old, new = (learned or pairs)[0]
    return [("before RL", old), ("after RL", new)]
