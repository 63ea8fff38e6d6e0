"""A recipe: one TOML file that says what is trained, on what, and how. Every key has a default or a reason."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, field_serializer, model_validator

import ludus
from ludus.core.config import Config, Place, apply_overrides, read_toml
from ludus.core.failures import ConfigError, not_there
from ludus.engine import EngineConfig
from ludus.envs import PoolConfig
from ludus.llm.address import is_address
from ludus.observe import RunFolder
from ludus.rollouts.agent import ProgramConfig
from ludus.rollouts.budgets import Budgets
from ludus.rollouts.workflows import WorkflowConfig
from ludus.sandbox import SandboxConfig
from ludus.tools.recording import RecordingConfig
from ludus.training.config.paths import beside
from ludus.training.config.rl import RLConfig, check_followed_metrics, check_overlong
from ludus.training.config.stages import (
    BaseStageConfig,
    DistillationConfig,
    EvaluationStageConfig,
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
STAGE_CONFIGS: tuple[type[BaseStageConfig], ...] = get_args(get_args(StageConfig)[0])
"""The kinds of stages, in the order of their settings."""


class ScratchConfig(Config):
    """A small Llama made on the spot, with a tokenizer fitted to the demonstrations."""

    layers: int = Field(default=2, ge=1)
    """Transformer layers."""
    width: int = Field(default=128, ge=16)
    """Size of the hidden states."""
    heads: int = Field(default=4, ge=1)
    """Attention heads; the width must be a multiple of them."""
    kv_heads: int = Field(default=2, ge=1)
    """Heads that keys and values have; the heads must be a multiple of them."""
    vocabulary: int = Field(default=1024, ge=300)
    """Most tokens the fitted tokenizer may have."""
    context: int = Field(default=4096, ge=16)
    """Longest sequence."""

    @model_validator(mode="after")
    def _divisible(self) -> ScratchConfig:
        if self.width % self.heads or (self.width // self.heads) % 2:
            raise ValueError("scratch.width must be an even multiple of scratch.heads")
        if self.heads % self.kv_heads:
            raise ValueError("scratch.heads must be a multiple of scratch.kv_heads")
        return self


class LoraConfig(Config):
    """Train small low-rank matrices beside the model's own, which stay as they are (extra: lora)."""

    rank: int | None = Field(default=None, ge=1, le=1024)
    """Rank of the update of each matrix: 16 for a new adapter when left out; a saved one has its own."""
    alpha: float | None = Field(default=None, gt=0)
    """The update is scaled by alpha / rank: 32 for a new adapter when left out; a saved one has its own."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout before the adapter, in training alone; above 0, engine and trainer differ by it."""
    targets: Literal["all-linear"] | tuple[str, ...] = "all-linear"
    """Which linear layers, by the last part of their names, such as ["q_proj", "v_proj"]."""
    reference: Literal["start", "base"] = "start"
    """What KL and DPO measure from: the model that the stage began with, or the bare one (docs/models.md)."""

    @model_validator(mode="after")
    def _has_targets(self) -> LoraConfig:
        if not self.targets:
            raise ValueError('lora.targets must name at least one layer; leave it out for "all-linear"')
        return self


class ModelConfig(Config):
    """Which model: a folder, a short or hub name, or one made from scratch."""

    name: Place | None = None
    """A folder in Hugging Face format, a .gguf file, a short name (smollm2), or a name on the hub."""
    scratch: ScratchConfig | None = None
    """Make a new small model instead."""
    lora: LoraConfig | None = None
    """Train an adapter instead of all weights."""
    vision: Literal["auto", "frozen", "trained", "off"] = "auto"
    """The vision part of a model that has one: frozen or trained; auto is frozen where pictures can be run, and
    else off, which reads text alone (docs/images.md)."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Number format of the weights; auto is bfloat16 on a GPU that computes in it, and else float32."""
    device: str = "auto"
    """Where it runs: auto, cpu, cuda, cuda:1, ..."""

    @model_validator(mode="after")
    def _one_of(self) -> ModelConfig:
        if (self.name is None) == (self.scratch is None):
            raise ValueError(
                "give exactly one of model.name and model.scratch; on the command line, model.scratch.layers=2 "
                "makes a model in place of the recipe's, and model.name=NAME takes another one"
            )
        if self.scratch is not None and self.lora is not None:
            raise ValueError(
                "model.lora adapts a model that has learned something; one made from scratch has not: leave "
                "out model.lora, or name a model"
            )
        if self.vision == "trained" and self.lora is not None:
            raise ValueError(
                'model.vision = "trained" trains weights of the model itself, and model.lora leaves all '
                "of them as they are: leave out one of the two"
            )
        return self


