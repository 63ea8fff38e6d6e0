"""Ludus trains language-model agents with reinforcement learning.

Rooms are nouns (`ludus.tools`, `ludus.training`), what one does is a verb (`ludus.train`). Everything below
is imported when it is first used, so that writing a tool does not load torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ludus.core.registry import lazy_exports

if TYPE_CHECKING:
    from ludus.core.failures import InfraError, ToolFault
    from ludus.core.messages import Message, ToolCall, ToolResult
    from ludus.core.task import Task
    from ludus.core.trajectory import Group, Trajectory
    from ludus.envs import Env
    from ludus.remote.user_log import log
    from ludus.rewards import group_reward, reward
    from ludus.rollouts import Agent, Episode
    from ludus.tools import Tool, tool
    from ludus.training import Recipe, evaluate, rollout, train

__version__ = "0.2.0"

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
    "log",
    "reward",
    "rollout",
    "tool",
    "train",
]

__getattr__, __dir__ = lazy_exports(__name__)
