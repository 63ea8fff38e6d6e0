"""[model], [tasks], [agent], [[task_sets]], [sampling], [evaluation], [run], [cluster].

Which model is trained, whole or through an adapter; what is played and how, what a run writes, and where its
processes are placed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_serializer, field_validator, model_validator

from ludus.core.config import ChoiceConfig, Config, Place, ShortConfig
from ludus.core.generation import COLDEST, HOTTEST, Sampling
from ludus.envs import PoolConfig
from ludus.llm.remote import is_address
from ludus.observe.files import read_regular
from ludus.rollouts.agent import ProgramConfig
from ludus.rollouts.recorder import Budgets
from ludus.rollouts.workflows import WorkflowConfig
from ludus.sandbox import SandboxConfig
from ludus.tools.recording import RecordingConfig

_NOT_VARIABLES = (
    "messages",
    "conversation",
    "tools",
    "documents",
    "chat_template",
    "add_generation_prompt",
    "continue_final_message",
    "tokenize",
)
"""Arguments of rendering that are not a template's own variables."""
_TRUNCATION = {"top_p": 1, "top_k": 0, "min_p": 0, "repetition_penalty": 1}
"""Sampling settings that importance ratios rule out, and the values with which they do nothing."""
_LAUNCHED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


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
    """Reference of KL and DPO: the model that the stage began with, or the base model (docs/models.md)."""

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
    """The vision part of a model that has one: frozen or trained; auto is frozen where images can be run, and
    else off, which reads text alone (docs/images.md)."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Number format of the weights; auto is bfloat16 on a GPU that computes in it, and else float32."""
    device: str = "auto"
    """Where it runs: auto, cpu, cuda, cuda:1, ..."""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Variables of the chat template, such as { enable_thinking = false }, wherever a conversation is rendered:
    training, evaluation, serving."""
    trust_remote_code: bool = False
    """Run the Python code that the model's folder or hub page brings: it can do anything that you can."""

    @property
    def is_from_scratch(self) -> bool:
        """Whether it is made from scratch, or was in the run whose checkpoint it is."""
        return self.scratch is not None or (self.name is not None and _began_from_scratch(self.name))

    @field_validator("chat_template_kwargs")
    @classmethod
    def _are_variables(cls, given: dict[str, Any]) -> dict[str, Any]:
        if own := [name for name in given if name in _NOT_VARIABLES]:
            raise ValueError(f"{', '.join(own)} is given by Ludus: leave it out")
        return given

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


def _began_from_scratch(name: str, runs: int = 8) -> bool:
    """Whether a folder is a checkpoint of a run that made its model, or began with such a checkpoint."""
    folder = Path(name)
    for run in (folder, folder.parent.parent) if runs else ():
        try:
            model = json.loads(read_regular(run / "recipe.json"))["model"]
            made, before = model.get("scratch"), model.get("name")
        except (OSError, ValueError, LookupError, TypeError, AttributeError):
            continue
        return made is not None or (isinstance(before, str) and _began_from_scratch(before, runs - 1))
    return False


class TasksConfig(Config):
    """Where tasks come from: a file, a folder of logs, 'dataset:NAME:CONFIG@SPLIT', or 'module:function'."""

    train: Place | None = None
    """Tasks to learn from."""
    evaluation: Place | None = None
    """Held-out tasks."""
    columns: dict[str, str] = Field(default_factory=dict)
    """Which column of the data is which field, such as { prompt = "question", target = "answer" }."""


