"""Ludus trains language-model agents with reinforcement learning.

Rooms are nouns (`ludus.tools`, `ludus.training`), what one does is a verb (`ludus.train`). Everything below
is imported when it is first used, so that writing a tool does not load torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ludus.core.failures import InfraError, ToolFault
    from ludus.core.messages import Message, ToolCall
    from ludus.core.task import Task
    from ludus.core.tooling import ToolResult
    from ludus.core.trajectory import Group, Trajectory
    from ludus.envs import Env
    from ludus.rewards import group_reward, reward
    from ludus.rollouts import Agent, Episode
    from ludus.tools import Tool, tool
    from ludus.training import Recipe, evaluate, rollout, train

__version__ = "0.1.0"

_HOMES = {
    "Agent": "ludus.rollouts",
    "Env": "ludus.envs",
    "Episode": "ludus.rollouts",
    "Group": "ludus.core.trajectory",
    "InfraError": "ludus.core.failures",
    "Message": "ludus.core.messages",
    "Recipe": "ludus.training",
    "Task": "ludus.core.task",
    "Tool": "ludus.tools",
    "ToolCall": "ludus.core.messages",
    "ToolFault": "ludus.core.failures",
    "ToolResult": "ludus.core.tooling",
    "Trajectory": "ludus.core.trajectory",
    "evaluate": "ludus.training",
    "group_reward": "ludus.rewards",
    "reward": "ludus.rewards",
    "rollout": "ludus.training",
    "tool": "ludus.tools",
    "train": "ludus.training",
}

__all__ = [
    "Agent",
    "Env",
    "Episode",
    "Group",
    "InfraError",
    "Message",
    "Recipe",
    "Task",
    "Tool",
    "ToolCall",
    "ToolFault",
    "ToolResult",
    "Trajectory",
    "evaluate",
    "group_reward",
    "reward",
    "rollout",
    "tool",
    "train",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'ludus' has no attribute {name!r}")
    found = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
