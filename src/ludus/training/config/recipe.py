"""A recipe: one TOML file that says what is trained, on what, and how. Every key has a default or a reason."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate
from typing import Annotated, Any, get_args

from pydantic import Field, model_validator

from ludus.core.config import Config
from ludus.engine import EngineConfig
from ludus.rollouts.recorder import Budgets
from ludus.training.config.agent import AgentConfig, TasksConfig, TaskSetConfig
from ludus.training.config.cluster import ClusterConfig
from ludus.training.config.model import ModelConfig
from ludus.training.config.rl import RLConfig
from ludus.training.config.rl_checks import check_followed_metrics, check_overlong
from ludus.training.config.run import EvaluationConfig, RunConfig, SamplingConfig
from ludus.training.config.stages import (
    BaseStageConfig,
    DistillationConfig,
    EvaluationStageConfig,
    OptimizerConfig,
    PreferenceConfig,
    RejectionConfig,
    SFTConfig,
)

log = logging.getLogger(__name__)


StageConfig = Annotated[
    SFTConfig
    | RLConfig
    | PreferenceConfig
    | RejectionConfig
    | DistillationConfig
    | EvaluationStageConfig,
    Field(discriminator="kind"),
]
AGAIN = "ludus train --resume {path}"
"""Command shown for resuming an interrupted run; API callers pass their own."""
STAGE_CONFIGS: tuple[type[BaseStageConfig], ...] = get_args(get_args(StageConfig)[0])
"""The kinds of stages, in the order of their settings."""


class Recipe(Config):
    """Everything about a run that is data. What is code is named by reference."""

    name: str = "run"
    """Names the run's folder."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Decides every random choice of the run."""
    threads: int | None = Field(default=None, ge=1, le=1024)
    """CPU threads; all cores when left out."""
    model: ModelConfig
    tasks: TasksConfig = TasksConfig()
    agent: AgentConfig = AgentConfig()
    rewards: tuple[str | dict[str, Any], ...] = ()
    """Rewards by library name or reference, or tables with options: { reward = "f1", weight = 0.5 }."""
    group_rewards: tuple[str | dict[str, Any], ...] = ()
    """Rewards over whole groups, in the same way."""
    budgets: Budgets = Budgets()
    sampling: SamplingConfig = SamplingConfig()
    engine: EngineConfig = EngineConfig()
    max_in_flight: int = Field(default=256, ge=1)
    """Most episodes running at once."""
    max_failures: float = Field(default=0.5, gt=0, le=1)
    """The run stops with an error when a larger share of the episodes it plays failed through our fault."""
    warm_start: SFTConfig | None = None
    rl: RLConfig = RLConfig()
    stage: tuple[StageConfig, ...] = ()
    """The stages in order, instead of a warm start and RL: tables with kind = sft, rl, dpo, ..."""
    task_sets: tuple[TaskSetConfig, ...] = ()
    """Several task sets in one run, instead of [tasks]."""
    evaluation: EvaluationConfig = EvaluationConfig()
    run: RunConfig = RunConfig()
    synth: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Settings of `ludus synth METHOD`, a table for each method: [synth.rejection] (docs/synthesis.md)."""
    cluster: ClusterConfig = ClusterConfig()

    @model_validator(mode="after")
    def _one_device_each(self) -> Recipe:
        if (self.cluster.trainer_ranks or 1) > 1 and ":" in self.model.device:
            raise ValueError(
                f"model.device = {self.model.device!r} is one device, and cluster.trainer_ranks = "
                f"{self.cluster.trainer_ranks} need one each: say auto, cuda or cpu"
            )
        return self

    @model_validator(mode="after")
    def _trusted_code(self) -> Recipe:
        if self.model.trust_remote_code and self.cluster.engines:
            raise ValueError(
                "model.trust_remote_code: engines in processes of their own (cluster.engines) run no code that "
                "a model brings; sample with the engine in the trainer's process, or with cluster.servers"
            )
        return self

    @model_validator(mode="after")
    def _shown_images(self) -> Recipe:
        if self.cluster.servers and self.model.vision in ("frozen", "trained"):
            raise ValueError(
                f"model.vision = {self.model.vision!r} asks for a model that is shown images, and vLLM "
                "servers (cluster.servers) are shown none here: sample with cluster.engines instead, or with "
                "the engine in the trainer's process"
            )
        return self

    @model_validator(mode="before")
    @classmethod
    def _lift_max_failures(cls, raw: Any) -> Any:
        """`max_failures` was a key of each stage: the largest that was set becomes the recipe's."""
        if not isinstance(raw, Mapping):
            return raw
        raw = dict(raw)
        found: dict[str, Any] = {}
        for name in ("warm_start", "rl", "stage"):
            several = isinstance(raw.get(name), list | tuple)
            tables = list(raw[name]) if several else [raw.get(name)]
            for number, table in enumerate(tables):
                if isinstance(table, Mapping) and "max_failures" in table:
                    place = f"{name}.{number}" if several else name
                    found[place] = table["max_failures"]
                    tables[number] = {key: table[key] for key in table if key != "max_failures"}
            if name in raw:
                raw[name] = tables if several else tables[0]
        usual = cls.model_fields["max_failures"].default
        given = [value for value in found.values() if value not in (None, usual)]
        if given and "max_failures" not in raw:
            raw["max_failures"] = max(given, key=lambda one: one if isinstance(one, float | int) else 0)
        if found:
            log.warning(
                "%s: max_failures is a key of the whole recipe, not of a stage: write max_failures = %s at its "
                "top, above all tables. This is the value in effect",
                ", ".join(f"{place}.max_failures" for place in found),
                raw.get("max_failures", usual),
            )
        return raw

    @model_validator(mode="before")
    @classmethod
    def _without_warm_start(cls, raw: Any) -> Any:
        """`warm_start.steps = 0` leaves the warm start out, as `rl.steps = 0` does RL."""
        first = raw.get("warm_start") if isinstance(raw, Mapping) else None
        is_left_out = isinstance(first, Mapping) and first.get("steps") == 0
        return {**raw, "warm_start": None} if is_left_out else raw

    @model_validator(mode="after")
    def _one_plan(self) -> Recipe:
        # run folders of earlier versions spell out the learning rate of an [rl] that is not used
        unused = (RLConfig(), RLConfig(optimizer=OptimizerConfig(learning_rate=1e-6)))
        if self.stage and (self.warm_start is not None or self.rl not in unused):
            raise ValueError("[[stage]] tables replace [warm_start] and [rl]; give the one or the other")
        names = [one.name for one in self.task_sets]
        if len(set(names)) < len(names):
            raise ValueError(f"task_sets need different names, not {', '.join(names)}")
        if self.task_sets and self.tasks != TasksConfig():
            raise ValueError("[[task_sets]] tables replace [tasks]; give the one or the other")
        check_recipe(self)
        return self

    @property
    def first_sft(self) -> SFTConfig:
        """The first stage that imitates: what is passed stands in for the demonstrations that it names."""
        imitating = [stage for stage in self.stages if isinstance(stage, SFTConfig)]
        return imitating[0] if imitating else SFTConfig()

    @property
    def stages(self) -> tuple[StageConfig, ...]:
        """The stages of the run, in order."""
        if self.stage:
            return self.stage
        first = () if self.warm_start is None else (self.warm_start,)
        return (*first, self.rl) if self.rl.steps or not first else first

    @property
    def named_stages(self) -> list[tuple[str, StageConfig]]:
        """The stages, each with what its table is called."""
        usual = {"sft": "warm_start", "rl": "rl"}
        return [
            (f"stage.{number}" if self.stage else usual[stage.kind], stage)
            for number, stage in enumerate(self.stages)
        ]


