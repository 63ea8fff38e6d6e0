"""`ludus simulate`: one row for each cluster, beside the same one without asynchrony."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from ludus.core.config import apply_overrides
from ludus.core.failures import ConfigError
from ludus.observe import Cell, ReportTable, Share
from ludus.training.simulation.cluster import SimulationConfig
from ludus.training.simulation.run import simulate

_COLUMNS = ("s/step", "gain", "eps/s", "tok/s", "play", "train", "lag", "deaths", "ms/group")
_FEWEST_STEPS = 5
_WIDTH = 110
CAPTION = (
    "gain: seconds a step with staleness 0, divided by these. eps/s, tok/s: episodes and tokens trained. "
    "play, train: share of the time in which engines and trainer were busy. lag: mean, and largest of its "
    "bound, in steps. ms/group: CPU time of controller and simulation."
)


def print_simulation(settings: Sequence[str], sweep: Sequence[str]) -> None:
    """Print the table, whole: a narrow terminal would cut its numbers."""
    console = Console()
    console = console if console.width >= _WIDTH else Console(width=_WIDTH)
    console.print(simulation_table(settings, sweep).rich())
    console.print(CAPTION)


def simulation_table(settings: Sequence[str], sweep: Sequence[str]) -> ReportTable:
    """Simulate every row of a sweep, each also with a staleness of 0."""
    names, swept = _rows(sweep)
    rows: list[list[Cell]] = []
    for values in swept:
        chosen = [f"{name}={value}" for name, value in zip(names, values, strict=True)]
        config = SimulationConfig.parse(apply_overrides({}, [*settings, *chosen]), "the simulation")
        if config.steps < _FEWEST_STEPS:
            raise ConfigError(
                f"steps = {config.steps} is too few to compare: rates leave out the first step, and one slow "
                f"tool decides about so few. Simulate at least {_FEWEST_STEPS}"
            )
        run = simulate(config)
        waiting = simulate(config.model_copy(update={"staleness": 0, "staleness_window": 1}))
        row: list[Cell] = [
            run.step_seconds,
            waiting.step_seconds / run.step_seconds,
            round(run.episodes_per_second),
            round(run.tokens_per_second),
            Share(run.engine_busy),
            Share(run.trainer_busy),
            f"{run.lag_mean:.1f} {run.lag_max}/{run.lag_bound}",
            run.deaths,
            1000 * run.controller_seconds,
        ]
        rows.append([*values, *row])
    return ReportTable((*names, *_COLUMNS), rows)


def _rows(sweep: Sequence[str]) -> tuple[list[str], list[tuple[str, ...]]]:
    pairs = [one.partition("=") for one in sweep]
    if any(not equals or not values for _, equals, values in pairs):
        raise ConfigError(f"--sweep takes key=value,value,...: {', '.join(sweep)}")
    columns = [values.split(",") for _, _, values in pairs]
    if len({len(column) for column in columns}) > 1:
        raise ConfigError(f"sweeps side by side need equally many values: {', '.join(sweep)}")
    rows: list[tuple[str, ...]] = list(zip(*columns, strict=True)) if columns else [()]
    return [name for name, _, _ in pairs], rows
