"""Curricula: settings that change while training.

A curriculum starts easy. A *schedule* says from which step on a value holds. An *adaptive* setting moves on by
itself when a metric, averaged over the last steps, says so. Both are state machines over the steps' metrics:
pure, resumable, and shown among the metrics as `curriculum/<setting>`. The growing horizon is that of
ScalingInter-RL: Xi et al., "AgentGym-RL: Training LLM Agents for Long-Horizon Decision Making through
Multi-Turn Reinforcement Learning", 2025, arXiv:2509.08755.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import Field, StrictFloat, StrictInt, ValidationError, model_validator

from ludus.core.config import Config
from ludus.core.config_errors import problem_lines
from ludus.core.failures import ConfigError, LudusError
from ludus.core.registry import load_function
from ludus.core.user_code import error_with_location
from ludus.observe import SPLITS, definition_of
from ludus.rollouts.recorder import Budgets

RECENT = 20
BUDGETS = "budgets."
DIFFICULTY = "tasks.difficulty"
STRICTNESS = "rewards.strictness"


class AdaptiveConfig(Config):
    """A value that moves on when the model is ready for it."""

    start: float
    """Where it begins."""
    stop: float
    """Where it ends; it can be below the start."""
    by: float = Field(gt=0)
    """How far it moves at a time."""
    metric: str = "success"
    """The metric that decides: success, truncated, or any metric of a step."""
    above: float | None = None
    """Move on when the metric's mean is at least this."""
    below: float | None = None
    """Move on when the metric's mean is at most this."""
    over: int = Field(default=5, ge=1)
    """Over how many steps the mean is taken; they are counted anew after each move."""

    @model_validator(mode="after")
    def _can_move(self) -> AdaptiveConfig:
        if self.start == self.stop:
            raise ValueError(f"start and stop are both {self.start:g}, so the value would never move")
        if (self.above is None) == (self.below is None):
            raise ValueError("give exactly one of above and below")
        is_of_a_step = self.metric.partition("/")[0] not in SPLITS
        if not is_of_a_step or definition_of(self.metric) is None:
            raise ValueError(
                f"metric = {self.metric!r} is no metric of a step, so the value would never move "
                "(docs/metrics.md has them all)"
            )
        return self


class CurriculumConfig(Config):
    """One setting that changes: by a schedule, or adaptively; or a function that gives several."""

    setting: (
        Literal[
            "budgets.max_turns",
            "budgets.max_tokens",
            "budgets.max_turn_tokens",
            "tasks.difficulty",
            "rewards.strictness",
        ]
        | None
    ) = None
    """A budget, the difficulty of the hardest tasks to draw, or how strict rewards are."""
    schedule: tuple[tuple[StrictInt, StrictFloat], ...] = ()
    """Pairs of (step, value): from that step of the stage on, the value holds."""
    adaptive: AdaptiveConfig | None = None
    """Or: when to move on."""
    function: str | None = None
    """Or, without a setting: 'file.py:function', which gives values by setting (docs/hooks.md)."""

    @model_validator(mode="after")
    def _one_way(self) -> CurriculumConfig:
        if (self.setting is None) == (self.function is None):
            raise ValueError("give a setting, or a function, which names the settings")
        if (bool(self.schedule), self.adaptive is not None, self.function is not None).count(True) != 1:
            raise ValueError("give exactly one of schedule and adaptive")
        steps = [step for step, _ in self.schedule]
        if self.schedule and (steps[0] != 0 or steps != sorted(set(steps))):
            raise ValueError("a schedule's steps start at 0 and rise")
        if self.setting is not None and self.setting.startswith(BUDGETS):
            self._check_budgets(self.setting.removeprefix(BUDGETS))
        return self

    @property
    def values(self) -> tuple[float, ...]:
        """Values of the schedule, or the two ends between which the setting moves."""
        if self.adaptive is not None:
            return (self.adaptive.start, self.adaptive.stop)
        return tuple(value for _, value in self.schedule)

    def _check_budgets(self, name: str) -> None:
        """Each value must be one that the budget itself could have."""
        for value in self.values:
            try:
                Budgets.model_validate({name: value})
            except ValidationError as error:
                (line,) = problem_lines(Budgets, error.errors())
                raise ValueError(f"{BUDGETS}{line.strip()}") from None
        if self.adaptive is not None and not self.adaptive.by.is_integer():
            raise ValueError(
                f"{self.setting} moves by whole numbers, not by {self.adaptive.by:g} (adaptive.by)"
            )