PER_SET = ("success", "reward", "turns", "episodes")
"""Metrics logged for each of several task sets: sets/NAME/success, ..."""


# Checks across tables: settings that another table leaves without effect.


def check_recipe(recipe: Recipe) -> None:
    """Raise a `ValueError` that names the key."""
    for where, value in _not_finite(recipe.model_dump(), ""):
        raise ValueError(f"{where}: must be a finite number (given: {value!r})")
    names = [one.name for one in recipe.task_sets]
    per_set = [f"sets/{name}/{metric}" for name in names for metric in PER_SET]
    own_budgets = [one.budgets for one in recipe.task_sets] or [None]
    for where, stage in recipe.named_stages:
        if isinstance(stage, RLConfig):
            check_followed_metrics(stage, where, per_set if len(names) > 1 else [])
            check_overlong(stage, where, recipe.budgets, own_budgets)


def _not_finite(value: Any, where: str) -> Iterator[tuple[str, float]]:
    """Numbers in tables of free form, such as a reward's options, which no field looks at."""
    if isinstance(value, float) and not math.isfinite(value):
        yield where, value
    inner: Iterable[tuple[Any, Any]] = value.items() if isinstance(value, Mapping) else ()
    if isinstance(value, list | tuple):
        inner = enumerate(value)
    for name, one in inner:
        yield from _not_finite(one, f"{where}.{name}" if where else str(name))


def stage_ends(recipe: Recipe, *, learning: bool = True) -> set[int]:
    """The steps with which the stages end that learn, or (`learning=False`) that do not."""
    ends = accumulate(stage.total_steps for stage in recipe.stages)
    return {end for end, stage in zip(ends, recipe.stages, strict=True) if stage.learns == learning}