class AgentConfig(Config):
    """The agent: its tools, environments, loop and call format."""

    tools: tuple[str | dict[str, Any], ...] = ()
    """Tools by short name, 'module:function', a server's address, 'mcp:...', or tables with options
    (docs/toolbox.md, docs/mcp.md)."""
    sandbox: SandboxConfig = SandboxConfig()
    """Where tools that run the model's code run it."""
    record: RecordingConfig | None = None
    """A memory of tool results, to replay them (docs/recording.md)."""
    envs: dict[str, str] = Field(default_factory=dict)
    """Environments by name: a prebuilt one's name, 'module:Class', a server's address (docs/services.md)."""
    pools: dict[str, PoolConfig] = Field(default_factory=dict)
    """How instances are kept, by the environment's name: [agent.pools.shop] size = 8, max_wait = 600."""
    step_rewards: Literal["sum", "max", "last"] | None = None
    """How rewards of calls make an episode's: sum, max or last; as environments say when left out."""
    loop: str = "ludus.rollouts.agent:Agent"
    """The agent: a class, 'command: python my_agent.py', or a function of (task, base_url, key)."""
    program: ProgramConfig = ProgramConfig()
    """How a command or function plays an episode."""
    format: ChoiceConfig = ChoiceConfig(name="auto")
    """How tool calls are written: auto (as the chat template writes them, or else hermes), a name of
    docs/formats.md, or { name = "tags", result = "observation" } with settings of the format."""
    history: Literal["strict", "keep", "split"] = "strict"
    """What to do when the chat template rewrites earlier turns: refuse, keep them, or split the episode."""
    turns: Literal["chat", "inline"] = "chat"
    """Where results go: into messages of their own, or as raw text into the turn and thought that called."""
    system: str | None = None
    """A system message put before every task that has none."""
    workflows: WorkflowConfig | None = None
    """How similar tasks were done before, for the prompt: [agent.workflows] file = "workflows.json"."""

    def pool(self, name: str) -> PoolConfig:
        """How instances of an environment are kept."""
        own = self.pools.get(name, PoolConfig())
        return own.model_copy(update={"size": own.size or 256})


class TaskSetConfig(TasksConfig):
    """One of several task sets. What it leaves out is as the recipe says."""

    name: str = Field(pattern=r"^[\w.-]+$")
    """Name of the set, also in its metrics: sets/NAME/..."""
    train: Place
    """Tasks to learn from: a file, 'dataset:NAME:CONFIG@SPLIT', or 'module:function'."""
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
    """How rewards of calls make an episode's, as in agent.step_rewards."""

    @field_serializer("budgets")
    def _limits(self, budgets: Budgets | None) -> dict[str, Any] | None:
        """Those that were given: written out in full, they would replace the recipe's when read again."""
        return None if budgets is None else budgets.model_dump(exclude_unset=True)


class SamplingConfig(Config):
    """How actions are drawn while training. There is no truncation: ratios would be wrong."""

    temperature: float = Field(default=1.0, ge=COLDEST, le=HOTTEST)
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
                "(temperature is fine; [evaluation], `ludus eval` and `ludus rollout` accept all of them)"
            )
        return {name: value for name, value in raw.items() if name not in _TRUNCATION}


class EvaluationSampling(Config):
    """How tokens are drawn in evaluations. Nothing is trained on them, so truncation is allowed."""

    temperature: float = Field(default=1.0, ge=0, le=HOTTEST)
    """0 is greedy."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Draw from the most likely tokens of this mass."""
    top_k: int = Field(default=0, ge=0)
    """Draw from so many of the most likely tokens; 0 is all."""
    min_p: float = Field(default=0.0, ge=0, le=1)
    """Least share of the best token's likelihood."""
    repetition_penalty: float = Field(default=1.0, ge=0.001, le=1000)
    """Above 1, tokens that have occurred are less likely."""

    @property
    def sampling(self) -> Sampling:
        """These settings as an engine takes them."""
        return Sampling(**{name: getattr(self, name) for name in EvaluationSampling.model_fields})


class EvaluationConfig(EvaluationSampling):
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

    @model_validator(mode="after")
    def _can_stop(self) -> EvaluationConfig:
        if self.patience is not None and not self.every:
            raise ValueError(
                "evaluation.patience counts evaluations within a stage, and there are none: set "
                "evaluation.every"
            )
        return self


