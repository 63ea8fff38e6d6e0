"""A recipe: one TOML file that says what is trained, on what, and how. Every key has a default or a reason.

What a recipe reads (tasks, demonstrations, code as file.py:name, databases, models) is looked for beside it,
then in the working directory, and made absolute. What a run writes (`run.folder`) is in the working directory.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any, get_args

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

import ludus
from ludus.algos.specs import ALGORITHMS
from ludus.core.config import Config, apply_overrides, read_toml
from ludus.core.failures import ConfigError, not_there
from ludus.engine import EngineConfig
from ludus.observe import RunFolder
from ludus.rollouts.recorder import Budgets
from ludus.training.config.rl import CriticConfig, RLConfig
from ludus.training.config.rl_checks import check_followed_metrics, check_overlong, check_tree_turns
from ludus.training.config.run import (
    AgentConfig,
    ClusterConfig,
    EvaluationConfig,
    ModelConfig,
    RunConfig,
    SamplingConfig,
    TasksConfig,
    TaskSetConfig,
)
from ludus.training.config.stages import (
    CRITIC_RATES,
    BaseStageConfig,
    DistillationConfig,
    EvaluationStageConfig,
    PreferenceConfig,
    RejectionConfig,
    SFTConfig,
    UsualRates,
)

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

RENAMED = {
    "agent.env_pool": "agent.pools.NAME.size",
    "agent.format_options": "agent.format = {{ name = ..., OPTION = ... }}",
    "cluster.replicas": "cluster.dp_replicate",
    "rl.options": "{table}.algorithm = {{ name = ..., OPTION = ... }}",
    "rl.loss_options": "{table}.loss = {{ name = ..., OPTION = ... }}",
    "rl.aggregation_options": "{table}.aggregation = {{ name = ..., OPTION = ... }}",
    "rl.correction_options": "{table}.correction = {{ name = ..., OPTION = ... }}",
    "rl.kl_control": "{table}.kl = {{ weight = ..., control = ... }}",
    "rl.kl_estimator": "{table}.kl = {{ weight = ..., estimator = ... }}",
    "rl.kl_in": "{table}.kl = {{ weight = ..., place = ... }}",
    "rl.staleness_window": "{table}.staleness = {{ steps = ..., window = ... }}",
    "rl.stale_updates": "{table}.staleness = {{ steps = ..., updates = ... }}",
    "rl.stall_seconds": "{table}.staleness = {{ steps = ..., stall_seconds = ... }}",
    "dpo.beta": "{table}.loss = {{ name = ..., beta = ... }}",
    "dpo.gamma": "{table}.loss = {{ name = ..., gamma = ... }}",
    "dpo.desirable_weight": "{table}.loss = {{ name = ..., desirable_weight = ... }}",
    "dpo.undesirable_weight": "{table}.loss = {{ name = ..., undesirable_weight = ... }}",
    "sft.max_failures": "max_failures, above all tables",
    "rl.max_failures": "max_failures, above all tables",
    "dpo.max_failures": "max_failures, above all tables",
    "rejection.max_failures": "max_failures, above all tables",
    "distill.max_failures": "max_failures, above all tables",
    "eval.max_failures": "max_failures, above all tables",
}
"""Keys of 0.1, by the kind of stage or the table, and what is written now. 0.3 deletes this table."""


class Recipe(Config):
    """Everything about a run that is data. What is code is named by reference."""

    renamed = RENAMED

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
    """The short form of a first [[stage]] of kind "sft": supervised learning on demonstrations."""
    rl: RLConfig = RLConfig()
    """The short form of a [[stage]] of kind "rl", after the warm start: reinforcement learning."""
    stage: tuple[StageConfig, ...] = ()
    """The stages in order: tables with kind = sft, rl, dpo, ... [warm_start] and [rl] are short for two."""
    task_sets: tuple[TaskSetConfig, ...] = ()
    """Several task sets in one run, each with what is its own; [tasks] is short for a single one."""
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
    def _without_stages(cls, raw: Any) -> Any:
        """No steps, or none, leave out the warm start as well as RL."""
        if not isinstance(raw, Mapping):
            return raw
        first, left_out = raw.get("warm_start"), dict[str, Any]()
        if isinstance(first, Mapping) and first.get("steps") == 0:
            left_out["warm_start"] = None
        if raw.get("rl") == "none":
            left_out["rl"] = {"steps": 0}
        return {**raw, **left_out}

    @model_validator(mode="after")
    def _one_form(self) -> Recipe:
        if self.stage and (self.warm_start is not None or self.rl != RLConfig()):
            raise ValueError("[[stage]] tables replace [warm_start] and [rl]; give the one or the other")
        names = [one.name for one in self.task_sets]
        if len(set(names)) < len(names):
            raise ValueError(f"task_sets need different names, not {', '.join(names)}")
        if self.task_sets and self.tasks != TasksConfig():
            raise ValueError("[[task_sets]] tables replace [tasks]; give the one or the other")
        check_recipe(self)
        return self

    @model_serializer(mode="wrap")
    def _without_the_other_form(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        made: dict[str, Any] = handler(self)
        unused = ("warm_start", "rl") if self.stage else ("stage",)
        for name in (*unused, "tasks" if self.task_sets else "task_sets"):
            made.pop(name, None)
        return made

    @property
    def stages(self) -> tuple[StageConfig, ...]:
        """The stages of the run, in order: [[stage]], or what [warm_start] and [rl] are short for."""
        if self.stage:
            return self.stage
        first = () if self.warm_start is None else (self.warm_start,)
        return (*first, self.rl) if self.rl.steps or not first else first

    @property
    def named_stages(self) -> list[tuple[str, StageConfig]]:
        """The stages, each with the key of its table in the recipe as it was written."""
        short = {"sft": "warm_start", "rl": "rl"}
        return [
            (f"stage.{number}" if self.stage else short[stage.kind], stage)
            for number, stage in enumerate(self.stages)
        ]

    def stage_title(self, number: int) -> str:
        """Name of a stage in sentences, numbered where several have it: `RL (1 of 2)`."""
        titles = [stage.title for stage in self.stages]
        title, before = titles[number], titles[: number + 1]
        alike = titles.count(title)
        return f"{title} ({before.count(title)} of {alike})" if alike > 1 else title

    @property
    def stage_spans(self) -> list[tuple[StageConfig, int, int]]:
        """The stages, each with the number of steps that are done before it and at its end."""
        ends = list(accumulate((stage.total_steps for stage in self.stages), initial=0))
        return list(zip(self.stages, ends, ends[1:], strict=False))

    def with_stages(self, stages: Iterable[StageConfig]) -> Recipe:
        """The recipe with these stages, of the same kinds, in place of its own, under the same keys."""
        if self.stage:
            return self.model_copy(update={"stage": tuple(stages)})
        return self.model_copy(
            update={name: one for (name, _), one in zip(self.named_stages, stages, strict=True)}
        )

    @property
    def first_sft(self) -> SFTConfig:
        """The first stage that imitates: what is passed stands in for the demonstrations that it names."""
        return next((one for one in self.stages if isinstance(one, SFTConfig)), SFTConfig())

    @property
    def sets(self) -> tuple[TasksConfig, ...]:
        """The task sets: [[task_sets]], each with a name and settings of its own, or [tasks] alone."""
        return self.task_sets or (self.tasks,)


PER_SET = ("success", "reward", "turns", "episodes")
"""Metrics logged for each of several task sets: sets/NAME/success, ..."""


# Checks across tables: settings that another table leaves without effect.


def check_recipe(recipe: Recipe) -> None:
    """Raise a `ValueError` that names the key."""
    for where, value in _not_finite(recipe.model_dump(), ""):
        raise ValueError(f"{where}: must be a finite number (given: {value!r})")
    names = [one.name for one in recipe.sets if isinstance(one, TaskSetConfig)]
    per_set = [f"sets/{name}/{metric}" for name in names for metric in PER_SET]
    own_budgets = [one.budgets if isinstance(one, TaskSetConfig) else None for one in recipe.sets]
    for where, stage in recipe.named_stages:
        if isinstance(stage, RLConfig):
            check_followed_metrics(stage, where, per_set if len(names) > 1 else [])
            check_overlong(stage, where, recipe.budgets, own_budgets)
            check_tree_turns(stage, where, recipe.budgets, own_budgets)


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
    return {end for stage, _, end in recipe.stage_spans if stage.learns == learning}


# Defaults that depend on the model: decided and printed when a run begins. A learning rate that suits a model
# made from scratch ruins a pretrained one. What was decided is in recipe.json, by which a run is resumed.


def with_usual_settings(recipe: Recipe) -> Recipe:
    """The recipe with a learning rate for all that learns, and a critic where an algorithm needs one."""
    return recipe.with_stages(_with_usual(one, recipe) for one in recipe.stages)


def _with_usual(stage: StageConfig, recipe: Recipe) -> StageConfig:
    if isinstance(stage, EvaluationStageConfig) or stage.usual_rates is None:
        return stage
    model = recipe.model
    update: dict[str, object] = {"optimizer": stage.optimizer.for_model(stage.usual_rates, model)}
    if isinstance(stage, RLConfig) and (stage.critic is not None or _needs_critic(stage)):
        update["critic"] = (stage.critic or CriticConfig()).for_model(model, stage.steps)
    return stage.model_copy(update=update)


def _needs_critic(stage: RLConfig) -> bool:
    if not stage.steps:
        return False
    if (spec := ALGORITHMS.get(stage.algorithm.name or "")) is not None:
        return spec.has_critic
    from ludus.algos import Need, load_algorithm  # torch comes with it

    return Need.CRITIC in load_algorithm(**stage.algorithm_settings).needs


def rate_notes(recipe: Recipe) -> list[str]:
    """The learning rates of a recipe in which they are decided, and whether they are usual, for what."""
    notes: list[str] = []
    for where, stage in recipe.named_stages:
        if (
            isinstance(stage, EvaluationStageConfig)
            or stage.usual_rates is None
            or not stage.total_steps
        ):
            continue
        notes.append(_note(where, stage.optimizer.peak_rate, stage.usual_rates, recipe))
        if isinstance(stage, RLConfig) and stage.critic is not None:
            rate = stage.critic.optimizer.peak_rate
            notes.append(_note(f"{where}.critic", rate, CRITIC_RATES, recipe))
    return notes


def _note(where: str, rate: float, usual: UsualRates, recipe: Recipe) -> str:
    model = recipe.model
    if model.lora is not None:
        what = "an adapter (LoRA)"
    else:
        what = (
            "a model made from scratch" if model.is_from_scratch else "all weights of a pretrained model"
        )
    expected = usual.of(model)
    than = f"usual for {what}" if rate == expected else f"usual for {what}: {expected:g}"
    return f"learning rate of {where}: {rate:g} ({than})"


# Recipes as files: those that come with Ludus, reading one with overrides, and the paths in one.


def packaged_recipes() -> dict[str, Path]:
    """The recipes that come with Ludus, by name."""
    package = Path(ludus.__file__).parent
    places = (package / "recipes", package.parent.parent / "recipes")  # of a wheel, and of a checkout
    found = next((place for place in places if place.is_dir()), places[0])
    return {path.stem: path for path in sorted(found.glob("*.toml"))}


def find_recipe(path: str | Path) -> Path:
    """A recipe's file: the path itself, or the recipe of that name that comes with Ludus."""
    named = packaged_recipes()
    if Path(path).is_dir() and str(path) not in named:
        raise ConfigError(_of_folder(Path(path)))
    if Path(path).is_file() or Path(path).suffix:
        return Path(path)
    if str(path) not in named:
        known, missing = ", ".join(named), not_there(path, beside_recipe=False)
        raise ConfigError(f"{missing}, and no recipe of that name comes with Ludus: {known}")
    return named[str(path)]


