"""Shared by the APIs: a request, a reply, an error, and parsing of clients' input."""

from __future__ import annotations

import json
import logging
import marshal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ludus.chat.streaming import Reply
from ludus.core.failures import LudusError
from ludus.core.generation import Completion, FinishReason
from ludus.core.images import PARTS, ImageError, image_of_part
from ludus.core.lru import LruCache
from ludus.core.messages import IMAGE_MARK, Json, Media, Message, ToolCall, ToolSpec
from ludus.core.strict_json import BadJson, whole_json
from ludus.core.tokenizer import ImageTokens
from ludus.serve.admission import WorkBudget

log = logging.getLogger(__name__)
_noted: set[str] = set()
"""Kinds of tools whose absence was logged."""

MOST_STOPS = 16
LONG = 20_000
"""A request of so many bytes takes milliseconds to encode."""
MOST_MESSAGES = 10_000
MOST_TOOLS = 1_000
MOST_TOOL_BYTES = 1_000_000
"""Names, descriptions and schemas of all tools together."""
_LONGEST = 8192
"""Bytes of a message that is remembered."""
_EMPTY = {"type": "object", "properties": {}}
_WHOLE = frozenset({"top_k", "seed"})
_TEXTS = frozenset({"text", "input_text", "output_text", "refusal"})


class ApiError(LudusError):
    """Why a request has no reply, with the HTTP status that says so."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.param, self.retry_after = status, code, param, retry_after


def bad(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """A request that cannot be understood or served."""
    return ApiError(400, message, param=param, code=code)


@dataclass(frozen=True, slots=True)
class ModelRequest:
    """A request for a reply, whatever the API that it came by."""

    model: str
    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...] = ()
    stream: bool = False
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    count: int = 1
    """How many replies (`n`)."""
    left_out: tuple[str, ...] = ()
    """The tools left out of the model's prompt, because it cannot call them: hosted ones, and the like."""
    calls_allowed: bool = True
    """False for tool_choice = "none": tools stay in the prompt, and what is written is text."""
    asked: Mapping[str, Any] = field(default_factory=dict)
    """The sampling that the client asked for: temperature, top_p, seed, ..."""
    usage_in_stream: bool = False
    places: tuple[str, ...] = ()
    """Where in the body each message stands, for errors."""
    messages_field: str = "messages"
    """The body's field that holds the conversation."""
    raw: Json = field(default_factory=dict)
    """The body."""
    size: int = 0
    """How many bytes it has."""

    def place(self, number: int) -> str:
        """Where a message stands in the body."""
        return self.places[number] if number < len(self.places) else f"{self.messages_field}[{number}]"


@dataclass(frozen=True, slots=True)
class ReplyHead:
    """The part of a reply that is known before it is sampled."""

    id: str
    prompt_tokens: int
    created: int


@dataclass(frozen=True, slots=True)
class ModelReply:
    """A reply, with what APIs tell about it."""

    reply: Reply
    finish: FinishReason
    stop: str | None
    """The client's stop string that ended it."""
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    created: int

    @classmethod
    def of(
        cls, reply: Reply, completion: Completion, prompt_tokens: int, request: ModelRequest
    ) -> ModelReply:
        """A completion as a reply to this request, sent now."""
        return cls(
            reply,
            completion.finish,
            completion.stop if completion.stop in request.stop else None,
            prompt_tokens,
            len(completion.tokens),
            completion.cached_tokens,
            int(time.time()),
        )

    @property
    def is_cut(self) -> bool:
        return self.finish is FinishReason.LENGTH

    @property
    def head(self) -> ReplyHead:
        return ReplyHead(self.reply.id, self.prompt_tokens, self.created)


Event = tuple[str | None, Json | str]
"""A server-sent event: its name, and its data."""


class StreamWriter(Protocol):
    """The events of one stream. Thoughts come before text; calls, and why a reply ended, come with the end."""

    def start(self) -> Iterator[Event]:
        """Before anything is said."""

    def thought(self, index: int, piece: str) -> Iterator[Event]:
        """The thought of a reply goes on."""

    def text(self, index: int, piece: str) -> Iterator[Event]:
        """The text of a reply goes on."""

    def end(self, replies: Sequence[ModelReply]) -> Iterator[Event]:
        """After the last piece: calls, usage, the end."""

    def error(self, problem: Json) -> Event:
        """Something failed after the stream had begun; `problem` is the API's form of it."""


@dataclass(frozen=True, slots=True)
class Dialect:
    """One API: how its requests are read and its replies are written."""

    name: str
    parse: Callable[[Json], ModelRequest]
    body: Callable[[ModelRequest, Sequence[ModelReply]], Json]
    writer: Callable[[ModelRequest, Sequence[ReplyHead]], StreamWriter]
    error: Callable[[ApiError], Json]


# Reading fields. What is null is left out.


