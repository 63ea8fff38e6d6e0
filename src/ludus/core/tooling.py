"""What passes between an agent and its tools."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from ludus.core.failures import Fault
from ludus.core.messages import Json, Media, ToolCall
from ludus.core.task import Task


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """A tool as the model is told of it; `parameters` is a JSON Schema."""

    name: str
    description: str
    parameters: Json

    def as_openai(self) -> Json:
        return {
            "type": "function",
            "function": {
                "name": self.name,
                "description": self.description,
                "parameters": self.parameters,
            },
        }


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What a call gave. `fault` marks the model's own mistake; `content` then says what was wrong."""

    content: str
    reward: float | None = None
    terminated: bool = False
    fault: Fault | None = None
    media: tuple[Media, ...] = ()
    seconds: float = 0.0


@dataclass(slots=True)
class ToolContext:
    """The episode a call belongs to. `envs` are the episode's own instances, by name."""

    episode: str
    task: Task
    envs: Mapping[str, Any] = field(default_factory=dict)
    one_call: bool = False
    """Whether the episode is this one call, so that nothing it leaves behind will be needed."""


yielding_slot: ContextVar[Callable[[], AbstractContextManager[None]] | None] = ContextVar(
    "yielding_slot", default=None
)
"""Set by what runs calls, such as a server: leaves the call's slot to others for the length of a block."""


@contextmanager
def waiting_for_others() -> Iterator[None]:
    """Around a wait for something that other calls hold, and may need a slot of their own to give back."""
    yielding = yielding_slot.get()
    if yielding is None:
        yield
    else:
        with yielding():
            yield


@runtime_checkable
class ToolSet(Protocol):
    """Tools with a life cycle per episode. The list may change while the episode runs."""

    async def open(self, context: ToolContext) -> None:
        """Get ready for the episode."""

    async def list(self, context: ToolContext) -> Sequence[ToolSpec]:
        """The tools that can be called now."""

    async def call(self, call: ToolCall, context: ToolContext) -> ToolResult:
        """Run one call. The model's faults come back as results; failures of ours raise `InfraError`."""

    async def close(self, context: ToolContext) -> None:
        """Release what the episode held."""