def _of_folder(folder: Path) -> str:
    """Error text for a folder given in place of a recipe."""
    text = f"{folder} is a folder, and a recipe is a TOML file"
    if RunFolder(folder).is_run:
        return f"{text}: it is a run's, and `ludus train --resume {folder}` resumes it"
    if (folder / "config.json").is_file():
        return f"{text}: it holds a model, which a recipe trains by model.name={folder}"
    found = sorted(str(one) for one in folder.glob("*.toml"))
    return f"{text}: did you mean {' or '.join(found[:3])}?" if found else f"{text}; it holds none"


def load_recipe(path: str | Path, overrides: Iterable[str] = ()) -> Recipe:
    """A recipe from a TOML file, or by its name, with `a.b=value` overrides."""
    given = list(overrides)
    path = find_recipe(path)
    raw = apply_overrides(beside(read_toml(path), path), given)
    refuse_empty(raw)
    is_named = any(override.startswith("model.name=") for override in given)
    is_made = any(override.startswith(("model.scratch=", "model.scratch.")) for override in given)
    if is_named != is_made:  # the one that is asked for replaces the recipe's
        raw["model"].pop("scratch" if is_named else "name", None)
    return Recipe.parse(raw, str(path))


def refuse_empty(raw: Mapping[str, Any]) -> None:
    """A list of stages or task sets without any, as a user wrote it: whatever is meant, nothing is done."""
    for name, usual in (("stage", "[warm_start] and [rl]"), ("task_sets", "[tasks]")):
        if name in raw and isinstance(raw[name], list | tuple) and not raw[name]:
            raise ConfigError(
                f"{name} = [] has no table: add [[{name}]] tables, or leave it out for {usual}"
            )