def text_field(body: Mapping[str, Any], name: str) -> str:
    value = body.get(name)
    if not isinstance(value, str) or not value:
        raise bad(f"'{name}' must be a text", name)
    return value


def number_field(body: Mapping[str, Any], *names: str) -> int | None:
    """The first of these fields that is given: a whole number above 0."""
    for name in names:
        value = body.get(name)
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise bad(f"'{name}' must be a whole number above 0, not {value!r:.40}", name)
        return value
    return None


def flag_field(body: Mapping[str, Any], name: str) -> bool:
    value = body.get(name)
    if not isinstance(value, bool | None):
        raise bad(f"'{name}' must be true or false, not {value!r:.40}", name)
    return bool(value)


def stream_options(body: Mapping[str, Any], *names: str) -> dict[str, bool]:
    """The flags of these names, which are for streams alone."""
    options = body.get("stream_options")
    if options is None:
        return dict.fromkeys(names, False)
    if not isinstance(options, dict):
        raise bad(f"'stream_options' must be an object, not {options!r:.40}", "stream_options")
    if not flag_field(body, "stream"):
        raise bad("'stream_options' is for streams: set 'stream' to true", "stream_options")
    try:
        return {name: flag_field(options, name) for name in names}
    except ApiError as error:
        raise bad(f"stream_options: {error}", f"stream_options.{error.param}") from None


def stops_field(value: Any, name: str) -> tuple[str, ...]:
    found = [value] if isinstance(value, str) else value or []
    if not isinstance(found, list) or not all(isinstance(one, str) and one for one in found):
        raise bad(f"'{name}' must be a text or a list of texts, none of them empty", name)
    if len(found) > MOST_STOPS:
        raise bad(f"'{name}' may have {MOST_STOPS} texts at most", name)
    return tuple(found)


def asked_of(body: Mapping[str, Any], names: Sequence[str]) -> Json:
    """The fields of these names that are given, numbers where there must be numbers."""
    found = {name: body[name] for name in names if body.get(name) is not None}
    for name, value in found.items():
        if name != "logit_bias" and (not isinstance(value, int | float) or isinstance(value, bool)):
            raise bad(f"'{name}' must be a number, not {value!r:.40}", name)
        if name in _WHOLE:
            if value != value // 1 or not -(2**63) <= value < 2**64:
                raise bad(f"'{name}' must be a whole number of 64 bits, not {value!r:.40}", name)
            found[name] = int(value)
    return found


def list_field(body: Mapping[str, Any], name: str, most: int = MOST_MESSAGES) -> list[Json]:
    value = body.get(name)
    found = [] if value is None else value
    if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
        raise bad(f"'{name}' must be a list of objects", name)
    if len(found) > most:
        raise ApiError(413, f"'{name}' has {len(found):,} entries, and may have {most:,}", param=name)
    return found


def content_text(content: Any, where: str) -> str:
    """The text of a message that holds no images; parts are joined, None is no text."""
    text, media = read_content(content, where)
    if media:
        raise bad(f"{where} holds an image, which is for messages of users and results", where)
    return text


def read_content(content: Any, where: str) -> tuple[str, tuple[Media, ...]]:
    """A message's text, with a mark for each image, and its images."""
    if content is None or isinstance(content, str):
        return content or "", ()
    if not isinstance(content, list):
        raise bad(f"the content of {where} must be a text or a list of parts", where)
    if len(content) > MOST_MESSAGES:
        said = f"{where} has {len(content):,} parts, and may have {MOST_MESSAGES:,}"
        raise ApiError(413, said, param=where)
    texts: list[str] = []
    media: list[Media] = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in PARTS:
            try:
                media.append(image_of_part(part))
            except ImageError as error:
                raise bad(f"{where}: {error}", where, "invalid_image") from None
            texts.append(IMAGE_MARK)
            continue
        text = part.get("refusal" if kind == "refusal" else "text") if isinstance(part, dict) else None
        if kind not in _TEXTS or not isinstance(text, str):
            raise bad(f"{where} holds a part of type {kind!r}: only text and images can be read", where)
        texts.append(text)
    return "".join(texts), tuple(media)


def refuse_images(request: ModelRequest, images: ImageTokens | None) -> None:
    """Refuse images where the model reads text only."""
    for number, message in enumerate(request.messages):
        if message.media and images is None:
            where = request.place(number)
            raise bad(f"this model reads text only: {where} holds an image", where, "no_images")


async def check_images(request: ModelRequest, images: ImageTokens | None, pixels: WorkBudget) -> None:
    """Render, and decode the images in a thread; an unreadable image is the client's error.

    Images of all requests together have so many pixels as the budget says while they are decoded.
    """
    refuse_images(request, images)
    for number, message in enumerate(request.messages):
        for media in message.media:
            assert images is not None
            try:
                await pixels.run(images.pixels(media), images.tokens, media)
            except ImageError as error:
                where = request.place(number)
                raise bad(f"{where}: {error}", where, "invalid_image") from None