class TasksConfig(Config):
    """Where tasks come from: a file, 'dataset:NAME:CONFIG@SPLIT', or 'module:function' that returns them."""

    train: Place | None = None
    """Tasks to learn from."""
    evaluation: Place | None = None
    """Held-out tasks."""
    columns: dict[str, str] = Field(default_factory=dict)
    """Which column of the data is which field, such as { prompt = "question", target = "answer" }."""


class AgentConfig(Config):
    """What the agent can do, and how it says so."""

    tools: tuple[str | dict[str, Any], ...] = ()
    """Tools by short name, 'module:function', a server's address, 'mcp:...', or tables with options
    (docs/toolbox.md, docs/mcp.md)."""
    sandbox: SandboxConfig = SandboxConfig()
    """Where tools that run the model's code run it."""
    record: RecordingConfig | None = None
    """A memory of tool results, to replay them (docs/recording.md)."""
    envs: dict[str, str] = Field(default_factory=dict)
    """Environments by name: a prebuilt one's name, 'module:Class', a server's address (docs/services.md)."""
    env_pool: int = Field(default=256, ge=1)
    """Most instances of each environment alive at once."""
    pools: dict[str, PoolConfig] = Field(default_factory=dict)
    """How instances are kept, by the environment's name: [agent.pools.shop] size = 8, max_wait = 600."""
    step_rewards: Literal["sum", "max", "last"] | None = None
    """What calls pay an episode in all: their sum, the highest, the last; as environments say when left out."""
    loop: str = "ludus.rollouts.agent:Agent"
    """The agent: a class, 'command: python my_agent.py', or a function of (task, base_url, key)."""
    program: ProgramConfig = ProgramConfig()
    """How a command or function plays an episode."""
    format: str = "hermes"
    """How tool calls are written: hermes, llama3, tags, fenced, react, plain."""
    format_options: dict[str, Any] = Field(default_factory=dict)
    """Settings of the format, such as which tag stands for which tool."""
    history: Literal["strict", "keep", "split"] = "strict"
    """What to do when the chat template rewrites earlier turns: refuse, keep them, or split the episode."""
    turns: Literal["chat", "inline"] = "chat"
    """Where results go: into messages of their own, or as raw text into the turn and thought that called."""
    system: str | None = None
    """A system message put before every task that has none."""
    workflows: WorkflowConfig | None = None
    """How similar tasks were done before, for the prompt: [agent.workflows] file = "workflows.json"."""


_TRUNCATION = {"top_p": 1, "top_k": 0, "min_p": 0, "repetition_penalty": 1}
"""Sampling settings that importance ratios rule out, and the values with which they do nothing."""


class SamplingConfig(Config):
    """How actions are drawn while training. There is no truncation: ratios would be wrong."""

    temperature: float = Field(default=1.0, gt=0)
    """Divides the logits, in sampling and in the trained distribution alike."""

    @model_validator(mode="before")
    @classmethod
    def _untruncated(cls, raw: Any) -> Any:
        """Settings that would truncate the distribution are refused, unless they are switched off."""
        if not isinstance(raw, Mapping):
            return raw
        if any(raw.get(name, off) != off for name, off in _TRUNCATION.items()):
            raise ValueError(
                "top_p, top_k, min_p and repetition_penalty draw from another distribution than the one "
                "that is trained, which makes importance ratios wrong; leave them out of an RL recipe "
                "(temperature is fine, and `ludus eval` and `ludus rollout` accept all of them)"
            )
        return {name: value for name, value in raw.items() if name not in _TRUNCATION}


