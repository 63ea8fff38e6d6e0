"""What only a whole recipe shows to be wrong: settings of one table that another one leaves without effect."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ludus.core.failures import ConfigError
from ludus.training.curriculum import BUDGETS
from ludus.training.settings import MeasurementConfig, RLConfig
from ludus.training.task_sets import PER_SET

if TYPE_CHECKING:
    from ludus.training.recipe import Recipe


def check_recipe(recipe: Recipe) -> None:
    """Raise a `ValueError` that names the key."""
    for where, value in _not_finite(recipe.model_dump(), ""):
        raise ValueError(f"{where}: must be a finite number (given: {value!r})")
    for where, stage in recipe.named_stages:
        if isinstance(stage, RLConfig):
            _check_followed_sets(stage, where, recipe)
            _check_overlong(stage, where, recipe)
        if isinstance(stage, MeasurementConfig) and not all(
            1 <= k <= stage.attempts for k in stage.pass_at
        ):
            raise ValueError(f"{where}.pass_at: pass@k needs k attempts, and there are {stage.attempts}")


def refuse_empty(raw: Mapping[str, Any]) -> None:
    """A list of stages or task sets without any, as a user wrote it: whatever is meant, nothing is done."""
    for name, usual in (("stage", "[warm_start] and [rl]"), ("task_sets", "[tasks]")):
        if name in raw and isinstance(raw[name], list | tuple) and not raw[name]:
            raise ConfigError(
                f"{name} = [] has no table: add [[{name}]] tables, or leave it out for {usual}"
            )


def _not_finite(value: Any, where: str) -> Iterator[tuple[str, float]]:
    """Numbers in tables of free form, such as a reward's options, which no field looks at."""
    if isinstance(value, float) and not math.isfinite(value):
        yield where, value
    inner: Iterable[tuple[Any, Any]] = value.items() if isinstance(value, Mapping) else ()
    if isinstance(value, list | tuple):
        inner = enumerate(value)
    for name, one in inner:
        yield from _not_finite(one, f"{where}.{name}" if where else str(name))


def _check_followed_sets(stage: RLConfig, where: str, recipe: Recipe) -> None:
    """A metric of a task set must be one that steps have."""
    names = [one.name for one in recipe.task_sets]
    known = [f"sets/{name}/{metric}" for name in names for metric in PER_SET] if len(names) > 1 else []
    for number, config in enumerate(stage.curriculum):
        metric = config.adaptive.metric if config.adaptive is not None else ""
        if metric.startswith("sets/") and metric not in known:
            there = f"there are: {', '.join(known)}" if known else "there are not several task sets"
            raise ValueError(
                f"{where}.curriculum.{number}.adaptive.metric: no step has {metric!r}, so the value would "
                f"never move; {there}"
            )


def _check_overlong(stage: RLConfig, where: str, recipe: Recipe) -> None:
    if stage.overlong is None:
        return
    most = max(_most_said(stage, recipe, own) for own in _own_budgets(recipe))
    if stage.overlong.longest > most:
        raise ValueError(
            f"{where}.overlong.longest: no episode says {stage.overlong.longest} tokens; the budgets end it "
            f"after {most} (max_turns * max_turn_tokens, and max_tokens). Lower it, or raise them"
        )


def _own_budgets(recipe: Recipe) -> list[dict[str, float]]:
    """The budgets that each task set gives itself."""
    given = [one.budgets for one in recipe.task_sets]
    return [
        {} if own is None else {name: getattr(own, name) for name in own.model_fields_set}
        for own in given or [None]
    ]


def _most_said(stage: RLConfig, recipe: Recipe, own: Mapping[str, float]) -> int:
    """Tokens that an episode can say under the largest budgets that it will ever have."""
    moved = {c.setting.removeprefix(BUDGETS): max(c.values) for c in stage.curriculum}

    def budget(name: str) -> int:
        if name in moved:
            return int(min(moved[name], own.get(name, moved[name])))
        return int(own.get(name, getattr(recipe.budgets, name)))

    return min(budget("max_turns") * budget("max_turn_tokens"), budget("max_tokens"))
