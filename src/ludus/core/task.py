"""A task: what an episode starts from and is scored against."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ludus.core.messages import Json, Message


@dataclass(frozen=True, slots=True)
class Task:
    """One thing to do. `envs` names environments and the arguments their reset gets."""

    id: str
    messages: tuple[Message, ...]
    target: Any = None
    envs: Mapping[str, Json] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        prompt: str | Sequence[Message | Mapping[str, Any]],
        target: Any = None,
        *,
        id: str = "",
        envs: Mapping[str, Json] | None = None,
        system: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        **more: Any,
    ) -> Task:
        """A task from a prompt (or messages) and a target. What else is given is metadata, as is `metadata`."""
        if not isinstance(metadata, Mapping | None):
            raise ValueError(f"a task's metadata is a table of fields, not {metadata!r:.80}")
        if both := sorted(more.keys() & (metadata or {}).keys()):
            raise ValueError(f"a task has the metadata {both[0]!r} twice: beside metadata, and in it")
        if isinstance(prompt, str):
            messages: tuple[Message, ...] = (Message("user", prompt),)
        else:
            if not hasattr(prompt, "__iter__"):
                raise ValueError(
                    f"a prompt is a text or a list of messages, not {type(prompt).__name__}"
                )
            messages = tuple(Message.parse(message) for message in prompt)
        if system is not None:
            messages = (Message("system", system), *messages)
        return cls(id, messages, target, dict(envs or {}), {**(metadata or {}), **more})

    @classmethod
    def parse(cls, raw: Task | Mapping[str, Any]) -> Task:
        """A task from a row of a task file: `prompt` or `messages`, and what else `of` takes."""
        if isinstance(raw, Task):
            return raw
        if not isinstance(raw, Mapping):
            raise ValueError(f"a task is a table of fields, not {type(raw).__name__}")
        fields = dict(raw)
        if ("prompt" in fields) == ("messages" in fields):
            raise ValueError("a task needs exactly one of 'prompt' and 'messages'")
        prompt = fields.pop("prompt") if "prompt" in fields else fields.pop("messages")
        fields["id"] = str(fields.get("id", ""))
        fields.update(fields.pop("metadata", None) or {})
        return cls.of(prompt, **fields)


def numbered(tasks: Iterable[Task]) -> list[Task]:
    """The same tasks, each with a unique id: its own, or its position where it has none."""
    result: list[Task] = []
    seen: set[str] = set()
    for position, task in enumerate(tasks):
        name = task.id or str(position)
        if name in seen:
            raise ValueError(f"two tasks have the id {name!r}; ids must be unique within a task set")
        seen.add(name)
        result.append(
            task if task.id else Task(name, task.messages, task.target, task.envs, task.metadata)
        )
    return result
