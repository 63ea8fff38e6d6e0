"""Functions of users around a step: `run.before_step`, `run.after_step` (docs/hooks.md)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ludus.core.failures import LudusError
from ludus.core.registry import load_function
from ludus.core.user_code import error_with_location
from ludus.training.config.run import RunConfig


class HookError(LudusError):
    """A hook raised. The run is saved after its last whole step."""


@dataclass(frozen=True, slots=True)
class StepEvent:
    """A step, as hooks see it."""

    run: Path
    """The run's folder."""
    stage: str
    """The kind of its stage: sft, rl, dpo, ..."""
    step: int
    """The number of the step in the run, from 1."""
    metrics: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    """The metrics of the step; empty before it."""


class StepHooks:
    """The functions that are called before and after every step, in order."""

    def __init__(self, config: RunConfig) -> None:
        self._before = _loaded("run.before_step", config.before_step)
        self._after = _loaded("run.after_step", config.after_step)

    def before(self, event: StepEvent) -> None:
        _call(self._before, event)

    def after(self, event: StepEvent) -> None:
        _call(self._after, event)


def _loaded(where: str, references: Sequence[str]) -> dict[str, Callable[[StepEvent], Any]]:
    return {f"{name} ({where})": load_function(where, name) for name in references}


def _call(hooks: Mapping[str, Callable[[StepEvent], Any]], event: StepEvent) -> None:
    for name, hook in hooks.items():
        try:
            hook(event)
        except Exception as error:
            raise HookError(f"the hook {name} raised {error_with_location(error)}") from error