class CurriculumFunction:
    """Settings that a function gives: `function(step, recent)`, from the metrics of the last `RECENT` steps.

    These are in checkpoints: a function of the two alone is resumable.
    """

    def __init__(self, reference: str) -> None:
        self._name, self._function = reference, load_function("rl.curriculum", reference)
        self._recent: list[dict[str, float]] = []
        self._known: dict[int, dict[str, float]] = {}
        """What it gave since the last step; many groups ask."""

    def values(self, step: int) -> dict[str, float]:
        if step not in self._known:
            try:
                given = self._function(step, [dict(row) for row in self._recent])
                found = {name: _checked_value(name, value) for name, value in given.items()}
            except Exception as error:
                why = str(error) if isinstance(error, LudusError) else error_with_location(error)
                raise ConfigError(f"rl.curriculum {self._name}, for step {step}: {why}") from error
            self._known[step] = found
        return self._known[step]

    def observe(self, metrics: Mapping[str, float]) -> None:
        self._recent = [*self._recent, dict(metrics)][-RECENT:]
        self._known = {}

    def state_dict(self) -> dict[str, Any]:
        return {"recent": self._recent}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._recent, self._known = [dict(row) for row in state["recent"]], {}


def _checked_value(name: str, value: Any) -> float:
    """The value of a setting, if a schedule could give it, too."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value):
        raise ConfigError(f"{name!r:.60} must be a finite number, not {value!r:.60}")
    (found,) = CurriculumConfig.parse(
        {"setting": name, "schedule": [[0, float(value)]]}, "its result"
    ).values
    return found


class Curriculum:
    """The scheduled settings of a stage, and where each of them stands."""

    def __init__(self, configs: Sequence[CurriculumConfig]) -> None:
        check_settings(configs)
        self._configs = by_setting(configs)
        self._adaptive = {
            name: _Adaptive(config.adaptive)
            for name, config in self._configs.items()
            if config.adaptive is not None
        }

    def values(self, step: int) -> dict[str, float]:
        """The settings that hold in a step of the stage, by name."""
        return {
            name: self._adaptive[name].value
            if config.adaptive is not None
            else scheduled(config.schedule, step)
            for name, config in self._configs.items()
        }

    def observe(self, metrics: Mapping[str, float]) -> None:
        """Take in the metrics of a step; adaptive settings may move on by them."""
        for setting in self._adaptive.values():
            setting.observe(metrics)

    def state_dict(self) -> dict[str, Any]:
        return {name: setting.state_dict() for name, setting in self._adaptive.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, setting in self._adaptive.items():
            setting.load_state_dict(state[name])


def by_setting(configs: Sequence[CurriculumConfig]) -> dict[str, CurriculumConfig]:
    return {config.setting: config for config in configs if config.setting is not None}


def function_of(configs: Sequence[CurriculumConfig]) -> str | None:
    """The function that is the curriculum."""
    return next((config.function for config in configs if config.function is not None), None)


def check_settings(configs: Sequence[CurriculumConfig]) -> None:
    """Refuse two of them for one setting, and others beside a function."""
    if function_of(configs) is not None and len(configs) > 1:
        raise ConfigError("a function is the whole curriculum: leave out its other tables")
    names = [config.setting for config in configs]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ConfigError(f"{twice[0]} is moved twice by a curriculum; give it one schedule")


def scheduled(schedule: Sequence[tuple[int, float]], step: int) -> float:
    """The value of the last entry whose step has come."""
    return [value for start, value in schedule if start <= step][-1]


class _Adaptive:
    def __init__(self, config: AdaptiveConfig) -> None:
        self._config = config
        self.value = config.start
        self._seen: list[float] = []

    def observe(self, metrics: Mapping[str, float]) -> None:
        if self._config.metric not in metrics:
            return
        self._seen = [*self._seen, float(metrics[self._config.metric])][-self._config.over :]
        if len(self._seen) == self._config.over and self._is_ready(statistics.fmean(self._seen)):
            self.value = self._next()
            self._seen = []

    def _is_ready(self, mean: float) -> bool:
        above, below = self._config.above, self._config.below
        return (above is not None and mean >= above) or (below is not None and mean <= below)

    def _next(self) -> float:
        config = self._config
        if config.stop >= config.start:
            return min(config.stop, self.value + config.by)
        return max(config.stop, self.value - config.by)

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value, "seen": self._seen}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.value, self._seen = float(state["value"]), [float(v) for v in state["seen"]]
