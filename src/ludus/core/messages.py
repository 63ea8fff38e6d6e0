"""Messages, tool calls and tool results: the conversation as people, tools and rewards read it.

The tokens that the model read and wrote are in `trajectory`.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol, runtime_checkable

from pydantic import BeforeValidator, Field, PlainSerializer, WithJsonSchema
from pydantic.json_schema import SkipJsonSchema

from ludus.core.failures import Fault

if TYPE_CHECKING:
    from ludus.core.task import Task

Role = Literal["system", "user", "assistant", "tool"]
Json = dict[str, Any]
Base64 = Annotated[
    bytes,
    BeforeValidator(
        lambda data: base64.b64decode(data, validate=True) if isinstance(data, str) else data
    ),
    PlainSerializer(
        lambda data: base64.b64encode(data).decode("ascii"), return_type=str, when_used="json"
    ),
    WithJsonSchema({"type": "string", "contentEncoding": "base64"}),
]
"""Bytes that are base64 in JSON."""
Origin = Annotated[str, Field(exclude=True), SkipJsonSchema()]
"""The file and line that something was read from, for messages: known in this process, and written nowhere."""

IMAGE_MARK = "\ufffc"
"""Where an image of `Message.media` stands in the text (Unicode's object replacement character). The marks
are those of the last images, in order; those before them stand before the text. Further marks are text."""

_SHAREGPT = {
    "human": "user",
    "gpt": "assistant",
    "function_call": "assistant",
    "observation": "tool",
    "function_response": "tool",
}
"""ShareGPT's names of roles that differ from OpenAI's."""


@dataclass(frozen=True, slots=True)
class Media:
    """Something that is not text, by reference: the content's hash, and its bytes while at hand."""

    kind: str
    sha256: str
    data: Base64 | None = field(default=None, repr=False, compare=False)
    origin: Origin = field(default="", repr=False, compare=False)

    @classmethod
    def image(cls, data: bytes, kind: str = "image") -> Media:
        """An image: the bytes of a PNG, JPEG, WebP, GIF or BMP file."""
        return cls(kind, hashlib.sha256(data).hexdigest(), data)

    @property
    def is_image(self) -> bool:
        return self.kind == "image" or self.kind.startswith("image/")

    def named(self, problem: object) -> str:
        """`problem`, preceded by the origin of the image if that is known."""
        return f"{self.origin}: {problem}" if self.origin else str(problem)


@dataclass(frozen=True, slots=True)
class MediaSpan:
    """Which tokens stand for a piece of media: of a segment, of a context, or of a row, as its owner says."""

    sha256: str
    start: int
    stop: int
    data: bytes | None = field(default=None, repr=False, compare=False)
    """The bytes, while they are at hand: files of episodes have the hash alone."""

    def moved(self, by: int) -> MediaSpan:
        """This span, counted from another place."""
        return MediaSpan(self.sha256, self.start + by, self.stop + by, self.data)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call as parsed from an action. `fault` and `problem` are set when it could not be parsed."""

    name: str
    arguments: Json = field(default_factory=dict)
    id: str = ""
    fault: Fault | None = None
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Message:
    """One message of the conversation."""

    role: Role
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    name: str | None = None
    tool_call_id: str | None = None
    media: tuple[Media, ...] = ()

    def as_chat(self) -> Json:
        """The OpenAI-style dictionary that chat templates take."""
        chat: Json = {"role": self.role, "content": self.content}
        if self.tool_calls:
            chat["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in self.tool_calls
            ]
        if self.name is not None:
            chat["name"] = self.name
        if self.tool_call_id is not None:
            chat["tool_call_id"] = self.tool_call_id
        return chat

    @classmethod
    def parse(cls, raw: Message | Mapping[str, Any]) -> Message:
        """A message as files hold it: `role` and `content`, or ShareGPT's `from` and `value`."""
        if isinstance(raw, Message):
            return raw
        if not isinstance(raw, Mapping):
            raise ValueError(f'a message is {{"role": "user", "content": "..."}}, not {raw!r:.80}')
        is_sharegpt = "from" in raw and "role" not in raw
        if is_sharegpt:
            raw = _from_sharegpt(raw)
        role, given = raw.get("role"), raw.get("content")
        content, media = _content(given, bool(raw.get("tool_calls")))
        if role not in ("system", "user", "assistant", "tool"):
            others = ", ".join(_SHAREGPT) if is_sharegpt else ""
            also = f" (in ShareGPT's form also {others})" if others else ""
            raise ValueError(
                f"a message's role must be system, user, assistant or tool{also}, not {role!r}"
            )
        if not isinstance(content, str):
            raise ValueError(
                "a message's content must be a string, or a list of parts of type text or image, not "
                f"{content!r:.80}"
            )
        known = {"role", "content", "name", "tool_calls", "tool_call_id"}
        # clients list fields that are empty; a 0 or a false would say something
        unknown = sorted(str(one) for one in raw.keys() - known if raw[one] not in (None, "", [], {}))
        if unknown:
            raise ValueError(f"a message has no field {unknown[0]!r}")
        made = raw.get("tool_calls") or ()
        if not isinstance(made, list | tuple):
            raise ValueError(f"a message's tool_calls are a list, not {made!r:.80}")
        calls = tuple(_call(call) for call in made)
        for text in ("name", "tool_call_id"):
            if not isinstance(raw.get(text), str | None):
                raise ValueError(f"a message's {text} is text, not {raw[text]!r:.80}")
        if calls and role != "assistant":
            raise ValueError(f"the assistant calls tools, not {role!r}")
        return cls(role, content, calls, raw.get("name"), raw.get("tool_call_id"), media)


def parse_messages(given: Any) -> list[Message]:
    """The messages of a conversation as files hold them: a list, in which each has a role and a content."""
    if isinstance(given, str | Mapping) or not isinstance(given, Iterable):
        raise ValueError(f'messages are a list of {{"role": ..., "content": ...}}, not {given!r:.80}')
    return [Message.parse(message) for message in given]


def _from_sharegpt(raw: Mapping[str, Any]) -> Json:
    """The message in the usual form; of what else ShareGPT's files note beside it, nothing is read."""
    role, value = raw["from"], raw.get("value")
    known = {"role": _SHAREGPT.get(role, role), "content": value}
    if role != "function_call":
        return known
    try:
        made = json.loads(value) if isinstance(value, str) else value
    except ValueError as error:
        raise ValueError(f"a function_call is not JSON ({error}): {value!r:.80}") from None
    calls = made if isinstance(made, list) else [made]
    return known | {"content": "", "tool_calls": [{"function": call} for call in calls]}


def _content(content: Any, has_calls: bool) -> tuple[Any, tuple[Media, ...]]:
    """A message's text and images; a call may come without any, and both may come in parts."""
    from ludus.core.images import PARTS, image_of_part  # which makes `Media`

    if has_calls and (content is None or content == []):
        return "", ()
    parts = content if isinstance(content, list) else []
    texts: list[str] = []
    media: list[Media] = []
    for part in parts:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind in PARTS:
            media.append(image_of_part(part))
            texts.append(IMAGE_MARK)
        elif kind == "text" and isinstance(part.get("text"), str):
            texts.append(part["text"])
        else:
            return content, ()
    return ("".join(texts), tuple(media)) if parts else (content, ())


def _call(raw: Any) -> ToolCall:
    """A call as servers of chats send it."""
    function = raw.get("function") if isinstance(raw, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(name, str):
        raise ValueError(
            f'a tool call is {{"function": {{"name": ..., "arguments": ...}}}}, not {raw!r:.80}'
        )
    return ToolCall(name, _arguments(name, function.get("arguments")), str(raw.get("id") or ""))


def _arguments(name: str, given: Any) -> dict[str, Any]:
    """A call's arguments: a table, one written as JSON, or none at all."""
    try:
        table = json.loads(given.strip() or "{}") if isinstance(given, str) else given
    except ValueError as error:
        raise ValueError(
            f"the arguments of a call of {name!r} are not JSON ({error}): {given!r:.80}"
        ) from None
    if table is None:
        return {}
    if not isinstance(table, Mapping):
        raise ValueError(f"the arguments of a call of {name!r} are a table, not {given!r:.80}")
    return dict(table)


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """A tool as the model sees it; `parameters` is a JSON Schema."""

    name: str
    description: str
    parameters: Json
    returns: Json | None = None
    """A JSON Schema of what its results hold, where that is known; synthesis reads it, models do not."""

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
    """The result of a call. `fault` marks the model's own mistake; `content` then says what was wrong."""

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
    exclusive: Callable[[Any], AbstractAsyncContextManager[None]] = field(
        default=nullcontext, repr=False
    )
    """Entered with the environment that a call works on: one call at a time, within its deadline."""


slot_release: ContextVar[Callable[[], AbstractContextManager[None]] | None] = ContextVar(
    "slot_release", default=None
)
"""Set by a server that runs a limited number of calls at once: gives the call's slot back during a block."""


@contextmanager
def released_slot() -> Iterator[None]:
    """Give the call's slot back while it waits for what other calls hold: they may need a slot to finish."""
    release = slot_release.get()
    with release() if release is not None else nullcontext():
        yield


@runtime_checkable
class ToolSet(Protocol):
    """Tools with a life cycle per episode. The list may change while the episode runs."""

    async def open(self, context: ToolContext) -> None:
        """Get ready for the episode."""

    async def list(self, context: ToolContext) -> Sequence[ToolSpec]:
        """The tools that can be called now."""

    async def call(self, call: ToolCall, context: ToolContext) -> ToolResult:
        """Run one call. The model's faults come back as results; infrastructure failures raise `InfraError`."""

    async def close(self, context: ToolContext) -> None:
        """Release what the episode held."""
