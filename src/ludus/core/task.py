"""A task: what an episode starts from and is scored against."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ludus.core.messages import Json, Message, parse_messages


@dataclass(frozen=True, slots=True)
class Task:
    """One thing to do. `envs` names environments and the arguments their reset gets."""

    id: str = ""
    messages: tuple[Message, ...] = ()
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
            if isinstance(prompt, Mapping) or not isinstance(prompt, Iterable):
                raise ValueError(f"a prompt is a text or a list of messages, not {prompt!r:.80}")
            messages = tuple(parse_messages(prompt))
        if not isinstance(system, str | None):
            raise ValueError(f"a task's system message is text, not {system!r:.80}")
        if system is not None:
            messages = (Message("system", system), *messages)
        return cls(id, messages, target, _environments(envs), {**(metadata or {}), **more})

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
        own = {name: fields.pop(name, None) for name in ("target", "envs", "system")}
        metadata = fields.pop("metadata", None) or {}
        name = fields.pop("id", "")
        made = cls.of(prompt, own["target"], envs=own["envs"], system=own["system"], metadata=metadata)
        if both := sorted(str(key) for key in fields.keys() & metadata.keys()):
            raise ValueError(f"a task has the metadata {both[0]!r} twice: beside metadata, and in it")
        return replace(made, id=str(name), metadata={**metadata, **fields})


def spread(tasks: Sequence[Task], count: int) -> list[Task]:
    """`count` of the tasks, far apart: sets are often sorted, and the first ones all of one kind."""
    some = min(count, len(tasks))
    return [tasks[place * len(tasks) // some] for place in range(some)]


def _environments(given: Any) -> dict[str, Json]:
    table = given if given is not None else {}
    if not isinstance(table, Mapping) or not all(isinstance(one, Mapping) for one in table.values()):
        form = 'envs name environments and what their reset gets, such as {"safe": {}}'
        raise ValueError(f"a task's {form}, not {given!r:.80}")
    return {str(name): dict(arguments) for name, arguments in table.items()}


def numbered(tasks: Iterable[Task]) -> list[Task]:
    """These tasks, each with a unique id: its own, or its position where it has none."""
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