class EvaluationConfig(Config):
    """When and how to measure on held-out tasks."""

    every: int = Field(default=0, ge=0)
    """Evaluate after so many steps of a stage that learns; 0 is only at the start and after each of them."""
    best_by: Literal["success", "reward"] = "success"
    """The held-out number whose highest value marks the best checkpoint, which is kept; then the reward."""
    patience: int | None = Field(default=None, ge=1)
    """End a stage (rl, dpo, distill) after so many evaluations in a row without a new best (by best_by)."""
    tasks: int | None = Field(default=None, ge=1)
    """How many of the held-out tasks; all when left out."""
    attempts: int = Field(default=1, ge=1)
    """Episodes for each task."""
    temperature: float = Field(default=1.0, ge=0)
    """0 is greedy."""

    @model_validator(mode="after")
    def _can_stop(self) -> EvaluationConfig:
        if self.patience is not None and not self.every:
            raise ValueError(
                "evaluation.patience counts evaluations within a stage, and there are none: set "
                "evaluation.every"
            )
        return self


class RunConfig(Config):
    """What is written down, and when."""

    folder: Place | None = None
    """The run's folder; runs/NAME-COUNTER when left out."""
    checkpoint_every: int = Field(default=50, ge=1)
    """Steps between checkpoints; there is always one after a stage, at the end and on Ctrl-C."""
    keep_checkpoints: int = Field(default=2, ge=1)
    """How many of the newest checkpoints stay; the best, and the last of every stage that learns, stay too."""
    trajectories_every: int = Field(default=1, ge=0)
    """Write the episodes of every so many steps; 0 writes none."""
    audit: bool | None = None
    """Write every tool call to audit.jsonl; left out, where tools of MCP servers are used (docs/mcp.md)."""
    renders: bool = False
    """Also record what environments look like before each turn (pictures, maps): ludus view shows it."""
    replay: Place | None = None
    """Train from the groups that the run in this folder recorded, and play nothing (ludus train --replay
    RUN)."""
    tensorboard: bool = False
    """Also write TensorBoard events (extra: tensorboard)."""
    wandb: str | None = None
    """Also log to this Weights & Biases project (extra: wandb)."""
    sinks: tuple[str, ...] = ()
    """Also send metrics to what these functions open, such as 'file.py:open_sink' (docs/observe.md)."""

    @property
    def all_sinks(self) -> list[str]:
        """The sinks by the names that `ludus.observe.SINKS` knows."""
        chosen = {"tensorboard": self.tensorboard, "wandb": self.wandb is not None}
        return [*(name for name, wanted in chosen.items() if wanted), *self.sinks]


class ClusterConfig(Config):
    """The processes of a run: those that train together, and those that sample (docs/distributed.md)."""

    engines: int = Field(default=0, ge=0, le=4096)
    """Processes that sample, each with a copy of the model on a device of its own, while others train; 0 is the
    trainer's own process, which samples the very module that it trains."""
    servers: tuple[str, ...] = ()
    """Addresses of vLLM servers that sample instead, such as ["http://127.0.0.1:8000"] (ludus serve vllm)."""
    weights: Place | None = None
    """A folder through which servers get new weights, which they see under the same path; shared memory when
    left out, for servers on this machine."""
    trainer_ranks: int | None = Field(default=None, ge=1, le=65536)
    """Processes that train, one per GPU; 1 when left out, or as many as torchrun has started."""
    replicas: int = Field(default=1, ge=1)
    """Copies of the model among the ranks (HSDP): each is sharded over trainer_ranks / replicas of them."""
    backend: Literal["auto", "nccl", "gloo"] = "auto"
    """What carries tensors between ranks; auto is nccl on GPUs and gloo on CPUs."""
    timeout: float = Field(default=600.0, gt=0)
    """Seconds that ranks wait for each other within a step before the run ends with an error, and that an
    engine may take to start, to load weights, or to give a sign of life before it is started again."""
    restarts: int = Field(default=0, ge=0, le=1000)
    """How often a run whose trainer rank has died goes on from its last checkpoint by itself."""
    address: str | None = None
    """The Ray cluster that places the processes: "auto", "host:port", or "local" for one of our own."""
    nodes: int | None = Field(default=None, ge=1, le=65536)
    """Nodes that this cluster must have; with it, the address is "auto" (or RAY_ADDRESS) when left out."""

    tools: int = Field(default=0, ge=0, le=65536)
    """Ray actors for tools, and as many each for environments and for rewards; 0 is the process of the run."""

    @property
    def is_on_ray(self) -> bool:
        """Whether Ray places the processes; else they live on this machine."""
        return self.address is not None or self.nodes is not None

    @model_validator(mode="after")
    def _one_kind_of_engine(self) -> ClusterConfig:
        if self.servers and self.engines:
            raise ValueError(
                f"cluster.servers and cluster.engines = {self.engines}: give one of them, either servers that "
                "you have started or engines that the run starts"
            )
        for one in self.servers:
            if not is_address(one):
                raise ValueError(
                    f"cluster.servers: {one!r} is not an address such as http://127.0.0.1:8000"
                )
        if len(set(self.servers)) < len(self.servers):
            raise ValueError("cluster.servers names a server twice")
        if self.weights is not None and not self.servers:
            raise ValueError("cluster.weights is for cluster.servers, and there are none")
        return self

    @model_validator(mode="after")
    def _on_ray(self) -> ClusterConfig:
        if self.tools and not self.is_on_ray:
            raise ValueError(
                f"cluster.tools = {self.tools} needs a Ray cluster: set cluster.address, to 'auto' for one "
                "that runs, or to 'local' for one of its own"
            )
        return self

    @model_validator(mode="after")
    def _divisible(self) -> ClusterConfig:
        if self.replicas > 1 and self.trainer_ranks is not None and self.trainer_ranks % self.replicas:
            raise ValueError(
                f"cluster.replicas = {self.replicas} must divide cluster.trainer_ranks = {self.trainer_ranks}"
            )
        return self


