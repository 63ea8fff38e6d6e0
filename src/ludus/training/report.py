"""What a finished run shows: a table, a curve, two episodes. Read from the run's folder alone."""

from __future__ import annotations

from dataclasses import dataclass

from ludus.core.success import is_success
from ludus.core.trajectory import Trajectory
from ludus.observe import RunFolder, atomic_write, episode_text, plot_curve, table_markdown
from ludus.observe.report import Cell
from ludus.training.recipe import Recipe
from ludus.training.settings import RLConfig
from ludus.training.steps import steps_of

_NAMES = {
    "sft": "the warm start",
    "rl": "RL",
    "dpo": "DPO",
    "rejection": "rejection sampling",
    "eval": "the evaluation",
}
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
    parts = [f"# {run.name}\n", table_markdown(COLUMNS, report.rows), *_passes(run)]
    parts.append("![curve](curve.png)\n")
    for label, trajectory in report.samples:
        parts.append(f"## An episode {label}\n\n```text\n{episode_text(trajectory)}\n```\n")
    atomic_write(run.report_path, "\n".join(parts))
    return report


def stage_of(step: int, recipe: Recipe) -> str:
    """Where in the recipe a step stands, in words."""
    start, before = 0, "at the start"
    for number, config in enumerate(recipe.stages):
        name, steps = _name(number, recipe), steps_of(config)
        if step == start:
            return before
        if step < start + steps:
            return f"after {step - start} steps of {name}"
        start, before = start + steps, f"after {name}"
    return before


def _name(number: int, recipe: Recipe) -> str:
    """What a stage is called, counted where there are several of its kind."""
    kinds = [config.kind for config in recipe.stages]
    kind = kinds[number]
    many = kinds.count(kind) > 1
    return f"{_NAMES[kind]} {kinds[:number].count(kind) + 1}" if many else _NAMES[kind]


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


def _passes(run: RunFolder) -> list[str]:
    """A table of pass@k and average@k for each measurement that has them."""
    tables: list[str] = []
    for row in run.metrics():
        ks = [int(name.partition("@")[2]) for name in row if name.startswith("eval/pass@")]
        shares = [
            [f"{what}@k", *(f"{row[f'eval/{what}@{k}']:.1%}" for k in ks)]
            for what in ("pass", "average")
        ]
        if ks:
            tables.append(
                table_markdown((f"after step {row['step']}", *(f"k = {k}" for k in ks)), shares)
            )
    return tables


def _cells(row: dict[str, float], names: tuple[str, ...]) -> list[Cell]:
    return [round(float(row[name]), 2) if row.get(name) is not None else None for name in names]


def _samples(run: RunFolder, recipe: Recipe) -> list[tuple[str, Trajectory]]:
    """The same task before and after RL, or all of the run: one that was learned, if there is such a one."""
    steps = sorted(file.step for file in run.trajectory_files() if file.split == "eval")
    first = _start_of_rl(recipe)
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
    what = "RL" if any(isinstance(stage, RLConfig) for stage in recipe.stages) else "training"
    return [(f"before {what}", old), (f"after {what}", new)]


def _start_of_rl(recipe: Recipe) -> int:
    """The step after which the first RL stage begins; 0 where there is none."""
    start = 0
    for config in recipe.stages:
        if isinstance(config, RLConfig):
            return start
        start += steps_of(config)
    return 0
