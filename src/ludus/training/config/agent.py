"""[tasks], [agent] and [[task_sets]]: what is played, and what the agent can do."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_serializer

from ludus.core.config import ChoiceConfig, Config, Place
from ludus.envs import PoolConfig
from ludus.rollouts.agent import ProgramConfig
from ludus.rollouts.recorder import Budgets
from ludus.rollouts.workflows import WorkflowConfig
from ludus.sandbox import SandboxConfig
from ludus.tools.recording import RecordingConfig


class TasksConfig(Config):
    """Where tasks come from: a file, 'dataset:NAME:CONFIG@SPLIT', or 'module:function' that returns them."""

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
    format: ChoiceConfig = ChoiceConfig(name="hermes")
    """How tool calls are written: hermes, llama3, tags, fenced, react, plain; or { name = "tags", result =
    "observation" } with settings of the format."""
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