_LAUNCHED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def launched_rank() -> tuple[int, int]:
    """(rank, number of ranks) as torchrun, or whoever has set its variables, says; (0, 1) without any."""
    if not all(name in os.environ for name in _LAUNCHED):
        return 0, 1
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


class TaskSetConfig(Config):
    """One of several task sets. What it leaves out is as the recipe says."""

    name: str = Field(pattern=r"^[\w.-]+$")
    """What its metrics are called: sets/NAME/..."""
    train: Place
    """Tasks to learn from: a file, 'dataset:NAME:CONFIG@SPLIT', or 'module:function'."""
    evaluation: Place | None = None
    """Held-out tasks."""
    columns: dict[str, str] = Field(default_factory=dict)
    """Which column of the data is which field, as in tasks.columns."""
    weight: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """Its share of the tasks, relative to the other sets' weights."""
    tools: tuple[str | dict[str, Any], ...] | None = None
    """Tools, as in agent.tools."""
    envs: dict[str, str] | None = None
    """Environments, as in agent.envs."""
    rewards: tuple[str | dict[str, Any], ...] | None = None
    """Rewards, as in the recipe."""
    group_rewards: tuple[str | dict[str, Any], ...] | None = None
    """Group rewards, as in the recipe."""
    budgets: Budgets | None = None
    """Limits on an episode; those that are left out are the recipe's."""
    system: str | None = None
    """A system message, as in agent.system."""
    step_rewards: Literal["sum", "max", "last"] | None = None
    """What calls pay an episode in all, as in agent.step_rewards."""

    @field_serializer("budgets")
    def _limits(self, budgets: Budgets | None) -> dict[str, Any] | None:
        """Those that were given: written out in full, they would replace the recipe's when read again."""
        return None if budgets is None else budgets.model_dump(exclude_unset=True)


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
    """What to do, in order, where a warm start and RL are not it: tables with kind = sft, rl, dpo, ..."""
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
        if self.stage and (self.warm_start is not None or self.rl != RLConfig()):
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
        """What the run does, in order."""
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
    """What to say of a folder that stands where a recipe is expected."""
    text = f"{folder} is a folder, and a recipe is a TOML file"
    if RunFolder(folder).is_run:
        return f"{text}: it is a run's, and `ludus train --resume {folder}` goes on with that run"
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


PER_SET = ("success", "reward", "turns", "episodes")
"""What a step tells of each task set, where there are several: sets/NAME/success, ..."""


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


def stage_ends(recipe: Recipe, *, learning: bool = True) -> set[int]:
    """The steps with which the stages end that learn, or (`learning=False`) that do not."""
    ends = accumulate(stage.total_steps for stage in recipe.stages)
    return {end for end, stage in zip(ends, recipe.stages, strict=True) if stage.learns == learning}