_known: LruCache[tuple[Message, ...]] = LruCache(
    1 << 25, lambda messages: 1000 + 2 * sum(len(message.content) for message in messages)
)


class ReadOnce:
    """The messages that a message of an API was read as before: the same objects when it comes again.

    Clients send the whole conversation with every request: what is not new in it should cost next to nothing.
    """

    def __init__(self, api: str, raw: Json) -> None:
        self._key: bytes | None = None
        try:
            key = marshal.dumps((api, raw), 2)  # version 2 is the same for equal values: no references
        except ValueError:  # nested too deeply
            key = bytes(_LONGEST + 1)
        if len(key) <= _LONGEST:
            self._key = key
        self.messages = None if self._key is None else _known.find(self._key)

    def keep(self, messages: tuple[Message, ...]) -> tuple[Message, ...]:
        """Remember what it was read as."""
        return messages if self._key is None else _known.get(self._key, lambda: messages)


def read_call(name: Any, arguments: Any, id: Any, where: str) -> ToolCall:
    """A call in a message; the arguments are an object, or its JSON."""
    if not isinstance(name, str) or not name:
        raise bad(f"{where}: a call needs the name of a tool", where)
    if isinstance(arguments, str):
        try:
            arguments = whole_json(arguments) if arguments.strip() else {}
        except BadJson as error:
            raise bad(f"{where}: the arguments of {name!r:.80} cannot be read: {error}", where) from None
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        raise bad(f"{where}: the arguments of {name!r} must be an object", where)
    return ToolCall(name, arguments, id if isinstance(id, str) else "")


def _read_tool(tool: Any, schema: str, where: str) -> ToolSpec:
    if not isinstance(tool, dict):
        raise bad(f"{where} has no 'function'", where)
    name, description = tool.get("name"), tool.get("description")
    parameters = tool.get(schema)
    if not isinstance(name, str) or not name:
        raise bad(f"{where} needs a name", where)
    if not isinstance(description, str | None) or not isinstance(parameters, dict | None):
        raise bad(f"{where}: description must be a text and {schema} a JSON Schema", where)
    return ToolSpec(name, description or "", parameters or dict(_EMPTY))


def read_tools(
    body: Json,
    kinds: frozenset[str | None],
    place: str,
    *,
    schema: str = "parameters",
    inner: str | None = None,
) -> tuple[tuple[ToolSpec, ...], tuple[str, ...]]:
    """The tools that a client offers, and the names of those that are left out.

    `schema` is the field with a tool's parameters, `inner` the one that holds the tool, if any does.
    Tools of other kinds than these are run by the API's own servers, or have a form that is not written out: a
    model that was not trained for them cannot call them. To be told to call one of them is an error.
    """
    tools: list[ToolSpec] = []
    left_out: list[str] = []
    for number, tool in enumerate(list_field(body, "tools", MOST_TOOLS)):
        if tool.get("type") in kinds:
            found = tool if inner is None else tool.get(inner)
            tools.append(_read_tool(found, schema, place.format(number)))
            continue
        kind, name = str(tool.get("type")), tool.get("name")
        left_out.append(kind if name in (None, kind) else f"{kind}:{name}")
        if kind not in _noted and len(_noted) < 100:
            _noted.add(kind)
            log.warning(
                "tools of type %.80r are left out of prompts: the model cannot call them, only functions",
                kind,
            )
    names = [tool.name for tool in tools]
    if len(set(names)) < len(names):
        raise bad("two tools have the same name", "tools")
    size = len(marshal.dumps([(tool.name, tool.description, tool.parameters) for tool in tools], 2))
    if size > MOST_TOOL_BYTES:
        said = f"'tools' has {size:,} bytes of names, descriptions and schemas, and may have"
        raise ApiError(413, f"{said} {MOST_TOOL_BYTES:,}", param="tools")
    _check_choice(body.get("tool_choice"), names, left_out)
    return tuple(tools), tuple(left_out)


def _check_choice(choice: Any, names: Sequence[str], left_out: Sequence[str]) -> None:
    """Refuse a choice that forces a tool which is left out."""
    if not left_out or choice is None:
        return
    told: Json = choice if isinstance(choice, dict) else {"type": choice}
    kind, inner = told.get("type"), told.get("function") or told.get("custom")
    name = inner.get("name") if isinstance(inner, dict) else told.get("name")
    kinds = [one.partition(":")[0] for one in left_out]
    is_out = kind in kinds if name is None else name not in names
    if is_out or (kind in ("any", "required") and not names):
        raise bad(
            f"'tool_choice' asks for {name or kind!r:.80}, which cannot be called here: only functions can",
            "tool_choice",
        )


def arguments_text(call: ToolCall) -> str:
    """A call's arguments as clients get them."""
    return json.dumps(call.arguments, ensure_ascii=False)