COMMAND = "command:"
"""Prefix of an agent.loop that is a command."""
_FILE = re.compile(
    r"(?P<path>.+\.(?:jsonl|json|toml|parquet|py|txt|md|gguf|db|sqlite3?|duckdb|sql))(?P<rest>:[\w.]+)?"
)
_DATASET = re.compile(r"dataset:(?P<path>[^:@]+)(?P<rest>[:@].*)?")
_FOLDERS = (
    ("model", "name"),
    ("stage", "teacher"),
    ("rewards", "folder"),
    ("task_sets", "rewards", "folder"),
    *((table, name) for table in ("tasks", "task_sets") for name in ("train", "evaluation")),
    *(
        (table, name)
        for table in ("warm_start", "stage")
        for name in ("demonstrations", "held_out", "pairs")
    ),
)
"""Keys whose texts name folders, which have no ending to be known by."""
_TEXTS = ("system", "run.folder", "wandb")
"""Keys whose texts are not read from: they are no path, or one that is written to."""


def with_absolute_paths(value: Any, root: Path | None = None, place: tuple[str, ...] = ()) -> Any:
    """Copy of the tables in which a text that names a path under `root` (the working directory) is absolute."""
    if isinstance(value, dict):
        return {name: with_absolute_paths(inner, root, (*place, name)) for name, inner in value.items()}
    if isinstance(value, list):
        return [with_absolute_paths(inner, root, place) for inner in value]
    if not isinstance(value, str) or any(name in _TEXTS for name in (*place, ".".join(place))):
        return value
    if place == ("agent", "loop") and value.startswith(COMMAND):
        return _absolute_command(value, root or Path())
    match = _DATASET.fullmatch(value) or _FILE.fullmatch(value)
    if match is None and place not in _FOLDERS:
        return value
    path = match["path"] if match else value
    found = (root or Path()) / path
    if path.startswith("~") or not (found.exists() if match is None else _is_there(found, match)):
        return value
    start, rest = value[: match.start("path")] if match else "", match["rest"] or "" if match else ""
    return f"{start}{found.resolve()}{rest}"


def _absolute_command(value: str, root: Path) -> str:
    """The command with the files that it names in full: words that are files under `root`."""
    try:
        words = shlex.split(value.removeprefix(COMMAND))
    except ValueError:
        return value  # said when it is run
    found = [str((root / word).resolve()) if (root / word).is_file() else word for word in words]
    return value if found == words else f"{COMMAND} {shlex.join(found)}"


def _is_there(found: Path, match: re.Match[str]) -> bool:
    return found.is_dir() if match.re is _DATASET else found.exists()


def beside(raw: dict[str, Any], recipe: str | Path) -> dict[str, Any]:
    """The tables of a recipe's file, with what lies beside it named in full."""
    folder = Path(recipe).resolve().parent
    if folder == Path.cwd():
        return raw
    found: dict[str, Any] = with_absolute_paths(raw, folder)
    return found