class WandbConfig(ShortConfig):
    """Weights & Biases (extra: wandb): what the run is called there."""

    short = "project"

    project: str
    """The project that the run is logged to."""
    name: str | None = None
    """The run's name there; that of its folder when left out."""
    entity: str | None = None
    """The user or team that owns the project."""
    group: str | None = None
    """A group of runs, such as the seeds of one recipe."""
    tags: tuple[str, ...] = ()
    """Tags of the run."""


class RunConfig(Config):
    """The run's outputs: where, what and how often."""

    folder: Place | None = None
    """The run's folder; runs/NAME-COUNTER when left out."""
    checkpoint_every: int = Field(default=50, ge=1)
    """Steps between checkpoints; there is always one after a stage, at the end and on Ctrl-C."""
    checkpoint_minutes: float | None = Field(default=10.0, gt=0)
    """Minutes after which there is one, too, as soon as a step ends; none: by steps alone."""
    keep_checkpoints: int = Field(default=2, ge=1)
    """How many of the newest checkpoints stay; the best, and the last of every stage that learns, stay too."""
    trajectories_every: int = Field(default=1, ge=0)
    """Write the episodes of every so many steps; 0 writes none."""
    audit: bool | None = None
    """Write every tool call to audit.jsonl; left out, where tools of MCP servers are used (docs/mcp.md)."""
    renders: bool = False
    """Also record what environments look like before each turn (images, maps): ludus view shows it."""
    replay: Place | None = None
    """Train from the groups that the run in this folder recorded, and play nothing (ludus train --replay
    RUN)."""
    tensorboard: bool = False
    """Also write TensorBoard events (extra: tensorboard)."""
    wandb: WandbConfig | None = None
    """Also log to Weights & Biases (extra: wandb): "PROJECT", or { project = "PROJECT", tags = ["a"], ... }."""
    before_step: tuple[str, ...] = ()
    """Functions that are called before every step, such as 'file.py:function' (docs/hooks.md)."""
    after_step: tuple[str, ...] = ()
    """Functions that are called after every step, with its metrics."""
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
    engine: str | None = None
    """The engine, by name (embedded, process, vllm, or one that an installed package registers) or as
    "file.py:Class" (docs/engine.md). Left out: vllm with servers, process with engines, else embedded."""
    servers: tuple[str, ...] = ()
    """Addresses of vLLM servers that sample instead, such as ["http://127.0.0.1:8000"] (ludus serve vllm)."""
    weights: Place | None = None
    """A folder through which servers get new weights, which they see under the same path; shared memory when
    left out, for servers on this machine."""
    trainer_ranks: int | None = Field(default=None, ge=1, le=65536)
    """Processes that train, one per GPU; 1 when left out, or as many as torchrun has started."""
    dp_replicate: int = Field(default=1, ge=1)
    """Copies of the model among the trainer ranks (HSDP): each is sharded over trainer_ranks / dp_replicate."""
    backend: Literal["auto", "nccl", "gloo"] = "auto"
    """Communication backend between ranks; auto is nccl on GPUs and gloo on CPUs."""
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
        if self.weights is not None and not (self.servers or self.engine):
            raise ValueError("cluster.weights is for cluster.servers, and there are none")
        if self.engine is not None and self.is_on_ray and self.engines:
            raise ValueError(
                f"cluster.engine = {self.engine!r} is made on this machine, and cluster.engines = "
                f"{self.engines} are placed by Ray: leave out one of them"
            )
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
        if self.trainer_ranks is not None and self.trainer_ranks % self.dp_replicate:
            raise ValueError(
                f"cluster.dp_replicate = {self.dp_replicate} must divide cluster.trainer_ranks = "
                f"{self.trainer_ranks}"
            )
        return self


def launched_rank() -> tuple[int, int]:
    """(rank, number of ranks) from torchrun's environment variables; (0, 1) without them."""
    if not all(name in os.environ for name in _LAUNCHED):
        return 0, 1
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
