"""What rewards read of an episode."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Set
from typing import Any

from ludus.core.failures import Fault
from ludus.core.messages import ToolCall
from ludus.core.task import Task
from ludus.core.trajectory import Trajectory

KNOWN = ("trajectory", "task", "envs", "env", "answer", "target", "messages")


def arguments(
    wanted: Set[str], trajectory: Trajectory, task: Task, envs: Mapping[str, Any]
) -> dict[str, Any]:
    """The values for the parameters a reward function asks for.

    `answer` is always text: an episode that ended without one is scored, as a wrong answer would be.
    A function that must tell the two apart reads `trajectory.answer`.
    """
    values: dict[str, Any] = {
        "trajectory": trajectory,
        "task": task,
        "envs": envs,
        "answer": trajectory.answer or "",
        "target": task.target,
        "messages": trajectory.messages,
    }
    if "env" in wanted:
        values["env"] = _only_env(envs)
    return {name: values[name] for name in wanted}


def _only_env(envs: Mapping[str, Any]) -> Any:
    if len(envs) != 1:
        have = ", ".join(envs) if envs else "none"
        raise ValueError(
            f"it takes `env`, which needs exactly one environment; the task has: {have}. "
            "Take `envs`, a mapping by name, or name the environment in the task"
        )
    return next(iter(envs.values()))


def spoken(trajectory: Trajectory) -> list[str]:
    """What the model said, turn by turn, without assistant messages that the task itself brought."""
    given = len(trajectory.task.messages)
    own = trajectory.messages
    if tuple(own[:given]) == trajectory.task.messages:
        own = own[given:]
    return [message.content for message in own if message.role == "assistant"]


def good_calls(trajectory: Trajectory) -> list[ToolCall]:
    """The calls of those actions that had no fault at all: an invented tool never earns anything."""
    return [
        call
        for action in trajectory.actions
        if not action.faults
        for call in action.calls
        if call.fault is None
    ]


def made_calls(trajectory: Trajectory, tools: Collection[str] | None = None) -> list[ToolCall]:
    """The calls of tools that there are, or of these: also those that a tool answered with an error.

    A call that cannot be read, or of an invented tool, calls nothing.
    """
    return [
        call
        for action in trajectory.actions
        if tools is not None or Fault.UNKNOWN_TOOL not in action.faults
        for call in action.calls
        if call.fault is None and (tools is None or call.name in tools)
    ]


def has_call_syntax(trajectory: Trajectory) -> bool:
    """Whether every call of the episode could be read."""
    malformed = Fault.MALFORMED_CALL
    return malformed not in trajectory.faults and all(c.fault is not malformed for c in trajectory.calls)
