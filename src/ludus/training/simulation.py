"""Discrete-event simulation of asynchronous training on more GPUs: the real controller, on a virtual clock.

The event loop jumps to the next event, so that hours of 1,000 GPUs take minutes of one core. An update takes
place on the engines' own GPUs while they are paused; or on GPUs of its own, and a sync pauses the engines.
"""

from __future__ import annotations

import asyncio
import selectors
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from ludus.core.config import apply_overrides
from ludus.core.failures import ConfigError
from ludus.core.task import Task
from ludus.observe import Cell, ReportTable, Share
from ludus.rollouts.rollout import Rollout
from ludus.training.config.rl import RolloutSettings
from ludus.training.controller import RolloutController, StalledError
from ludus.training.data.tasks import TaskSet
from ludus.training.ledger import Ledger, Phase
from ludus.training.simulated_cluster import SimulatedPlayer, SimulationConfig

T = TypeVar("T")

_COLUMNS = ("s/step", "gain", "eps/s", "tok/s", "play", "train", "lag", "deaths", "ms/group")
_FEWEST_STEPS = 5
CAPTION = (
    "gain: seconds a step with staleness 0, divided by these. eps/s, tok/s: episodes and tokens trained. "
    "play, train: share of the time in which engines and trainer were busy. lag: mean, and largest of its "
    "bound, in steps. ms/group: CPU time of controller and simulation."
)


@dataclass(frozen=True, slots=True)
class SimulatedRun:
    """Results of a simulation. Rates leave out the first step, in which the pipeline fills."""

    seconds: float
    steps: int
    step_seconds: float
    episodes_per_second: float
    tokens_per_second: float
    """Trained tokens."""
    engine_busy: float
    """Share of the engines' time in which they had requests and ran."""
    trainer_busy: float
    lag_mean: float
    lag_max: int
    lag_bound: int
    deaths: int
    given_up: int
    """Groups that failed too often."""
    controller_seconds: float
    """CPU seconds of the controller, the simulation included, for each group."""


def simulate(config: SimulationConfig) -> SimulatedRun:
    return run_virtually(_run(config))


class _VirtualSelector(selectors.SelectSelector):
    """Waits for nothing: what would be waited for is added to the clock."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise StalledError("the controller waits, and nothing is left that could happen")
        self.now += max(0.0, timeout)
        return []


class _VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._clock = _VirtualSelector()
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.now


def run_virtually(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on a virtual clock: sleeping takes no time."""
    with asyncio.Runner(loop_factory=_VirtualLoop) as runner:
        return runner.run(main)


async def _run(config: SimulationConfig) -> SimulatedRun:
    """The trainer: takes batches from the controller, and lets time pass."""
    ledger = Ledger(config.tasks, config.staleness, config.staleness_window, config.steps * config.tasks)
    clock, began = asyncio.get_running_loop().time, time.process_time()
    player = SimulatedPlayer(config)
    tasks = [Task.of("", id=str(i)) for i in range(config.tasks)]
    # no rollout: the player does without
    sets = [TaskSet("simulated", 1.0, tasks, [], cast(Rollout, None))]
    settings = RolloutSettings(tasks=config.tasks, attempts=config.attempts)
    rollouts = RolloutController(
        sets, settings, config.seed, ledger, player, lambda step: {}, stall_seconds=1e9
    )
    lags: list[int] = []
    ends: list[float] = []
    tokens: list[int] = []
    training, given_up = 0.0, 0
    while ledger.phase is not Phase.ENDED:
        batch = await rollouts.next_batch()
        lags += [ledger.lag(plan.ordinal) for plan in batch.plans]
        given_up += sum(not group.trainable for group in batch.played.groups)
        tokens.append(sum(player.tokens.pop(plan.ordinal, 0) for plan in batch.plans))
        seconds = config.update_seconds(tokens[-1])
        if config.trainers:
            await asyncio.sleep(seconds)
        await player.hold()
        await asyncio.sleep(config.sync_seconds + (0.0 if config.trainers else seconds))
        player.release()
        training += seconds
        ends.append(clock())
        rollouts.trained(batch)
    await rollouts.close()
    steady = ends[-1] - ends[0] if len(ends) > 1 else ends[-1]
    counted = max(1, len(ends) - 1)
    busy = sum(engine.busy for engine in player.engines) / len(player.engines)
    return SimulatedRun(
        seconds=ends[-1],
        steps=len(ends),
        step_seconds=steady / counted,
        episodes_per_second=counted * config.tasks * config.attempts / steady,
        tokens_per_second=sum(tokens[-counted:]) / steady,
        engine_busy=busy / ends[-1],
        trainer_busy=training / ends[-1],
        lag_mean=sum(lags) / len(lags),
        lag_max=max(lags),
        lag_bound=ledger.max_lag,
        deaths=player.deaths,
        given_up=given_up,
        controller_seconds=(time.process_time() - began) / len(lags),
    )


def simulation_table(settings: Sequence[str], sweep: Sequence[str]) -> ReportTable:
    """Simulate every row of a sweep, each also with a staleness of 0."""
    names, swept = _swept(sweep)
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


def _swept(sweep: Sequence[str]) -> tuple[list[str], list[tuple[str, ...]]]:
    pairs = [one.partition("=") for one in sweep]
    if any(not equals or not values for _, equals, values in pairs):
        raise ConfigError(f"--sweep takes key=value,value,...: {', '.join(sweep)}")
    columns = [values.split(",") for _, _, values in pairs]
    if len({len(column) for column in columns}) > 1:
        raise ConfigError(f"sweeps side by side need equally many values: {', '.join(sweep)}")
    rows: list[tuple[str, ...]] = list(zip(*columns, strict=True)) if columns else [()]
    return [name for name, _, _ in pairs], rows
